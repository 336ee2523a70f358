"""Runs several examples one after the other in the same processes: starting them takes longest.

``python -m tests.examples FOLDER JSON``, where JSON holds the words of each example by the number
of ranks, ``{"1": [["gpt", "--steps", "2"], …], …}``. The ranks are forked from a process that has
imported what examples do, and find what torchrun would tell them. What the first one of two ranks
prints of an example is then in ``FOLDER/ranks-2/gpt.0``, and so on.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "taktline.train",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
    "pytorch_lightning",
)


def run(folder: Path, examples: list[list[str]]) -> None:
    """Run each example as its own program would be, with a working folder of its own."""
    for name, *words in examples:
        sys.argv = [str(EXAMPLES / f"{name}.py"), *words]
        (there := folder / f"in-{name}").mkdir(exist_ok=True)
        printed = io.StringIO()
        with contextlib.chdir(there), contextlib.redirect_stdout(printed):
            runpy.run_path(sys.argv[0], run_name="__main__")
        (folder / f"{name}.{os.environ.get('RANK', '0')}").write_text(printed.getvalue())


def fork(rank: int, ranks: int, port: int, folder: Path, examples: list[list[str]]) -> int:
    """Start a rank; returns the id of its process."""
    if process := os.fork():
        return process
    failed = 1
    try:
        if ranks > 1:
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ |= {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": str(ranks)}
            os.environ |= {name: str(value) for name, value in told.items()}
        run(folder, examples)
        failed = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(failed)


def main(folder: Path, launches: dict[str, list[list[str]]]) -> int:
    """Run all of it; returns 1 if a rank has failed, and ends the others then."""
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    processes: set[int] = set()
    for ranks, examples in launches.items():
        (there := folder / f"ranks-{ranks}").mkdir()
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        processes |= {fork(r, int(ranks), port, there, examples) for r in range(int(ranks))}
    while processes:
        process, status = os.wait()
        processes.discard(process)
        if status:
            for other in processes:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), json.loads(sys.argv[2])))
