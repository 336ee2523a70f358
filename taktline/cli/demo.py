"""``taktline demo``: what Taktline does today, in a few seconds."""

from __future__ import annotations

import typer

from taktline.cli.compare import for_one_model, print_table
from taktline.plan import Plan, build, lower, validate

__all__ = ["demo"]


def demo() -> None:
    """Plan, check, break, simulate and compare: a tour in a few seconds."""
    typer.echo("1. A schedule is data. 1F1B on 4 ranks, 6 micro-batches:\n")
    plan = build("1f1b", ranks=4, microbatches=6)
    typer.echo(str(plan))

    lowered = lower(plan)
    typer.echo(
        f"\n2. Spelled out with every send and receive it has {len(lowered)} actions. Checked: "
        f"{'sound' if not validate(lowered) else 'broken'}, no deadlock even if sends block."
    )

    typer.echo("\n3. Swap two actions of rank 1, and the check says what is wrong:\n")
    typer.echo("\n".join(f"   {violation}" for violation in validate(_swapped(plan))))

    typer.echo("\n4. The same model under other schedules (one rank's F = I = W = 1):\n")
    names = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"]
    print_table(for_one_model(names, ranks=4, microbatches=12))
    typer.echo(
        "Next: taktline show 1f1b zbv -r 4 -m 8 (with -o page.html, a page to explore), "
        "or taktline --help"
    )


def _swapped(plan: Plan) -> Plan:
    """The plan with a forward and a backward of rank 1 in each other's place."""
    ranks = [plan[rank] for rank in range(plan.ranks)]
    backward = next(at for at, action in enumerate(ranks[1]) if str(action) == "1B1")
    forward = next(at for at, action in enumerate(ranks[1]) if str(action) == "1F1")
    ranks[1][forward], ranks[1][backward] = ranks[1][backward], ranks[1][forward]
    return Plan.from_actions(ranks, plan.placement, plan.microbatches, name="1f1b, swapped")
