"""README and the first page of the tutorial, in a fresh environment with the wheel in it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.documents import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run(*command: object, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a wheel, and an environment that has it; what it needs is that of this one."""
    folder = tmp_path_factory.mktemp("install")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    made = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode and os.environ.get("CI", "").lower() != "true":
        pytest.skip(f"no wheel can be built here: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", wheel, folder=folder)
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", place, folder=folder).strip())
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (folder / "tests").mkdir()
    for name in ("documents.py", "settled.py", "warm.py", "workers.py"):
        (folder / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    return folder


def test_it_is_the_wheel_that_is_used(folder: Path) -> None:
    python = folder / "venv" / "bin" / "python"
    where = run(python, "-c", "import taktline; print(taktline.__file__)", folder=folder)
    assert where.startswith(str(folder))
    assert run(folder / "venv" / "bin" / "taktline", "--version", folder=folder)
    (wheel,) = folder.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (file.relative_to(ROOT) for file in (ROOT / "taktline").rglob("*") if file.is_file())
    assert packed == {str(file) for file in files if "__pycache__" not in file.parts}


def test_a_typed_program_in_a_strict_project(folder: Path) -> None:
    """What a user with pyright sees of the package: py.typed, and types without holes."""
    program = folder / "typed_user.py"
    program.write_text((ROOT / "tests" / "typed_user.py").read_text())
    python = folder / "venv" / "bin" / "python"
    command = ["-m", "pyright", "--pythonpath", python, program]
    assert "0 errors, 0 warnings" in run(sys.executable, *command, folder=folder)
    code = f"import typed_user as t; print(t.compare(['1f1b']), t.train(t.Path({str(folder)!r})))"
    assert "1f1b" in run(python, "-c", code, folder=folder)


def test_the_wheel_from_a_source_distribution(folder: Path) -> None:
    """It has what the wheel from the repository has, and so all that is needed to build it."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    tools, places = folder / "tools", folder / "from_source"
    run(*pip, "install", "--target", tools, "hatchling>=1.27,<2", folder=folder)
    code = f"import sys; sys.path.insert(0, {str(tools)!r}); from hatchling.cli import hatchling"
    code += "; sys.exit(hatchling())"
    build = (sys.executable, "-c", code, "build", "--target", "sdist", "--directory", places)
    run(*build, folder=ROOT)
    (source,) = places.glob("*.tar.gz")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", places, source, folder=folder)
    made, (wheel,) = [*places.glob("*.whl")], folder.glob("*.whl")
    assert [sorted(zipfile.ZipFile(each).namelist()) for each in made] == [
        sorted(zipfile.ZipFile(wheel).namelist())
    ]


def test_what_the_pages_say(folder: Path) -> None:
    """The other pages run in this environment: tests/test_documents.py."""
    pages = [ROOT / "README.md", ROOT / "docs" / "tutorial" / "first-model.md"]
    copies = [folder / page.name for page in pages]
    for page, copy in zip(pages, copies, strict=True):
        copy.write_text(page.read_text())
    run(folder / "venv" / "bin" / "python", "-m", "tests.documents", *copies, folder=folder)
    for page, copy in zip(pages, copies, strict=True):
        assert copy.read_text() == page.read_text()
