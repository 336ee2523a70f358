"""Local ranks: who runs when, what arrives where, and how it ends when it cannot go on."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from taktline.errors import DeadlockError, TransportError
from taktline.transport.base import Channel, Handle, Transport
from taktline.transport.local import LocalTransport, current, run

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def here() -> LocalTransport:
    transport = current()
    assert transport is not None
    return transport


def send(to: int, buffer: torch.Tensor, *, gradients: bool = False) -> Handle:
    channel = Channel(here().rank, to, gradients)
    here().open([channel])
    return here().sender(channel)(buffer)


def receive(source: int, buffer: torch.Tensor, *, gradients: bool = False) -> Handle:
    channel = Channel(source, here().rank, gradients)
    here().open([channel])
    return here().receiver(channel)(buffer)


def received(source: int, *, gradients: bool = False) -> int:
    buffer = torch.zeros(1, dtype=torch.int64)
    receive(source, buffer, gradients=gradients).wait()
    return int(buffer.item())


def test_results_come_in_the_order_of_the_ranks() -> None:
    def ask(rank: int, word: str) -> tuple[int, int, str]:
        transport: Transport = here()
        return transport.rank, transport.size, f"{word} {rank}"

    assert run(ask, 3, "rank") == [(0, 3, "rank 0"), (1, 3, "rank 1"), (2, 3, "rank 2")]
    assert run(ask, 1, "only") == [(0, 1, "only 0")]
    assert current() is None


@pytest.mark.parametrize("receive_first", [False, True])
def test_messages_of_a_channel_keep_their_order(receive_first: bool) -> None:
    def talk(rank: int) -> list[int]:
        buffers = [torch.tensor([10 + i if rank else -1]) for i in range(4)]
        if rank == int(receive_first):
            # The other rank begins only now, so that all of its messages are posted before.
            here().exchange([])
        post = (lambda buffer: send(0, buffer)) if rank else (lambda buffer: receive(1, buffer))
        handles = [post(buffer) for buffer in buffers]
        if rank != int(receive_first):
            here().exchange([])
        for handle in reversed(handles):
            handle.wait()
        return [int(buffer.item()) for buffer in buffers]

    assert run(talk, 2) == [[10, 11, 12, 13], [10, 11, 12, 13]]


def test_bytes_arrive_whatever_they_stand_for() -> None:
    def talk(rank: int) -> torch.Tensor:
        buffer = torch.empty(2, 2) if rank else torch.arange(16, dtype=torch.uint8)
        (receive(0, buffer) if rank else send(1, buffer)).wait()
        return buffer

    sent, got = run(talk, 2)
    assert got.view(torch.uint8).flatten().tolist() == sent.tolist() == list(range(16))


def test_a_send_is_done_when_it_is_received() -> None:
    log: list[str] = []

    def talk(rank: int) -> None:
        if rank == 0:
            handle = send(1, torch.tensor([1]))
            log.append("sent")
            handle.wait()
            handle.wait()
            log.append("arrived")
        else:
            log.append("other")
            received(0)

    run(talk, 2)
    assert log == ["sent", "other", "arrived"]
    log.clear()
    run(talk, 2, strict=True)
    assert log == ["other", "sent", "arrived"]


def swap(rank: int) -> int:
    handle = send(1 - rank, torch.tensor([rank]))
    number = received(1 - rank)
    handle.wait()
    return number


def test_both_may_send_first_unless_sends_block() -> None:
    assert run(swap, 2) == [1, 0]
    with pytest.raises(DeadlockError) as caught:
        run(swap, 2, strict=True)
    assert str(caught.value) == (
        "no rank can go on\n"
        "  rank 0 waits to send activations from rank 0 to rank 1\n"
        "  rank 1 waits to send activations from rank 1 to rank 0"
    )
    assert caught.value.__notes__ == ["on rank 0 of 2 local ranks"]


def test_only_one_rank_runs_at_a_time() -> None:
    inside: list[int] = []
    interval = sys.getswitchinterval()

    def work(rank: int) -> int:
        seen = 0
        for _ in range(20):
            inside.append(rank)
            seen += sum(inside == [rank] for _ in range(100))
            inside.pop()
            here().exchange([])
        return seen

    # Threads that may run at once would now change places amid the work.
    sys.setswitchinterval(1e-6)
    try:
        assert run(work, 4) == [2000] * 4
    finally:
        sys.setswitchinterval(interval)


def draw(rank: int, device: str, generator: torch.Generator | None = None) -> list[float]:
    numbers: list[float] = []
    for _ in range(3):
        numbers += torch.rand(rank + 1, device=device, generator=generator).tolist()
        if generator is None:
            here().exchange([])
    return numbers


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_random_numbers_belong_to_the_rank(device: str) -> None:
    torch.manual_seed(11)
    torch.rand(3, device=device)
    states = [torch.get_rng_state, torch.cuda.get_rng_state][: 1 + (device == "cuda")]
    before = [state() for state in states]
    together = run(draw, 3, device)
    assert all(torch.equal(state(), old) for state, old in zip(states, before, strict=True))
    for rank in range(3):
        generator = torch.Generator(device)
        generator.set_state(before[-1])
        assert together[rank] == draw(rank, device, generator)


def test_buffers_made_in_inference_mode() -> None:
    def talk(rank: int) -> int:
        with torch.inference_mode(rank == 0):
            buffer = torch.tensor([rank])
            (send if rank else receive)(1 - rank, buffer)
        here().exchange([])
        return int(buffer.item())

    assert run(talk, 2) == [1, 1]


def test_the_text_of_a_deadlock() -> None:
    texts: list[str] = []

    def talk(rank: int) -> None:
        try:
            if rank == 0:
                received(1, gradients=True)
            elif rank == 2:
                here().exchange([])
            elif rank == 3:
                send(0, torch.tensor([1])).wait()
        except DeadlockError as error:
            texts.append(str(error))

    run(talk, 4)
    expected = (
        "no rank can go on\n"
        "  rank 0 waits to receive gradients from rank 1 to rank 0\n"
        "  rank 1 has ended\n"
        "  rank 2 waits for an exchange with ranks 0, 1, 3\n"
        "  rank 3 waits to send activations from rank 3 to rank 0"
    )
    assert texts == [expected] * 3


def test_after_a_deadlock_ranks_can_go_on() -> None:
    def talk(rank: int) -> int:
        with pytest.raises(DeadlockError):
            received(1 - rank, gradients=True)
        return swap(rank)

    assert run(talk, 2) == [1, 0]


def test_an_error_wakes_those_who_wait_for_its_rank() -> None:
    texts: list[str] = []

    def talk(rank: int) -> None:
        if rank == 2:
            raise KeyError("the cause")
        try:
            received(2)
        except DeadlockError as error:
            texts.append(str(error))
            raise

    with pytest.raises(KeyError, match="the cause") as caught:
        run(talk, 4)
    assert caught.value.__notes__ == ["on rank 2 of 4 local ranks"]
    assert len(texts) == 3
    assert all("\n  rank 2 has raised KeyError\n" in text for text in texts)


@pytest.mark.parametrize("first", [0, 1])
def test_sizes_that_differ(first: int) -> None:
    def talk(rank: int) -> None:
        if rank != first:
            here().exchange([])
        handle = receive(0, torch.zeros(3)) if rank else send(1, torch.zeros(250, 2))
        if rank == first:
            here().exchange([])
        handle.wait()

    with pytest.raises(TransportError) as caught:
        run(talk, 2)
    text = "activations from rank 0 to rank 1: 2,000 bytes sent, but 12 bytes expected"
    assert str(caught.value) == text
    assert caught.value.__notes__ == [f"on rank {1 - first} of 2 local ranks"]


def test_what_is_refused() -> None:
    channel = Channel(0, 1, gradients=True)

    def refused(rank: int) -> LocalTransport:
        with pytest.raises(TransportError, match=r"^rank 0 is a local rank and cannot run local"):
            run(refused, 1)
        with pytest.raises(TransportError, match=r"1: rank 0 has not opened this channel$"):
            here().sender(channel)
        here().open([channel])
        with pytest.raises(TransportError, match=r"^rank 0 cannot receive gradients from"):
            here().receiver(channel)
        return here()

    for ranks in (0, -1):
        with pytest.raises(TransportError, match=f"whole number from 1 to 1,024, not {ranks}$"):
            run(refused, ranks)
    [transport] = run(refused, 1)
    for late in (lambda: transport.exchange([]), lambda: transport.sender(channel)(torch.ones(1))):
        with pytest.raises(TransportError, match=r"^only rank 0 can use its transport"):
            late()


def test_ctrl_c_stops_every_rank() -> None:
    log: list[str] = []
    main = threading.get_ident()

    def work(rank: int) -> None:
        try:
            # Not for ever, so that the test fails rather than hangs.
            for step in range(1_000_000):
                if (rank, step) == (1, 5):
                    for _ in range(2):
                        signal.pthread_kill(main, signal.SIGINT)
                        time.sleep(0.1)
                    log.append("slept")
                here().exchange([])
        except KeyboardInterrupt:
            log.append(f"rank {rank} stopped")
            raise

    before = torch.get_rng_state()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            run(work, 3)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert log[0] == "slept"
    assert sorted(log[1:]) == ["rank 0 stopped", "rank 1 stopped", "rank 2 stopped"]
    assert not hasattr(caught.value, "__notes__")
    assert torch.equal(torch.get_rng_state(), before)


class Memory(bytearray):
    """What a tensor can lie in, and a weak reference can point at."""


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_keeps_tensors_alive(fails: bool) -> None:
    memories: list[weakref.ref[Memory]] = []

    def tensor() -> torch.Tensor:
        memory = Memory(8)
        memories.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.int64)

    def work(rank: int) -> torch.Tensor:
        send(rank, tensor(), gradients=True)
        buffer = tensor()
        (receive if rank else send)(1 - rank, buffer).wait()
        if fails:
            raise ValueError(rank)
        return buffer

    gc.disable()
    try:
        try:
            run(work, 2)
        except ValueError:
            assert fails
        assert [memory() for memory in memories] == [None] * 4
    finally:
        gc.enable()


@cuda
@pytest.mark.parametrize(("first", "slow"), [(0, 1), (1, 0)])
def test_copies_follow_the_streams(first: int, slow: int) -> None:
    def talk(rank: int) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            buffer = torch.zeros(1 << 20, device="cuda")
            if rank != first:
                here().exchange([])
            if rank == slow:
                torch.cuda._sleep(100_000_000)
            buffer.fill_(1 - rank)
            handle = (receive if rank else send)(1 - rank, buffer)
            if rank == first:
                here().exchange([])
            handle.wait()
            total = buffer.sum()
            buffer.fill_(5)
            here().exchange([])
            return total.item()

    # Twice: where a kernel is used for the first time, the device may be waited for.
    for _ in range(2):
        assert run(talk, 2) == [1 << 20, 1 << 20]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")
@pytest.mark.processes
def test_kernels_start_no_more_threads_than_the_caller_allows() -> None:
    """In a new thread, oneDNN's gelu started a team of all cores, whatever was set."""
    code = """if True:
        import os, torch
        from taktline.transport.local import run
        x = torch.randn(64, 4096)
        def started(rank):
            there = len(os.listdir("/proc/self/task"))
            torch.nn.functional.gelu(x)
            return len(os.listdir("/proc/self/task")) - there
        torch.set_num_threads(1)
        assert run(started, 1) == [0]
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
