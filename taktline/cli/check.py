"""``taktline check``: whether a plan can run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from taktline.cli.options import Json, echo_json
from taktline.plan import Violation, read, validate
from taktline.text import counted


def check(
    file: Annotated[Path, typer.Argument(help="A plan, .csv or .json.")], json: Json = False
) -> None:
    """Check a plan: every rule that it breaks, and whether it can deadlock.

    Exits with 1 if it breaks a rule. A plan that could deadlock only where sends block until their
    receive is posted gets a warning.

    Example: `taktline check plan.csv`
    """
    plan = read(file)
    errors = validate(plan, sends="asynchronous")
    warnings = () if errors else validate(plan, sends="blocking")
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
                "violations": [_as_dict(violation) for violation in errors],
                "warnings": [_as_dict(violation) for violation in warnings],
            }
        )
    else:
        typer.echo(repr(plan))
        for violation in errors:
            typer.echo(f"  {violation}")
        for violation in warnings:
            typer.echo(f"  warning, where sends block: {violation}")
        typer.echo(_verdict(len(errors), bool(warnings)))
    if errors:
        raise typer.Exit(1)


def _verdict(errors: int, warnings: bool) -> str:
    if errors:
        return f"not valid: {counted(errors, 'violation')}"
    if warnings:
        return "valid with asynchronous sends only"
    return "valid: every action once, every dependency met, no deadlock even if sends block"


def _as_dict(violation: Violation) -> dict[str, Any]:
    return {
        "rule": violation.rule,
        "rank": violation.rank,
        "position": violation.position,
        "action": None if violation.action is None else str(violation.action),
        "message": violation.message,
        "cycle": [[rank, str(here), str(there)] for rank, here, there in violation.cycle],
    }
