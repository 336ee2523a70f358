"""Checks arguments of a pipeline before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from taktline.checks import (
    refuse,
    require_callable,
    require_flag,
    require_instance,
    require_iterable,
    require_number,
    require_whole,
)
from taktline.errors import MismatchError, PartitionError, ScheduleError
from taktline.split import Pipe


def _require_state(name: str, value: Any) -> None:
    if not hasattr(value, "__getitem__"):
        refuse(name, "a mapping from names to tensors", value)


def _require_wrapper(name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in ("ddp", "fsdp"):
        raise MismatchError(f'{name} is "ddp", "fsdp" or None, not {value!r}')


_FLAGS = ("dynamic_shapes", "cuda_graphs", "run_ahead", "compile", "measure", "check_finite")
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(_FLAGS, require_flag),
    **dict.fromkeys(("loss_fn", "prepare", "on_preempt"), require_callable),
    "microbatches": partial(require_whole, least=1, error=ScheduleError),
    "stages_per_rank": partial(require_whole, least=1, error=ScheduleError),
    "report_stragglers": partial(require_whole, least=1),
    "seed": require_whole,
    "mesh": partial(require_instance, kind=DeviceMesh),
    "state_dict": _require_state,
    "data_parallel": _require_wrapper,
}


def check(given: Mapping[str, Any]) -> None:
    """Raise unless each argument is valid; all but flags may be None."""
    for name, require in _CHECKS.items():
        if given[name] is not None or require is require_flag:
            require(name, given[name])
    if given["measure"]:
        _require_measurable(given["model"], given["example"], given["cuts"])


def _require_measurable(model: Any, example: Any, cuts: Any) -> None:
    """Raise unless there is a model to cut by the times of its layers, and what to run them on."""
    if cuts is not None:
        raise PartitionError(
            "measure=True finds where to cut the model, and cuts=[…] says it; pass one of them"
        )
    if not isinstance(model, nn.Module) or isinstance(model, Pipe):
        raise PartitionError(
            "measure=True is for a model that has yet to be cut, and these are its stages; pass "
            "the whole model, or leave out measure=True"
        )
    if example is None:
        raise PartitionError(
            "measure=True runs the layers; pass example=(…), the arguments of one micro-batch"
        )


def names_of(cuts: Any) -> list[str] | None:
    """The names of the submodules at which stages begin, as a list."""
    if cuts is None:
        return None
    return require_iterable("cuts", cuts, "a list of names of submodules", PartitionError)


def as_timedelta(timeout: float | timedelta | None) -> timedelta | None:
    """A timeout that was given in seconds, or as a timedelta."""
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    return timedelta(seconds=require_number("timeout", timeout, least=0.001))
