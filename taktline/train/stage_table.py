"""The printed tables of a pipeline: its stages, what each sends to the next one, and needs."""

from __future__ import annotations

import copy
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from taktline import pytree
from taktline.device import keep_generators
from taktline.meta import as_arguments, name_of
from taktline.plan import Costs, Plan, Timeline, peak_memory, simulate
from taktline.private import private
from taktline.side_values import Aside, Skip
from taktline.split.arguments import arguments_of, tensors_in
from taktline.split.costs import OperationCounter
from taktline.split.recorded_stage import crossings_of
from taktline.stage.names import named_parameters
from taktline.text import size_text, table
from taktline.transport import Transport
from taktline.transport.containers import note_containers
from taktline.transport.exchange import share_values

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
        there = {_memory(tensor) for tensor in state.values()}
        with Aside(stage, skips) as aside, OperationCounter() as counter, _keeping(there) as kept:
            given = tuple(args), kwargs if stage == 0 else {}
            output = functional_call(module, state, *given, tie_weights=False)
        skips, args = aside.skips, as_arguments(output)
        note_containers(pytree.tree_structure(args))
        handed = (args, [skip.value for skip in skips.values()])
        crosses = tuple(
            (name_of(leaf.dtype), tuple(leaf.shape), leaf.nbytes) for leaf in tensors_in(handed)
        )
        sends = sum(nbytes for *_, nbytes in crosses)
        keeps = sum(storage.nbytes() for storage in kept.values())
        found.append(StageNeeds(counter.cost, sends, keeps, crosses))
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


