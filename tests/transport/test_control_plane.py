"""The control plane: who hears of what, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from taktline.errors import JsonError, LostRankError, StageError, StallError
from taktline.transport import exit_hooks
from taktline.transport.control_messages import Link, Routed, State, decode, encode
from taktline.transport.control_news import RESTS, Heard, News
from taktline.transport.control_plane import Plane
from taktline.transport.exchange import written
from taktline.transport.verdict import Cause, Member, Verdict

SOON = 20.0


@pytest.fixture
def planes() -> Iterator[list[Plane]]:
    """Three processes, as far as the plane knows."""
    store = HashStore()
    made = [Plane(store, process, 3, "test") for process in range(3)]
    yield made
    for plane in made:
        plane.close()


def meet(planes: list[Plane], group: list[int], place: str = "here") -> list[Member]:
    """Members of a group whose processes know each other."""
    members = [Member(group, place, lambda _: None) for _ in group]
    for process, member in zip(group, members, strict=True):
        planes[process].join(member)
        planes[process].tell(group, place, f"{process} is here")
    for process, member in zip(group, members, strict=True):
        found = planes[process].gather(member, group, place, SOON)
        assert found == {other: f"{other} is here" for other in group}
    return members


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def die(plane: Plane) -> None:
    """Let its sockets end without a goodbye, as if its process had ended."""
    plane._closing = True
    plane._links.wake()
    plane._thread.join(SOON)


def test_a_verdict_reaches_every_member(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1, 2])
    planes[1].announce(Verdict(Cause.RAISED, 1, "KeyboardInterrupt", "in 1F0"))
    for member in members:
        assert member.told.wait(SOON)
        assert member.verdict is not None
        assert str(member.verdict.error([0, 1, 2])) == (
            "rank 1 has raised KeyboardInterrupt in 1F0, and left the others behind"
        )


def test_it_spreads_over_groups_that_share_a_process(planes: list[Plane]) -> None:
    first, second = meet(planes, [0, 1]), meet(planes, [1, 2], "there")
    planes[0].announce(Verdict(Cause.LOST, 0))
    for member in (*first, *second):
        assert member.told.wait(SOON)
        assert member.verdict is not None
        assert member.verdict.process == 0


def test_a_process_that_is_gone_without_a_goodbye(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1, 2])
    die(planes[2])
    assert members[0].told.wait(SOON)
    assert members[0].verdict is not None
    assert (members[0].verdict.cause, members[0].verdict.process) == (Cause.LOST, 2)
    assert planes[0].news.gone[2] == "is lost"


def test_a_socket_that_ends_alone_is_replaced(planes: list[Plane]) -> None:
    meet(planes, [0, 1, 2])
    before = dict(planes[1]._links._links)
    for peer in before.values():
        peer.socket.shutdown(socket.SHUT_RDWR)
    wait_until(
        lambda: (
            planes[1]._links._links.keys() == before.keys()
            and not any(
                planes[1]._links._links[process] is peer for process, peer in before.items()
            )
        )
    )
    members = meet(planes, [0, 1, 2])
    planes[2].announce(Verdict(Cause.RAISED, 2, "ValueError"))
    for member in members:
        assert member.told.wait(SOON)
        assert member.verdict is not None
        assert member.verdict.cause == Cause.RAISED


def test_what_is_told_while_a_socket_is_replaced(planes: list[Plane]) -> None:
    """A verdict on another group comes with it, and does not undo it."""
    first, second = meet(planes, [0, 1]), meet(planes, [0, 1], "there")
    planes[0].announce(Verdict(Cause.STALLED, 1))
    assert all(member.told.wait(SOON) for member in (*first, *second))
    again = [Member([0, 1], "here", lambda _: None) for _ in range(2)]
    for plane, before, now in zip(planes[:2], first, again, strict=True):
        plane.leave(before)
        plane.join(now, again=True)
    for peer in list(planes[1]._links._links.values()):
        peer.socket.shutdown(socket.SHUT_RDWR)
    for plane in planes[:2]:
        plane.tell([0, 1], "here", "back")
    for plane, member in zip(planes[:2], again, strict=True):
        assert plane.gather(member, [0, 1], "here", SOON / 4) == {0: "back", 1: "back"}


def test_what_was_said_before_processes_meet_again_is_past(planes: list[Plane]) -> None:
    for process, member in enumerate(meet(planes, [0, 1])):
        planes[process].announce(Verdict(Cause.STALLED, 1 - process))
        planes[process].leave(member)
    again = [Member([0, 1], "there", lambda _: None) for _ in range(2)]
    planes[0].join(again[0], again=True)
    planes[1].announce(Verdict(Cause.STALLED, 0))
    planes[1].join(again[1], again=True)
    for plane in planes[:2]:
        plane.tell([0, 1], "there", "back")
    for plane, member in zip(planes[:2], again, strict=True):
        assert plane.gather(member, [0, 1], "there", SOON) == {0: "back", 1: "back"}
        assert member.verdict is None
    planes[1].announce(Verdict(Cause.STALLED, 0))
    assert again[0].told.wait(SOON)


def test_a_process_that_says_goodbye_is_no_fault(planes: list[Plane]) -> None:
    members = meet(planes, [0, 1])
    planes[1].close()
    wait_until(lambda: 1 in planes[0].news.gone)
    assert planes[0].news.gone[1] == "has ended"
    assert members[0].verdict is None


def test_a_verdict_that_was_concluded_does_not_reach_new_members(planes: list[Plane]) -> None:
    verdict = Verdict(Cause.STALLED, 1)
    (_, other) = meet(planes, [0, 1])
    planes[0].announce(verdict)
    assert other.told.wait(SOON)
    planes[1].leave(other)
    (_, again) = meet(planes, [0, 1], "there")
    planes[1]._conclude(verdict, 0)
    assert again.verdict is None
    planes[1]._conclude(Verdict(Cause.STALLED, 1), 0)
    assert again.verdict is not None


def test_who_holds_up_the_others(planes: list[Plane]) -> None:
    meet(planes, [0, 1, 2])
    now = time.monotonic()
    planes[0].news.heard = {
        1: Heard(now, "1F0 for 9 seconds: waits", True),
        2: Heard(now, "2F0: computes", True),
    }
    assert planes[0].stalled([0, 1, 2], [1], "activations").process == 2
    planes[0].news.heard[1] = Heard(now - 60, "1F0: waits", True)
    verdict = planes[0].stalled([0, 1, 2], [2], "activations")
    assert verdict.process == 1
    assert verdict.where == "(rank 0 waits for activations)"
    assert "rank 1: silent for 60 seconds (stopped, or cut off); then: 1F0" in verdict.text


@pytest.mark.parametrize(
    ("states", "suspect"),
    [
        (["save() for 9 seconds: computes, in a.py", "save() for 9 seconds: waits"], 1),
        (["save() for 9 seconds: waits", "save() for 9 seconds: computes, in a.py"], 2),
        (["save() for 9 seconds: waits", "save() for 1 second: waits for a file, or an op"], None),
        (["save() for 9 seconds: waits", f"save() for 1 second: {RESTS}"], 2),
        (["load() for 9 seconds: waits", "save() for 1 second: waits"], 1),
        (["save() for 9 seconds: waits", "load() for 1 second: waits"], 2),
        (["save() for 9 seconds: waits", "save() for 1 second: waits"], None),
        (["load() for 9 seconds: waits", "load() for 1 second: waits"], None),
        (["load() for 9 seconds: waits", "step() for 1 second: waits"], None),
    ],
)
def test_who_is_not_where_the_others_are(states: list[str], suspect: int | None) -> None:
    news = News(0, lambda: ("save() for 9 seconds: waits", True))
    now = time.monotonic()
    news.heard = {process: Heard(now, state, True) for process, state in enumerate(states, 1)}
    verdict = news.stalled([0, 1, 2], [1], "save()")
    if suspect is None:
        assert verdict.where.endswith("which rank holds them up cannot be told)")
    else:
        assert (verdict.process, verdict.where) == (suspect, "(rank 0 waits for save())")


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
PLAIN: dict[str, Any] = asdict(VERDICT)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("hello", (("::1", 1, "token", ""), [("here", "1f"), ("gone", [3, "is lost"])])),
        ("beat", State(1, 2, 0.5, "größer", True)),
        (
            "news",
            [("ask", 7), ("state", State(1, 2, 0.5, "waits", True)), ("verdict", (2, VERDICT))],
        ),
        ("routed", Routed(0, 9, [1, 2], "here", "a value")),
        ("routed", Routed(0, 9, [1, 2], "here", verdict=VERDICT)),
        ("goodbye", None),
    ],
)
def test_messages_survive(kind: str, body: Any) -> None:
    assert decode(encode(kind, body)[4:]) == (kind, body)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        ["beat", [1, 2, 0.5, "waits", 1]],
        ["magic", None],
        ["news", [["magic", 1]]],
        ["news", [["here", 1]]],
        ["news", [["here", "x"]]],
        ["news", [["verdict", [1, {**PLAIN, "cause": "magic"}]]]],
        ["news", [["verdict", [1, {**PLAIN, "number": "1"}]]]],
        ["routed", {"origin": 1, "number": 1, "to": [], "place": "", "value": ""}],
        ["goodbye", 1],
    ],
)
def test_what_is_no_message(value: Any) -> None:
    with pytest.raises(JsonError):
        decode(json.dumps(value).encode() if value is not None else b"")


def test_a_length_that_cannot_be() -> None:
    here, there = socket.socketpair()
    with here, there:
        peer = Link(here, 1)
        there.sendall((2**31).to_bytes(4, "little"))
        assert peer.read() is None


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
        assert member.told.wait(SOON / 4)
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
