"""Ranks as processes: channels, the small exchange, and groups for channels as nccl needs them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from taktline.errors import LostRankError, MismatchError, TransportError
from taktline.transport import (
    Channel,
    Handle,
    Transport,
    distributed,
    local,
    transport_of,
)
from taktline.transport.base import Alone, Frame
from taktline.transport.communicators import Communicator
from taktline.transport.control_plane import PeerFailure
from taktline.transport.distributed import Distributed
from taktline.transport.news import Cause, Verdict
from tests.runtime.scenarios import (
    Case,
    Result,
    check_case,
    run_case,
)
from tests.workers import Workers

MANY = 1 << 20
"""More bytes than any connection takes before they are awaited."""

SOON = 60.0
"""Where ranks miss each other while they make a group, they wait for half an hour."""

GRADIENTS = [False, True]
PER_CHANNEL = pytest.mark.parametrize(
    "per_channel", [False, True], ids=["by lanes", "by group per channel"]
)


@contextmanager
def opened(
    group: dist.ProcessGroup, per_channel: bool, channels: list[Channel]
) -> Iterator[Distributed]:
    """A transport whose ranks are all done in the end."""
    transport = Distributed(group, lanes=not per_channel)
    transport.open(channels)
    yield transport
    transport.exchange([0])


def both_ways(one: int = 0, other: int = 1) -> list[Channel]:
    """All four channels between two ranks."""
    return [
        Channel(sender, receiver, gradients)
        for sender, receiver in ((one, other), (other, one))
        for gradients in GRADIENTS
    ]


def message(number: int, size: int = MANY) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.uint8)


def received(transport: Transport, channel: Channel, size: int = MANY) -> int:
    buffer = message(255, size)
    transport.receiver(channel)(buffer).wait()
    (number,) = set(buffer.tolist())
    return number


def send_crossing(rank: int, group: dist.ProcessGroup, per_channel: bool) -> list[int]:
    """Both ranks send on one channel and the other, and receive from the other and the one."""
    with opened(group, per_channel, both_ways()) as transport:
        out, back = ([Channel(a, 1 - a, g) for g in GRADIENTS] for a in (rank, 1 - rank))
        handles = [
            transport.sender(out[gradients])(message(10 * rank + number))
            for number, gradients in enumerate((False, False, True, True))
        ]
        numbers = [received(transport, back[g]) for g in (True, False, True, False)]
        for handle in handles:
            handle.wait()
        return numbers


@pytest.mark.processes
@PER_CHANNEL
def test_a_message_that_waits_holds_up_no_other_channel(
    workers: Workers, per_channel: bool
) -> None:
    assert workers.run(send_crossing, per_channel, timeout=SOON) == [[12, 10, 13, 11], [2, 0, 3, 1]]


def send_between_others(rank: int, group: dist.ProcessGroup, per_channel: bool) -> Any:
    """Ranks 3 and 1 of four are a group of their own, in which they are ranks 1 and 0."""
    pair = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    assert isinstance(pair, dist.ProcessGroup)
    try:
        with opened(pair, per_channel, both_ways()) as transport:
            here = transport.rank
            handle = transport.sender(Channel(here, 1 - here, False))(message(rank))
            number = received(transport, Channel(1 - here, here, False))
            handle.wait()
            return here, transport.size, number, transport.exchange([rank])
    finally:
        dist.destroy_process_group(pair)


@pytest.mark.processes
@PER_CHANNEL
def test_ranks_are_counted_within_the_group(workers: Workers, per_channel: bool) -> None:
    assert workers.run(send_between_others, per_channel, ranks=4, timeout=SOON) == [
        None,
        (0, 2, 3, [[1], [3]]),
        None,
        (1, 2, 1, [[1], [3]]),
    ]


def end_after_an_exchange(rank: int, group: dist.ProcessGroup) -> list[Any]:
    """Rank 0 ends by an error while rank 2 has still to send its numbers to rank 1."""
    transport = Distributed.of(group)
    transport.exchange([rank])
    assert transport._all_gather is not None
    send = transport._all_gather._send

    def send_late(messages: dict[int, bytes]) -> list[Handle]:
        first = send({0: messages[0]})
        assert transport._member.heard.wait(SOON / 2)
        return first + send({1: messages[1]})

    if rank == 2:
        transport._all_gather._send = send_late
    found: list[Any] = [transport.exchange([rank])]
    if rank == 0:
        transport.plane.raised(MismatchError("they do not fit"))
    else:
        transport._all_gather._send = send
        with pytest.raises(LostRankError) as caught:
            transport.exchange([rank])
        found.append(str(caught.value))
    return found


@pytest.mark.processes
def test_a_rank_that_ends_does_not_disturb_the_exchange_it_has_ended(workers: Workers) -> None:
    story = (
        "rank 0 has raised MismatchError outside of a step, and left the others behind: they do "
        "not fit"
    )
    everyone = [[0], [1], [2]]
    assert workers.run(end_after_an_exchange, ranks=3, timeout=SOON) == [
        [everyone],
        [everyone, story],
        [everyone, story],
    ]


def come_late(rank: int, group: dist.ProcessGroup) -> str:
    """Rank 1 ends by an error in a pair, before rank 0 has come to it."""
    pair = dist.new_group([0, 1])
    assert isinstance(pair, dist.ProcessGroup)
    transport = Distributed.of(group)
    transport.exchange([rank])
    if rank == 1:
        Distributed.of(pair).raised(ValueError("no luck"))
        return ""
    assert transport._member.heard.wait(SOON / 2)
    with pytest.raises(LostRankError) as caught:
        Distributed.of(pair).exchange([rank])
    return str(caught.value)


@pytest.mark.processes
def test_nobody_waits_where_another_rank_has_left_before(workers: Workers) -> None:
    text = "rank 1 has raised ValueError, and left the others behind: no luck"
    assert workers.run(come_late, timeout=SOON) == [text, ""]


def leave_after(rank: int, group: dist.ProcessGroup) -> str:
    """Rank 0 ends by an error; rank 1 leaves for another, and rank 2 waits for rank 1."""
    transport = Distributed.of(group)
    transport.exchange([rank])
    if rank == 0:
        transport.plane.raised(ValueError("no luck"))
        return ""
    assert transport._member.heard.wait(SOON / 2)
    if rank == 1:
        transport.raised(LostRankError("a lane has ended"))
        return ""
    assert transport._all_gather is not None
    with pytest.raises(PeerFailure) as caught:
        transport._all_gather._receive(1, 1)
    return str(caught.value)


@pytest.mark.processes
def test_nobody_waits_for_a_rank_that_has_left(workers: Workers) -> None:
    *_, told = workers.run(leave_after, ranks=3, timeout=SOON)
    assert told == "a connection has ended"


def long_numbers(rank: int, group: dist.ProcessGroup) -> bool:
    """More than fits into the sockets, from everybody at once."""
    numbers = [[peer] * 1_000_000 for peer in range(group.size())]
    return Distributed(group).exchange(numbers[rank]) == numbers


@pytest.mark.processes
def test_long_exchanges(workers: Workers) -> None:
    assert workers.run(long_numbers, ranks=3) == [True] * 3


def run_per_channel(rank: int, group: dist.ProcessGroup, case: Case) -> tuple[Result, list[int]]:
    """A case over groups for channels, run twice; also how many groups there were after each."""
    before = distributed._known.pop(group, None)
    transport = Distributed(group, lanes=False)
    distributed._known[group] = {"cpu": transport}
    try:
        run_case(rank, group, case)
        counts = [len(transport._connections)]
        # Another schedule over the same channels, which are open already.
        result = run_case(rank, group, case)
        return result, [*counts, len(transport._connections)]
    finally:
        del distributed._known[group]
        if before is not None:
            distributed._known[group] = before


CALLS = (("eval", 8), ("step", 8), ("step", 8), ("step", 9), ("eval", 8))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "counts"),
    [
        (Case("Schedule1F1B", 4, 1, 6, "gpt", CALLS), [2, 4, 4, 2]),
        (Case("ScheduleInterleaved1F1B", 2, 2, 4, "llama", CALLS), [4, 4]),
        (Case("ScheduleZBVZeroBubble", 4, 2, 6, "mlp", CALLS), [4, 8, 8, 4]),
    ],
    ids=str,
)
def test_training_over_groups_for_channels_is_that_of_the_plain_model(
    workers: Workers, case: Case, counts: list[int]
) -> None:
    results = workers.run(run_per_channel, case, ranks=case.ranks, timeout=SOON)
    check_case([result for result, _ in results], case)
    assert [found for _, found in results] == [[count, count] for count in counts]


def find_here(rank: int, group: dist.ProcessGroup) -> tuple[Any, ...]:
    mine, default = transport_of(group), transport_of()
    assert isinstance(mine, Distributed)
    assert isinstance(default, Distributed)
    assert mine.group is group
    assert transport_of(group) is mine
    assert transport_of() is default
    assert Distributed.of(group) is mine

    def inside(rank: int) -> tuple[bool, int]:
        transport = transport_of(group)
        return transport is local.current(), transport.size

    return mine.rank, mine.size, default.size, local.run(inside, 3)


@pytest.mark.processes
def test_each_group_has_one_transport(workers: Workers) -> None:
    inside = [(True, 3)] * 3
    assert workers.run(find_here, ranks=2) == [(0, 2, 4, inside), (1, 2, 4, inside)]


def test_without_a_process_group_a_rank_is_alone() -> None:
    transport = transport_of()
    assert type(transport) is Alone
    assert (transport.rank, transport.size) == (0, 1)
    assert transport.exchange([1, 2]) == [[1, 2]]
    transport.open([])


MIXED = (
    "the ranks disagree on the call: grad_norm() on rank 0; step() on rank {}; make the same calls "
    "in the same order on every rank"
)


def mixed(rank: int, group: dist.ProcessGroup, few: int) -> list[Any]:
    """Ranks that are in different exchanges, which have different lengths; then in the same one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_FEW", few)
        transport = Distributed(group)
        found: list[Any] = []
        for length in (1, 20, 400):
            try:
                transport.exchange(
                    [rank] * (length if rank else 1), "step()" if rank else "grad_norm()"
                )
            except MismatchError as error:
                found.append(str(error))
        try:
            transport.exchange([rank] * (1 + rank), "step()")
        except TransportError as error:
            found.append(str(error))
        return [*found, transport.exchange([rank] * (200 * rank), "a trace", ragged=True)]


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "few"), [(2, 8), (3, 1)], ids=["direct", "passed on"])
def test_ranks_in_different_exchanges(workers: Workers, ranks: int, few: int) -> None:
    others = ", ".join(map(str, range(1, ranks)))
    counts = "; ".join(f"{1 + rank} on rank {rank}" for rank in range(ranks))
    unequal = f"step() takes equally many numbers of each rank, but got {counts}"
    ragged = [[rank] * (200 * rank) for rank in range(ranks)]
    expected = [*[MIXED.format(others)] * 3, unequal, ragged]
    assert workers.run(mixed, few, ranks=ranks) == [expected] * ranks


