"""A ``python`` that starts quickly: what it runs is a fork of a process that has torch already.

:func:`install` forks a server off this process, and writes ``python`` and ``taktline`` into a
folder. They hand their arguments, folder, environment and streams to the
server, pass on signals, and end as the program does. What the program starts by ``sys.executable``,
as torchrun does, starts as quickly.
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

COMMAND = f"""#!{sys.executable} -SE
import json, os, signal, socket, sys
words = sys.argv[1:]
if "taktline.compat" in words:  # which has to come before torch
    os.execv({sys.executable!r}, [{sys.executable!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(sys.argv[0]), "server"))
request = [sys.argv[0], words, os.getcwd(), dict(os.environ)]
socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
answers = server.makefile()
process = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(process, number))
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def commands(*modules: str) -> Iterator[Path]:
    """The same for a process that has not imported everything: a folder with the commands.

    Programs find these modules loaded, too, where they are installed.
    """
    # Here, as it imports torch, which the callers of this have loaded.
    from tests.workers import PRELOADED

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folder = Path(tempfile.mkdtemp())
    process = context.Process(target=_install, args=(folder, modules))
    process.start()
    try:
        while not (folder / "server").exists():
            time.sleep(0.01)
        yield folder
    finally:
        process.kill()
        process.join()
        shutil.rmtree(folder)


def _install(folder: Path, modules: Sequence[str]) -> None:
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    install(folder)
    signal.pause()


def install(folder: Path) -> None:
    """Write the commands into a folder; they work as long as this process lives."""
    for name in ("python", "taktline"):
        (folder / name).write_text(COMMAND)
        (folder / name).chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "server"))
    listener.listen(64)
    parent = os.getpid()
    if os.fork():
        listener.close()
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.getppid() == parent:
        if select.select([listener], [], [], 0.5)[0]:
            connection, _ = listener.accept()
            if not os.fork():
                _serve(connection)
    os._exit(0)


def _serve(connection: socket.socket) -> None:
    """Run a program in a fork, and end it if whoever has asked for it is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, streams, *_ = socket.recv_fds(connection, 1 << 16, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 16)
    process = os.fork()
    if not process:
        connection.close()
        _run(json.loads(data), streams)
    connection.sendall(f"{process}\n".encode())
    for stream in streams:
        os.close(stream)
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if select.select([connection], [], [], 0.01)[0]:
            os.kill(process, signal.SIGKILL)
    connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
    os._exit(0)


def _run(request: Any, streams: list[int]) -> None:
    """As Python does: a script, or a module with ``-m``."""
    command, words, folder, environment = request
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1) for fd in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = str(Path(command).with_name("python"))
    if "taktline" in sys.modules:  # which has been imported in another process
        atexit.register(sys.modules["taktline"]._end, os.getpid())
    code: Any = 0
    try:
        words = [word for word in words if word != "-u"]
        if Path(command).name == "taktline":
            from taktline.cli import main

            sys.argv = ["taktline", *words]
            main()
        elif words[0] == "-m":
            sys.path[0], sys.argv = folder, words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0], sys.argv = str(Path(words[0]).parent), words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # as at Python's own end
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