@contextmanager
def _keeping(there: set[int]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Yields what autograd keeps inside, each piece of memory once, and without what is there."""
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _memory(tensor) not in there:  # as weights are
            found[_memory(tensor)] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Crossing(NamedTuple):
    """A tensor that goes from one stage to the next."""

    what: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Boundaries(dict[int, tuple[Crossing, ...]]):
    """The tensors that each stage sends to the next one for a micro-batch of the example.

    >>> import taktline as tl, torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> pipe = tl.Pipeline(model, example=(torch.ones(2, 4),), microbatches=2, ranks=2, cuts=["1"])
    >>> print(pipe.boundaries)
    from  to  what            type     shape   bytes
    0     1   0 (its output)  float32  [2, 8]     64
    """

    @classmethod
    def of(cls, modules: Sequence[nn.Module], needs: Sequence[StageNeeds]) -> Boundaries:
        """The boundaries between all stages, as they were measured."""
        found = cls()
        for stage, (module, need) in enumerate(zip(modules[:-1], needs[:-1], strict=True)):
            names = crossings_of(module)
            rest = "an argument of the model" if names else "output"
            names += [rest] * (len(need.crosses) - len(names))
            pairs = zip(names, need.crosses, strict=True)
            found[stage] = tuple(Crossing(name, *crossing) for name, crossing in pairs)
        return found

    def __str__(self) -> str:
        lines = [["from", "to", "what", "type", "shape", "bytes"]]
        for stage, found in self.items():
            for place, (what, dtype, shape, nbytes) in enumerate(found):
                ends = ["", ""] if place else [str(stage), str(stage + 1)]
                lines.append([*ends, what, dtype, str(list(shape)), f"{nbytes:,}"])
        return table(lines, left=lines[0][:-1])


@dataclass(frozen=True, slots=True)
class Row:
    """One stage in the table."""

    stage: int
    layers: str
    parameters: int
    needs: StageNeeds | None

    @classmethod
    def of(cls, stage: int, module: nn.Module, needs: StageNeeds | None) -> Row:
        """The row of a stage's module."""
        parameters = named_parameters(module)
        count = sum({id(p): p.numel() for p in parameters.values()}.values())
        return cls(stage, _layers(parameters), count, needs)


class StageTable:
    """All stages of a pipeline, and a prediction for its plan."""

    def __init__(
        self, plan: Plan, rows: Sequence[Row], boundaries: Boundaries | None = None
    ) -> None:
        self._plan = plan
        self.prepared = False
        """Whether ``prepare`` has changed the stages since they were measured."""
        self.boundaries = boundaries or Boundaries()
        self._rows = {row.stage: row for row in rows}

    @classmethod
    def of(
        cls, plan: Plan, modules: Mapping[int, nn.Module], example: Any, transport: Transport
    ) -> StageTable:
        """The table of all stages; other processes report theirs."""
        if len(modules) == plan.stages:
            listed = [modules[stage] for stage in range(plan.stages)]
            needs = None if example is None else measure(listed, example)
            rows = [Row.of(s, listed[s], needs[s] if needs else None) for s in range(plan.stages)]
            return cls(plan, rows, Boundaries.of(listed, needs) if needs else None)
        mine = [asdict(Row.of(stage, module, None)) for stage, module in modules.items()]
        shape = [{"stage": int, "layers": str, "parameters": int, "needs": None}]
        shared = share_values(transport, mine, shape, "Pipeline(…)", what="the stages")
        return cls(plan, [Row(**row) for rows in shared for row in rows])

    @property
    def work(self) -> Costs | None:
        """The costs of the stages, if they were counted: work for time, bytes for memory."""
        needs = [self._rows[stage].needs for stage in range(self._plan.stages)]
        known = [need for need in needs if need is not None]
        if len(known) < len(needs) or not any(need.work for need in known):
            return None
        work = tuple(need.work for need in known)
        return Costs(
            forward=work,
            backward_input=work,
            backward_weight=work,
            message_bytes=tuple(need.sends for need in known),
            activation=tuple(need.keeps for need in known),
        )

    def predicted(self) -> Timeline:
        """The simulated timeline; times and memory are relative to those of a mean stage."""
        counted, stages = self.work, self._plan.stages
        if counted is None:
            return simulate(self._plan)
        each = (counted.of(name, stages) for name in ("forward", "activation"))
        work, memory = (tuple(numbers / (numbers.mean() or 1.0)) for numbers in each)
        return simulate(
            self._plan,
            Costs(forward=work, backward_input=work, backward_weight=work, activation=memory),
        )

    def __str__(self) -> str:
        plan, known = self._plan, self._rows[0].needs is not None
        peaks = peak_memory(plan, self.work)
        lines = [["rank", "stage", "layers", "parameters", "sends", "keeps", "peak"]]
        for rank in range(plan.ranks):
            peak = size_text(peaks[rank]) if known else f"{peaks[rank]:g}"
            for place, stage in enumerate(plan.placement.stages_of(rank)):
                row = self._rows[stage]
                sends = size_text(row.needs.sends) if row.needs and stage < plan.stages - 1 else ""
                keeps = size_text(row.needs.keeps) if row.needs else ""
                once = ["", ""] if place else [str(rank), peak]
                numbers = [f"{row.parameters:,}", sends, keeps]
                lines.append([once[0], str(stage), row.layers, *numbers, once[1]])
        basis, memory = "all stages alike", "peak: activations in flight"
        if known:
            basis = "from counted operations"
            memory = "sends, keeps: per micro-batch; peak: activations of a rank"
            memory += "; all before prepare=" * self.prepared
        bubble = f"predicted bubble: {self.predicted().bubble():.1%}"
        return f"{table(lines, left=['layers'])}\n{bubble} ({basis}); {memory}"


def _layers(names: Sequence[str] | Mapping[str, Any]) -> str:
    """The layers that parameters belong to; consecutive layers of a list as a range.

    >>> _layers(["embed.weight", "blocks.0.a.weight", "blocks.1.a.weight", "blocks.1.b", "scale"])
    'embed, blocks.0–1, scale'
    """
    found: dict[tuple[str, int | None], None] = {}
    for name in names:
        match = re.match(r"(?:(\D.*?)\.)?(\d+)\.", name)
        if match is not None:
            found[match[1] or "", int(match[2])] = None
        else:
            found[name.rpartition(".")[0] or name, None] = None
    texts: list[str] = []
    for (path, _), run in groupby(enumerate(found), lambda pair: _consecutive(*pair)):
        numbers = [number for _, (_, number) in run]
        first, last = numbers[0], numbers[-1]
        if first is None:
            texts.append(path)
        else:
            through = f"{first}" if first == last else f"{first}–{last}"
            texts.append(f"{path}.{through}" if path else through)
    return ", ".join(texts)


def _consecutive(place: int, layer: tuple[str, int | None]) -> tuple[str, int | None]:
    """A key that is the same for consecutive layers of one list."""
    path, number = layer
    return path, None if number is None else number - place
