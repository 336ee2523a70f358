"""Starts ranks on this machine if no launcher has."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

COMMAND = ("-m", "taktline")
_POLL = 0.1


def called() -> str:
    """How a user of this Python calls ``taktline`` from the folder that they are in.

    Whether it is on the path or not: ``.venv/bin/taktline``, for one.
    """
    script = shutil.which("taktline", path=os.path.dirname(sys.executable))
    if script is None:
        return f"{os.path.relpath(sys.executable)} -m taktline"
    on_path = shutil.which("taktline")
    if on_path is not None and os.path.samefile(on_path, script):
        return "taktline"
    relative = os.path.relpath(script)
    return script if relative.startswith(os.pardir) else relative


def launch(ranks: int, words: Sequence[str], patience: float) -> int:
    """Run ``python -m taktline`` with these words on each rank; returns one exit code for all.

    Once a rank has failed, the others have ``patience`` seconds to report what they miss.
    """
    threads = max(1, (os.cpu_count() or 1) // ranks)
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    command = [sys.executable, *COMMAND, *words]
    processes = [
        subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        return _wait(processes, patience)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> int:
    end = math.inf
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + patience)
        time.sleep(_POLL)
    return int(any(process.poll() != 0 for process in processes))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
