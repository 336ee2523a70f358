"""The control planes of this process, and what happens when the process ends or forks."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from taktline.errors import LostRankError, StallError
from taktline.transport.sockets import NOWHERE, hosts_of

_CALL_SECONDS = 1.0

planes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The control plane of each default process group."""


def store_name() -> str:
    """Under which name processes tell their addresses in the store."""
    return f"taktline/control/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def leave_word() -> None:
    """Leave word in the store that this process ends, if it has no control plane.

    Others look for its address there, and would wait for it.
    """
    group = dist.group.WORLD
    if group is not None and group in planes:  # whose end others notice by themselves
        return
    with suppress(Exception):  # the store may be gone
        if group is None:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(place, _CALL_SECONDS).close()
            store, rank, _ = _meeting(timedelta(seconds=_CALL_SECONDS))
            store.compare_set(_OUTCOME, "", f"ended {rank}")
            return
        store = group.get_group_store()
        if (there := next(hosts_of(store), None)) is not None:
            # If it is gone, torch would write a warning with its whole stack.
            socket.create_connection(there, _CALL_SECONDS).close()
        PrefixStore(store_name(), store).set(str(group.rank()), json.dumps(NOWHERE))


_OUTCOME = "outcome"
"""Of a meeting: whether all have met, which one has ended before, or which ones came too late."""
_meetings = 0
"""How often this process has met the others that its launcher has started."""


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """A store for a process group of all processes, once all of them have come.

    Also returns the number of this process, and how many there are. It raises in all of them as
    soon as one has ended instead of coming, or has waited for longer than the timeout.
    """
    global _meetings
    store, rank, size = _meeting(timeout)
    _meetings += 1
    store.set_timeout(timeout)
    store.set(f"come/{rank}", "")
    if store.add("come", 1) == size:
        store.compare_set(_OUTCOME, "", "met")
    with suppress(dist.DistStoreError):
        store.wait([_OUTCOME])
    missing = [str(each) for each in range(size) if not store.check([f"come/{each}"])]
    # All have the outcome that the first of them has found: one may come when others have given up.
    found = store.compare_set(_OUTCOME, "", f"late {' and '.join(missing)}").decode()
    outcome, _, ranks = found.partition(" ")
    advice = "look at its output, and make the pipeline on every rank"
    if outcome == "late":
        raise StallError(f"rank {ranks} of {size} made no pipeline within {timeout}; {advice}")
    if outcome == "ended":
        raise LostRankError(f"rank {ranks} has ended before it made a pipeline; {advice}")
    return store, rank, size


def _meeting(timeout: timedelta) -> tuple[Store, int, int]:
    """The launcher's store, for the next meeting: it may keep what earlier ones have written."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(f"{store_name()}/{_meetings}", store), rank, size


def _close_all() -> None:
    """Close all planes at the end of the program, which in multiprocessing may be an error."""
    error = sys.exc_info()[1]
    for plane in list(planes.values()):
        if error is not None and not isinstance(error, SystemExit):
            plane.raised(error)
        plane.close()


def _forked() -> None:
    """Close the sockets of the parent in a forked process, such as a data loader's worker.

    While it holds them, no other process notices that its parent has died.
    """
    for plane in list(planes.values()):
        plane.close_inherited()


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Announce that an error ends this program, and call the hook that was there before."""
    for plane in list(planes.values()):
        with suppress(Exception):
            plane.raised(error)
    _before(kind, error, trace)


_before = sys.excepthook
sys.excepthook = _excepthook
atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)
# A process of multiprocessing ends without calling what atexit has registered.
Finalize(None, _close_all, exitpriority=100)
