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
    title = f"{counted(len(report.ranks), 'rank')} on {counted(hosts, 'host')}, {way}"
    table = Table(title=title)
    table.add_column("rank", justify="right")
    table.add_column("host", overflow="fold")
    table.add_column("device", overflow="fold")
    for heading in ("cores", "threads"):
        table.add_column(heading, justify="right")
    for facts in report.ranks:
        gpu = f" {facts['gpu']}" if facts["gpu"] else ""
        table.add_row(
            str(facts["rank"]),
            escape(facts["host"]),
            escape(f"{facts['device']}{gpu}"),
            str(facts["cores"]),
            str(facts["threads"]),
        )
    return table


def _matrix(report: Report) -> Table:
    known = {(link.sender, link.receiver): link for link in report.links}
    table = Table(title="Links: latency and bandwidth", show_lines=True)
    table.add_column("from", justify="right")
    for receiver in range(len(report.ranks)):
        table.add_column(f"to rank {receiver}", justify="right")
    best = max(link.bandwidth for link in report.links)
    for sender in range(len(report.ranks)):
        cells = [
            _cell(known.get((sender, receiver)), best) for receiver in range(len(report.ranks))
        ]
        table.add_row(f"rank {sender}", *cells)
    return table


def _list(links: Sequence[MeasuredLink]) -> Table:
    table = Table(title="Links between neighbours")
    table.add_column("from → to", justify="right")
    for heading in ("latency", "bandwidth"):
        table.add_column(heading, justify="right")
    best = max(link.bandwidth for link in links)
    for link in sorted(links, key=lambda link: (link.sender, link.receiver)):
        parts = _cell(link, best).split("\n")
        table.add_row(f"{link.sender} → {link.receiver}", *parts)
    return table


def _cell(link: MeasuredLink | None, best: float) -> Text:
    if link is None:
        return Text("·", style="dim")
    if not link.intact:
        return Text("broken", style="bold red")
    colour = "yellow" if link.bandwidth < best / 4 else ""
    return Text(f"{_amount(link.latency, _UNITS)}\n{_amount(link.bandwidth, _RATES)}", colour)


def _runs(runs: Sequence[Run]) -> Table:
    table = Table(title="A tiny pipeline under each schedule")
    table.add_column("schedule", no_wrap=True)
    table.add_column("stages/rank", justify="right")
    table.add_column("gradients")
    table.add_column("a step", justify="right")
    for run in runs:
        gradients = "[green]right[/]" if run.good else "[bold red]wrong[/]"
        if run.error:
            gradients = "[bold red]did not run[/]"
        seconds = "" if run.seconds is None else _amount(run.seconds, _UNITS)
        table.add_row(run.schedule, str(run.stages_per_rank), gradients, seconds)
    return table


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(title="Checks")
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        mark, colour = _MARKS[finding.verdict]
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style=colour)
        table.add_row(Text(mark, style=colour), finding.check, text)
    return table


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
