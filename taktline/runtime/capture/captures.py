"""Decides which steps are captured, replayed, or run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from taktline.checks import warn
from taktline.errors import TaktlineError, text_of
from taktline.runtime.bind import Binding, Bound, bind
from taktline.runtime.capture.carried import Carried, kind_of
from taktline.runtime.capture.cuda import Graph, Graphs
from taktline.runtime.capture.gradient_buffers import Buffers, Pool, Touched
from taktline.runtime.capture.module_state import (
    Attribute,
    Kept,
    difference,
    keep_state,
    state_of,
)
from taktline.runtime.capture.step_buffers import Inputs, Static
from taktline.runtime.capture.streams import side_by_side
from taktline.runtime.program import Failure
from taktline.runtime.step_data import Feed
from taktline.stage import PipelineStage
from taktline.text import counted
from taktline.transport.local import LocalTransport

_WARM_UP = 2
"""How many steps of a kind run eagerly before a capture, once its signatures are known."""
_KINDS = 8
"""The most kinds of steps that are captured; each has buffers for its batch."""
_TRIES = 8
"""The most captures of a kind; then it runs eagerly."""


@dataclass(slots=True)
class _Captured:
    """A graph with its buffers, and the state that it was captured in."""

    graph: Graph
    static: Static
    buffers: Buffers
    carried: Carried
    state: tuple[object, ...]
    replays: int = 0

    def is_right(self, state: tuple[object, ...]) -> bool:
        """Whether a replay does the same as an eager step now."""
        return self.state == state and self.buffers.are_usable() and self.buffers.are_same()


@dataclass(slots=True)
class _Entry:
    """One kind of step."""

    name: str
    warm: int = 0
    captures: int = 0
    state: tuple[object, ...] | str = ()
    """The state after the latest warm-up; a capture needs the same."""
    touched: list[nn.Parameter] = field(default_factory=list)
    """The parameters that get gradients."""
    any_order: bool = False
    """Whether no forward changes what another one reads."""
    captured: _Captured | None = None
    streams: int = 1
    """How many micro-batches run side by side in the latest capture."""
    refusal: str | None = None
    """Why it always runs eagerly; None if it does not."""


class Captures:
    """The captured programs of one schedule on this rank."""

    def __init__(
        self, graphs: Graphs, stages: Sequence[PipelineStage], *, dynamic_shapes: bool = False
    ) -> None:
        self._graphs = graphs
        self._stages = list(stages)
        self._refusal = graphs.refusal()
        if dynamic_shapes:
            self._refusal = "shapes depend on values (dynamic_shapes), so no step is like another"
        self._reasons: set[str] = set()
        self._entries: dict[Hashable, _Entry] = {}
        self._pool = Pool()
        self._changing: dict[Attribute, None] = {}
        """The attributes of modules that forwards change."""

    def forget(self) -> None:
        """Drop all graphs, after a failed step."""
        self._entries.clear()
        self._pool = Pool()

    def run(
        self,
        key: Hashable,
        bound: Bound,
        eagerly: Callable[[], Failure | None],
        apart: Collection[nn.Parameter],
    ) -> Failure | None:
        """Run a step: by a replay, or ``eagerly``.

        Args:
            key: the kind of step that the ranks have agreed on.
            bound: the program.
            eagerly: runs the program.
            apart: the parameters whose earlier gradients are kept elsewhere during the step.
        """
        feed = bound.binding.feed
        inputs = Inputs(feed)
        reason = self._refusal or inputs.refusal(self._stages[0].device)
        if isinstance(bound.binding.transport, LocalTransport):
            reason = "ranks are threads, which wait for each other in the middle of a step"
        state = self._state(bound.binding)
        if reason is not None or isinstance(state, str):
            self._warn(reason or str(state))
            return eagerly()
        if bound.known is None:
            return eagerly()  # the first step finds the signatures
        entry = self._entry((key, inputs.kind, kind_of(self._changing)), bound)
        if entry is None or entry.refusal is not None:
            return eagerly()
        if entry.captured is not None and not entry.captured.is_right(state):
            entry.captured, entry.warm = None, _WARM_UP - 1
        if entry.captured is None and (entry.warm < _WARM_UP or entry.state != state):
            known = len(self._changing)
            failure = self._warm_up(entry, bound.binding, state, eagerly)
            if len(self._changing) > known:  # graphs of other kinds do not carry it
                self._entries = {(key, inputs.kind, kind_of(self._changing)): entry}
            return failure
        if entry.captured is None and not self._capture(entry, bound, inputs, state, apart):
            return eagerly()
        self._replay(entry, inputs, feed)
        return None

    def _entry(self, kind: Hashable, bound: Bound) -> _Entry | None:
        """The entry of a kind of step; None if there are too many."""
        entry = self._entries.get(kind)
        if entry is None:
            if len(self._entries) >= _KINDS:
                self._warn(f"there are more than {_KINDS} kinds of steps; the rest runs eagerly")
                return None
            entry = self._entries[kind] = _Entry(_name(bound))
        return entry

    def _state(self, binding: Binding) -> tuple[object, ...] | str:
        return state_of(self._stages, binding.loss_fn, self._changing)

    def _warm_up(
        self,
        entry: _Entry,
        binding: Binding,
        state: tuple[object, ...],
        eagerly: Callable[[], Failure | None],
    ) -> Failure | None:
        touched, kept = Touched(self._stages), Kept(self._stages, binding.loss_fn)
        failure = eagerly()
        if failure is None:
            entry.touched = touched.found()
            entry.any_order = not kept.have_changed() and not binding.feed.observed
            entry.warm += 1
            if entry.warm > _WARM_UP + _TRIES:
                what = difference(self._stages, entry.state, state)
                self._refuse(
                    entry,
                    f"{what} changes before every step; keep it in a tensor, and change that in "
                    "place",
                )
            self._changing |= dict.fromkeys(kept.changed_attributes())
            entry.state = self._state(binding)
            if any(p.grad is not None and p.grad.layout != torch.strided for p in entry.touched):
                self._refuse(entry, "there are sparse gradients")
        return failure

    def _capture(
        self,
        entry: _Entry,
        bound: Bound,
        inputs: Inputs,
        state: tuple[object, ...],
        apart: Collection[nn.Parameter],
    ) -> bool:
        """Capture a program; returns whether it worked."""
        entry.captures += 1
        if entry.captures > _TRIES:
            self._refuse(entry, f"it was captured {_TRIES} times, and something changes every time")
            return False
        static = inputs.static(self._stages[0].device)
        static.fill(inputs, bound.binding.feed.number)
        buffers = self._pool.buffers(entry.touched, apart)
        carried = Carried(self._changing, self._stages)
        restore = keep_state(self._stages, bound.binding.loss_fn)
        binding = replace(bound.binding, feed=static.feed, any_order=entry.any_order)

        def make(binding: Binding) -> Callable[[], None]:
            program = bind(binding, bound.known).program

            def run() -> None:
                static.begin()
                with (
                    buffers.adding(self._stages) as adding,
                    side_by_side(
                        program.actions(),
                        self._stages[0].device,
                        adding if entry.any_order else None,
                    ) as streams,
                ):
                    program.run_alone(streams.enter, adding.take_all if adding else lambda: None)
                entry.streams = streams.count

            return run

        graph = None
        try:
            with buffers.lent(self._stages) as reasons, carried.lent(reasons):
                graph = self._graphs.capture(binding, make)
        except Exception as error:
            reasons = [_reason(error)]
        if self._state(bound.binding) != state:
            reasons.append("its forward replaces parameters or buffers")
        if graph is None or reasons:
            restore()
            self._refuse(entry, reasons[0])
            return False
        entry.captured = _Captured(graph, static, buffers, carried, state)
        return True

    def _replay(self, entry: _Entry, inputs: Inputs, feed: Feed) -> None:
        captured = entry.captured
        assert captured is not None
        captured.static.fill(inputs, feed.number)
        captured.carried.fill()
        with captured.buffers.in_place():
            captured.graph.replay(feed.number)
        captured.static.hand_over(feed)
        captured.carried.hand_over()
        captured.replays += 1

    def _refuse(self, entry: _Entry, reason: str) -> None:
        entry.refusal, entry.captured = reason, None
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Warn once for each reason."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            warn(f"not captured as a CUDA graph, so it runs eagerly: {reason}")

    def __str__(self) -> str:
        lines = [f"  {entry.name}: {_state(entry)}" for entry in self._entries.values()]
        lines += [
            f"  eagerly: {reason}" for reason in self._reasons if not self._is_of_entry(reason)
        ]
        return "\n".join(["CUDA graphs:", *(lines or ["  no step has run"])])

    def _is_of_entry(self, reason: str) -> bool:
        return any(entry.refusal == reason for entry in self._entries.values())


def _name(bound: Bound) -> str:
    call = "step()" if bound.binding.trains else "eval()"
    rows, parts = bound.binding.feed.rows, counted(bound.plan.microbatches, "micro-batch")
    return f"{call} with {counted(rows, 'row')} in {parts}" if rows else f"{call} with {parts}"


def _state(entry: _Entry) -> str:
    if entry.refusal is not None:
        return f"eagerly, {entry.refusal}"
    if entry.captured is not None:
        beside = f", {entry.streams} micro-batches side by side" if entry.streams > 1 else ""
        return f"captured{beside}, {counted(entry.captured.replays, 'replay')}"
    return "warms up"


def _reason(error: Exception) -> str:
    if isinstance(error, TaktlineError):
        return text_of(error)
    return f"{type(error).__name__}: {text_of(error)}"
