"""Runs the tests of the drop-in under other versions of torch, each in an environment of its own.

::

    python -m tests.compat.versions                # 2.11 to 2.15
    python -m tests.compat.versions 2.11 -- -x     # one of them; pytest gets what follows

Environments lie in ``.versions`` and are kept. A CPU build is installed: pip is asked for torch at
``--index``. Where that cannot be reached, build an environment by hand and name its interpreter:
``--python path/to/python``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TOOLS = ("numpy", "pytest", "hypothesis")
"""What the tests need; those of programs that are not installed are skipped."""


def main() -> int:
    """Run all versions; fails if one does."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat.versions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="of torch, such as 2.11")
    parser.add_argument("--index", default=CPU_INDEX, help="where pip finds CPU builds of torch")
    parser.add_argument("--python", help="run under this interpreter, and install nothing")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    options, for_pytest = parser.parse_args(given[:end]), given[end + 1 :]
    if options.python is not None:
        return _test(Path(options.python), for_pytest)
    outcomes = {v: _test(_environment(v, options.index), for_pytest) for v in options.versions}
    for version, code in outcomes.items():
        print(f"torch {version}: {'passed' if code == 0 else f'failed ({code})'}")
    return max(outcomes.values())


def _environment(version: str, index: str) -> Path:
    """The interpreter of an environment with that torch; made at the first call."""
    folder = ROOT / ".versions" / version
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *TOOLS], check=True)
        subprocess.run([*install, "--index-url", index, f"torch=={version}.*"], check=True)
    return python


def _test(python: Path, for_pytest: list[str]) -> int:
    """Run the tests against the package as it lies here; returns what pytest returns."""
    show = "import torch; print(f'== torch {torch.__version__}', flush=True)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([python, "-c", show], check=True, env=environment)
    command = [python, "-m", "pytest", "tests/compat", *for_pytest]
    return subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
