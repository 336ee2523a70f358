"""Decides which steps are captured, replayed, or run eagerly."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.checks import warn
from taktline.errors import ScheduleError, TaktlineError, text_of
from taktline.meta import local
from taktline.plan import Action, Kind
from taktline.runtime.capture import buffers
from taktline.runtime.capture.buffers import Adding, Buffers, Static
from taktline.runtime.capture.cuda import CudaGraphs, Streams, is_loop
from taktline.runtime.capture.state import State
from taktline.runtime.program import Program, bind
from taktline.stage import PipelineStage
from taktline.stage.grad_sync import GradSync
from taktline.stage.kinds import compilations
from taktline.stage.stage import parameters_of
from taktline.text import counted
from taktline.transport.local import LocalTransport

_WARM_UP = 2
"""How many steps of a kind run eagerly before a capture, once its signatures are known."""
_KINDS = 8
"""The most kinds of steps that are captured; each has buffers for its batch."""
_TRIES = 8
"""How often a kind may be captured anew; then it runs eagerly."""


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
    graph: Any = None
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
    """The captured programs of one schedule on this rank.

    ``make_graph`` makes graphs: each has ``capture(run)``, and ``replay()`` that runs it again.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        device: torch.device,
        make_graph: Callable[[], Any] | None = None,
        *,
        dynamic_shapes: bool = False,
    ) -> None:
        self._make_graph = make_graph or CudaGraphs(device)
        self._stages = list(stages)
        self._device = device
        self._refusal: str | None = None
        if make_graph is None and device.type != "cuda":
            self._refusal = f"the stages compute on {device}"
        elif dynamic_shapes:
            self._refusal = "shapes depend on values (dynamic_shapes), so no step is like another"
        self._reasons: list[str] = []
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, after a failed step."""
        self._entries: dict[Hashable, _Entry] = {}
        self._buffers: Buffers = {}
        self._warming: tuple[Any, ...] | None = None
        """If the running step warms up: its kind, and what was there before."""

    def replay(self, key: Hashable, program: Program) -> bool:
        """Run a step by a replay; False: it must run eagerly, before :meth:`note` is called.

        ``key`` is the kind that the ranks have agreed on.
        """
        self._warming, feed = None, program.binding.feed
        leaves, structure = buffers.leaves_of(feed)
        state = State(self._stages, program.binding.loss_fn)
        reason = (
            self._refusal
            or _refusal(program)
            or buffers.refusal_of(leaves, self._device)
            or state.refusal
            or self._held_back()
        )
        if reason is not None:
            self._warn(reason)
        if reason is not None or program.known is None:  # the first step finds the signatures
            return False
        kind = key, structure, buffers.kind_of(feed, leaves)
        if kind not in self._entries and len(self._entries) >= _KINDS:
            self._warn(f"there are more than {_KINDS} kinds of steps; the rest runs eagerly")
            return False
        entry = self._entries.setdefault(kind, _Entry(_name(program)))
        if entry.refusal is None:
            self._check(entry, state)
        if entry.refusal is None and entry.graph is None:
            if entry.warm < _WARM_UP:
                gradients = [(p, p.grad, _version_of(p.grad)) for p in self._parameters()]
                before = State(self._stages, program.binding.loss_fn, deep=True)
                self._warming = entry, before, gradients, compilations(), program.quickest
                _rehearse(program, any_order=entry.any_order)
                return False
            self._capture(entry, program, state)
        if entry.graph is None:
            return False
        entry.static.fill(feed, leaves)
        buffers.begin(self._buffers, entry.touched)
        entry.graph.replay()
        for sync in self._syncs():
            sync.replayed()
        entry.static.hand_over(feed)
        entry.replays += 1
        return True

    def _check(self, entry: _Entry, state: State) -> None:
        """Drop the graph if something has changed; all graphs if gradients have."""
        changed = None if entry.state is None else entry.state.difference(state)
        if changed is not None:
            reason = f"{changed} changes before every step; keep it in a tensor, changed in place"
            entry.graph = None
        elif entry.graph is not None and not buffers.fit(self._buffers, entry.touched):
            reason = "your code keeps or replaces gradients before every step; keep copies of them"
            self._drop_gradients()
        else:
            return
        entry.warm, entry.changes = min(entry.warm, _WARM_UP - 1), entry.changes + 1
        if entry.changes > _TRIES:
            self._refuse(entry, reason)

    def _drop_gradients(self) -> None:
        self._buffers = {}
        for entry in self._entries.values():
            entry.graph = None

    def note(self, program: Program) -> None:
        """Look at what a step has changed that has run eagerly, if it warms up."""
        if self._warming is None:
            return
        entry, before, gradients, compiled, program.quickest = self._warming
        loss_fn, observed = program.binding.loss_fn, program.binding.feed.observed
        for sync in self._syncs():
            sync.finish()  # then a stage has its sharded parameters again
        self._warming, after = None, State(self._stages, loss_fn, deep=True)
        entry.touched = [
            p
            for p, gradient, version in gradients
            if p.grad is not None and (p.grad is not gradient or _version_of(p.grad) != version)
        ]
        rehearsed = entry.any_order
        entry.any_order = before.versions == after.versions and not observed
        entry.state = State(self._stages, loss_fn)
        if compiled != compilations():  # a capture may compile nothing
            entry.warm, entry.changes = 0, entry.changes + 1
            if entry.changes > _TRIES:
                self._refuse(entry, "torch.compile compiles something new in every step")
            return
        if entry.warm < _WARM_UP - 1 or rehearsed == entry.any_order:
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

    def _capture(self, entry: _Entry, program: Program, state: State) -> None:
        """Capture a program, or refuse it."""
        buffers.make(self._buffers, entry.touched)
        if not buffers.fit(self._buffers, entry.touched):
            self._drop_gradients()
            buffers.make(self._buffers, entry.touched)
        feed = program.binding.feed
        static = Static(feed, self._device)
        static.fill(feed, buffers.leaves_of(feed)[0])
        binding = replace(program.binding, feed=static.feed, any_order=entry.any_order)
        captured = bind(binding, program.known)
        several = entry.any_order and is_loop([each.action for each in captured.quickest])
        shards = [each for each in self._stages if each.grad_sync and each.grad_sync.shards]
        sharded = {p for stage in shards for p in parameters_of(stage.submod)}
        touched = {*entry.touched}

        def run() -> None:
            static.begin()
            parameters = self._parameters()
            with ExitStack() as stack:
                for sync in self._syncs():
                    stack.enter_context(sync.captured())
                now = self._parameters()
                leaves = zip(parameters, now, strict=True)
                mine = {leaf: self._buffers[p] for p, leaf in leaves if p in touched}
                adding = stack.enter_context(Adding(now, mine, sharded).instead())
                streams = Streams(self._device, adding, several=several)

                def before(action: Action) -> None:
                    streams.enter(action)
                    if action.kind == Kind.REDUCE_GRAD:
                        adding.put_back()

                captured.run_alone(before, adding.take_all)
                streams.join()
                entry.streams = streams.count

        try:
            graph = self._make_graph()
            graph.capture(run)
            entry.graph, entry.static = graph, static
        except Exception as error:
            for stage in self._stages:
                stage.clear()
            kind = "" if isinstance(error, TaktlineError) else f"{type(error).__name__}: "
            text = text_of(error).partition("Search for")[0].strip()  # without advice of CUDA
            self._refuse(entry, f"{kind}{text}{self._place_of(error.__cause__ or error)}")
        changed = state.difference(State(self._stages, program.binding.loss_fn))
        if changed is not None:
            error = ScheduleError(
                f"{changed} was changed by a forward that is captured as a CUDA graph, but not by "
                "those before; turn cuda_graphs off"
            )
            error.recoverable = "restart"
            raise error

    def _place_of(self, error: BaseException) -> str:
        """The innermost module of a stage in which an error was raised, with the line."""
        names = {m: name for each in self._stages for name, m in each.submod.named_modules()}
        trace, found = error.__traceback__, ""
        while trace is not None:
            frame, module = trace.tb_frame, trace.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module) and names.get(module):
                where = f"{os.path.relpath(frame.f_code.co_filename)}:{trace.tb_lineno}"
                found = f", in {names[module]!r} ({type(module).__name__}, {where})"
            trace = trace.tb_next
        return found

    def _syncs(self) -> list[GradSync]:
        return [stage.grad_sync for stage in self._stages if stage.grad_sync is not None]

    def _held_back(self) -> str | None:
        """Why the reductions of this step cannot be part of a graph; None if they can."""
        if not any(sync.holds_back for sync in self._syncs()):
            return None
        return "gradients add up over several steps before they are reduced over the replicas"

    def _parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for stage in self._stages for p in parameters_of(stage.submod)))

    def _refuse(self, entry: _Entry, reason: str) -> None:
        entry.refusal, entry.graph = reason, None
        if not any(each.graph for each in self._entries.values()):
            self._buffers = {}
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Warn once for each reason."""
        if reason not in self._reasons:
            self._reasons.append(reason)
            warn(f"not captured as a CUDA graph, so it runs eagerly: {reason}")

    def __str__(self) -> str:
        entries = self._entries.values()
        known = {entry.refusal for entry in entries}
        lines = [*map(str, entries)]
        lines += [f"eagerly: {reason}" for reason in self._reasons if reason not in known]
        return "\n  ".join(["CUDA graphs:", *(lines or ["no step has run"])])


