"""All that is changed in our copy of torch's modules; nobody else sees it.

What takes the places of torch's functions and classes is defined beside it: the split backward
(``_halves``), how stages compute (``_stages``), how schedules run (``_schedules``, ``_steps``,
``_calls``), how models are traced (``_IR``), how orders are drawn (``_schedule_visualizer``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from taktline.compat._finder import PEER
from taktline.compat.torch_pipelining import _halves
from taktline.compat.torch_pipelining._replaced import Watched, remember
from taktline.errors import PipeliningMetadataError
from taktline.split import PipeInfo
from taktline.transport import local, transport_of

__all__ = ["apply"]

_WAITS = ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")
"""Actions that later versions of torch have."""
_NAMES = ("_backward", "_debug", "_unflatten", "_utils", "microbatch", "schedules", "stage")
_COPIES: list[Any] = [import_module(f"taktline.compat.torch_pipelining.{name}") for name in _NAMES]
_backward, _debug, _unflatten, _utils, microbatch, schedules, stage = _COPIES


def apply() -> None:
    """Change what differs."""
    for module in _COPIES:
        if hasattr(module, "logger"):
            # Under torch's name, so that TORCH_LOGS=pp shows it.
            name = module.__name__.rpartition(".")[2]
            module.logger = logging.getLogger(f"{PEER}.{name}")
    stage.dist = _Ranks("torch.distributed")
    for name in _WAITS:
        _add_kind(name)
    # All kinds but the overlap, which is written around others; the longest first.
    kinds = {kind.value for kind in schedules._ComputationType} - {"OVERLAP_F_B"}
    either = "|".join(sorted(kinds, key=len, reverse=True))
    schedules._action_regex = re.compile(rf"(\d+)({either})(\d*)")
    _put(_check_torch_compile_compatibility, PipeInfo)
    _put(*_names_of(_halves))
    _utils.PipeliningMetadataError = _utils.PipeliningShapeError = PipeliningMetadataError
    stage.PipeliningMetadataError = stage.PipeliningShapeError = PipeliningMetadataError
    if hasattr(_utils, "validate_metadata"):
        _utils.validate_metadata = _of_tensors(_utils.validate_metadata)
        _utils.validate_tensor_metadata = partial(_utils.validate_metadata, raise_on_mismatch=True)
    # Their bases are what they replace.
    from taktline.compat.torch_pipelining import _named, _schedules, _stages

    ours = [value for module in (_stages, _schedules, _named) for value in _names_of(module)]
    _put(*ours)
    remember(*(value for value in ours if isinstance(value, Watched)))
    stage._RootArgPlaceholder = getattr(stage, "_RootArgPlaceholder", _RootArgPlaceholder)


def _names_of(module: ModuleType) -> list[Any]:
    return [getattr(module, name) for name in module.__all__]


def _put(*values: Any) -> None:
    """Put functions and classes in the places of torch's of the same names."""
    for value in values:
        for module in _COPIES:
            if hasattr(module, name := value.__name__):
                setattr(module, name, value)


def _of_tensors(check: Any) -> Any:
    """Torch's check, for which before 2.13 a tensor said what is expected."""

    @wraps(check)
    def validate_metadata(desc: str, expected: Any, actual: Any, **options: Any) -> Any:
        if isinstance(expected, torch.Tensor):
            expected = _utils.extract_tensor_meta(expected)
        return check(desc, expected, actual, **options)

    return validate_metadata


class _RootArgPlaceholder:
    """Stood for an argument of the whole model before torch 2.13: its shape, without its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.meta = tensor.to("meta")


class _Ranks(ModuleType):
    """torch.distributed for stages: a local rank, or a process without a group, has a rank, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self, group: dist.ProcessGroup | None = None) -> int:
        """The rank of this process, or thread."""
        return dist.get_rank(group) if _has_groups() else transport_of().rank

    def get_world_size(self, group: dist.ProcessGroup | None = None) -> int:
        """How many there are."""
        return dist.get_world_size(group) if _has_groups() else transport_of().size


def _has_groups() -> bool:
    return local.current() is None and dist.is_initialized()


def _check_torch_compile_compatibility(stages: Sequence[Any], schedule_name: str) -> None:
    """Nothing: compiled stages work under every schedule."""


def _add_kind(name: str) -> None:
    """Add a kind of action to torch's enumeration, which cannot be derived from."""
    kinds = schedules._ComputationType
    if name not in kinds.__members__:
        member = str.__new__(kinds, name)
        member._name_ = member._value_ = name
        member._sort_order_ = len(kinds)
        kinds._member_names_.append(name)
        kinds._member_map_[name] = kinds._value2member_map_[name] = member
        type.__setattr__(kinds, name, member)
    setattr(schedules, name, kinds[name])
