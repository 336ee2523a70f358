"""The module tree of torch.distributed.pipelining, on Taktline's runtime.

A module that is not here is a copy of torch's own, loaded under a name of this package: the path of
this package also has torch's folder. :mod:`_patches` changes these copies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed

from taktline.compat._finder import PEER

__path__.append(str(Path(torch.distributed.__file__).with_name("pipelining")))


@contextmanager
def _named_as_torchs() -> Iterator[None]:
    """Let copies of torch's modules import those of this package by torch's names."""
    before = {name: module for name, module in sys.modules.items() if name.startswith(PEER)}
    ours = {name: module for name, module in sys.modules.items() if name.startswith(__name__)}
    try:
        sys.modules.update({PEER + n.removeprefix(__name__): m for n, m in ours.items()})
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(PEER)]:
            del sys.modules[name]
        sys.modules.update(before)


def of_torch(name: str) -> Any:
    """A copy of a module of torch that has the name of a module here."""
    spec = spec_from_file_location(f"{__name__}.{name}", f"{__path__[-1]}/{name}.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = module_from_spec(spec)
    with _named_as_torchs():
        spec.loader.exec_module(module)
    return module


import_module(f"{__name__}._utils")
with _named_as_torchs():
    import_module(f"{__name__}.schedules")

from taktline.compat.torch_pipelining import _patches  # noqa: E402

_patches.apply()

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:
    # The public names of torch's package, from these modules.
    _shown = of_torch("__init__")
    globals().update(
        {k: v for k, v in vars(_shown).items() if k == "__all__" or not k.startswith("__")}
    )