def _version_of(gradient: torch.Tensor | None) -> int:
    """How often it was changed in place; FSDP changes what is inside of its DTensors."""
    return 0 if gradient is None else local(gradient)._version


def _rehearse(program: Program, *, any_order: bool) -> None:
    """Let an eager step run what will be captured, so that all of it is compiled by then."""
    feed = program.binding.feed
    feed.arguments, feed.keywords, feed.targets = pytree.tree_map_only(
        torch.Tensor, torch.clone, (feed.arguments, feed.keywords, feed.targets)
    )
    if any_order and program.binding.alone:
        binding = replace(program.binding, any_order=True)
        program.quickest = bind(binding, program.known).quickest


def _refusal(program: Program) -> str | None:
    """Why a program cannot be captured, whatever its stages and batch; None if it can."""
    binding = program.binding
    if binding.seed is not None:
        return "a seed is set before each forward, which a replay would not do; leave it out"
    if isinstance(binding.transport, LocalTransport):
        return "ranks are threads, which wait for each other in the middle of a step"
    if any(work.redraws for work in program.works.values()):
        return "a forward that is recomputed draws random numbers, which a replay would not repeat"
    return None


def _name(program: Program) -> str:
    call = "step()" if program.binding.trains else "eval()"
    rows, parts = (
        program.binding.feed.rows,
        counted(program.binding.plan.microbatches, "micro-batch"),
    )
    return f"{call} with {counted(rows, 'row')} in {parts}" if rows else f"{call} with {parts}"
