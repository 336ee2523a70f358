"""Runs the examples of Markdown pages, and writes down what they print.

A ``python`` block runs in one namespace a page, and a ``text`` block right behind it is its output.
In a ``console`` block, lines that begin with ``$ `` are commands and the rest is their output.

``python -m tests.documents`` refreshes the outputs in README.md and docs/, or in the pages that are
named, each page in a process of its own, so that none depends on another.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tests.warm import install

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.S | re.M)


def with_outputs(text: str) -> str:
    """The page with every output as the examples print it now."""
    namespace: dict[str, object] = {"__name__": "page"}

    def run(block: re.Match[str]) -> str:
        language, code, _ = block.groups()
        if language == "console":
            return f"```console\n{_run_console(code)}```"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "page", "exec"), namespace)
        output = _tidy(printed.getvalue())
        return f"```python\n{code}```" + (f"\n\n```text\n{output}```" if output else "")

    # Not a TemporaryDirectory, which every program that is forked from here would remove.
    folder = Path(tempfile.mkdtemp())
    (commands := folder / ".bin").mkdir()
    os.environ["PATH"] = os.pathsep.join([str(commands), os.environ["PATH"]])
    try:
        if "```console" in text:
            install(commands)
        with contextlib.chdir(folder):
            return _BLOCK.sub(run, text)
    finally:
        shutil.rmtree(folder)


def _run_console(code: str) -> str:
    """All commands of a block in one shell, so that ``$?`` and variables work."""
    commands = [line[2:] for line in code.splitlines() if line.startswith("$ ")]
    mark = "--- end of output ---"
    script = "".join(f"{line}\nstatus=$?\necho '{mark}'\n(exit $status)\n" for line in commands)
    result = subprocess.run(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    outputs = result.stdout.split(f"{mark}\n")
    return "".join(
        f"$ {command}\n{_tidy(output)}" for command, output in zip(commands, outputs, strict=False)
    )


def _tidy(output: str) -> str:
    """Without spaces at the ends of lines; an error of torch as versions before 2.15 word it."""
    output = output.replace("RuntimeError: addmm: mat1", "RuntimeError: mat1")
    return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


def fresh(page: Path) -> str:
    """The page as it should be, found out in a process of its own, which has torch already."""
    if not _BLOCK.search(page.read_text()):
        return page.read_text()
    # Here, as it imports torch; the same as for other tests, which share what they are forked from.
    from tests.workers import PRELOADED

    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_send, args=(page, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"{page} does not run; what it has raised stands above") from None
    finally:
        process.join()


def _send(page: Path, sender: Connection) -> None:
    os.environ.pop("COLUMNS", None)
    sender.send(with_outputs(page.read_text()))


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]) if sys.argv[1:] else PAGES:
        page.write_text(fresh(page))
