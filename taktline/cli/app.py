"""All commands in one application, with errors in a line and exit codes for scripts.

0: fine; 1: the plan breaks its rules, or a check of the doctor failed; 2: the command or its input
cannot be used.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from taktline import __version__
from taktline.cli.commands import balance, check, compare, plan, show, simulate
from taktline.cli.explorer import explore
from taktline.cli.fit import fit
from taktline.cli.optimise import optimise
from taktline.cli.options import Size, Times, Within
from taktline.cli.ranks import demo, doctor
from taktline.errors import InvalidPlanError, TaktlineError

# Where click is depends on typer's version.
_UsageError: Any = typer.BadParameter.__bases__[0]


class _Commands(TyperGroup):
    """All commands, with one way to end."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run a command, and exit."""
        try:
            code = super().main(*args, **options | {"standalone_mode": False})
        except (TaktlineError, _UsageError) as error:
            code = 1 if isinstance(error, InvalidPlanError) else 2
            message = str(error) if isinstance(error, TaktlineError) else error.format_message()
            if message:  # not where the help was shown
                typer.echo(f"error: {message}", err=True)
        except typer.Abort:
            code = 130
        sys.exit(code)


app = typer.Typer(
    name="taktline",
    cls=_Commands,
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


def _as_command(command: Callable[..., None]) -> Callable[..., None]:
    """A function as a command; in place of an argument of type Size, it has its fields."""
    options: list[inspect.Parameter] = []
    groups: dict[str, type[Size]] = {}
    for name, option in inspect.signature(command, eval_str=True).parameters.items():
        inner = [option]
        if option.annotation in (Size, Times, Within):
            groups[name] = option.annotation
            inner = inspect.signature(option.annotation, eval_str=True).parameters.values()
        options += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in inner]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__dict__["__signature__"] = inspect.Signature(options)
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


_PLANNING = (plan, check, show, simulate, compare, optimise, explore, balance)
for _command in (*_PLANNING, fit, demo, doctor):
    app.command()(_as_command(_command))
