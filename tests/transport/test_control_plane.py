"""The control plane: who hears of what, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from taktline.errors import JsonError, LostRankError, StageError, StallError
from taktline.transport import exit_hooks
from taktline.transport.control_plane import Member, PeerFailure, Plane
from taktline.transport.exchange import written
from taktline.transport.links import Link
from taktline.transport.news import Cause, Heard, News, State, Verdict, decode, encode

SOON = 20.0


def meet(planes: list[Plane], group: list[int], place: str = "here") -> list[Member]:
    """Members of a group whose processes have met."""
    members = [Member(group, place, lambda _: None) for _ in group]
    for process, member in zip(group, members, strict=True):
        planes[process].join(member)
    return meet_again(planes, members)


def meet_again(planes: list[Plane], members: list[Member]) -> list[Member]:
    """Let the processes of a group come to their place."""
    group = members[0].processes
    with ThreadPoolExecutor(len(group)) as threads:
        waits = [
            threads.submit(planes[process].meet, member, SOON)
            for process, member in zip(group, members, strict=True)
        ]
        for each in waits:
            each.result()
    assert len({member.place for member in members}) == 1
    assert all(member.addresses.keys() == {*group} for member in members)
    return members


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def die(plane: Plane) -> None:
    """Let its sockets end without a goodbye, as if its process had ended."""
    plane._closing = True
    plane._wake()
    plane._thread.join(SOON)


def verdicts(members: list[Member]) -> list[Verdict]:
    """What each member hears."""
    assert all(member.heard.wait(SOON) for member in members)
    return [member.verdict for member in members if member.verdict is not None]


def links_of(plane: Plane) -> list[Link]:
    return [near.link for near in plane._near.values() if near.link is not None]


def test_a_verdict_reaches_every_member(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1, 2])
    planes[1].announce(Verdict(Cause.RAISED, 1, "KeyboardInterrupt", "in 1F0"))
    assert [str(verdict.error([0, 1, 2])) for verdict in verdicts(members)] == [
        "rank 1 has raised KeyboardInterrupt in 1F0, and left the others behind"
    ] * 3


def test_it_spreads_over_groups_that_share_a_process(planes: list[Plane]) -> None:
    first, second = meet(planes, [0, 1]), meet(planes, [1, 2], "there")
    planes[0].announce(Verdict(Cause.LOST, 0))
    assert [verdict.process for verdict in verdicts([*first, *second])] == [0] * 4


def test_a_process_that_is_gone_without_a_goodbye(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1, 2])
    die(planes[2])
    assert verdicts(members[:1]) == [Verdict(Cause.LOST, 2)]
    assert planes[0].news.gone[2] == "is lost"


def test_a_socket_that_ends_alone_is_replaced(planes: list[Plane]) -> None:
    meet(planes, [0, 1, 2])
    before = links_of(planes[1])
    for link in before:
        link.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: len(links_of(planes[1])) == 2 and not {*links_of(planes[1])} & {*before})
    members = meet(planes, [0, 1, 2], "there")
    planes[2].announce(Verdict(Cause.RAISED, 2, "ValueError"))
    assert {verdict.cause for verdict in verdicts(members)} == {Cause.RAISED}


def test_what_is_said_while_a_socket_is_replaced(planes: list[Plane]) -> None:
    """A verdict on another group comes with it, and does not undo it."""
    first, second = meet(planes, [0, 1]), meet(planes, [0, 1], "there")
    planes[0].announce(Verdict(Cause.STALLED, 1))
    verdicts([*first, *second])
    for plane, member in zip(planes[:2], first, strict=True):
        plane.join(member)
    for link in links_of(planes[1]):
        link.socket.shutdown(socket.SHUT_RDWR)
    meet_again(planes, first)
    assert not any(member.verdict for member in first)


def test_what_was_said_before_processes_meet_again_is_past(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1])
    planes[0].announce(Verdict(Cause.STALLED, 1))
    verdicts(members)
    old = members[0].place
    for process in (0, 1):
        planes[process].join(members[process])
    planes[1].send("left", Verdict(Cause.STALLED, 0), [old])
    meet_again(planes, members)
    assert not any(member.verdict for member in members)
    planes[1].announce(Verdict(Cause.STALLED, 0))
    assert members[0].heard.wait(SOON)


def test_who_has_failed_to_meet_again_more_often_is_caught_up_with(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1])
    for _ in range(3):
        planes[0].announce(Verdict(Cause.STALLED, 1))
        planes[0].join(members[0])
    wait_until(lambda: sum(at.verdict is not None for at in planes[1]._places.values()) == 3)
    planes[1].join(members[1])
    meet_again(planes, members)


def test_processes_meet_again_without_a_verdict(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1])
    planes[0].join(members[0])
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(planes[0].meet, members[0], SOON)
        with pytest.raises(TimeoutError):  # the other one is still at the first meeting
            waits.result(0.2)
        planes[1].join(members[1])
        planes[1].meet(members[1], SOON)
        waits.result()


def test_sockets_between_members(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1])
    early = planes[1].connect(members[1], 0, "early", SOON)  # process 0 is not there yet
    ends = [planes[0].connect(members[0], 1, "early", SOON), early]
    ends[0].setblocking(True)
    early.sendall(b"hello")
    assert ends[0].recv(9) == b"hello"
    for end in ends:
        end.close()
    with pytest.raises(PeerFailure):
        planes[0].connect(members[0], 1, "other", 0.1)


def test_a_process_that_says_goodbye_is_no_fault(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1])
    planes[1].close()
    wait_until(lambda: 1 in planes[0].news.gone)
    assert planes[0].news.gone[1] == "has ended"
    assert members[0].verdict is None


def heard(time: float, process: int, state: str) -> Heard:
    return Heard(time, State(process, 1, 0.0, state, True))


def test_who_holds_up_the_others(planes: list[Plane]) -> None:
    meet(planes, [0, 1, 2])
    now = time.monotonic()
    planes[0].news.heard = {
        1: heard(now, 1, "1F0 for 9 seconds: waits"),
        2: heard(now, 2, "2F0: computes"),
    }
    assert planes[0].stalled([0, 1, 2], [1], "activations").process == 2
    planes[0].news.heard[1] = heard(now - 60, 1, "1F0: waits")
    verdict = planes[0].stalled([0, 1, 2], [2], "activations")
    assert verdict.process == 1
    assert verdict.where == "(rank 0 waits for activations)"
    assert "rank 1: silent for 60 seconds (stopped, or cut off); then: 1F0" in verdict.text


@pytest.mark.parametrize(
    ("states", "suspect"),
    [
        (["save() for 9 seconds: computes, in a.py", "save() for 9 seconds: waits"], 1),
        (["save() for 9 seconds: waits", "save() for 9 seconds: computes, in a.py"], 2),
        (["load() for 9 seconds: waits", "save() for 1 second: waits"], 1),
        (["save() for 9 seconds: waits", "load() for 1 second: waits"], 2),
        (["save() for 9 seconds: waits", "save() for 1 second: waits"], None),
        (["load() for 9 seconds: waits", "load() for 1 second: waits"], None),
        (["load() for 9 seconds: waits", "step() for 1 second: waits"], None),
        # A wait of C++ for a rank of the same stage looks like computing, with no place in a file.
        (["save() for 9 seconds: computes", "save() for 9 seconds: computes, in a.py"], 2),
    ],
)
def test_who_is_not_where_the_others_are(states: list[str], suspect: int | None) -> None:
    news = News(0, time.monotonic)
    news.state = lambda: ("save() for 9 seconds: waits", True)
    now = time.monotonic()
    news.heard = {process: heard(now, process, state) for process, state in enumerate(states, 1)}
    verdict = news.stalled([0, 1, 2], [1], "save()")
    if suspect is None:
        assert verdict.where.endswith("which rank holds them up cannot be told)")
    else:
        assert (verdict.process, verdict.where) == (suspect, "(rank 0 waits for save())")


def test_several_that_compute() -> None:
    news = News(0, time.monotonic)
    now = time.monotonic()
    news.heard = {process: heard(now, process, "0B1: computes") for process in (1, 2, 3)}
    verdict = news.stalled([0, 1, 2, 3], [2], "gradients")
    assert verdict.process == 2
    text = "rank 0 waits for gradients; rank 1 and rank 3 compute, too: which of them"
    assert verdict.where.startswith(f"({text} holds up the others cannot be told")


@pytest.mark.parametrize(
    ("store", "call"), [(HashStore, "check"), (HashStore, "clone"), (PrefixStore, "set")]
)
def test_a_store_that_ends_while_a_plane_is_made(
    store: type[Store], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(store, call, broken)
    with pytest.raises(LostRankError, match="rank 0 is lost: the store") as caught:
        Plane(HashStore(), 1, 3, "test")
    assert caught.value.peer == 0


def test_what_each_cause_is_called() -> None:
    lost = Verdict(Cause.LOST, 3).error([0, 1, 2, 3])
    assert isinstance(lost, LostRankError)
    assert (lost.peer, lost.recoverable) == (3, "restart")
    stalled = Verdict(Cause.STALLED, 3, "  rank 0: waits").error([1, 3])
    assert isinstance(stalled, StallError)
    assert str(stalled) == "rank 3 of the job has not answered in time\n  rank 0: waits"
    assert stalled.recoverable == "reconnect"
    cut = Verdict(Cause.CUT, 3, "rank 1", "(step())").error([0, 1, 2, 3])
    assert isinstance(cut, LostRankError)
    assert (cut.peer, cut.recoverable) == (3, "reconnect")
    assert str(cut) == (
        "the connection of rank 1 to rank 3 was reset (step()), though both live; call reconnect() "
        "of the pipeline on every rank, and go on"
    )
    fields: dict[str, Any] = {
        "rank": 1,
        "stage": 1,
        "microbatch": 2,
        "action": "1F2",
        "reason": "ValueError: no",
    }
    error = Verdict(Cause.RAISED, 3, "", "", written(StageError(**fields))).error([1, 3])
    assert isinstance(error, StageError)
    assert str(error) == "rank 1, stage 1, micro-batch 2 (1F2): ValueError: no"
    assert {name: getattr(error, name) for name in fields} == fields


VERDICT = Verdict(Cause.RAISED, 3, "no", "in 1F0")
PLAIN = list(astuple(VERDICT))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("hello", ("::1", 1, "token", "")),
        ("ask", (1, 7)),
        ("gone", (3, "is lost")),
        ("left", (VERDICT, ["here", "there"])),
        ("state", State(1, 2, 0.5, "größer", True)),
        ("came", (0, "here", ("::1", 1, "token", ""))),
    ],
)
def test_messages_survive(kind: str, body: Any) -> None:
    assert decode(encode(kind, *body)) == (kind, body)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        ["state", [1, 2, 0.5, "waits", 1]],
        ["magic", None],
        ["came", [1, "here", ["::1", 1]]],
        ["left", [["magic", *PLAIN[1:]], []]],
        ["left", [[*PLAIN[:-1], 1], []]],
        ["left", [PLAIN, "here"]],
        ["ask", None],
    ],
)
def test_what_is_no_message(value: Any) -> None:
    with pytest.raises(JsonError):
        decode(b"    " + (json.dumps(value).encode() if value is not None else b""))


def test_a_forked_process_does_not_hide_that_its_parent_has_died(
    planes: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    (member, _) = meet(planes, [0, 1])
    monkeypatch.setattr(exit_hooks, "planes", {"job": planes[1]})
    child = os.fork()
    if not child:
        time.sleep(SOON)
        os._exit(0)
    try:
        die(planes[1])
        assert member.heard.wait(SOON / 4)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_plane_that_is_closed_on_its_own_thread(planes: list[Plane]) -> None:
    meet(planes, [0, 1])
    planes[1].watched = (Closing(planes[1]),)
    planes[1]._thread.join(SOON)
    assert not planes[1]._thread.is_alive()
    assert planes[1]._closing


class Closing:
    """What closes a plane as soon as it is looked at."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def tick(self) -> None:
        self.plane.close()
