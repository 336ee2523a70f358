"""The module tree of torch.distributed.pipelining, on Taktline's runtime.

A module that is not here is a copy of torch's own, loaded under a name of this package: the path of
this package also has torch's folder. In these copies our classes and functions take the place of
torch's: stages (``_stages``), schedules (``_schedules``), models cut at split points (``_IR``) and
drawings (``_schedule_visualizer``). Torch's own modules stay as they are.
"""

from __future__ import annotations

import logging
import sys
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from taktline.compat._finder import PEER
from taktline.errors import PipeliningMetadataError
from taktline.split import PipeInfo

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


def _check_torch_compile_compatibility(stages: Sequence[Any], schedule_name: str) -> None:
    """Accept everything: compiled stages work under every schedule."""


def _make_tensor_from_meta(meta: Any, device: Any) -> torch.Tensor:
    """A tensor for one message; contiguous, whatever the strides of what is sent."""
    return torch.empty(meta.shape, dtype=meta.dtype, device=device)


def _with_idle_ranks(add: Any) -> Any:
    """Torch's pass that adds messages, which fails for a rank that has nothing to do."""

    @wraps(add)
    def _add_send_recv(compute_actions: Any, *args: Any, **kwargs: Any) -> Any:
        for rank, row in compute_actions.items():
            compute_actions[rank] = row or [None]
        return add(compute_actions, *args, **kwargs)  # which consumes them

    return _add_send_recv


class _RootArgPlaceholder:
    """A placeholder for an argument of the model, which torch had before 2.13."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.meta = tensor.to("meta")


def _put(*values: Any) -> None:
    """Replace torch's functions and classes of the same names."""
    for value in values:
        for module in _COPIES:
            if hasattr(module, name := value.__name__):
                setattr(module, name, value)


import_module(f"{__name__}._utils")
with _named_as_torchs():
    import_module(f"{__name__}.schedules")

_NAMES = ("_utils", "schedules", "stage", "_backward", "_debug", "_unflatten", "microbatch")
_SINCE_2_15 = [name for name in ("_p2p", "_recv_buffers") if find_spec(f"{__name__}.{name}")]
_COPIES: list[Any] = [import_module(f"{__name__}.{name}") for name in (*_NAMES, *_SINCE_2_15)]
_utils, schedules, stage = _COPIES[:3]
for _copy in _COPIES:
    if hasattr(_copy, "logger"):
        # Under torch's name, so that TORCH_LOGS=pp shows it.
        _copy.logger = logging.getLogger(_copy.__name__.replace(__name__, PEER))
    if hasattr(_copy, "_make_tensor_from_meta") and _copy is not _utils:
        _copy._make_tensor_from_meta = _make_tensor_from_meta
_put(_check_torch_compile_compatibility, PipeInfo)
schedules._add_send_recv = _with_idle_ranks(schedules._add_send_recv)
for _copy in (_utils, stage):
    _copy.PipeliningMetadataError = _copy.PipeliningShapeError = PipeliningMetadataError
stage._RootArgPlaceholder = getattr(stage, "_RootArgPlaceholder", _RootArgPlaceholder)

# Only now, as their bases are the classes that they replace.
from taktline.compat.torch_pipelining import _schedules, _stages  # noqa: E402
from taktline.compat.torch_pipelining._steps import remember  # noqa: E402

for _ours in (_stages, _schedules):
    _defined = [v for v in vars(_ours).values() if getattr(v, "__module__", "") == _ours.__name__]
    _put(*_defined)
    remember(*(value for value in _defined if isinstance(value, ABCMeta)))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:
    # The public names of torch's package, from these modules.
    _shown = of_torch("__init__")
    globals().update(
        {k: v for k, v in vars(_shown).items() if k == "__all__" or not k.startswith("__")}
    )
