"""What the layers of a model cost: counted operations, also without data, or measured times."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from taktline import pytree
from taktline.device import keep_generators
from taktline.errors import PartitionError, text_of
from taktline.private import private
from taktline.side_values import SideValues
from taktline.split.arguments import Call, all_tensors
from taktline.split.cut import Cut

_RECURRENT = {"mkldnn_rnn_layer", "_cudnn_rnn"}
_PRODUCT = re.compile(r"(^|_)(mm|bmm|gmm|mv|dot|linear|matmul)(_|$)")
"""Operations that multiply matrices, of torch and of other libraries: ``_scaled_grouped_mm_v2``."""
_GATHERS = {"embedding", "index", "index_select", "gather", "index_put_", "index_add_"}
"""Operations that read only some rows of a tensor."""
_VIEWS = {"_unsafe_view"}
"""Views, which their schemas do not say."""
_NUMBER = 16
"""A number that is read or written takes as long as so many operations of a product."""
_CALL = 100_000
"""The same of a call, forward and backward, as small as it may be."""

_Mode = private("torch.utils._python_dispatch.TorchDispatchMode", "counting operations")


class OperationCounter(_Mode):
    """Counts the operations that run inside of it.

    >>> import torch
    >>> with OperationCounter() as counter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counter.flops, counter.numbers, counter.calls
    (48, 44, 3)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        """Floating-point operations of products of matrices, convolutions and attention."""
        self.numbers = 0
        """Numbers that operations read and write, without views."""
        self.calls = 0
        """Operations, without views."""

    @property
    def cost(self) -> int:
        """How long it takes, in the time of one floating-point operation of a product."""
        return self.flops + _NUMBER * self.numbers + _CALL * self.calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        made = [] if schema is None else [each.alias_info for each in schema.returns]
        name = getattr(func, "__name__", "").partition(".")[0]
        is_view = any(alias is not None and not alias.is_write for alias in made)
        is_view = is_view or name in _VIEWS
        if all_tensors(result) and not is_view:  # it computes, and does not only ask
            self.calls += 1
            self.flops += _flops(func, args, kwargs, result)
            written = _size(result)
            self.numbers += written + (written if name in _GATHERS else _size((args, kwargs)))
        return result


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating-point operations of a product; 0 of others."""
    packet = getattr(func, "overloadpacket", func)
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result)
    name = getattr(packet, "__name__", "")
    given = all_tensors((args, kwargs))
    if name in _RECURRENT:
        # Each vector of the input, or of the state, is multiplied with every matrix of weights.
        vectors = given[0].numel() // given[0].shape[-1]
        matrices = [weight for weight in all_tensors(args[1:3]) if weight.ndim == 2]
        return sum(2 * vectors * weight.numel() for weight in matrices)
    if "dot_product" in name and len(given) > 2:
        query, key, value = given[:3]
        pairs = query.numel() // query.shape[-1] * key.shape[-2]
        return 2 * pairs * (query.shape[-1] + value.shape[-1])
    if _PRODUCT.search(name) and len(given) > 1 and given[0].ndim:
        one, other, made = *given[:2], all_tensors(result)
        if one.ndim == other.ndim == 2 and made and made[0].ndim == 3:  # in groups of columns
            return 2 * one.numel() * other.shape[-1]
        return 2 * _size(result) * one.shape[-1]
    return 0


def _size(tree: Any) -> int:
    return sum(tensor.numel() for tensor in all_tensors(tree))


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
    side = SideValues(0, {})

    def run(name: str, *args: Any, **kwargs: Any) -> Any:
        took, output = _time(whole.get_submodule(name), (args, kwargs), device, side)
        times[Cut(name, sum(cut.unit == name for cut in times))] = took
        return pytree.tree_map_only(torch.Tensor, lambda part: part.detach().to(here), output)

    try:
        # A forward may change what it finds: buffers, and attributes of modules.
        whole = copy.deepcopy(model, {id(part): part for part in model.parameters()})
        for name in units:
            vars(whole.get_submodule(name))["forward"] = partial(run, name)
        with keep_generators([here, device]), torch.no_grad(), side:
            whole(*args, **kwargs)
    except Exception as error:  # the model's code may raise anything
        raise PartitionError(
            f"the layers of {type(model).__name__} cannot be measured: {type(error).__name__}: "
            f"{text_of(error)}; leave out measure=True, or say where to cut"
        ) from error
    return times


def _time(
    module: nn.Module, call: Call, device: torch.device, side: SideValues
) -> tuple[float, Any]:
    """The shortest time of a call of a module's copy, and its output."""
    tensors = (*module.parameters(), *module.buffers())
    made = copy.deepcopy(module, {id(part): _there(part, device) for part in tensors})
    del made.__dict__["forward"]
    took: list[float] = []
    output: Any = None
    skips = side.skips
    fewest, most = _RUNS
    while len(took) <= fewest or (len(took) <= most and sum(took[1:]) < _ENOUGH):
        args, kwargs = pytree.tree_map(lambda part: _argument(part, device), call)
        given = {name: copy.copy(skip) for name, skip in skips.items()}
        with SideValues(0, given) as inner, torch.enable_grad():
            start = _now(device)
            output = made.forward(*args, **kwargs)  # hooks run around the unit
            parts = [part for part in all_tensors(output) if part.requires_grad]
            if parts:
                torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
            took.append(_now(device) - start)
            side.skips = inner.skips
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
