"""Imports the package as if torch lacked all private names, and prints how many are asked for.

``python -m tests.missing_names``. The drop-in is left out: it has names of torch itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

_LOADED = ("torch.distributed.tensor", "torch.distributed.fsdp", "rich")
"""What looks up names of its own when it is imported."""


def main() -> None:
    """Raises what keeps the package from being imported."""
    for module in _LOADED:
        importlib.import_module(module)
    asked: set[str] = set()
    resolve: Callable[[str], Any] = pkgutil.resolve_name

    def look_up(name: str) -> Any:
        if name.partition(".")[0] != "torch":
            return resolve(name)
        asked.add(name)
        raise AttributeError(name)

    pkgutil.resolve_name = look_up
    package = importlib.import_module("taktline")
    for module in pkgutil.walk_packages(package.__path__, "taktline."):
        if not module.name.startswith(("taktline.compat", "taktline.__main__")):
            importlib.import_module(module.name)
    print(f"{len(asked)} names")


if __name__ == "__main__":
    main()
