"""Makes every import of torch.distributed.pipelining return Taktline's modules.

Every process that a program starts loads this file at its very beginning, by its path. So this file
imports only modules that are loaded already, and does nothing before the first such import.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from os.path import dirname, isfile, join
from types import ModuleType

PEER = "torch.distributed.pipelining"
_OURS = "taktline.compat.torch_pipelining"


class Finder:
    """Finds and loads our modules under the names of torch's.

    A module stays the same object, and keeps its own name.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module, if it is in our folder or in torch's."""
        if name != PEER and not name.startswith(f"{PEER}."):
            return None
        ours, torchs = join(dirname(__file__), "torch_pipelining"), sys.modules["torch"].__path__[0]
        inner = f"{join(*name.removeprefix(PEER).split('.'))}.py"
        folders = (ours, join(torchs, "distributed", "pipelining"))
        if name != PEER and not any(isfile(join(folder, inner)) for folder in folders):
            return None
        return ModuleSpec(name, self)  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Our module."""
        _find_package()
        module = import_module(_OURS + spec.name.removeprefix(PEER))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec: it has run already, when it was imported."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def _find_package() -> None:
    """Import the package of this file, also if it is not on the path of this process."""
    if "taktline" not in sys.modules:
        folder = dirname(dirname(dirname(__file__)))
        sys.path.insert(0, folder)
        try:
            import_module("taktline")
        finally:
            sys.path.remove(folder)


def put_first() -> None:
    """Put this finder before all others, once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())  # pyright: ignore[reportArgumentType]


def is_ours(module: ModuleType) -> bool:
    """Whether a module is Taktline's."""
    return module.__name__.startswith(_OURS)
