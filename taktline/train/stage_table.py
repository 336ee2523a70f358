"""The printed tables of a pipeline: its stages, and what each sends to the next one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from taktline.plan import Costs, Plan, Timeline, peak_memory, simulate
from taktline.split.recorded_stage import crossings_of
from taktline.stage.names import named_parameters
from taktline.text import size_text, table
from taktline.train.measure import StageNeeds, measure
from taktline.transport import Transport
from taktline.transport.exchange import share_values


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
    for (path, _), run in groupby(enumerate(found), lambda pair: _run(*pair)):
        numbers = [number for _, (_, number) in run]
        first, last = numbers[0], numbers[-1]
        if first is None:
            texts.append(path)
        else:
            through = f"{first}" if first == last else f"{first}–{last}"
            texts.append(f"{path}.{through}" if path else through)
    return ", ".join(texts)


def _run(place: int, layer: tuple[str, int | None]) -> tuple[str, int | None]:
    """A key that is the same for consecutive layers of one list."""
    path, number = layer
    return path, None if number is None else number - place
