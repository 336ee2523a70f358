"""Faults of the network between two hosts: network namespaces, and a wire that loses packets.

Ranks 0 and 1 live on the first, where the store is as well, ranks 2 and 3 on the second.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.faults.case import TIMEOUT, Case
from tests.faults.judge import LIMIT, Verdict, went_on
from tests.faults.messages import Answer, Place, Struck
from tests.faults.pool import PATIENCE, Job, Report

SETUP = Case.of("stop-1f1b-4-none-steady")
SIDES = ((0, 1), (2, 3))
ADDRESSES = ("10.214.0.1", "10.214.0.2")
V6_ADDRESSES = ("fd00:214::1", "fd00:214::2")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
STEPS = 100
"""Some seconds; the fault comes half a second after their beginning."""


class Unable(Exception):
    """The fault cannot be made on this machine."""


class Wire(threading.Thread):
    """Carries packets between two interfaces; ``loss`` is the part of them that it drops."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(name="wire", daemon=True)
        self.loss = 0.0
        self._random = Random(0)
        self._ends: list[int] = []
        self._cut = False
        for name in names:
            self._ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            request = struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI)
            fcntl.ioctl(self._ends[-1], TUNSETIFF, request)

    def run(self) -> None:
        while not self._cut:
            for end in select.select(self._ends, [], [], 0.1)[0]:
                packet = os.read(end, 1 << 16)
                if self._random.random() >= self.loss:
                    with suppress(OSError):  # the other end is not up yet
                        os.write(self._ends[1 - self._ends.index(end)], packet)

    def close(self) -> None:
        """Take the interfaces away."""
        self._cut = True
        if self.is_alive():
            self.join()
        for end in self._ends:
            os.close(end)


