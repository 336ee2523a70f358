"""What the demo shows; nothing on ranks but the first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from taktline.cli.options import rich_table

__all__ = ["Screen"]


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
        self._console.print(rich_table(headings, rows, left=headings[:1]))
