"""Counts what stages compute, send and keep, by a run without data where that is possible."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from taktline import pytree
from taktline.device import keep_generators
from taktline.meta import as_arguments, name_of
from taktline.private import private
from taktline.side_values import Aside, Skip
from taktline.split.arguments import arguments_of, tensors_in
from taktline.split.costs import OperationCounter
from taktline.transport.containers import note_containers

_log = logging.getLogger("taktline")
_CONTAINERS = (list, dict, set, OrderedDict)

_WITHOUT_DATA = "a prediction without data"
_FakeMode = private("torch._subclasses.fake_tensor.FakeTensorMode", _WITHOUT_DATA)
_with_data = private("torch._subclasses.fake_tensor.unset_fake_temporarily", _WITHOUT_DATA)
_Mode = private("torch.utils._python_dispatch.TorchDispatchMode", _WITHOUT_DATA)


class StageNeeds(NamedTuple):
    """Of one stage, for one micro-batch."""

    work: float
    """What a forward costs, counted."""
    sends: int
    """Bytes that go to the next stage."""
    keeps: int
    """Bytes that a forward keeps for its backward."""
    crosses: tuple[tuple[str, tuple[int, ...], int], ...] = ()
    """Of each tensor that goes to the next stage: type, shape and bytes."""


def measure(modules: Sequence[nn.Module], example: Any) -> list[StageNeeds] | None:
    """Run the stages without data, or else with that of the example; None if neither works."""
    # Forwards may count their calls, and these count for nothing.
    undo = _undo_of([part for module in modules for part in module.modules()])
    for run in (_run_without_data, _run_with_data):
        try:
            with torch.enable_grad(), _quietly():
                return run(modules, *arguments_of(example))
        except Exception as error:
            # Whatever a model raises here. This is for a prediction only, and what is wrong with
            # the model itself a step reports; here it is left in the log.
            text = f"{type(error).__name__}: {error}"
            _log.info("no prediction of work and memory by %s: %s", run.__name__[1:], text)
        finally:
            undo()
    return None


def _undo_of(parts: Sequence[nn.Module]) -> Callable[[], None]:
    """A function that gives modules the attributes, and the lists, dicts and hooks, of now."""
    tables = [vars(part) for part in parts]
    held = [value for table in tables for value in table.values() if type(value) in _CONTAINERS]
    before = [(each, copy.copy(each)) for each in (*tables, *held)]

    def undo() -> None:
        for each, copied in before:
            each.clear()
            (each.extend if isinstance(each, list) else each.update)(copied)

    return undo


def _run_without_data(
    modules: Sequence[nn.Module], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[StageNeeds]:
    mode = _FakeMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return mode.from_tensor(tensor)
        with mode:
            return torch.empty_like(tensor, device="cpu", requires_grad=tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    states = [_replaced(module, fake) for module in modules]
    with mode, _Filled(fake):
        # What a first call does beside its work does not count.
        _run(modules, states, args, kwargs)
        return _run(modules, states, args, kwargs)


def _run_with_data(
    modules: Sequence[nn.Module], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[StageNeeds]:
    """The same on real tensors, as what is done, or its shapes, may depend on data."""
    tensors = [tensor for m in modules for tensor in (*m.parameters(), *m.buffers())]
    if any(tensor.is_meta for tensor in (*tensors, *tensors_in((args, kwargs)))):
        raise ValueError("there is no data")
    device = tensors[0].device if tensors else torch.device("cpu")
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda part: part.to(device), (args, kwargs))
    states = [with_copied_buffers(module) for module in modules]
    with keep_generators([device]):
        return _run(modules, states, args, kwargs)


def with_copied_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors for a call of a module that leaves its buffers as they are."""
    return _replaced(module, lambda one: one if isinstance(one, nn.Parameter) else one.clone())


def _replaced(
    module: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What replaces the tensors of a module: once for each module that holds one.

    For ``functional_call(…, tie_weights=False)``: with ties, torch replaces the tensors of a module
    in two places twice, and does not put them back.
    """
    found = {
        f"{path}.{name}" if path else name: tensor
        for path, inner in module.named_modules()
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items())
        if tensor is not None
    }
    made = {id(tensor): replace(tensor) for tensor in found.values()}
    return {name: made[id(tensor)] for name, tensor in found.items()}


def _run(
    modules: Sequence[nn.Module],
    states: Sequence[dict[str, torch.Tensor]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> list[StageNeeds]:
    found: list[StageNeeds] = []
    skips: dict[str, Skip] = {}
    for stage, (module, state) in enumerate(zip(modules, states, strict=True)):
        kept = _Kept({_memory(tensor) for tensor in state.values()})
        with Aside(stage, skips) as aside, OperationCounter() as counter, kept.noting():
            given = tuple(args), kwargs if stage == 0 else {}
            output = functional_call(module, state, *given, tie_weights=False)
        skips, args = aside.skips, as_arguments(output)
        note_containers(pytree.tree_structure(args))
        handed = (args, [skip.value for skip in skips.values()])
        crosses = tuple(
            (name_of(leaf.dtype), tuple(leaf.shape), leaf.nbytes) for leaf in tensors_in(handed)
        )
        sends = sum(nbytes for *_, nbytes in crosses)
        found.append(StageNeeds(counter.cost, sends, kept.bytes, crosses))
    return found


class _Filled(_Mode):
    """Runs on zeros what cannot run without data."""

    def __init__(self, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            with _with_data():
                args, kwargs = pytree.tree_map_only(torch.Tensor, _zeros, (args, kwargs))
                output = func(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, self._fake, output)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without compiling, and what torch writes of operations that cannot run without data."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        log.disabled = before


class _Kept:
    """What autograd keeps, each piece of memory once, and without what is there."""

    def __init__(self, there: set[int]) -> None:
        self._there = there
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def noting(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = _memory(tensor)
        if memory not in self._there:  # as weights are
            self._storages[memory] = tensor.untyped_storage()
        return tensor


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
