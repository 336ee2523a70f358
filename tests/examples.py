"""Runs several examples one after the other in the same processes: starting them takes longest.

``python -m tests.examples FOLDER JSON``, by itself or under torchrun, where JSON holds the words of
each example, ``[["gpt", "--steps", "2"], …]``. What the first rank prints of it is then in
``FOLDER/gpt.0``, and so on.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def main(folder: Path, examples: list[list[str]]) -> None:
    """Run each example as its own program would be, with a working folder of its own."""
    for name, *words in examples:
        sys.argv = [str(EXAMPLES / f"{name}.py"), *words]
        (there := folder / f"in-{name}").mkdir(exist_ok=True)
        printed = io.StringIO()
        with contextlib.chdir(there), contextlib.redirect_stdout(printed):
            runpy.run_path(sys.argv[0], run_name="__main__")
        (folder / f"{name}.{os.environ.get('RANK', '0')}").write_text(printed.getvalue())


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
