"""The findings of the doctor, as plain data and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from taktline.cli.options import rich_table
from taktline.text import counted

Verdict: TypeAlias = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, and what to do about it."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """From one rank to another: seconds for a small message, bytes a second for large ones."""

    sender: int
    receiver: int
    latency: float
    bandwidth: float
    intact: bool = True
    """Whether all messages arrived unchanged."""


@dataclass(frozen=True, slots=True)
class Run:
    """A tiny pipeline under one schedule."""

    schedule: str
    stages_per_rank: int
    seconds: float | None = None
    """For one step."""
    wrong: str = ""
    """Where it differs from the plain model."""
    error: str = ""


@dataclass(slots=True)
class Report:
    """All findings; the same on every rank, unless a connection broke."""

    way: str
    """The backend, or ``local``."""
    ranks: list[dict[str, Any]]
    """The facts of each rank."""
    findings: list[Finding] = field(default_factory=list)
    links: list[MeasuredLink] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether nothing failed; warnings do not count."""
        return all(finding.verdict != "failed" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"well": self.well, **asdict(self)}


def of_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, not too many of them.

    >>> of_ranks([2]), of_ranks([0, 1, 3]), of_ranks(range(12))
    ('rank 2', 'ranks 0, 1, 3', '12 ranks (0, 1, 2, 3, …)')
    """
    if len(ranks) > 8:
        return f"{counted(len(ranks), 'rank')} ({', '.join(map(str, ranks[:4]))}, …)"
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "bold red")}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))


def show(report: Report, console: Console) -> None:
    """Print tables of the ranks, the links, the runs and the findings."""
    console.print(_ranks(report))
    if report.links:
        console.print(_links(report.links))
    if report.runs:
        console.print(_runs(report.runs))
    console.print(_findings(report.findings))
    console.print(_conclusion(report))


def _ranks(report: Report) -> Table:
    hosts = len({facts["host"] for facts in report.ranks})
    way = "in one process" if report.way == "local" else report.way
    rows = [
        {
            "rank": str(facts["rank"]),
            "host": escape(facts["host"]),
            "device": escape(f"{facts['device']} {facts['gpu'] or ''}".strip()),
            "cores": str(facts["cores"]),
            "threads": str(facts["threads"]),
        }
        for facts in report.ranks
    ]
    title = f"{counted(len(report.ranks), 'rank')} on {counted(hosts, 'host')}, {way}"
    return rich_table(rows, ["host", "device"], title=title)


def _links(links: Sequence[MeasuredLink]) -> Table:
    best = max(link.bandwidth for link in links)
    rows: list[dict[str, Text]] = []
    for link in sorted(links, key=lambda link: (link.sender, link.receiver)):
        colour = "yellow" if link.bandwidth < best / 4 else ""
        cells = [_amount(link.latency, _UNITS), _amount(link.bandwidth, _RATES)]
        if not link.intact:
            colour, cells = "bold red", ["broken", ""]
        latency, bandwidth = (Text(cell, colour) for cell in cells)
        ends = Text(f"{link.sender} → {link.receiver}")
        rows.append({"from → to": ends, "latency": latency, "bandwidth": bandwidth})
    return rich_table(rows, title="Links between ranks")


def _runs(runs: Sequence[Run]) -> Table:
    rows: list[dict[str, str]] = []
    for run in runs:
        gradients = "[bold red]wrong[/]" if run.wrong else "[green]right[/]"
        if run.error:
            gradients = "[bold red]did not run[/]"
        row = {"schedule": run.schedule, "stages/rank": str(run.stages_per_rank)}
        time = "" if run.seconds is None else _amount(run.seconds, _UNITS)
        rows.append({**row, "gradients": gradients, "a step": time})
    return rich_table(rows, ["schedule", "gradients"], title="A tiny pipeline under each schedule")


def _findings(findings: Sequence[Finding]) -> Table:
    rows: list[dict[str, Text]] = []
    for finding in findings:
        mark, colour = _MARKS[finding.verdict]
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style=colour)
        check = Text(finding.check, no_wrap=True)
        rows.append({"": Text(mark, colour), "check": check, "found, and what to do": text})
    return rich_table(rows, rows[0], title="Checks")


def _conclusion(report: Report) -> str:
    verdicts = [finding.verdict for finding in report.findings]
    if failed := verdicts.count("failed"):
        return f"[bold red]{counted(failed, 'check')} failed.[/]"
    if warnings := verdicts.count("warning"):
        return f"[yellow]Everything works, with {counted(warnings, 'warning')}.[/]"
    return "[green]All is well.[/]"


def _amount(value: float, units: Sequence[tuple[float, Any]]) -> str:
    """Three digits and a unit.

    >>> _amount(0.0000421, _UNITS), _amount(1.5e9, _RATES), _amount(12.0, _UNITS)
    ('42.1 µs', '1.5 GB/s', '12 s')
    """
    size, unit = next((pair for pair in units if value >= pair[0]), units[-1])
    return f"{value / size:.3g} {unit}"
