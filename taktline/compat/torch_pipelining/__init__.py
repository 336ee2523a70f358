"""The module tree of torch.distributed.pipelining, on Taktline's runtime.

A module that is not here is torch's own, loaded once more under a name of this package: its path
goes on in torch's folder. What differs in these copies, :mod:`_differences` says and puts in.
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
    """Inside, modules that torch's own import by their full names are those of this package."""
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
    """A copy of a module of torch's for which there is one of the same name here."""
    spec = spec_from_file_location(f"{__name__}.{name}", f"{__path__[-1]}/{name}.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = module_from_spec(spec)
    with _named_as_torchs():
        spec.loader.exec_module(module)
    return module


import_module(f"{__name__}._utils")
with _named_as_torchs():
    import_module(f"{__name__}.schedules")

from taktline.compat.torch_pipelining import _differences  # noqa: E402

_differences.apply()

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:
    # What torch's package shows, taken from these modules.
    _shown = of_torch("__init__")
    globals().update(
        {k: v for k, v in vars(_shown).items() if k == "__all__" or not k.startswith("__")}
    )
