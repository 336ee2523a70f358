"""``python -m taktline``: the commands, also as a launcher such as torchrun starts them."""

from __future__ import annotations

from taktline.cli import main

if __name__ == "__main__":
    main()
