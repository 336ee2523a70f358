"""The command: draws cases until the time is over, and counts what went wrong."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count

from rich.console import Console
from rich.table import Table

from tests.settled import settle
from tests.torture.case import TRANSPORTS, Case, draw
from tests.torture.verdict import Verdict, judge
from tests.workers import Workers

PROGRESS_SECONDS = 10.0
"""How often there is a line where lines cannot be written over."""


def main() -> int:
    """Run the cases; 1 if any of them went wrong."""
    options = _parse()
    settle()
    # A group waits longer than a case may take: who hangs is found busy, not with an error.
    workers = Workers(options.ranks, group_timeout=2 * options.case_timeout + 10)
    tally = Tally()
    end = time.monotonic() + options.seconds
    try:
        for name in [options.case] if options.case else _names(options.seed):
            case = draw(name, options.ranks)
            if options.case:
                print(case)
            verdict = judge(workers, case, options.case_timeout)
            tally.count(case, verdict)
            if verdict.wrong:
                tally.clear_line()
                print(f"{case}\n{verdict}\n  again: {_command(name, options.ranks)}\n", flush=True)
            if time.monotonic() > end:
                break
            tally.show(end)
    except KeyboardInterrupt:
        print("\nstopped")
    finally:
        workers.stop()
    tally.clear_line()
    Console().print(tally.table())
    return int(tally.wrong > 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture", description="Random plans, values and faults."
    )
    add = parser.add_argument
    add("--seconds", type=float, default=120.0, help="how long to go on (120)")
    add("--seed", type=int, default=None, help="where to begin; by default somewhere new")
    add("--ranks", type=int, default=4, help="at most so many ranks (4)")
    add("--case", metavar="NAME", help="run one case alone, such as gloo-17")
    add("--case-timeout", type=float, default=60.0, help="seconds after which a case hangs (60)")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int(time.time()) % 100_000 * 100_000
    return options


def _names(first: int) -> Iterator[str]:
    for number in count(first):
        for transport in TRANSPORTS:
            yield f"{transport}-{number}"


def _command(name: str, ranks: int) -> str:
    return f"python -m tests.torture --case {name} --ranks {ranks}"


class Tally:
    """What was run so far, and what became of it."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in TRANSPORTS}
        self._shown = time.monotonic()

    @property
    def wrong(self) -> int:
        return sum(counts[kind] for counts in self.counts.values() for kind in Verdict.KINDS)

    def count(self, case: Case, verdict: Verdict) -> None:
        counts = self.counts[case.transport]
        counts["cases"] += 1
        counts["calls"] += sum(call.what != "zero" for call in case.calls)
        counts["faults"] += sum(len(call.faults) for call in case.calls)
        if verdict.wrong:
            counts[verdict.kind] += 1

    def show(self, end: float) -> None:
        """A line that is written over; where that cannot be, a line now and then."""
        now, live = time.monotonic(), sys.stdout.isatty()
        if live or now - self._shown > PROGRESS_SECONDS:
            self._shown = now
            numbers = ", ".join(f"{c['cases']} {name}" for name, c in self.counts.items())
            text = f"{numbers} cases, {self.wrong} wrong, {max(0.0, end - now):.0f} s to go"
            print(f"\r{text}\033[K" if live else text, end="" if live else "\n", flush=True)

    def clear_line(self) -> None:
        if sys.stdout.isatty():
            print("\r\033[K", end="")

    def table(self) -> Table:
        table = Table(title="Torture")
        table.add_column("ranks over")
        columns = ("cases", "calls", "faults", *Verdict.KINDS)
        for column in columns:
            table.add_column(column, justify="right")
        for name, counts in self.counts.items():
            table.add_row(name, *(_cell(column, counts[column]) for column in columns))
        return table


def _cell(column: str, number: int) -> str:
    if column not in Verdict.KINDS:
        return str(number)
    return f"[bold red]{number}[/]" if number else "[green]0[/]"


if __name__ == "__main__":
    sys.exit(main())
