"""All changes to our copies of torch's modules; torch's own modules stay as they are.

The classes and functions that replace torch's are in other modules: stages (``_stages``), schedules
(``_schedules``), models cut at split points (``_IR``) and drawings (``_schedule_visualizer``).
"""

from __future__ import annotations

import logging
from abc import ABCMeta
from collections.abc import Sequence
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from taktline.compat._finder import PEER
from taktline.errors import PipeliningMetadataError
from taktline.split import PipeInfo

_NAMES = ("_utils", "schedules", "stage", "_backward", "_debug", "_unflatten", "microbatch")
_SINCE_2_15 = ("_p2p", "_recv_buffers")
_HERE = "taktline.compat.torch_pipelining"
_THERE = [name for name in _SINCE_2_15 if find_spec(f"{_HERE}.{name}")]
_COPIES: list[Any] = [import_module(f"{_HERE}.{name}") for name in (*_NAMES, *_THERE)]
_utils, schedules, stage = _COPIES[:3]


def apply() -> None:
    """Apply all changes."""
    for module in _COPIES:
        if hasattr(module, "logger"):
            # Under torch's name, so that TORCH_LOGS=pp shows it.
            name = module.__name__.rpartition(".")[2]
            module.logger = logging.getLogger(f"{PEER}.{name}")
    _put(_check_torch_compile_compatibility, PipeInfo)
    schedules._add_send_recv = _with_idle_ranks(schedules._add_send_recv)
    _utils.PipeliningMetadataError = _utils.PipeliningShapeError = PipeliningMetadataError
    stage.PipeliningMetadataError = stage.PipeliningShapeError = PipeliningMetadataError
    for module in _COPIES[1:]:  # before 2.12, buffers are contiguous
        if hasattr(module, "_make_tensor_from_meta"):
            module._make_tensor_from_meta = _buffer
    # Imported only now, as their bases are the classes that they replace.
    from taktline.compat.torch_pipelining import _schedules, _stages
    from taktline.compat.torch_pipelining._steps import remember

    ours = [
        value
        for module in (_stages, _schedules)
        for value in vars(module).values()
        if getattr(value, "__module__", None) == module.__name__
    ]
    _put(*ours)
    remember(*(value for value in ours if isinstance(value, ABCMeta)))
    stage._RootArgPlaceholder = getattr(stage, "_RootArgPlaceholder", _RootArgPlaceholder)


def _put(*values: Any) -> None:
    """Replace torch's functions and classes of the same names."""
    for value in values:
        for module in _COPIES:
            if hasattr(module, name := value.__name__):
                setattr(module, name, value)


def _with_idle_ranks(add: Any) -> Any:
    """Torch's pass that adds messages, which fails for a rank that has nothing to do."""

    @wraps(add)
    def _add_send_recv(compute_actions: Any, *args: Any, **kwargs: Any) -> Any:
        for rank, row in compute_actions.items():
            compute_actions[rank] = row or [None]
        return add(compute_actions, *args, **kwargs)  # which consumes them

    return _add_send_recv


def _buffer(meta: Any, device: Any) -> torch.Tensor:
    """A tensor for one message; contiguous, whatever the strides of what is sent."""
    return torch.empty(meta.shape, dtype=meta.dtype, device=device)


class _RootArgPlaceholder:
    """A placeholder for an argument of the model, which torch had before 2.13."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.meta = tensor.to("meta")


def _check_torch_compile_compatibility(stages: Sequence[Any], schedule_name: str) -> None:
    """Accept everything: compiled stages work under every schedule."""
