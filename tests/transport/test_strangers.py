"""Callers that do not belong to the job: whatever they send, it goes on, and hears of faults."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import taktline as tl
from taktline.transport import sockets as listeners
from taktline.transport.control_plane import Member, Plane
from taktline.transport.news import Cause, Verdict
from taktline.transport.sockets import CONTROL, Address, Listener, call
from tests.faults.case import Case
from tests.faults.pool import Job
from tests.fuzz.targets.greetings import bytes_of
from tests.transport.test_control_plane import SOON, die, meet, verdicts, wait_until
from tests.workers import Workers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux has names without files")


def reach(address: Address) -> list[socket.socket]:
    """Connections that any process of the host can make."""
    made = [socket.create_connection(address[:2], SOON)]
    if address[3] and sys.platform == "linux":
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].connect(f"\0taktline-{address[3]}")
    return made


def say(address: Address, words: bytes) -> None:
    """Send bytes as a stranger, who may have been refused before the last of them."""
    for stranger in reach(address):
        with stranger, suppress(OSError):
            stranger.sendall(words)


def greeted(listener: Listener) -> int:
    """The number of the next caller that has greeted."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        for _, number, connection in listener.accept(0.1):
            connection.close()
            return number
    raise TimeoutError


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener("127.0.0.1") as made:
        yield made


@contextmanager
def crowd(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """Callers that say nothing."""
    with ExitStack() as them:
        yield [them.enter_context(each) for _ in range(count) for each in reach(address)]


@pytest.mark.parametrize("name", ["its own", "", "on-another-host"])
def test_silent_callers_keep_nobody_waiting(listener: Listener, name: str) -> None:
    """On one host callers come without TCP, if the host has such names."""
    address = (*listener.address[:3], listener.address[3] if name == "its own" else name)
    family = socket.AF_UNIX if address[3] == listener.address[3] != "" else socket.AF_INET
    with crowd(listener.address, 3), call(address, CONTROL, 7, SOON) as caller:
        assert greeted(listener) == 7
        assert caller.family == family


def test_who_does_not_greet_in_time_is_dropped(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_GREETING_SECONDS", 0.05)
    with crowd(listener.address, 2) as silent:
        listener.accept(SOON)
        wait_until(lambda: listener.accept() == [] and not listener._strangers)
        for each in silent:
            assert each.recv(1) == b""


def test_callers_that_never_greet_are_bounded(listener: Listener) -> None:
    with crowd(listener.address, 60):
        listener.accept()
        with crowd(listener.address, 60), crowd(listener.address, 60):
            while len(listener._calls.get_map()) < 2 + listeners._STRANGERS:
                listener.accept(SOON)
            listener.accept()
            assert len(listener._strangers) == listeners._STRANGERS
            with call(listener.address, CONTROL, 5, SOON):
                assert greeted(listener) == 5


@LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_host_is_refused_without_tcp(listener: Listener) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(12345)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0taktline-{listener.address[3]}")
            stranger.settimeout(SOON)
            stranger.sendall(bytes_of(listener.address[2], 3))
            os.write(writer, b"refused" if stranger.recv(1) == b"" else b"let in")
        os._exit(0)
    os.close(writer)
    answers: list[bytes] = []
    reading = threading.Thread(target=lambda: answers.append(os.read(reader, 99)))
    reading.start()
    while reading.is_alive():
        assert listener.accept(0.05) == []
    os.close(reader)
    os.waitpid(child, 0)
    assert answers in ([b"refused"], [b""])  # nothing: its message met a closed socket


@LINUX
def test_a_listener_of_another_user_is_called_over_tcp(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_is_own_user", lambda _: False)
    with call(listener.address, CONTROL, 3, SOON) as caller:
        assert caller.family == socket.AF_INET


OTHER = '[1, "ü", ["", 1, ""]]'.encode()
WORDS = [
    b"",
    b"\0" * 52,
    "ü".encode() * 26,
    b"\xff" * 100,
    b"GET / HTTP/1.1\r\n\r\n",
    len(OTHER).to_bytes(4, "little") + OTHER,
]


def test_the_control_plane_goes_on_whatever_a_stranger_says(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1, 2])
    for plane in planes:
        for words in [*WORDS, *(bytes_of(plane.address[2], n)[:-1] for n in range(3))]:
            say(plane.address, words)
    random = Random(0)
    for _ in range(100):
        say(random.choice(planes).address, random.randbytes(random.randrange(100)))
    # One who knows the token, but is none of the processes.
    for number in (0, 3, 2**32 - 1):
        say(planes[0].address, bytes_of(planes[0].address[2], number) + b"\0" * 9)
    die(planes[2])
    assert verdicts(members[:2]) == [Verdict(Cause.LOST, 2)] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [TypeError, MemoryError, SystemExit])
def test_a_control_thread_that_fails_fails_the_job(
    planes: list[Plane], kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = meet(planes, [0, 1, 2])

    def fail(seconds: float) -> None:
        raise kind("no")

    monkeypatch.setattr(planes[1], "_wait", fail)
    story = f"rank 1 has raised {kind.__name__} in its control thread, and left the others behind"
    assert [str(v.error([0, 1, 2])) for v in verdicts(members)] == [f"{story}: no"] * 3
    wait_until(lambda: not planes[1]._thread.is_alive())
    late = Member([0, 1], "later", lambda _: None)
    planes[1].join(late)
    assert late.verdict is not None  # a group that comes later hears of it, too


def _train(rank: int, group: dist.ProcessGroup) -> list[float]:
    """Connect and train while strangers call every listener, silently and not."""
    begin = Listener.__init__

    def harassed(self: Listener, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        crowd.extend(each for _ in range(10) for each in reach(self.address))
        for words in WORDS:
            say(self.address, words)

    crowd: list[socket.socket] = []
    Listener.__init__ = harassed
    try:
        layer = torch.nn.Linear(4, 4)
        stage = tl.PipelineStage(layer, rank, 2, torch.device("cpu"), group=group)
        schedule = tl.Schedule1F1B(stage, 4, F.mse_loss)
        x = torch.ones(8, 4)
        losses: list[Any] = []
        for _ in range(3):
            schedule.step(*([x] if rank == 0 else []), target=x, losses=losses)
        return [loss.item() for loss in losses]
    finally:
        Listener.__init__ = begin
        for each in crowd:
            each.close()


@pytest.mark.processes
def test_ranks_connect_among_strangers(workers: Workers) -> None:
    first, last = workers.run(_train, timeout=30.0)
    assert len(last) == 4 or len(first) == 4


@pytest.mark.processes
def test_a_death_after_strangers_is_blamed_on_the_right_rank() -> None:
    case = Case.of("kill-1f1b-4-none-steady")
    with Job(case) as job:
        job.build()
        for answer in job.ask("address").values():
            address: Any = answer.where
            for words in WORDS:
                say(address, words)
        job.tell("face", case)
        others = [rank for rank in range(case.ranks) if rank != case.victim]
        answers = job.listen(others, SOON)
    assert {rank: (a.kind, a.peer) for rank, a in answers.items()} == dict.fromkeys(
        others, ("LostRankError", case.victim)
    )


def test_a_greeting_in_pieces(listener: Listener) -> None:
    words = bytes_of(listener.address[2], 9)
    with crowd(listener.address, 1) as (slow, *_):
        for word in words[:-1]:
            slow.sendall(bytes([word]))
            assert listener.accept(0.01) == []
        slow.sendall(words[-1:])
        assert greeted(listener) == 9
