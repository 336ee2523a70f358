"""Decides which steps are captured, replayed, or run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import torch
from torch import nn

from taktline.checks import warn
from taktline.errors import ScheduleError, TaktlineError, text_of
from taktline.runtime.capture.buffers import Adding, Gradients, Inputs, Static
from taktline.runtime.capture.cuda import CudaGraphs, Streams, is_loop
from taktline.runtime.capture.state import State
from taktline.runtime.program import Bound, Failure, bind
from taktline.runtime.stage_actions import Binding, Drawing, RankRandom
from taktline.stage import PipelineStage
from taktline.stage.stage import parameters_of
from taktline.text import counted
from taktline.transport.local import LocalTransport

_WARM_UP = 2
"""How many steps of a kind run eagerly before a capture, once its signatures are known."""
_KINDS = 8
"""The most kinds of steps that are captured; each has buffers for its batch."""
_TRIES = 8
"""How often a kind may be captured anew; then it runs eagerly."""


class Graph(Protocol):
    """The graph of a program."""

    def capture(self, run: Callable[[], None]) -> None:
        """Capture a run of the program; raises if that fails."""
        ...

    def replay(self) -> None:
        """Run the program again."""
        ...


Graphs: TypeAlias = Callable[[], Graph]
"""Makes graphs."""


@dataclass(slots=True)
class _Entry:
    """One kind of step."""

    name: str
    warm: int = 0
    changes: int = 0
    """How often something has changed that a graph depends on."""
    state: State | None = None
    """The state after the latest warm-up; a graph is right while it stays the same."""
    touched: list[nn.Parameter] = field(default_factory=list)
    """The parameters that get gradients."""
    any_order: bool = False
    """Whether no forward changes what another one reads."""
    graph: Graph | None = None
    static: Static = field(init=False)
    """The buffers of the graph."""
    streams: int = 1
    """How many micro-batches run side by side in the graph."""
    replays: int = 0
    refusal: str | None = None
    """Why it always runs eagerly; None if it does not."""

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"{self.name}: eagerly, {self.refusal}"
        if self.graph is None:
            return f"{self.name}: warms up"
        beside = f", {self.streams} micro-batches side by side" if self.streams > 1 else ""
        return f"{self.name}: captured{beside}, {counted(self.replays, 'replay')}"


class Captures:
    """The captured programs of one schedule on this rank."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        device: torch.device,
        graphs: Graphs | None = None,
        *,
        dynamic_shapes: bool = False,
    ) -> None:
        self._graphs = graphs or CudaGraphs(device)
        self._stages = list(stages)
        self._device = device
        self._refusal: str | None = None
        if graphs is None and device.type != "cuda":
            self._refusal = f"the stages compute on {device}"
        elif dynamic_shapes:
            self._refusal = "shapes depend on values (dynamic_shapes), so no step is like another"
        self._reasons: list[str] = []
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, after a failed step."""
        self._entries: dict[Hashable, _Entry] = {}
        self._gradients = Gradients()

    def run(
        self, key: Hashable, bound: Bound, eagerly: Callable[[], Failure | None]
    ) -> Failure | None:
        """Run a step: by a replay, or ``eagerly``; ``key`` is the kind that the ranks agreed on."""
        binding = bound.binding
        inputs, state = Inputs(binding.feed), State(self._stages, binding.loss_fn)
        reason = self._refusal or _refusal(binding) or inputs.refusal(self._device) or state.refusal
        if reason is not None:
            self._warn(reason)
        if reason is not None or bound.known is None:  # the first step finds the signatures
            return eagerly()
        kind = key, inputs.kind
        if kind not in self._entries and len(self._entries) >= _KINDS:
            self._warn(f"there are more than {_KINDS} kinds of steps; the rest runs eagerly")
            return eagerly()
        entry = self._entries.setdefault(kind, _Entry(_name(bound)))
        if entry.refusal is None:
            self._check(entry, state)
        if entry.refusal is None and entry.graph is None:
            if entry.warm < _WARM_UP:
                return self._warm_up(entry, binding, eagerly)
            self._capture(entry, bound, inputs, state)
        if entry.graph is None:
            return eagerly()
        entry.static.fill(inputs)
        self._gradients.begin(entry.touched)
        entry.graph.replay()
        entry.static.hand_over(binding.feed)
        entry.replays += 1
        return None

    def _check(self, entry: _Entry, state: State) -> None:
        """Drop the graph if something has changed; all graphs if gradients have."""
        changed = None if entry.state is None else entry.state.difference(state)
        if changed is not None:
            reason = f"{changed} changes before every step; keep it in a tensor, changed in place"
            entry.graph = None
        elif entry.graph is not None and not self._gradients.fit(entry.touched):
            reason = "your code keeps or replaces gradients before every step; keep copies of them"
            self._drop_gradients()
        else:
            return
        entry.warm, entry.changes = min(entry.warm, _WARM_UP - 1), entry.changes + 1
        if entry.changes > _TRIES:
            self._refuse(entry, reason)

    def _drop_gradients(self) -> None:
        self._gradients = Gradients()
        for entry in self._entries.values():
            entry.graph = None

    def _warm_up(
        self, entry: _Entry, binding: Binding, eagerly: Callable[[], Failure | None]
    ) -> Failure | None:
        """Run a step eagerly, and look at what it changes."""
        gradients = [(p, p.grad, getattr(p.grad, "_version", 0)) for p in self._parameters()]
        before = State(self._stages, binding.loss_fn, deep=True)
        failure = eagerly()
        if failure is not None:
            return failure
        after = State(self._stages, binding.loss_fn, deep=True)
        entry.touched = [
            p
            for p, gradient, version in gradients
            if p.grad is not None and (p.grad is not gradient or p.grad._version != version)
        ]
        entry.any_order = before.versions == after.versions and not binding.feed.observed
        entry.state = State(self._stages, binding.loss_fn)
        entry.warm += 1
        changed = before.difference(after)
        if changed is not None and entry.warm == _WARM_UP:  # earlier steps may fill caches
            self._refuse(
                entry,
                f"{changed} is changed by a forward, but not by a replay; keep such state in a "
                f"buffer on {self._device}, and change it in place",
            )
        elif any(p.grad is not None and p.grad.layout != torch.strided for p in entry.touched):
            self._refuse(entry, "there are sparse gradients")
        return None

    def _capture(self, entry: _Entry, bound: Bound, inputs: Inputs, state: State) -> None:
        """Capture a program, or refuse it."""
        self._gradients.make(entry.touched)
        if not self._gradients.fit(entry.touched):
            self._drop_gradients()
            self._gradients.make(entry.touched)
        static = Static(inputs, self._device)
        static.fill(inputs)
        try:
            graph, drawing = self._graphs(), bound.binding.drawing
            if isinstance(drawing, RankRandom):
                drawing = Drawing(self._device)  # no rank draws, so they need no numbers
            changes = {"feed": static.feed, "drawing": drawing, "any_order": entry.any_order}
            program = bind(replace(bound.binding, **changes), bound.known).program
            several = entry.any_order and is_loop(program.actions())

            def run() -> None:
                static.begin()
                with self._adding(entry.touched).instead() as adding:
                    streams = Streams(self._device, adding, several=several)
                    program.run_alone(streams.enter, adding.take_all)
                    streams.join()
                    entry.streams = streams.count

            graph.capture(run)
            entry.graph, entry.static = graph, static
        except Exception as error:
            for stage in self._stages:
                stage.clear()
            kind = "" if isinstance(error, TaktlineError) else f"{type(error).__name__}: "
            self._refuse(entry, f"{kind}{text_of(error)}")
        changed = state.difference(State(self._stages, bound.binding.loss_fn))
        if changed is not None:
            error = ScheduleError(
                f"{changed} was changed by a forward that is captured as a CUDA graph, but not by "
                "those before; turn cuda_graphs off"
            )
            error.recoverable = "restart"
            raise error

    def _adding(self, touched: Sequence[nn.Parameter]) -> Adding:
        return Adding(self._parameters(), {p: self._gradients.buffers[p] for p in touched})

    def _parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for stage in self._stages for p in parameters_of(stage.submod)))

    def _refuse(self, entry: _Entry, reason: str) -> None:
        entry.refusal, entry.graph = reason, None
        if not any(each.graph for each in self._entries.values()):
            self._gradients = Gradients()
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Warn once for each reason."""
        if reason not in self._reasons:
            self._reasons.append(reason)
            warn(f"not captured as a CUDA graph, so it runs eagerly: {reason}")

    def __str__(self) -> str:
        entries = self._entries.values()
        lines = [f"  {entry}" for entry in entries]
        known = {entry.refusal for entry in entries}
        lines += [f"  eagerly: {reason}" for reason in self._reasons if reason not in known]
        return "\n".join(["CUDA graphs:", *(lines or ["  no step has run"])])


def _refusal(binding: Binding) -> str | None:
    """Why a program cannot be captured, whatever its stages and batch; None if it can."""
    if binding.seed is not None:
        return "a seed is set before each forward, which a replay would not do; leave it out"
    if isinstance(binding.transport, LocalTransport):
        return "ranks are threads, which wait for each other in the middle of a step"
    if isinstance(binding.drawing, RankRandom) and binding.drawing.draws:
        return "ranks that share a process draw random numbers of their own; use one rank"
    return None


def _name(bound: Bound) -> str:
    call = "step()" if bound.binding.trains else "eval()"
    rows, parts = bound.binding.feed.rows, counted(bound.plan.microbatches, "micro-batch")
    return f"{call} with {counted(rows, 'row')} in {parts}" if rows else f"{call} with {parts}"
