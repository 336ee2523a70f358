"""Loss, speed, bubble and memory of recent steps; the progress bar; reports of slow ranks."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from taktline.plan import Timeline, stragglers
from taktline.text import size_text
from taktline.train.build import Built
from taktline.train.loader import length_of

T = TypeVar("T")

_log = logging.getLogger("taktline")
_WINDOW = 21
"""Speeds are averaged over 20 steps, between so many ends."""
_REMEMBERED = 8
"""With how many earlier steps a step is compared, where the work of stages is not known."""


class Metrics:
    """The metrics of the latest steps."""

    def __init__(self, report_every: int | None = None) -> None:
        """Every so many steps, the log says which ranks are slow."""
        self._report_every = report_every
        self._timelines: deque[Timeline] = deque(maxlen=_REMEMBERED + 1)
        """Of the latest reports."""
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        """When each step ended, with its rows and its tokens."""
        self.loss: torch.Tensor | None = None
        self.bubble: float | None = None
        """Of the latest step that was traced."""

    def note(self, args: tuple[Any, ...], loss: torch.Tensor | None) -> None:
        """Note a step that has ended."""
        first = next((value for value in args if isinstance(value, torch.Tensor)), None)
        rows = tokens = 0
        if first is not None and first.dim():
            rows = first.shape[0]
            tokens = first.numel() if first.dim() > 1 and not first.is_floating_point() else 0
        self._ends.append((time.perf_counter(), rows, tokens))
        self.loss = loss

    def read(self, steps: int, replicas: int, device: torch.device) -> dict[str, float]:
        """The metrics that are known by now; waits for the loss."""
        found: dict[str, float] = {"step": steps, "peak_memory": _peak(device)}
        if self.loss is not None:
            found["loss"] = self.loss.item()
        if self.bubble is not None:
            found["bubble"] = self.bubble
        if len(self._ends) > 1:
            later = list(self._ends)[1:]
            seconds = max(later[-1][0] - self._ends[0][0], 1e-9)
            found["step_ms"] = 1e3 * seconds / len(later)
            for place, name in ((1, "rows_per_s"), (2, "tokens_per_s")):
                if total := sum(end[place] for end in later):
                    found[name] = replicas * total / seconds
        return found

    @contextmanager
    def report(self, built: Built) -> Iterator[None]:
        """Wrap a training step; if it is time, trace it, and log which ranks were slow in it."""
        number, every = built.schedule.steps, self._report_every
        if not every or (number + 1) % every or built.schedule._runner.recorder is not None:
            yield
            return
        with built.schedule.trace() as trace:
            yield
        self._timelines.extend(trace.timelines)
        work, ranks = built.table.work, built.ranks
        judged = list(self._timelines) if work is None else list(self._timelines)[-1:]
        where = f"replica {ranks.replica}, " if ranks.replicas > 1 else ""
        for straggler in stragglers(judged, work=work) if 0 in ranks.own else ():
            _log.warning("%sstep %d: %s", where, number, straggler)


def _peak(device: torch.device) -> int:
    """The peak memory in bytes: of tensors on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def progress(pipe: Any, batches: Iterable[T], every: int, *, measured: bool) -> Iterator[T]:
    """Yields the batches; the first rank shows a bar on a terminal, and lines elsewhere."""
    total = length_of(batches)
    bar = _bar(total) if pipe.is_first and sys.stdout.isatty() else None
    with bar or nullcontext():
        for done, batch in enumerate(batches, start=1):
            # The second one: in the first, ranks still exchange shapes.
            tracing = pipe.trace() if measured and done % every == 2 % every else nullcontext()
            with tracing as trace:
                yield batch
            if trace is not None and trace.timelines:
                pipe._metrics.bubble = trace.timelines[0].bubble()
            if bar is not None:
                bar.update(0, completed=done)
            # Not each time: reading the loss waits for the GPU.
            if not pipe.is_first or (done % every and done != total):
                continue
            text = line(pipe.metrics())
            if bar is not None:
                bar.update(0, line=text)
            else:
                print(f"step {done:4}  {text}", flush=True)


def line(numbers: Mapping[str, float]) -> str:
    """The metrics as one line of text.

    >>> line({"loss": 2.5, "tokens_per_s": 1234.5, "bubble": 0.25, "peak_memory": 3 << 20})
    'loss 2.500  1,234 tokens/s  bubble 25%  peak 3.0 MiB'
    """
    texts = {
        "loss": lambda number: f"loss {number:.3f}",
        "tokens_per_s": lambda number: f"{number:,.0f} tokens/s",
        "rows_per_s": lambda number: f"{number:,.0f} rows/s",
        "bubble": lambda number: f"bubble {number:.0%}",
        "peak_memory": lambda number: f"peak {size_text(number)}",
    }
    if "tokens_per_s" in numbers:
        texts.pop("rows_per_s")
    return "  ".join(text(numbers[name]) for name, text in texts.items() if name in numbers)


def _bar(total: int | None) -> Any:
    """A progress bar of rich with one task, if rich is installed."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        return None
    bar = Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[line]}"))
    bar.add_task("", total=total, line="")
    return bar
