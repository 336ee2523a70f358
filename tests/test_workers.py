"""Whether the pool of worker processes can be trusted by the tests that use it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from taktline.transport.distributed import Distributed
from tests.workers import Workers, WorkersFailed, WorkersLost

pytestmark = pytest.mark.processes


class Reworded(Exception):
    """Pickle makes it anew from its text, and that changes the text."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")


@pytest.fixture(scope="module")
def own_workers() -> Iterator[Workers]:
    """A small pool to break; its groups give up early."""
    pool = Workers(size=2, group_timeout=3.0)
    yield pool
    pool.stop()


def _where(rank: int, group: dist.ProcessGroup, *args: object) -> tuple[object, ...]:
    return rank, group.rank(), group.size(), *args


def _identity(rank: int, group: dist.ProcessGroup) -> int:
    return os.getpid()


def _raise(rank: int, group: dist.ProcessGroup, error: type[Exception], *args: object) -> int:
    if rank == 1:
        raise error(*args)
    return rank


def _return_function(rank: int, group: dist.ProcessGroup) -> object:
    return lambda: rank


def _warn(rank: int, group: dist.ProcessGroup) -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def _leave_a_message(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 0:
        dist.isend(torch.tensor(1.0), 1, group=group)
    else:
        raise RuntimeError("fetches nothing")


def _pass_on(rank: int, group: dist.ProcessGroup, value: float) -> float:
    message = torch.tensor(value if rank == 0 else 0.0)
    if rank == 0:
        dist.send(message, 1, group=group)
    else:
        dist.recv(message, 0, group=group)
    return message.item()


def _wait_in_vain(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 0:
        dist.recv(torch.zeros(()), 1, group=group)


def _sleep(rank: int, group: dist.ProcessGroup, sleeper: int) -> int:
    if rank == sleeper:
        time.sleep(100)
    return rank


def _die(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(100)


def test_the_same_processes_serve_every_run(workers: Workers) -> None:
    for ranks in (1, 3, 4):
        expected = [(rank, rank, ranks, "a", 1) for rank in range(ranks)]
        assert workers.run(_where, "a", 1, ranks=ranks) == expected
    first = workers.run(_identity, ranks=4)
    assert len({os.getpid(), *first}) == 5
    assert workers.run(_identity, ranks=4) == first
    with pytest.raises(ValueError, match="ranks must be from 1 to 4, not 5"):
        workers.run(_where, ranks=5)


def test_an_exception_on_one_rank(workers: Workers) -> None:
    before = workers.run(_identity)
    with pytest.raises(WorkersFailed) as caught:
        workers.run(_raise, ZeroDivisionError, "by nought", ranks=3)
    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.errors[1], ZeroDivisionError)
    text = str(caught.value)
    assert text.startswith("raised on rank 1\n--- rank 1 ---\nTraceback")
    assert "in _raise\n    raise error(*args)" in text
    assert text.endswith("ZeroDivisionError: by nought")
    first, second, third = workers.outcomes(_raise, KeyError, "x", ranks=3)
    assert (first, type(second), second.args, third) == (0, KeyError, ("x",), 2)
    # An exception that pickle would lose comes as its text.
    _, reworded = workers.outcomes(_raise, Reworded, "item")
    assert (type(reworded), str(reworded)) == (RuntimeError, "Reworded: no item")
    assert workers.run(_identity) == before


def test_what_is_an_error(workers: Workers) -> None:
    with pytest.raises(WorkersFailed, match=r"raised on ranks 0, 1\n(.*\n)*.*pickle"):
        workers.run(_return_function)
    with pytest.raises(WorkersFailed, match="UserWarning: careful"):
        workers.run(_warn)


def test_a_message_of_a_failed_run_does_not_reach_the_next(workers: Workers) -> None:
    before = workers.run(_identity)
    with pytest.raises(WorkersFailed, match="fetches nothing"):
        workers.run(_leave_a_message)
    assert workers.run(_pass_on, 2.0) == [2.0, 2.0]
    assert workers.run(_identity) == before


def test_a_wait_in_gloo_ends_as_an_error(own_workers: Workers) -> None:
    outcomes = own_workers.outcomes(_wait_in_vain)
    assert isinstance(outcomes[0], RuntimeError)
    assert "imed out" in str(outcomes[0])
    assert own_workers.run(_pass_on, 2.0) == [2.0, 2.0]


def test_workers_that_hang_or_die(own_workers: Workers) -> None:
    before = own_workers.run(_identity)
    with pytest.raises(WorkersLost) as caught:
        own_workers.run(_sleep, 0, timeout=0.5)
    assert (caught.value.died, caught.value.silent) == ({}, [0])
    text = str(caught.value)
    assert text.startswith("no answer within 0.5 s from rank 0\n--- rank 0 ---\n")
    assert "in _sleep" in text
    with pytest.raises(WorkersLost) as caught:
        own_workers.outcomes(_die)
    assert (caught.value.died, caught.value.silent) == ({1: 7}, [0])
    text = str(caught.value)
    assert text.startswith("rank 1 died with exit code 7\nno answer until then from rank 0\n")
    after = own_workers.run(_identity)
    assert not set(before) & set(after)
    os.kill(after[0], signal.SIGKILL)
    with pytest.raises(WorkersLost, match=f"rank 0 died with exit code {-signal.SIGKILL}"):
        own_workers.run(_where, ranks=1)
    pids = own_workers.run(_identity)
    own_workers.stop()
    own_workers.stop()
    assert not set(pids) & {child.pid for child in multiprocessing.active_children()}


def _exchange(rank: int, group: dist.ProcessGroup) -> list[list[int]]:
    return Distributed.of(group).exchange([rank])


def _leave(rank: int, group: dist.ProcessGroup) -> None:
    transport = Distributed.of(group)
    transport.exchange([rank])
    if rank == 0:
        transport.raised(KeyboardInterrupt())


def test_ranks_that_have_left_each_other_meet_again(workers: Workers) -> None:
    for ranks in (2, 3):
        assert len(workers.run(_exchange, ranks=ranks)) == ranks
    workers.run(_leave, ranks=2)
    for ranks in (2, 3):
        assert len(workers.run(_exchange, ranks=ranks)) == ranks


def _sum_in_a_pair(rank: int, group: dist.ProcessGroup, *pair: int) -> float:
    """The sum of the ranks of a group that is made for it."""
    made = dist.new_group(pair, timeout=timedelta(seconds=10))
    total = torch.tensor(float(rank))
    if rank in pair:
        dist.all_reduce(total, group=made)
    return total.item()


def test_groups_that_only_some_ranks_have_made_before(workers: Workers) -> None:
    """Torch counts groups, and those who have made another number would not find each other."""
    assert workers.run(_sum_in_a_pair, 0, 1, ranks=2) == [1.0, 1.0]
    assert workers.run(_sum_in_a_pair, 1, 2, ranks=3) == [0.0, 3.0, 3.0]
