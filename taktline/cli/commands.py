"""The commands that plan, check, draw and compare; none of them imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from taktline import plan as plans
from taktline.cli.options import (
    OUTPUT,
    Json,
    Predict,
    Size,
    Within,
    complete,
    complete_name,
    echo_json,
    memory_note,
    optimised,
    print_table,
)
from taktline.errors import ArgumentError
from taktline.plan import Timeline, Violation
from taktline.plan.io import TRACE, to_json
from taktline.render.files import save
from taktline.render.svg import shared_axis
from taktline.render.text import chart, legend
from taktline.text import counted, memory_text


def plan(
    name: str | None = typer.Argument(
        None, help="Name of a schedule; without it, lists all.", autocompletion=complete_name
    ),
    *,
    size: Size,
    output: Path | None = typer.Option(None, *OUTPUT, help="Write to this .csv or .json file."),
    lowered: bool = typer.Option(False, "--lower", help="Include every send and receive."),
    json: Json = False,
) -> None:
    """Print or write a plan: the actions of each rank, in order.

    Examples:

    - `taktline plan` lists the schedules
    - `taktline plan 1f1b --ranks 4 --microbatches 8`
    - `taktline plan interleaved_1f1b -r 4 -s 2 -m 8 -o plan.csv`
    - `taktline plan zbv -r 4 -m 8 --lower --json`
    """
    if name is None:
        summaries = {name: plans.find(name).summary for name in plans.names()}
        width = max(map(len, summaries))
        lines = [f"{name:<{width}}  {summary}" for name, summary in summaries.items()]
        echo_json(summaries) if json else typer.echo("\n".join(lines))
        return
    result = plans.lower(size.build(name)) if lowered else size.build(name)
    if output is not None:
        plans.write(result, output)
        summary = f"{counted(len(result), 'action')} of {counted(result.ranks, 'rank')}"
        typer.echo(f"{output}: {summary}", err=json)
    if json:
        typer.echo(to_json(result), nl=False)
    elif output is None:
        typer.echo(str(result))


def check(
    file: Path = typer.Argument(..., help="A plan, .csv or .json."), json: Json = False
) -> None:
    """Check a plan: every rule that it breaks, and whether it can deadlock.

    Exits with 1 if it breaks a rule. A plan that could deadlock only where sends block until their
    receive is posted gets a warning.

    Example: `taktline check plan.csv`
    """
    plan = plans.read(file)
    errors = plans.validate(plan, sends="asynchronous")
    warnings = () if errors else plans.validate(plan, sends="blocking")
    if json:
        echo_json(
            {
                "file": str(file),
                "valid": not errors,
                "level": plan.level.name.lower(),
                "ranks": plan.ranks,
                "stages": plan.stages,
                "microbatches": plan.microbatches,
                "actions": len(plan),
                "violations": [_violation(violation) for violation in errors],
                "warnings": [_violation(violation) for violation in warnings],
            }
        )
    else:
        verdict = "valid: every action once, every dependency met, no deadlock even if sends block"
        if errors:
            verdict = f"not valid: {counted(len(errors), 'violation')}"
        elif warnings:
            verdict = "valid with asynchronous sends only"
        lines = [repr(plan), *(f"  {violation}" for violation in errors)]
        lines += [f"  warning, where sends block: {violation}" for violation in warnings]
        typer.echo("\n".join([*lines, verdict]))
    if errors:
        raise typer.Exit(1)


def _violation(violation: Violation) -> dict[str, Any]:
    return {
        "rule": violation.rule,
        "rank": violation.rank,
        "position": violation.position,
        "action": None if violation.action is None else str(violation.action),
        "message": violation.message,
        "cycle": [[rank, str(here), str(there)] for rank, here, there in violation.cycle],
    }


def show(
    targets: list[str] = typer.Argument(
        ..., metavar="FILE|NAME…", help="Plans, timelines or schedules.", autocompletion=complete
    ),
    *,
    times: Within,
    predict: Predict = False,
    output: Path | None = typer.Option(
        None,
        *OUTPUT,
        help="Write to this file: .svg, .html (a page), .json or .perfetto.json (a trace).",
    ),
    width: int | None = typer.Option(
        None, min=20, help="Width: columns of the terminal, or pixels of an SVG."
    ),
) -> None:
    """Draw plans: in the terminal, as SVG, as an HTML page, or as a trace for Perfetto.

    Times are for a rank's whole share of the model, so that schedules can be compared. Files with
    costs keep their own, and timelines are drawn as they are.

    Examples:

    - `taktline show 1f1b`
    - `taktline show plan.csv`
    - `taktline show 1f1b zbv -r 4 -m 8 -o compare.html`
    - `taktline show measured.json --predict`
    - `taktline show dualpipev -r 4 -m 10 --forward 1 --backward 1.1 --comm 0.1 -o plan.svg`
    """
    from rich.console import Console

    timelines = times.timelines(targets, predict=predict)
    if output is not None:
        save(timelines, output, width=width)
        # Once, .json was the trace.
        plain = output.suffix.lower() == ".json" and not output.name.lower().endswith(TRACE)
        note = f"; a trace for Perfetto ends in {TRACE}" if plain else ""
        typer.echo(f"{output}: {counted(len(timelines), 'timeline')}{note}")
        return
    screen = Console()
    painted = screen.color_system is not None and not screen.no_color
    parts = [
        chart(timelines, width, colour=painted),
        legend(timelines, colour=painted),
        memory_note(timelines),
    ]
    typer.echo("\n".join(parts), color=True)


def simulate(
    target: str = typer.Argument(
        ..., metavar="FILE|NAME", help="A plan or a schedule.", autocompletion=complete
    ),
    *,
    times: Within,
    json: Json = False,
) -> None:
    """Simulate a plan: busy and idle time, bubble and peak memory of each rank.

    Times are for one micro-batch on a rank's whole share of the model. Files with costs keep their
    own, which are per stage.

    Examples:

    - `taktline simulate plan.csv --forward 1 --backward 1.1 --weight 0.9 --comm 0.05`
    - `taktline simulate zb_h1 -r 8 -m 24`
    - `taktline simulate 1f1b --memory 2 --offload 1`
    """
    timeline, *_ = times.timelines([target], predict=True)
    if not json:
        _print_ranks(timeline)
        return
    echo_json(
        {
            "name": timeline.plan.name,
            "makespan": timeline.makespan,
            "bubble": timeline.bubble(),
            "bubble_by_span": timeline.bubble("span"),
            "least_bubble": timeline.bound and timeline.bound.bubble_of_makespan,
            "least_bubble_by_span": timeline.bound and timeline.bound.bubble,
            "rank_spans": timeline.rank_spans.tolist(),
            "busy": timeline.busy.tolist(),
            "utilisation": timeline.utilisation.tolist(),
            "peak_memory": timeline.peak_memory.tolist(),
            "memory_unit": timeline.costs.memory_unit,
            "critical_path": [str(span.action) for span in timeline.critical_path()],
        }
    )


def _print_ranks(timeline: Timeline) -> None:
    plan = timeline.plan
    rows = [
        {
            "rank": str(rank),
            "stages": " ".join(map(str, plan.placement.stages_of(rank))),
            "busy": f"{timeline.busy[rank]:.4g}",
            "idle": f"{timeline.makespan - timeline.busy[rank]:.4g}",
            "span": f"{timeline.rank_spans[rank]:.4g}",
            "utilisation": f"{timeline.utilisation[rank]:.1%}",
            "memory": memory_text(timeline.peak_memory[rank], timeline.costs.memory_unit),
        }
        for rank in range(plan.ranks)
    ]
    microbatches = counted(plan.microbatches, "micro-batch")
    print_table(rows, title=f"{plan.name}: {plan.placement}, {microbatches}")
    unit = f" {timeline.costs.unit}" if timeline.costs.unit else ""
    least = timeline.bound
    floors = least and (least.bubble_of_makespan, least.bubble)
    at = "" if plan.saves_memory else " at this memory"
    floor = floors and "no plan{} is below {:.2%}, and {:.2%}\n".format(at, *floors)
    typer.echo(
        f"makespan {timeline.makespan:.6g}{unit}; bubble {timeline.bubble():.2%} of it, "
        f"{timeline.bubble('span'):.2%} of the longest rank's own span\n{floor or ''}"
        f"{memory_note([timeline])}"
    )


def compare(
    schedules: list[str] | None = typer.Argument(
        None,
        metavar="FILE|NAME…",
        help="Schedules, plans or timelines; by default all schedules that train.",
        autocompletion=complete,
    ),
    *,
    times: Within,
    predict: Predict = False,
    json: Json = False,
) -> None:
    """Compare schedules for one model on the same ranks: bubble, makespan, peak memory.

    Times and memory are for one micro-batch on a rank's whole share of the model; the stages of a
    rank share them equally. Files keep their own numbers: a plan is simulated with its costs, and
    a timeline is shown as it is. The last row of several plans is the best that a short search
    finds at the costs, in the memory and on the ranks of the quickest.

    Examples:

    - `taktline compare`
    - `taktline compare 1f1b zb_h1 zbv --ranks 8 --microbatches 32 --comm 0.05`
    - `taktline compare measured.json --predict`
    - `taktline compare --memory 2 --offload 0.8 --recompute 1`, as far as they fit
    """
    trained = [name for name in plans.names() if name != "forward_only"]
    timelines = times.timelines(schedules or trained, predict=predict)
    _, unit = shared_axis(timelines)  # raises if they cannot be compared
    if len(timelines) > 1 and not any(timeline.measured for timeline in timelines):
        timelines += optimised(timelines)
    if json:
        echo_json(figures(timelines))
    else:
        print_schedules(timelines, unit)


def figures(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """What is compared of each timeline."""
    return [
        {
            "schedule": timeline.name,
            "ranks": timeline.plan.ranks,
            "stages_per_rank": timeline.plan.stages // timeline.plan.ranks,
            "microbatches": timeline.plan.microbatches,
            "bubble": timeline.bubble(),
            "bubble_by_span": timeline.bubble("span"),
            "least_bubble": timeline.bound and timeline.bound.bubble_of_makespan,
            "makespan": timeline.makespan,
            "peak_memory": float(timeline.peak_memory.max()),
            "memory_unit": timeline.costs.memory_unit,
        }
        for timeline in timelines
    ]


def print_schedules(timelines: Sequence[Timeline], unit: str) -> None:
    """Print a table with a row for each; the best figure of a column stands out."""
    shown = figures(timelines)

    def cell(of: dict[str, Any], name: str, form: str) -> str:
        text = f"{of[name]:{form}}"
        alike = [each[name] for each in shown if each["memory_unit"] == of["memory_unit"]]
        if name == "peak_memory":
            text = memory_text(of[name], of["memory_unit"])
        best = of[name] <= min(alike if name == "peak_memory" else [e[name] for e in shown]) + 1e-9
        return f"[bold green]{text}[/]" if best and len(shown) > 1 else text

    rows = [
        {
            "schedule": of["schedule"],
            "stages\n/rank": str(of["stages_per_rank"]),
            "bubble": cell(of, "bubble", ".1%"),
            "least": "" if of["least_bubble"] is None else f"{of['least_bubble']:.1%}",
            "by\nspan": cell(of, "bubble_by_span", ".1%"),
            f"makespan/{unit}" if unit else "makespan": cell(of, "makespan", ".4g"),
            "memory": cell(of, "peak_memory", ".4g"),
        }
        for of in shown
    ]
    sizes = {(of["ranks"], of["microbatches"]) for of in shown}
    titles = [f"{counted(r, 'rank')}, {counted(m, 'micro-batch')}" for r, m in sizes]
    title = titles[0] if len(titles) == 1 else None
    style = {"caption": memory_note(timelines), "caption_justify": "left", "pad_edge": False}
    print_table(rows, ["schedule"], title=title, **style)


def balance(
    costs: str = typer.Argument(..., help="Cost of each layer, such as 3,1,4."),
    stages: int = typer.Option(..., help="Number of stages."),
    memory: str | None = typer.Option(None, help="Memory of each layer, in any unit: 8,8,16."),
    limits: str | None = typer.Option(
        None, help="Memory limit of a stage, in that unit: one number, or one per stage."
    ),
    json: Json = False,
) -> None:
    """Cut layers into stages, so that the largest is as small as possible.

    Example: `taktline balance 5,3,3,3,3,3,9 --stages 3`
    """
    layers = None if memory is None else _numbers(memory)
    each = None if limits is None else _numbers(limits)
    limit = each[0] if each is not None and len(each) == 1 else each
    cut = plans.balance(_numbers(costs), stages, memory=layers, limits=limit)
    if not json:
        typer.echo(str(cut))
        return
    values = {"largest": cut.largest, "bounds": cut.bounds, "stage_costs": cut.stage_costs}
    if cut.stage_memory is not None:
        values["stage_memory"] = cut.stage_memory
    echo_json(values)


def _numbers(text: str) -> list[float]:
    """Numbers with commas between them; whole ones stay whole, and so exact."""
    try:
        return [int(word) if word.strip().isdecimal() else float(word) for word in text.split(",")]
    except ValueError:
        raise ArgumentError(f"expected numbers with commas between them, not {text!r}") from None