def test_local_ranks_in_different_exchanges() -> None:
    def ask(rank: int) -> str:
        with pytest.raises(MismatchError) as caught:
            transport_of().exchange([rank] * (1 + rank), "step()" if rank else "grad_norm()")
        return str(caught.value)

    assert local.run(ask, 2) == [MIXED.format(1)] * 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([0, 0], "rank 3 has sent no message of an exchange, or one of another version;"),
        ([distributed._MARK + 1, 0], "rank 3 has sent no message of an exchange, or one of"),
        ([distributed._MARK, -1], "rank 3 announces -1 bytes, more than there can be"),
        (
            [distributed._MARK, 2**60],
            "rank 3 announces 1,152,921,504,606,846,976 bytes, more",
        ),
    ],
)
def test_an_invalid_frame(words: list[int], text: str) -> None:
    frame = struct.pack("<8q", *words, *[0] * 6)
    with pytest.raises(TransportError) as caught:
        distributed.size_of(frame, 0, rank=3)
    assert str(caught.value).startswith(text)


def test_an_exchange_has_its_limits() -> None:
    with pytest.raises(TransportError, match=r"a trace takes 134,217,729 bytes; at most 134,217,7"):
        distributed.packed(Frame("a trace", bytes(distributed._MOST + 1)))


