"""All commands in one application, with errors told in a line and exit codes for scripts.

0: fine; 1: the plan breaks its rules, or a check of the doctor failed; 2: the command or its input
cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from taktline import __version__
from taktline.cli.balance import balance
from taktline.cli.check import check
from taktline.cli.compare import compare
from taktline.cli.demo import demo
from taktline.cli.doctor import doctor
from taktline.cli.explorer import explore
from taktline.cli.plan import plan
from taktline.cli.show import show
from taktline.cli.simulate import simulate
from taktline.errors import InvalidPlanError, TaktlineError

__all__ = ["app"]

app = typer.Typer(
    name="taktline",
    help="Pipeline-parallel training for PyTorch: plan, check, draw and compare schedules.",
    epilog="Exit codes: 0 fine, 1 the plan breaks its rules, 2 the input cannot be used.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"taktline {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


def _tell_errors(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def told(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (TaktlineError, typer.BadParameter) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1 if isinstance(error, InvalidPlanError) else 2) from None

    return told


for _command in (plan, check, show, simulate, compare, explore, balance, demo, doctor):
    app.command()(_tell_errors(_command))
