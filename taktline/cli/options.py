"""Options that several commands share, and how a FILE or NAME becomes a plan."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from taktline.errors import ArgumentError, CostError, ScheduleError, TaktlineError
from taktline.plan import (
    Costs,
    Link,
    Plan,
    Timeline,
    find,
    fit_memory,
    names,
    optimise,
    read,
    read_costs,
    read_timeline,
    simulate,
)
from taktline.plan.io import is_timeline
from taktline.text import size_in

OUTPUT = ("--output", "-o")


_MOST = 500_000
"""The most forwards of a plan that a command builds: with more it would run for a minute."""


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a plan; each field is an option."""

    ranks: Annotated[int | None, _option("Number of ranks (default 4).", "--ranks", "-r")] = None
    stages_per_rank: Annotated[
        int | None,
        _option("Stages per rank, for schedules that leave it open.", "--stages-per-rank", "-s"),
    ] = None
    microbatches: Annotated[
        int | None, _option("Number of micro-batches (default 8).", "--microbatches", "-m")
    ] = None

    def build(self, name: str) -> Plan:
        """The plan of a schedule, by default on 4 ranks with 8 micro-batches."""
        ranks = 4 if self.ranks is None else self.ranks
        microbatches = 8 if self.microbatches is None else self.microbatches
        return find(name).build(ranks, microbatches, self.stages_per_rank, most=_MOST)


