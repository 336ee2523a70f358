"""The printed tables of a pipeline: its stages, what each sends to the next one, and needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from taktline import pytree
from taktline.meta import as_arguments, name_of
from taktline.plan import Costs, Plan, Timeline, peak_memory, simulate
from taktline.plan.estimate import RankLimit, boundary_messages
from taktline.side_values import SideValues, Skip
from taktline.split.costs import OperationCounter
from taktline.split.recorded_stage import crossings_of
from taktline.split.steps import all_tensors, arguments_of
from taktline.stage.names import named_parameters
from taktline.text import size_text, table
from taktline.train.moments import Given, Saved, without_data
from taktline.train.weights import bytes_of
from taktline.transport import Transport
from taktline.transport.codec import note_containers
from taktline.transport.exchange import share_values

_log = logging.getLogger("taktline")


class Crossing(NamedTuple):
    """A tensor that goes from one stage to the next."""

    what: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class StageNeeds(NamedTuple):
    """What one stage needs for one micro-batch."""

    work: tuple[float, float, float]
    """What a forward and the two halves of a backward cost, counted."""
    keeps: int
    """Bytes that a forward keeps for its backward."""
    crosses: tuple[Crossing, ...]
    """The tensors that go to the next stage."""
    given: Given | None = None
    """What it gets, as tensors without data."""

    @property
    def sends(self) -> int:
        """Bytes that go to the next stage."""
        return sum(tensor.nbytes for tensor in self.crosses)


NOTHING = StageNeeds((0, 0, 0), 0, ())


def measure(modules: Sequence[nn.Module], example: Any) -> list[StageNeeds] | None:
    """What stages need for an example, by a run of copies of them without data.

    None if the forward reads data: it is for a prediction only, and what is wrong with a model a
    step reports.
    """
    try:
        call = pytree.tree_map_only(torch.Tensor, _alone, arguments_of(example))
        with without_data(modules, (tuple(call[0]), dict(call[1]))) as (copies, (args, kwargs)):
            names = [crossings_of(module) for module in modules]
            # What a first call does beside its work does not count.
            _needs_of(names, copies, args, kwargs)
            found = _needs_of(names, copies, args, kwargs)
        return [need._replace(given=_described(need.given)) for need in found]
    except Exception as error:  # whatever a model raises
        _log.info("no prediction of work and memory: %s: %s", type(error).__name__, error)
        return None


def _described(given: Any) -> Any:
    """The same as tensors that have no data anywhere."""

    def described(part: torch.Tensor) -> torch.Tensor:
        size, dtype, meta = part.shape, part.dtype, torch.device("meta")
        made = torch.empty_strided(size, part.stride(), dtype=dtype, device=meta)
        return made.requires_grad_(part.requires_grad)

    skips = {
        name: Skip(pytree.tree_map_only(torch.Tensor, described, skip.value), skip.stage)
        for name, skip in given.skips.items()
    }
    args, kwargs = pytree.tree_map_only(torch.Tensor, described, (given.args, given.kwargs))
    return Given(args, kwargs, skips)


def _needs_of(
    names: Sequence[list[str]], copies: Sequence[nn.Module], args: Any, kwargs: dict[str, Any]
) -> list[StageNeeds]:
    found: list[StageNeeds] = []
    skips: dict[str, Skip] = {}
    for stage, module in enumerate(copies):
        own = kwargs if stage == 0 else {}
        given = Given(tuple(args), own, {k: Skip(s.value, s.stage) for k, s in skips.items()})
        kept = Saved([*module.parameters(), *module.buffers()])
        with SideValues(stage, skips) as side, OperationCounter() as counter, kept.hooks:
            output = module(*args, **own)
        skips, args = side.skips, as_arguments(output)
        note_containers(pytree.tree_structure(args))
        crossing = all_tensors((args, [skip.value for skip in skips.values()]))
        other = "an argument of the model" if names[stage] else "output"
        crosses = tuple(
            Crossing(name, name_of(part.dtype), tuple(part.shape), part.nbytes)
            for name, part in zip(chain(names[stage], repeat(other)), crossing, strict=False)
        )
        work = (counter.cost, counter.backward_input, counter.backward_weight)
        found.append(StageNeeds(work, kept.total, crosses, given))
    return found


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same without the rest of the batch, if it is part of one."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


class Boundaries(dict[int, tuple[Crossing, ...]]):
    """The tensors that each stage sends to the next one for a micro-batch of the example.

    >>> import taktline as tl, torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> pipe = tl.Pipeline(model, example=(torch.ones(2, 4),), microbatches=2, ranks=2, cuts=["1"])
    >>> print(pipe.boundaries)
    from  to  what            type     shape   bytes
    0     1   0 (its output)  float32  [2, 8]     64
    """

    def __str__(self) -> str:
        lines = [["from", "to", "what", "type", "shape", "bytes"]]
        for stage, found in self.items():
            for place, (what, dtype, shape, nbytes) in enumerate(found):
                ends = ["", ""] if place else [str(stage), str(stage + 1)]
                lines.append([*ends, what, dtype, str(list(shape)), f"{nbytes:,}"])
        return table(lines, left=lines[0][:-1])


@dataclass(slots=True)
class StageTable:
    """All stages of a pipeline, and a prediction for its plan."""

    plan: Plan
    rows: dict[int, tuple[str, int]]
    """The layers of each stage, as a text, and how many parameters it has."""
    needs: list[StageNeeds] | None
    """Of each stage for the example, if known."""
    limits: Sequence[RankLimit] = ()
    """What each rank has, if it was said."""
    memory: str = ""
    """What each rank holds, and what is left of its memory, as a table."""
    held: tuple[float, ...] = ()
    """The bytes of weights, gradients and AdamW's state of each stage, if all are known."""
    prepared: bool = False
    """Whether ``prepare`` or ``checkpoint`` has changed the stages since they were measured."""

    @classmethod
    def of(
        cls, plan: Plan, modules: Mapping[int, nn.Module], example: Any, transport: Transport
    ) -> StageTable:
        """The table of all stages; other processes report theirs."""
        mine: list[tuple[int, str, int]] = []
        for stage, module in modules.items():
            parameters = named_parameters(module)
            sizes = {id(p): p.numel() for p in parameters.values()}
            mine.append((stage, _layers(parameters), sum(sizes.values())))
        if len(modules) == plan.stages:
            listed = [modules[stage] for stage in range(plan.stages)]
            needs = None if example is None else measure(listed, example)
            rows = {stage: (layers, count) for stage, layers, count in mine}
            return cls(plan, rows, needs, held=tuple(map(_held, listed)))
        shared = share_values(transport, mine, [(int, str, int)], "Pipeline(…)", what="the stages")
        return cls(plan, {stage: (text, n) for rank in shared for stage, text, n in rank}, None)

    @property
    def boundaries(self) -> Boundaries:
        """The tensors between the stages."""
        return Boundaries(enumerate(need.crosses for need in (self.needs or ())[:-1]))

    @property
    def work(self) -> Costs | None:
        """The costs of the stages, if they were counted: work for time, bytes for memory."""
        if self.needs is None or not any(need.work[0] for need in self.needs):
            return None
        speeds = [limit.speed for limit in self.limits] or [1.0] * self.plan.ranks
        rates = np.array(speeds)[[*self.plan.placement.rank_of]]
        times = np.array([need.work for need in self.needs]).T / rates
        forward, inputs, weights = map(tuple, times.tolist())
        return Costs(
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            message_bytes=tuple(need.sends for need in self.needs),
            activation=tuple(need.keeps for need in self.needs),
        )

    def predicted(self) -> Timeline:
        """The simulated timeline; times are relative to those of a mean stage."""
        if (work := self.work) is None:
            return simulate(self.plan)
        n, unit = self.plan.stages, work.of("forward", self.plan.stages).mean() or 1.0
        names = ("forward", "backward_input", "backward_weight")
        times: dict[str, Any] = {name: tuple(work.of(name, n) / unit) for name in names}
        return simulate(self.plan, Costs(**times, activation=work.activation))

    def __str__(self) -> str:
        plan, needs = self.plan, self.needs
        peaks = peak_memory(plan, self.work)
        lines = [["rank", "stage", "layers", "parameters", "sends", "keeps", "peak"]]
        lines[0] += ["total"] * bool(needs and self.held)
        messages = boundary_messages(
            plan, [need.sends for need in needs or ()] or [0] * plan.stages
        )
        for rank in range(plan.ranks):
            peak = [size_text(peaks[rank]) if needs else f"{peaks[rank]:g}"]
            if needs and self.held:
                held = sum(self.held[stage] for stage in plan.placement.stages_of(rank))
                peak.append(size_text(held + peaks[rank] + messages[rank]))
            for place, stage in enumerate(plan.placement.stages_of(rank)):
                layers, parameters = self.rows[stage]
                sends = size_text(needs[stage].sends) if needs and stage < plan.stages - 1 else ""
                keeps = size_text(needs[stage].keeps) if needs else ""
                numbers = [f"{parameters:,}", sends, keeps]
                ends = [""] * len(peak) if place else peak
                lines.append(["" if place else str(rank), str(stage), layers, *numbers, *ends])
        basis, memory = "all stages alike", "peak: activations of a rank, in micro-batches"
        if needs:
            basis = "from counted operations"
            memory = "sends, keeps: per micro-batch; peak: activations of a rank"
            if self.held:
                memory += "; total: and weights, gradients, AdamW, messages"
            memory += "; all before prepare= and checkpoint=" * self.prepared
        verdict = self.predicted().verdict
        text = f"{table(lines, left=['layers'])}\npredicted {verdict} ({basis})\n{memory}"
        return f"{text}\n{self.memory}" if self.memory else text


def _held(module: nn.Module) -> float:
    tensors = {id(each): each for each in (*module.parameters(), *module.buffers())}.values()
    return float(sum(bytes_of(each) + 3 * each.nbytes * each.requires_grad for each in tensors))


def _layers(names: Iterable[str]) -> str:
    """The first and the last layer that parameters belong to.

    >>> _layers(["embed.weight", "blocks.0.a.weight"]), _layers(["blocks.1.a", "blocks.3.b"])
    ('embed–blocks.0', 'blocks.1–3')
    """
    numbered = {name: re.match(r"(.*?\b\d+)\.", name) for name in names}
    layers = [m[1] if m else name.rpartition(".")[0] or name for name, m in numbered.items()]
    if not layers or layers[0] == layers[-1]:
        return layers[0] if layers else ""
    path = layers[0].rpartition(".")[0]
    return f"{layers[0]}–{layers[-1].removeprefix(f'{path}.')}"
