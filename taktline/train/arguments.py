"""Checks arguments of a pipeline before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
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
from taktline.device import require_usable_device
from taktline.errors import MismatchError, PartitionError, ScheduleError
from taktline.split import Pipe
from taktline.split.arguments import arguments_of


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


def checked(given: dict[str, Any]) -> SimpleNamespace:
    """The arguments of a pipeline by name; raises unless each is valid, as far as one can see."""
    for name, require in _CHECKS.items():
        if given[name] is not None or require is require_flag:  # all but flags may be None
            require(name, given[name])
    if given["measure"]:
        _require_measurable(given["model"], given["example"], given["cuts"])
    found = SimpleNamespace(**{name: value for name, value in given.items() if name != "self"})
    found.example = None if found.example is None else arguments_of(found.example)
    if found.cuts is not None:
        takes = "a list of names of submodules"
        found.cuts = require_iterable("cuts", found.cuts, takes, PartitionError)
    if found.device is not None:
        found.device = require_usable_device(found.device)
    if found.timeout is not None and not isinstance(found.timeout, timedelta):
        found.timeout = timedelta(seconds=require_number("timeout", found.timeout, least=0.001))
    return found


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
