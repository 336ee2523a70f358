"""The command line: one file per command."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Run the ``taktline`` command."""
    try:
        import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import typer  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        sys.exit(f"taktline: the commands need {error.name}: pip install 'taktline[cli]'")
    from typer import Abort, BadParameter, echo

    from taktline.cli.app import app

    # Where click is depends on typer's version.
    usage_error: Any = BadParameter.__bases__[0]
    try:
        code = app(standalone_mode=False)
    except usage_error as error:
        if message := error.format_message():  # not where the help was shown
            echo(f"error: {message}", err=True)
        code = 2
    except Abort:
        code = 130
    sys.exit(code)
