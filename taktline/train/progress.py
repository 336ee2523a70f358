"""A progress bar around a loader: loss, speed, bubble, memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar

from taktline.text import size_text
from taktline.train.loader import length_of

__all__ = ["progress"]

T = TypeVar("T")


_Show: TypeAlias = Callable[[int, Mapping[str, float] | None], None]
"""Shows how many batches are done and, now and then, the numbers."""


def progress(pipe: Any, batches: Iterable[T], every: int, *, measured: bool) -> Iterator[T]:
    """The batches of a pipeline; a bar on a terminal, and lines elsewhere, on the first rank."""
    total = length_of(batches)
    with _shown(total, silent=not pipe.is_first) as show:
        for done, batch in enumerate(batches, start=1):
            # The second one: the first learns shapes.
            trace = pipe.trace() if measured and done % every == 2 % every else nullcontext()
            with trace as noted:
                yield batch
            if noted is not None and noted.timelines:
                pipe._metrics.bubble = noted.timelines[0].bubble()
            # Not each time: to read the loss is to wait for a GPU.
            show(done, pipe.metrics() if done % every == 0 or done == total else None)


def line(numbers: Mapping[str, float]) -> str:
    """The numbers that people look at.

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


@contextmanager
def _shown(total: int | None, *, silent: bool) -> Iterator[_Show]:
    bar = None if silent or not sys.stdout.isatty() else _bar()

    def say(done: int, numbers: Mapping[str, float] | None) -> None:
        if numbers is not None and not silent:
            print(f"step {done:4}  {line(numbers)}", flush=True)

    if bar is None:
        yield say
        return
    with bar:
        task = bar.add_task("", total=total, line="")

        def move(done: int, numbers: Mapping[str, float] | None) -> None:
            bar.update(task, completed=done)
            if numbers is not None:
                bar.update(task, line=line(numbers))

        yield move


def _bar() -> Any:
    """A bar of rich, if it is installed."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        return None
    return Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[line]}"))
