"""The command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the ``taktline`` command."""
    try:
        import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import typer  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        sys.exit(f"taktline: the commands need {error.name}: pip install 'taktline[cli]'")
    from taktline.cli.app import app

    app()
