"""Ends the process groups that were made for a pipeline.

DTensor caches meshes, and uses a cached one for every mesh that equals it. So all ranks must have
the same in their caches. But Python collects a pipeline on one rank sooner than on another, and on
any thread. So its groups end in calls that all ranks make: when it is closed, or when the next
pipeline is made.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from contextlib import suppress
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from taktline.private import private
from taktline.transport.distributed import Distributed

_abort = private(
    "torch.distributed.distributed_c10d._abort_process_group",
    "ending a group without waiting",
    dist.destroy_process_group,
)


class Groups:
    """Groups that live as long as any of their users does, unless they are closed before."""

    def __init__(self, groups: Iterable[ProcessGroup] = ()) -> None:
        self._end = finalize(self, _unused.extend, tuple(groups))
        self._end.atexit = False  # at exit, all groups of the process end anyway

    def keep_for(self, *users: object) -> None:
        """Keep the groups alive for stages and schedules, which may outlive their pipeline."""
        for user in users:
            _kept[user] = self

    def close(self) -> None:
        """End the groups now, on every rank."""
        self._end()
        end_unused()


_kept: WeakKeyDictionary[object, Groups] = WeakKeyDictionary()
_unused: list[ProcessGroup] = []


def end_unused() -> None:
    """End the groups of pipelines that are gone; every rank calls it at the same place."""
    gc.collect()
    while _unused:
        group = _unused.pop()
        Distributed.forget(group)
        with suppress(ValueError):  # the program has ended all groups itself
            if "nccl" in dist.get_backend_config(group):
                # Abort once its work is done: to destroy it, nccl would wait for the other ranks.
                torch.cuda.synchronize()
                _abort(group)
            else:
                dist.destroy_process_group(group)
    if "torch.distributed.tensor" in sys.modules:
        what = "a DTensor of a second pipeline"
        private("torch.distributed.tensor.debug._clear_sharding_prop_cache", what, _do_nothing)()


def _do_nothing() -> None:
    pass
