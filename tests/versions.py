"""Runs the quick tests and those of the drop-in under every Python × torch that can be installed.

``python -m tests.versions`` (``make versions``) makes an environment of each in ``.versions``, 5 GB
with the CUDA libraries, and writes what came of it into docs/support.md. ``--python 3.12`` and
``--torch 2.11 2.13`` select some. A result stays until its environment is tested again.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from tests.documents import ROOT

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
PAGE = ROOT / "docs" / "support.md"
_FOLDER = ROOT / ".versions"
_MARKS = "<!-- versions: python -m tests.versions -->\n", "<!-- end of versions -->\n"
_QUICK = ("-m", "not (processes or slow or zoo or matrix)", "--ignore=tests/compat")
_COMPAT = ("-m", "not matrix", "tests/compat")

Pair: TypeAlias = tuple[str, str]
"""A version of Python and one of torch."""


def install(pair: Pair, folder: Path) -> str:
    """Make the environment of a pair; returns why it cannot be, or nothing."""
    python, torch = pair
    if (folder / ".stamp").exists():
        return ""
    if shutil.which(f"python{python}") is None:
        return f"no python{python} here"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
    # The tools of development at their versions, but for torch and triton, which belongs to it.
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    pins = [line for line in lines if not line.startswith(("torch==", "triton=="))]
    (folder / "constraints.txt").write_text("".join(pins))
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
    told = ["--constraint", folder / "constraints.txt", f"torch=={torch}.*"]
    told += ["--editable", f"{ROOT}[dev]"]
    done = subprocess.run([*pip, *told], capture_output=True, text=True, check=False)
    if done.returncode:
        (folder / "pip.log").write_text(done.stdout + done.stderr)
        return "no wheel" if f"torch=={torch}" in done.stderr else f"see {folder.name}/pip.log"
    (folder / ".stamp").touch()
    return ""


def run_tests(folder: Path) -> str:
    """Run the tests in an environment: what came of them."""
    words = [folder / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider"]
    told = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    failed = [
        name
        for name, which in (("unit", _QUICK), ("drop-in", _COMPAT))
        if subprocess.run([*words, *which], cwd=ROOT, env=told, check=False).returncode
    ]
    return f"fails: {', '.join(failed)}" if failed else "passes"


def table(results: Mapping[Pair, str]) -> str:
    """The results: a row for each torch, a column for each Python.

    >>> print(table({("3.11", "2.13"): "passes", ("3.14", "2.11"): "no wheel"}), end="")
    | torch | Python 3.11 | Python 3.14 |
    |---|---|---|
    | 2.11 | not run | no wheel |
    | 2.13 | passes | not run |
    """
    pythons, torches = (sorted({pair[at] for pair in results}, key=_number) for at in (0, 1))
    rows = [["torch", *(f"Python {python}" for python in pythons)], ["---"] * (1 + len(pythons))]
    for torch in torches:
        rows.append([torch, *(results.get((python, torch), "not run") for python in pythons)])
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    lines[1] = lines[1].replace(" ", "")
    return "".join(lines)


def with_table(page: str, results: Mapping[Pair, str], *, day: str) -> str:
    """The page with this table between its marks."""
    (before, rest), (_, after) = page.split(_MARKS[0]), page.split(_MARKS[1])
    assert _MARKS[1] in rest
    note = f"`make versions`, {day}: `make unit` and the tests of the drop-in.\n\n"
    return f"{before}{_MARKS[0]}\n{note}{table(results)}\n{_MARKS[1]}{after}"


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main(words: Sequence[str] | None = None) -> int:
    """Test the selected pairs, and write the table of all that were ever tested here."""
    parser = argparse.ArgumentParser(description="Test with versions of Python and torch.")
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS)
    parser.add_argument("--torch", nargs="+", choices=TORCHES, default=TORCHES)
    asked = parser.parse_args(words)
    for pair in [(python, torch) for python in asked.python for torch in asked.torch]:
        folder = _FOLDER / "-".join(pair)
        print(f"== Python {pair[0]}, torch {pair[1]}", flush=True)
        result = install(pair, folder) or run_tests(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.txt").write_text(result)
        print(result, flush=True)
    found = {
        (python, torch): file.read_text()
        for file in sorted(_FOLDER.glob("*/result.txt"))
        for python, _, torch in [file.parent.name.partition("-")]
    }
    day = datetime.date.today().isoformat()
    PAGE.write_text(with_table(PAGE.read_text(), found, day=day))
    return int(any(result.startswith("fails") for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
