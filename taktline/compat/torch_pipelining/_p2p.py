"""Messages handed to torch.distributed in groups."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

import torch.distributed as dist

__all__ = ["_batch_p2p", "_sorted_batch_p2p", "_wait_batch_p2p", "dist", "logger"]

# Under torch's name, so that TORCH_LOGS=pp shows it.
logger = logging.getLogger("torch.distributed.pipelining.schedules")


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """Start messages as one group.

    >>> _batch_p2p([])
    []
    """
    if not p2p_ops:
        return []
    logger.debug("batch_p2p %s%s", f"{desc}, " if desc else "", p2p_ops)
    return dist.batch_isend_irecv(p2p_ops)


def _sorted_batch_p2p(
    p2p_ops: list[dist.P2POp], desc: str | None = None
) -> dict[int, list[dist.Work]]:
    """Start messages in one group for each peer, the lowest first.

    >>> _sorted_batch_p2p([])
    {}
    """
    by_peer: defaultdict[int, list[dist.P2POp]] = defaultdict(list)
    for op in p2p_ops:
        by_peer[op.peer].append(op)
    return {peer: _batch_p2p(by_peer[peer], desc) for peer in sorted(by_peer)}


def _wait_batch_p2p(work: Iterable[dist.Work]) -> None:
    """Wait for a group of messages.

    >>> _wait_batch_p2p([])
    """
    for started in work:
        started.wait()
