"""Taktline in the place of torch.distributed.pipelining, in a program and in those it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import taktline

_ROOT = str(Path(taktline.__file__).parents[1])

# Prints for each way of importing whose modules came, in this process and in its children.
_PROGRAM = """
import multiprocessing, sys

def child(results):
    from torch.distributed.pipelining.schedules import _Action
    results.put(_Action.__module__.partition(".")[0])

if __name__ == "__main__":
    print(sys.argv[1:], sorted(name for name in sys.modules if name.startswith("torch")))
    import torch.distributed.pipelining.schedules as schedules
    from torch.distributed.pipelining import Pipe, stage
    import torch
    import torch.distributed.pipelining._schedule_visualizer
    assert torch.distributed.pipelining.stage is stage
    assert torch.distributed.pipelining.schedules is schedules
    print(Pipe.__module__.partition(".")[0], schedules.__name__.partition(".")[0])
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        results = context.Queue()
        process = context.Process(target=child, args=(results,))
        process.start()
        print(method, results.get(timeout=60))
        process.join()
"""


def _run(
    *arguments: str,
    cwd: Path,
    path: tuple[str, ...] = (),
    code: int = 0,
    python: str | Path = sys.executable,
) -> list[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TAKTLINE_COMPAT"},
        "PYTHONPATH": os.pathsep.join([_ROOT, *path]),
    }
    done = subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout.splitlines()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.matrix
def test_a_program_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    lines = _run("-m", "taktline.compat", "program.py", "--steps", "3", cwd=tmp_path)
    assert lines == [
        "['--steps', '3'] []",
        "taktline taktline",
        "spawn taktline",
        "fork taktline",
    ]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.matrix
def test_a_program_that_torchrun_starts(tmp_path: Path) -> None:
    """The other way round, where Taktline starts torchrun, is on a page of the docs, and run."""
    (tmp_path / "trainer.py").write_text(
        "import os\n"
        "from torch.distributed.pipelining import ScheduleGPipe\n"
        "where = ScheduleGPipe.__module__.partition('.')[0]\n"
        "with open(os.environ['RANK'], 'w') as file:\n"
        "    file.write(where)\n"
    )
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _run("-m", *torchrun, "-m", "taktline.compat", "trainer.py", cwd=tmp_path)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["taktline"] * 2


@pytest.mark.processes
def test_another_sitecustomize_has_its_turn(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('from', __name__)\nHERE = 1\n")
    code = "import sitecustomize, sys; print(sitecustomize.HERE, 'taktline' in sys.modules)"
    lines = _run("-m", "taktline.compat", "-c", code, cwd=tmp_path, path=(str(tmp_path),))
    # Once for the first process, once for the program.
    assert lines == ["from sitecustomize", "from sitecustomize", "1 False"]


@pytest.mark.processes
def test_uninstalling_brings_torchs_own_back(tmp_path: Path, commands: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys, taktline.compat as compat\n"
        "before = dict(os.environ), list(sys.meta_path)\n"
        "compat.install(); compat.install()\n"
        "assert len(sys.meta_path) == len(before[1]) + 1\n"
        "import torch.distributed.pipelining.schedules as ours\n"
        "compat.uninstall(); compat.uninstall()\n"
        "assert (dict(os.environ), sys.meta_path) == before\n"
        "assert not hasattr(sys.modules['torch.distributed'], 'pipelining')\n"
        "import torch.distributed.pipelining.schedules as theirs\n"
        "print(ours.__name__, theirs.__name__)\n"
        "try:\n"
        "    compat.install()\n"
        "except compat.InstallError as error:\n"
        "    print(error)\n"
    )
    names, error = _run("program.py", cwd=tmp_path, python=commands / "python")
    assert names == (
        "taktline.compat.torch_pipelining.schedules torch.distributed.pipelining.schedules"
    )
    assert error.startswith("torch.distributed.pipelining has been imported already, and the")
    assert "call taktline.compat.install() before anything that imports it, or run" in error


@pytest.mark.processes
def test_what_cannot_be_run(tmp_path: Path) -> None:
    assert _run("-m", "taktline.compat", cwd=tmp_path, code=2)[0].startswith("usage: python -m")
    assert _run("-m", "taktline.compat", "--help", cwd=tmp_path)[0].startswith("usage: python -m")
    lines = _run("-S", "-m", "taktline.compat", "program.py", cwd=tmp_path, code=1)
    assert lines == ["error: Python's flags -E, -I and -S keep Taktline from being installed"]


@pytest.mark.processes
def test_names_that_there_are_not(tmp_path: Path, commands: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import importlib.util as util, taktline.compat; taktline.compat.install()\n"
        "names = ['.schedules', '', '.nonsense']\n"
        "print([util.find_spec(f'torch.distributed.pipelining{n}') is None for n in names])\n"
        "import torch.distributed.pipelining.nonsense"
    )
    lines = _run("program.py", cwd=tmp_path, code=1, python=commands / "python")
    assert lines[0] == "[False, False, True]"
    assert lines[-1] == (
        "ModuleNotFoundError: No module named 'torch.distributed.pipelining.nonsense'"
    )
