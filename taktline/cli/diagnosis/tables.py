"""The report for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from taktline.cli.diagnosis.links import ALL_PAIRS
from taktline.cli.diagnosis.report import Finding, MeasuredLink, Report, Run, Verdict
from taktline.cli.options import rich_table
from taktline.text import counted

__all__ = ["show"]

_MARKS = {
    Verdict.OK: ("✓", "green"),
    Verdict.WARNING: ("!", "yellow"),
    Verdict.FAILED: ("✗", "bold red"),
}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))


def show(report: Report, console: Console) -> None:
    """Print everything: who, how fast, and what to do."""
    if report.ranks:
        console.print(_ranks(report))
    if report.links:
        console.print(_matrix(report) if len(report.ranks) <= ALL_PAIRS else _list(report.links))
    if report.runs:
        console.print(_runs(report.runs))
    console.print(_findings(report.findings))
    console.print(_conclusion(report))


def _ranks(report: Report) -> Table:
    hosts = len({facts["host"] for facts in report.ranks})
    way = "local ranks of one process" if report.way == "local" else report.way
    rows = [
        [
            str(facts["rank"]),
            escape(facts["host"]),
            escape(f"{facts['device']} {facts['gpu'] or ''}".strip()),
            str(facts["cores"]),
            str(facts["threads"]),
        ]
        for facts in report.ranks
    ]
    title = f"{counted(len(report.ranks), 'rank')} on {counted(hosts, 'host')}, {way}"
    headings = ["rank", "host", "device", "cores", "threads"]
    return rich_table(headings, rows, ["host", "device"], title=title)


def _matrix(report: Report) -> Table:
    known = {(link.sender, link.receiver): link for link in report.links}
    best = max(link.bandwidth for link in report.links)
    ranks = range(len(report.ranks))
    rows = [
        [f"rank {sender}", *(_cell(known.get((sender, receiver)), best) for receiver in ranks)]
        for sender in ranks
    ]
    headings = ["from", *(f"to rank {receiver}" for receiver in ranks)]
    return rich_table(headings, rows, title="Links: latency and bandwidth", show_lines=True)


def _list(links: Sequence[MeasuredLink]) -> Table:
    best = max(link.bandwidth for link in links)
    rows = [
        [f"{link.sender} → {link.receiver}", *_cell(link, best).split("\n")]
        for link in sorted(links, key=lambda link: (link.sender, link.receiver))
    ]
    return rich_table(["from → to", "latency", "bandwidth"], rows, title="Links between neighbours")


def _cell(link: MeasuredLink | None, best: float) -> Text:
    if link is None:
        return Text("·", style="dim")
    if not link.intact:
        return Text("broken", style="bold red")
    colour = "yellow" if link.bandwidth < best / 4 else ""
    return Text(f"{_amount(link.latency, _UNITS)}\n{_amount(link.bandwidth, _RATES)}", colour)


def _runs(runs: Sequence[Run]) -> Table:
    rows: list[list[str]] = []
    for run in runs:
        gradients = "[green]right[/]" if run.good else "[bold red]wrong[/]"
        if run.error:
            gradients = "[bold red]did not run[/]"
        seconds = "" if run.seconds is None else _amount(run.seconds, _UNITS)
        rows.append([run.schedule, str(run.stages_per_rank), gradients, seconds])
    headings = ["schedule", "stages/rank", "gradients", "a step"]
    title = "A tiny pipeline under each schedule"
    return rich_table(headings, rows, ["schedule", "gradients"], title=title)


def _findings(findings: Sequence[Finding]) -> Table:
    rows: list[list[Text]] = []
    for finding in findings:
        mark, colour = _MARKS[finding.verdict]
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style=colour)
        rows.append([Text(mark, style=colour), Text(finding.check, no_wrap=True), text])
    headings = ["", "check", "found, and what to do"]
    return rich_table(headings, rows, headings, title="Checks")


def _conclusion(report: Report) -> str:
    failed, warnings = report.count(Verdict.FAILED), report.count(Verdict.WARNING)
    if failed:
        return f"[bold red]{counted(failed, 'check')} failed.[/]"
    if warnings:
        return f"[yellow]Everything works, with {counted(warnings, 'warning')}.[/]"
    return "[green]All is well.[/]"


def _amount(value: float, units: Sequence[tuple[float, Any]]) -> str:
    """Three digits and a unit.

    >>> _amount(0.0000421, _UNITS), _amount(1.5e9, _RATES), _amount(12.0, _UNITS)
    ('42.1 µs', '1.5 GB/s', '12 s')
    """
    size, unit = next((pair for pair in units if value >= pair[0]), units[-1])
    return f"{value / size:.3g} {unit}"
