"""``python -m taktline``: the commands, also as a launcher such as torchrun starts them."""

from taktline.cli import main

if __name__ == "__main__":
    main()