class Hosts:
    """The two namespaces; their names hold the process that made them."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = addresses
        self.names = [f"taktline-{os.getpid()}-{side}" for side in range(2)]
        self.links = [f"takt{os.getpid()}.{side}" for side in range(2)]
        self.wire: Wire | None = None

    def make(self) -> None:
        self.wire = Wire(self.links)
        self.wire.start()
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "set", link, "netns", name)
            for words in (
                f"addr add {address}/64 dev {link} nodad"
                if ":" in address
                else f"addr add {address}/24 dev {link}",
                "link set lo up",
                f"link set {link} up",
            ):
                _run("ip", "-n", name, *words.split())

    def lose(self, part: float) -> None:
        """Let the wire drop so much from now on."""
        assert self.wire is not None
        self.wire.loss = part

    def places(self, quiet: bool) -> list[Place]:
        return [
            Place(self.addresses[0], namespace=name, interface=link, quiet=quiet)
            for name, link, ranks in zip(self.names, self.links, SIDES, strict=True)
            for _ in ranks
        ]

    def remove(self) -> None:
        """Also what processes have left behind that are gone."""
        if self.wire is not None:
            self.wire.close()
        for line in _run("ip", "netns", "list").splitlines():
            name = line.split()[0]
            owner = re.fullmatch(r"taktline-(\d+)-\d", name)
            if owner and (name in self.names or not Path("/proc", owner[1]).exists()):
                _run("ip", "netns", "del", name)


@contextmanager
def hosts(addresses: Sequence[str] = ADDRESSES) -> Iterator[Hosts]:
    """Two hosts, for as long as the block lasts."""
    made = Hosts(addresses)
    try:
        try:
            made.make()
        except OSError as error:
            raise Unable(f"the machine does not allow networks of one's own: {error}") from error
        yield made
    finally:
        made.remove()


def _cut(hosts: Hosts, job: Job) -> None:
    hosts.lose(1.0)


def _mend(hosts: Hosts, job: Job) -> None:
    hosts.lose(0.0)


def _flap(hosts: Hosts, job: Job) -> None:
    hosts.lose(1.0)
    time.sleep(2.0)
    hosts.lose(0.0)


def _lossy(hosts: Hosts, job: Job) -> None:
    hosts.lose(0.05)


def _reset(hosts: Hosts, job: Job) -> None:
    ended = _run("ip", "netns", "exec", hosts.names[0], "ss", "-K", "dst", ADDRESSES[1])
    if ADDRESSES[1] not in ended:
        raise Unable("the kernel does not reset connections on request (ss -K)")


def _stop(hosts: Hosts, job: Job) -> None:
    job.strike_store("stopped")
    job.send_signal(signal.SIGSTOP, SIDES[0])


def _wake(hosts: Hosts, job: Job) -> None:
    job.send_signal(signal.SIGCONT, SIDES[0])


def _nothing(hosts: Hosts, job: Job) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """What happens to the network."""

    act: Callable[[Hosts, Job], None]
    undo: Callable[[Hosts, Job], None] = _nothing
    """Before the ranks go on together."""
    detection: float | None = None
    """None: nobody is to notice."""
    asked: tuple[int, ...] = (0, 1, 2, 3)
    """The ranks that are to know of it at once."""


FAULTS = {
    "network-cut": Fault(_cut, _mend, TIMEOUT),
    "network-flap": Fault(_flap),
    "network-reset": Fault(_reset, detection=0.0),
    "network-loss": Fault(_lossy),
    "network-host": Fault(_stop, _wake, TIMEOUT, SIDES[1]),
}
NAMES = tuple(FAULTS)


def run(name: str, *, limit: float = LIMIT, quiet: bool = True) -> Verdict:
    """Let a fault come over a job on two hosts."""
    fault = FAULTS[name]
    with hosts() as made, Job(SETUP, made.places(quiet), quiet=quiet) as job:
        job.build()
        job.tell("march", STEPS)
        time.sleep(0.5)
        struck = Struck(time.monotonic(), None)
        fault.act(made, job)
        patience = PATIENCE + (0.0 if fault.detection is not None else 60.0)
        answers = job.listen(fault.asked, (fault.detection or 0.0) + patience)
        report = Report(struck, answers, healthy=job.healthy)
        report.silent = [rank for rank in fault.asked if rank not in answers]
        if report.silent:
            job.send_signal(signal.SIGUSR1, report.silent)
            time.sleep(0.2)
        else:
            fault.undo(made, job)
            others = [rank for rank in range(SETUP.ranks) if rank not in fault.asked]
            report.awoken = job.listen(others, PATIENCE)
            report.resumed = job.go_on([*answers.values(), *report.awoken.values()])
            report.left = job.leave()
    return _judge(fault, report, struck.at, limit)


def _judge(fault: Fault, report: Report, struck: float, limit: float) -> Verdict:
    verdict = Verdict(hangs=bool(report.silent), resumed=bool(report.resumed))
    verdict.wrong += [f"rank {rank} hangs" for rank in report.silent]
    answers = report.answers | report.awoken
    if fault.detection is None:
        for rank, answer in answers.items():
            loss = report.healthy[rank].numbers[0]
            if answer.kind:
                verdict.wrong.append(f"rank {rank} raised: {answer}")
            elif not math.isclose(answer.numbers[0], loss) or answer.numbers[1]:
                verdict.wrong.append(f"rank {rank}: loss and spread {answer.numbers}, not {loss}")
        return verdict
    for rank, answer in answers.items():
        if not answer.ours:
            verdict.wrong.append(f"rank {rank} raised no error of ours: {answer}")
        elif rank in fault.asked and not _names_other_side(rank, answer):
            verdict.wrong.append(f"rank {rank} names no rank on the other host: {answer}")
    verdict.wrong += went_on(SETUP.ranks, report)
    if not report.silent:
        known = max(report.answers[rank].at for rank in fault.asked)
        verdict.delay = max(0.0, known - struck - fault.detection)
        if verdict.delay > limit:
            verdict.wrong.append(f"the last rank knew {verdict.delay:.1f} s after the detection")
    verdict.wrong += [f"rank {rank} had to be killed in the end" for rank in report.left]
    return verdict


def _names_other_side(rank: int, answer: Answer) -> bool:
    others = SIDES[0] if rank in SIDES[1] else SIDES[1]
    return any(re.search(rf"\brank {other}\b", answer.text) for other in others)


def _run(*words: str) -> str:
    """The output of a command."""
    if shutil.which(words[0]) is None:
        raise Unable(f"there is no command {words[0]} (Debian: apt-get install iproute2)")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unable(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
