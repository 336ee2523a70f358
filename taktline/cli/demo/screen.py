"""What the demo shows: a bar on a terminal, lines elsewhere; nothing on ranks but the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

__all__ = ["Meter", "Screen"]


class Meter(Protocol):
    """Told of each step."""

    def __call__(self, step: int, loss: float, speed: float, bubble: float | None) -> None: ...


class Screen:
    """A console that may be silent."""

    def __init__(self, *, silent: bool) -> None:
        self._console = Console(quiet=silent, highlight=False)

    def title(self, text: str) -> None:
        """Begin a part."""
        self._console.print(f"\n[bold]{text}[/]\n")

    def say(self, text: str = "") -> None:
        """Plain text, as it is."""
        self._console.print(text, markup=False, soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Words to the left, numbers to the right."""
        table = Table()
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    @contextmanager
    def progress(self, steps: int) -> Iterator[Meter]:
        """A bar that a step moves on; without a terminal, ten lines."""
        if not self._console.is_terminal or self._console.quiet:
            every = max(1, steps // 10)

            def line(step: int, loss: float, speed: float, bubble: float | None) -> None:
                if (step + 1) % every == 0:
                    self.say(f"step {step + 1:4}  {_figures(loss, speed, bubble)}")

            yield line
            return
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}")
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task("", total=steps, figures="")

            def move(step: int, loss: float, speed: float, bubble: float | None) -> None:
                bar.update(task, completed=step + 1, figures=_figures(loss, speed, bubble))

            yield move


def _figures(loss: float, speed: float, bubble: float | None) -> str:
    measured = "" if bubble is None else f"  bubble {bubble:4.0%}"
    return f"loss {loss:.3f}  {speed:7,.0f} tokens/s{measured}"
