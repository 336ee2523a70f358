"""``python -m taktline.compat script.py …`` runs ``python script.py …`` on Taktline."""

from __future__ import annotations

import os
import subprocess
import sys

from taktline.compat import install

_USAGE = """\
usage: python -m taktline.compat script.py [argument ...]
       python -m taktline.compat -m module [argument ...]

Runs a program that was written for torch.distributed.pipelining on Taktline, unchanged. Under
torchrun: python -m taktline.compat -m torch.distributed.run --nproc-per-node 2 script.py"""


def main(arguments: list[str]) -> None:
    """Replace this process by a new Python, with Taktline installed."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if arguments else 2)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise SystemExit("error: Python's flags -E, -I and -S keep Taktline from being installed")
    install()
    flags = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *flags, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