@dataclass(frozen=True, slots=True)
class Times(Size):
    """Also how long actions take; each field is an option."""

    forward: Annotated[float | None, _option("Time of a rank's forward, F (default 1).")] = None
    backward: Annotated[float | None, _option("Time of a backward for inputs, I (default 1).")] = (
        None
    )
    weight: Annotated[float | None, _option("Time of a backward for weights, W (default 1).")] = (
        None
    )
    comm: Annotated[float | None, _option("Time of a message between ranks (default 0).")] = None

    def costs(self, share: int, known: Costs | None) -> Costs:
        """The known costs, with the given times in their place.

        If no costs are known, times are those of a rank's whole share of the model, of which each
        of its ``share`` stages takes a part: a plan takes equally long in all commands.
        """
        names = ("forward", "backward_input", "backward_weight")
        times = zip(names, (self.forward, self.backward, self.weight), strict=True)
        given: dict[str, Any] = {name: time for name, time in times if time is not None}
        if given:
            given["overlap"] = None
        if given.keys() & {"backward_input", "backward_weight"}:
            given["backward"] = None
        if self.comm is not None:
            given["link"] = Link(latency=self.comm)
        costs = replace(known or Costs(), **given)
        if known is not None:
            return costs
        parts = {name: getattr(costs, name) / share for name in names}
        return replace(costs, **parts)

    def timelines(self, targets: Sequence[str], *, predict: bool) -> list[Timeline]:
        """The timelines in files, and simulated timelines of plans and schedules.

        With ``predict``, the predicted timeline of a file comes before its own. The size applies
        to schedules only; its stages per rank to schedules that leave them open.
        """
        from rich.console import Console

        own = (self.ranks, self.stages_per_rank, self.microbatches) == (None, None, None)
        if not own and all(map(_is_file, targets)):
            raise ArgumentError(
                f"{targets[0]} is a file and has its own numbers; leave out --ranks, "
                "--stages-per-rank and --microbatches"
            )
        timelines, left_out = list[Timeline](), dict[str, TaktlineError]()
        with Console(stderr=True).status("simulating …") as status:
            for target in targets:
                status.update(f"simulating {target} …")
                measured = known = None
                if not _is_file(target):
                    plan = self._build_beside(target, len(targets) - 1)
                elif is_timeline(target):
                    measured = read_timeline(target)
                    plan, known = measured.plan, measured.costs
                else:
                    plan, known = read(target), read_costs(target)
                if measured is None or predict:
                    costs = self.costs(plan.stages // plan.ranks, known)
                    try:
                        timelines.append(simulate(self.fitted(plan, costs), costs))
                    except (ScheduleError, CostError) as error:  # there is not enough memory
                        left_out[plan.name] = error
                timelines += [] if measured is None else [measured]
        if left_out and not timelines:
            raise next(iter(left_out.values()))
        if left_out:
            typer.echo(f"left out, as they do not fit: {', '.join(left_out)}", err=True)
        return timelines

    def fitted(self, plan: Plan, costs: Costs) -> Plan:
        """The plan within what a rank may use."""
        return plan

    def _build_beside(self, name: str, others: int) -> Plan:
        try:
            fixed = find(name).stages_per_rank
        except ScheduleError as error:
            raise ScheduleError(f"{error}; a file's name ends in .csv or .json") from None
        return (replace(self, stages_per_rank=None) if fixed and others else self).build(name)


@dataclass(frozen=True, slots=True)
class Within(Times):
    """Also what ranks may use, and what saves memory; each field is an option."""

    memory: Annotated[
        float | None,
        _option("Memory of a rank: micro-batches, or bytes as in a file's costs (default: any)."),
    ] = None
    offload: Annotated[
        str | None,
        _option("Time of a copy of what a forward keeps to the host, or its speed, like 50GB/s."),
    ] = None
    recompute: Annotated[
        float | None, _option("Time of a forward that runs again for its backward.")
    ] = None

    def costs(self, share: int, known: Costs | None) -> Costs:
        """Also with those of what saves memory."""
        costs, part = Times.costs(self, share, known), share if known is None else 1
        if self.recompute is not None:
            costs = replace(costs, recompute=self.recompute / part)
        if self.offload is None:
            return costs
        try:
            return replace(costs, offload=float(self.offload) / part, reload=None)
        except ValueError:
            speed = size_in(self.offload.removesuffix("/s"))
        if not speed or costs.activation is None or costs.unit not in ("s", "ms"):
            raise ArgumentError(
                "--offload takes a time or, for a file with costs in bytes, and in s or ms, bytes "
                f"per second such as 50GB/s, not {self.offload!r}"
            )
        time = (1e3 if costs.unit == "ms" else 1.0) / speed * np.array(costs.activation)
        return replace(costs, offload=time.tolist(), reload=None)

    def fitted(self, plan: Plan, costs: Costs) -> Plan:
        """The plan with OFFLOAD and RECOMPUTE, if the memory asks for it."""
        return plan if self.memory is None else fit_memory(plan, costs, self.memory)


def optimised(timelines: Sequence[Timeline], memory: float = math.inf) -> list[Timeline]:
    """The best plan that is found at the costs, in the memory and on the ranks of the quickest.

    None, if none of them is of a plan that trains, or within a ``memory``.
    """
    known = [each for each in timelines if each.bound and each.peak_memory.max() <= memory]
    if not known:
        return []
    best = min(known, key=lambda each: (round(each.makespan, 9), each.peak_memory.max()))
    plan = optimise(
        best.costs,
        placement=best.plan.placement,
        microbatches=best.plan.microbatches,
        memory=float(best.peak_memory.max()),
        by="makespan",
        rounds=200,
        seconds=10.0,
        solver=False,
    )
    rows = [plan.rows_of(rank) for rank in range(plan.ranks)]
    named = Plan(rows, plan.placement, plan.microbatches, name="optimised")
    return [simulate(named, best.costs)]


def memory_note(timelines: Sequence[Timeline]) -> str:
    """What the memory is that a chart or a table shows."""
    units = " or ".join(sorted({timeline.costs.memory_unit for timeline in timelines})[::-1])
    return f"memory: peak activations on a rank, in {units}"


Predict = Annotated[
    bool, _option("Add the prediction from each timeline's own costs.", "--predict")
]
Json = Annotated[bool, _option("Print JSON.", "--json")]


def complete(begun: str) -> list[str]:
    """Completions of a FILE|NAME: schedules, and files of plans and timelines."""
    files = (str(path) for path in Path(".").glob("*") if path.suffix in (".csv", ".json"))
    return complete_name(begun) + sorted(file for file in files if file.startswith(begun))


def complete_name(begun: str) -> list[str]:
    """Completions of the NAME of a schedule."""
    return [name for name in names() if name.startswith(begun)]


def _is_file(target: str) -> bool:
    """Whether a FILE|NAME is a file."""
    return target.lower().endswith((".csv", ".json"))


def print_table(rows: Sequence[Mapping[str, str]], left: Container[str] = (), **style: Any) -> None:
    """Print a table: the columns named in ``left`` to the left, the others to the right.

    A row has a cell for each heading.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(**style)
    for heading in rows[0]:
        justify, overflow = ("left", "fold") if heading in left else ("right", "ellipsis")
        table.add_column(heading, justify=justify, overflow=overflow)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def echo_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))
