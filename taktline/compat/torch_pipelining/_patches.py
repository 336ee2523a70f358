"""All changes to our copies of torch's modules; torch's own modules stay as they are.

The functions and classes that replace torch's are in other modules: the split backward
(``_split_backward``), stages (``_stages``), schedules (``_schedules``, ``_named_schedules``), steps
(``_steps``, ``_calls``), models cut at split points (``_IR``, ``_flat_stages``) and drawings
(``_schedule_visualizer``).
"""

from __future__ import annotations

import logging
import re
from abc import ABCMeta
from collections.abc import Sequence
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from taktline.compat._finder import PEER
from taktline.compat.torch_pipelining import _split_backward
from taktline.compat.torch_pipelining._overrides import remember
from taktline.errors import PipeliningMetadataError
from taktline.split import PipeInfo
from taktline.transport import local, transport_of

_WAITS = ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")
"""Kinds of actions that only later versions of torch have."""
_NAMES = ("_utils", "schedules", "stage", "_backward", "_debug", "_unflatten", "microbatch")
_SINCE_2_15 = ("_p2p", "_recv_buffers")
_HERE = "taktline.compat.torch_pipelining"
_THERE = [name for name in _SINCE_2_15 if find_spec(f"{_HERE}.{name}")]
_COPIES: list[Any] = [import_module(f"{_HERE}.{name}") for name in (*_NAMES, *_THERE)]
_utils, schedules, stage = _COPIES[:3]


LATER: list[Any] = []
"""Public names of the package that only later versions of torch have."""


def apply() -> None:
    """Apply all changes."""
    for module in _COPIES:
        if hasattr(module, "logger"):
            # Under torch's name, so that TORCH_LOGS=pp shows it.
            name = module.__name__.rpartition(".")[2]
            module.logger = logging.getLogger(f"{PEER}.{name}")
    stage.dist = _Ranks("torch.distributed")
    for name in _WAITS:
        _add_kind(name)
    # All kinds but the overlap, which contains others; the longest first.
    kinds = {kind.value for kind in schedules._ComputationType} - {"OVERLAP_F_B"}
    either = "|".join(sorted(kinds, key=len, reverse=True))
    schedules._action_regex = re.compile(rf"(\d+)({either})(\d*)")
    _put(_check_torch_compile_compatibility, PipeInfo)
    schedules._add_send_recv = _with_idle_ranks(schedules._add_send_recv)
    if hasattr(stage, "_build_p2p_direction_groups"):  # in 2.14
        stage._build_p2p_direction_groups = _or_one_group(stage._build_p2p_direction_groups)
    _put(*_defined_in(_split_backward))
    _utils.PipeliningMetadataError = _utils.PipeliningShapeError = PipeliningMetadataError
    stage.PipeliningMetadataError = stage.PipeliningShapeError = PipeliningMetadataError
    for module in _COPIES[1:]:  # before 2.12, buffers are contiguous
        if hasattr(module, "_make_tensor_from_meta"):
            module._make_tensor_from_meta = _buffer
    if hasattr(_utils, "validate_metadata"):
        _utils.validate_metadata = _of_tensors(_utils.validate_metadata)
        _utils.validate_tensor_metadata = partial(_utils.validate_metadata, raise_on_mismatch=True)
    # Imported only now, as their bases are the classes that they replace.
    from taktline.compat.torch_pipelining import _named_schedules, _schedules, _stages
    from taktline.compat.torch_pipelining._later import PipelineStageInfo
    from taktline.compat.torch_pipelining._liveness import (
        PipelineActivationLiveness,
        analyze_pipeline_activation_liveness,
    )

    liveness = (PipelineActivationLiveness, analyze_pipeline_activation_liveness)
    show(stage, PipelineStageInfo)
    show(schedules, *liveness)
    LATER.extend((PipelineStageInfo, *liveness))
    modules = (_stages, _schedules, _named_schedules)
    ours = [value for module in modules for value in _defined_in(module)]
    _put(*ours)
    remember(*(value for value in ours if isinstance(value, ABCMeta)))
    stage._RootArgPlaceholder = getattr(stage, "_RootArgPlaceholder", _RootArgPlaceholder)


def show(module: Any, *values: Any) -> None:
    """Make functions and classes public names of a module, if they are not."""
    for value in values:
        setattr(module, value.__name__, value)
    names = [value.__name__ for value in values]
    module.__all__ = [*dict.fromkeys((*module.__all__, *names))]


def _defined_in(module: ModuleType) -> list[Any]:
    """The functions and classes of a module."""
    here = module.__name__
    return [each for each in vars(module).values() if getattr(each, "__module__", None) == here]


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


def _or_one_group(split: Any) -> Any:
    """Torch's groups for each direction; one for both where a group cannot be split.

    Taktline's own channels have a direction in any case, and messages by calls a tag of their own.
    """

    @wraps(split)
    def _build_p2p_direction_groups(group: Any) -> Any:
        try:
            return split(group)
        except RuntimeError:
            return group, group

    return _build_p2p_direction_groups


def _of_tensors(check: Any) -> Any:
    """Torch's check, which took a tensor as the expectation before 2.13."""

    @wraps(check)
    def validate_metadata(desc: str, expected: Any, actual: Any, **options: Any) -> Any:
        if isinstance(expected, torch.Tensor):
            expected = _utils.extract_tensor_meta(expected)
        return check(desc, expected, actual, **options)

    return validate_metadata


def _buffer(meta: Any, device: Any) -> torch.Tensor:
    """A tensor for one message; contiguous, whatever the strides of what is sent."""
    return torch.empty(meta.shape, dtype=meta.dtype, device=device)


class _RootArgPlaceholder:
    """A placeholder for an argument of the model, which torch had before 2.13."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.meta = tensor.to("meta")


class _Ranks(ModuleType):
    """torch.distributed for stages, which also has ranks in threads and without a group."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self, group: dist.ProcessGroup | None = None) -> int:
        """The rank of this process, or thread."""
        return dist.get_rank(group) if _has_groups() else transport_of().rank

    def recv_object_list(self, object_list: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Receive objects; an error of the sender in their place is raised."""
        received = dist.recv_object_list(object_list, *args, **kwargs)
        if isinstance(object_list[0], Exception):
            raise object_list[0]
        return received

    def get_world_size(self, group: dist.ProcessGroup | None = None) -> int:
        """How many ranks there are."""
        return dist.get_world_size(group) if _has_groups() else transport_of().size


def _has_groups() -> bool:
    return local.current() is None and dist.is_initialized()


def _check_torch_compile_compatibility(stages: Sequence[Any], schedule_name: str) -> None:
    """Accept everything: compiled stages work under every schedule."""


def _add_kind(name: str) -> None:
    """Add a kind of action to torch's enumeration, as an enumeration cannot be subclassed."""
    kinds = schedules._ComputationType
    if name not in kinds.__members__:
        member = str.__new__(kinds, name)
        member._name_ = member._value_ = name
        member._sort_order_ = len(kinds)
        kinds._member_names_.append(name)
        kinds._member_map_[name] = kinds._value2member_map_[name] = member
        type.__setattr__(kinds, name, member)
    setattr(schedules, name, kinds[name])
