"""Notes when each instruction of this rank begins, has its values, and ends.

Both loops that are not the plain one are made here: while there is a trace, and while the profiler
of PyTorch looks on. Otherwise nothing of this is in the way of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

from taktline.plan import Action, Plan
from taktline.runtime.bind import Bound
from taktline.runtime.clocks import Clock, Offsets, align
from taktline.runtime.executor import Instruction, Wrap
from taktline.transport import Transport

__all__ = ["Record", "Recorder", "watching"]


@dataclass(slots=True)
class Record:
    """One step on this rank."""

    plan: Plan
    offsets: Offsets
    actions: list[Action] = field(default_factory=list)
    stamps: list[Any] = field(default_factory=list)
    """Of each action three: when it began, when its values were here, and when it ended."""


class Recorder:
    """Notes the steps of this rank while there is a trace."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.records: list[Record] = []
        """The steps that have worked on every rank."""
        self._latest: Record | None = None
        self._arrived: Any = None

    @contextmanager
    def watch(self, bound: Bound, transport: Transport, profiled: bool) -> Iterator[Wrap]:
        """Note what happens inside; all ranks take part."""
        record = self._latest = Record(bound.plan, align(transport))
        with ExitStack() as stack:
            for work in bound.works.values():
                stack.enter_context(work.noting(self._note))
            yield lambda instruction: self._noted(
                record, instruction.action, _named(instruction) if profiled else instruction.run
            )

    def keep(self) -> None:
        """The latest step has worked on every rank."""
        if self._latest is not None:
            self.records.append(self._latest)
            self._latest = None

    def _note(self) -> None:
        self._arrived = self.clock.stamp()

    def _noted(self, record: Record, action: Action, run: Callable[[], None]) -> Callable[[], None]:
        stamp, keep = self.clock.stamp, record.stamps.extend
        record.actions.append(action)

        def noted() -> None:
            self._arrived = None
            began = stamp()
            run()
            ended = stamp()
            keep((began, began if self._arrived is None else self._arrived, ended))

        return noted


def watching(
    recorder: Recorder | None, bound: Bound, transport: Transport
) -> AbstractContextManager[Wrap | None]:
    """What goes around the instructions of a step: None, unless somebody looks on."""
    # Looked up here, once a step: it changes when a profiler starts and stops.
    profiled = profiler._is_profiler_enabled
    if recorder is None:
        return nullcontext(_named if profiled else None)
    return recorder.watch(bound, transport, profiled)


def _named(instruction: Instruction) -> Callable[[], None]:
    """With a range for the profiler."""
    name, run = f"taktline {instruction.action}", instruction.run

    def named() -> None:
        with record_function(name):
            run()

    return named
