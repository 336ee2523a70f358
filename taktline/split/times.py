"""The times of a model's layers, forward and backward, on the device where they will train."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from taktline import pytree
from taktline.device import keep_generators
from taktline.errors import PartitionError, text_of
from taktline.side_values import Aside
from taktline.split.arguments import Call, tensors_in
from taktline.split.steps import Cut

_RUNS = (5, 20)
"""The fewest and the most runs of a call; of a quick one there are more."""
_ENOUGH = 20.0
"""The milliseconds after which there need not be more."""
_clock = time.perf_counter

Measure: TypeAlias = Callable[[nn.Module, Iterable[str], Call], Mapping[Cut, float]]
"""Returns the time of each call of some units of a model, in milliseconds."""


def measure_times(
    model: nn.Module, units: Iterable[str], call: Call, device: torch.device | None = None
) -> dict[Cut, float]:
    """The time of each call of a unit, forward and backward, in milliseconds.

    The shortest of a few runs, after one to warm up. Copies of the units run, one at a time, on
    ``device``, so the model need not fit there, and stays as it is. On the meta device it has no
    values: then those of the copies, and of their arguments, are random.
    """
    tensors = [*model.parameters(), *model.buffers()]
    here = next((tensor.device for tensor in tensors), torch.device("cpu"))
    device = device or (torch.device("cpu") if here.type == "meta" else here)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda part: part.to(here), call)
    times: dict[Cut, float] = {}
    aside = Aside(0, {})

    def run(name: str, *args: Any, **kwargs: Any) -> Any:
        took, output = _time(whole.get_submodule(name), (args, kwargs), device, aside)
        times[Cut(name, sum(cut.unit == name for cut in times))] = took
        return pytree.tree_map_only(torch.Tensor, lambda part: part.detach().to(here), output)

    try:
        # A forward may change what it finds: buffers, and attributes of modules.
        whole = copy.deepcopy(model, {id(part): part for part in model.parameters()})
        for name in units:
            vars(whole.get_submodule(name))["forward"] = partial(run, name)
        with keep_generators([here, device]), torch.no_grad(), aside:
            whole(*args, **kwargs)
    except Exception as error:  # the model's code may raise anything
        raise PartitionError(
            f"the layers of {type(model).__name__} cannot be measured: {type(error).__name__}: "
            f"{text_of(error)}; leave out measure=True, or say where to cut"
        ) from error
    return times


def _time(module: nn.Module, call: Call, device: torch.device, aside: Aside) -> tuple[float, Any]:
    """The shortest time of a call of a module's copy, and its output."""
    tensors = (*module.parameters(), *module.buffers())
    made = copy.deepcopy(module, {id(part): _there(part, device) for part in tensors})
    del made.__dict__["forward"]
    took: list[float] = []
    output: Any = None
    skips = aside.skips
    fewest, most = _RUNS
    while len(took) <= fewest or (len(took) <= most and sum(took[1:]) < _ENOUGH):
        args, kwargs = pytree.tree_map(lambda part: _argument(part, device), call)
        given = {name: copy.copy(skip) for name, skip in skips.items()}
        with Aside(0, given) as inner, torch.enable_grad():
            start = _now(device)
            output = made.forward(*args, **kwargs)  # hooks run around the unit
            parts = [part for part in tensors_in(output) if part.requires_grad]
            if parts:
                torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
            took.append(_now(device) - start)
            aside.skips = inner.skips
    return min(took[1:]), output


def _argument(part: Any, device: torch.device) -> Any:
    """An argument for one run, which may change it in place."""
    if not isinstance(part, torch.Tensor):
        return part if callable(part) else copy.deepcopy(part)
    there = _there(part, device).detach()
    return there.requires_grad_(there.is_floating_point() or there.is_complex()).clone()


def _there(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, with random floats, or zeros of other types, if there are no values."""
    if not tensor.is_meta:
        made = tensor.detach().to(device, copy=True)
    else:
        made = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=device)
        if made.is_floating_point():
            made.normal_(0, 0.1)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _now(device: torch.device) -> float:
    """The time in milliseconds, once the device has done its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return 1e3 * _clock()
