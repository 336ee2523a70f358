"""How ranks that a launcher has started find each other, with an end to every wait."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from taktline.checks import read
from taktline.errors import TransportError
from taktline.transport.communicators import default_group

_GRACE = 5.0
"""How much longer an alarm waits than the timeout that it guards, whose error says more."""


class Rendezvous:
    """The store where ranks meet before there is a process group.

    Ranks that have not come by the end of the wait are ``missing``.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self.missing: list[int] = []
        limit = timedelta(seconds=timeout)
        try:
            # As if alone, because rank 0 would wait here for others that it could not name.
            store, _, _ = next(rendezvous("env://", world_size=1, timeout=limit))
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise TransportError(
                f"rank {self.rank} cannot reach {self.address} within {timeout:g} s; see "
                f"whether rank 0 runs there and the port is open ({reason})"
            ) from None
        # torchrun may keep one store for all attempts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"taktline doctor {attempt}", store)

    def share_facts(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Share the facts of this rank, and return those of each rank."""
        try:
            self._store.set(f"rank {self.rank}", json.dumps(facts))
            self.missing = self._wait_for("rank", range(self.size), self.timeout)
            present = [rank for rank in range(self.size) if rank not in self.missing]
            texts = [self._store.get(f"rank {rank}") for rank in present]
            return [read(text, {str: object}, what="the facts of a rank") for text in texts]
        except RuntimeError:
            raise TransportError(
                f"rank {self.rank} has lost {self.address}, where the ranks meet; see what rank 0 "
                "says"
            ) from None

    def group(self, backend: str, device: torch.device) -> dist.ProcessGroup:
        """The process group of all ranks."""
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout),
            device_id=device if device.type == "cuda" else None,
        )
        return default_group()

    def leave(self) -> None:
        """Leave after rank 0 has printed: launchers end all ranks with the first one."""
        with suppress(Exception):
            if self.rank == 0:
                self._store.set("leaves 0", "")
                # It may keep the store, so it stays until the others have seen that.
                others = [rank for rank in range(1, self.size) if rank not in self.missing]
                self._wait_for("left", others, _GRACE)
            else:
                self._wait_for("leaves", [0], self.timeout + _GRACE)
                self._store.set(f"left {self.rank}", "")

    def _wait_for(self, what: str, ranks: Sequence[int], timeout: float) -> list[int]:
        """Wait until each of these ranks has set its key; returns the ranks that have not."""
        with suppress(dist.DistStoreError):  # one is missing
            self._store.wait([f"{what} {rank}" for rank in ranks], timedelta(seconds=timeout))
        return [rank for rank in ranks if not self._store.check([f"{what} {rank}"])]


@contextmanager
def alarm(rank: int, timeout: float, doing: str) -> Iterator[None]:
    """End this process if the block takes too long: a backend's own waits may have no end.

    An error that the block raises gets a note of what it was doing.
    """

    def end_process() -> None:
        print(
            f"rank {rank}: nothing has moved for {timeout + _GRACE:g} s while {doing}; see what "
            "the other ranks say, and whether a firewall is between them (--timeout waits longer)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(timeout + _GRACE, end_process)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        error.add_note(doing)
        raise
    finally:
        timer.cancel()