WHAT = "(activations from rank 0 to rank 1)"
CUT = f"LostRankError: the connection of rank 0 to rank 1 was reset {WHAT}, though both live"
SAID = {
    "[pair.cc:534] Connection closed by peer [::1]:9": CUT,
    "NCCL error: remote process exited or there was": CUT,
    "Timed out waiting 1000ms for recv operation": "StallError: rank 1 has not answered in time",
    "input tensor has to be contiguous": (
        f"TransportError: rank 0 cannot talk to rank 1 {WHAT}: input tensor has to be contiguous"
    ),
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate": (
        f"TransportError: rank 0 cannot talk to rank 1 {WHAT}: [enforce fail"
    ),
}


def became(rank: int, group: dist.ProcessGroup, said: str) -> str:
    """What is raised on rank 0 if gloo says something of a message to rank 1."""
    transport = Distributed(group)
    transport.exchange([rank])
    if rank:
        transport._member.heard.wait(20.0)  # stays until the other one is done with it
        return ""

    communicator = Mock(send=Mock(side_effect=RuntimeError(said)))
    channel = Channel(0, 1, False)
    link = Communicator(communicator, 1, lambda error: transport._failed(error, 1, channel))
    with pytest.raises(TransportError) as caught:
        link.send(torch.zeros(1))
    if transport.verdict is None:
        transport.give_up(Verdict(Cause.LOST, transport.processes[0]))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.processes
def test_what_became_of_a_message(workers: Workers) -> None:
    for said, text in SAID.items():
        first, _ = workers.run(became, said)
        assert first.startswith(text)


def test_a_device_is_asked_only_about_what_is_sent_eagerly() -> None:
    work = Mock(**{"is_completed.side_effect": [False, True]})
    link = Communicator(Mock(**{"send.return_value": work}), 1, Mock())
    message = link.send(torch.zeros(2))
    assert not message.done
    work.is_completed.assert_not_called()
    eager = link.send(torch.zeros(2), asks=True)
    assert [eager.done, eager.done] == [False, True]
