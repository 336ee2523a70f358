"""The command: runs the table or a part of it, and tells when the last rank knew."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from random import Random

from rich.console import Console
from rich.table import Table

from tests.faults import network
from tests.faults.case import WRAPPERS, Case, draw, sample, table
from tests.faults.judge import LIMIT, Verdict, judge, run
from tests.faults.pool import started, trial

COMMAND = "python -m tests.faults"


def main() -> int:
    """Run the cases; 1 if any of them went wrong."""
    options = _parse()
    tally = Tally()
    try:
        if options.case:
            verdict = _replay(options.case)
            tally.add(options.case, verdict)
            if verdict.delay is not None:
                print(f"the last rank knew {verdict.delay:.2f} s after the detection")
        elif options.mtbf:
            print(
                f"seed {options.seed}; again: {COMMAND} --mtbf {options.mtbf} --seed {options.seed}"
            )
            _in_a_row(options.mtbf, Random(options.seed), tally)
        else:
            _whole(options, tally)
    except KeyboardInterrupt:
        print("\nstopped")
    if not options.case:
        tally.report()
    return int(bool(tally.failed))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Faults of every kind, in every phase of a step."
    )
    add = parser.add_argument
    add("--case", metavar="NAME", help="run one case alone, with the output of its ranks")
    add("--sample", action="store_true", help="run the few that are tests, too")
    add("--ranks", type=int, nargs="+", help="only those on so many ranks")
    add("--only", metavar="TEXT", default="", help="only those with this in their names")
    add("--part", metavar="I/N", default="1/1", help="only every Nth, from the Ith on")
    add("--mtbf", type=int, metavar="N", help="run N random faults in a row in one job")
    add("--seed", type=int, default=None, help="what to draw them by; by default something new")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int(time.time())
    return options


def _replay(name: str) -> Verdict:
    if name in network.NAMES:
        return network.run(name, quiet=False)
    return run(Case.of(name), quiet=False)


def _whole(options: argparse.Namespace, tally: Tally) -> None:
    cases = sample() if options.sample else table()
    names = [case.name for case in cases if not options.ranks or case.ranks in options.ranks]
    if not options.ranks and not options.sample:
        names += network.NAMES
    first, every = map(int, options.part.split("/"))
    names = [name for name in names if options.only in name][first - 1 :: every]
    for number, name in enumerate(names):
        tally.show(f"{number + 1} of {len(names)}: {name}")
        try:
            tally.add(name, network.run(name) if name in network.NAMES else run(Case.of(name)))
        except network.Unable as error:
            tally.skip(name, str(error))


def _in_a_row(count: int, rng: Random, tally: Tally) -> None:
    """Faults in one job after another; a job lives as long as it can go on."""
    while len(tally.verdicts) < count:
        first = draw(rng)
        try:
            with started(first) as job:
                for survived, case in enumerate(_of_one_job(first, rng)):
                    number = len(tally.verdicts) + 1
                    tally.show(f"{number} of {count}: {case.name}, in a job with {survived} before")
                    report = trial(job, case)
                    verdict = judge(case, report)
                    tally.add(case.name, verdict)
                    ended = verdict.wrong or not report.resumed or case.what.store
                    if ended or number == count:
                        break
        except RuntimeError as error:
            tally.add(first.name, Verdict([str(error)]))


def _of_one_job(first: Case, rng: Random) -> Iterator[Case]:
    yield first
    while True:
        case = draw(rng, first.setup)
        if case.what.store != "rank 0":  # that is settled when a job begins
            yield case


class Tally:
    """What was run so far, and what became of it."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[str, Verdict]] = []
        self.skipped: list[tuple[str, str]] = []

    @property
    def failed(self) -> list[str]:
        return [name for name, verdict in self.verdicts if verdict.wrong]

    def add(self, name: str, verdict: Verdict) -> None:
        self.verdicts.append((name, verdict))
        if verdict.wrong:
            self.clear_line()
            print(f"{name}\n{verdict}\n  again: {COMMAND} --case {name}", flush=True)

    def skip(self, name: str, reason: str) -> None:
        self.skipped.append((name, reason))

    def show(self, text: str) -> None:
        """A line that is written over; where that cannot be, one in ten."""
        text = f"{text} ({len(self.failed)} wrong)"
        if sys.stdout.isatty():
            print(f"\r{text}\033[K", end="", flush=True)
        elif len(self.verdicts) % 10 == 0:
            print(text, flush=True)

    def clear_line(self) -> None:
        if sys.stdout.isatty():
            print("\r\033[K", end="")

    def report(self) -> None:
        """The table, and what to do about what failed."""
        self.clear_line()
        Console().print(self._table())
        for name, reason in self.skipped:
            print(f"left out: {name}: {reason}")
        for name in self.failed:
            print(f"wrong: {COMMAND} --case {name}")

    def _table(self) -> Table:
        title = f"Until the last rank knew, in seconds above the detection (at most {LIMIT:g})"
        table = Table("fault", "wrapper", title=title)
        for column in ("cases", "median", "worst", "never", "went on", "wrong"):
            table.add_column(column, justify="right")
        keys = dict.fromkeys(_key(name) for name, _ in self.verdicts)
        for key in sorted(keys):
            self._row(table, key, [v for name, v in self.verdicts if _key(name) == key])
        table.add_section()
        self._row(table, ("all", ""), [verdict for _, verdict in self.verdicts])
        return table

    def _row(self, table: Table, key: Sequence[str], verdicts: Sequence[Verdict]) -> None:
        delays = [verdict.delay for verdict in verdicts if verdict.delay is not None]
        wrong = sum(bool(verdict.wrong) for verdict in verdicts)
        table.add_row(
            *key,
            str(len(verdicts)),
            f"{statistics.median(delays):.2f}" if delays else "",
            f"{max(delays):.2f}" if delays else "",
            str(sum(verdict.hangs for verdict in verdicts) or ""),
            str(sum(verdict.resumed for verdict in verdicts) or ""),
            f"[bold red]{wrong}[/]" if wrong else "[green]0[/]",
        )


def _key(name: str) -> tuple[str, str]:
    """The fault and the wrapper of a case."""
    parts = name.split("-")
    return (parts[0], next((part for part in parts if part in WRAPPERS), ""))


if __name__ == "__main__":
    sys.exit(main())
