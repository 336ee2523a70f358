"""Process groups that a pipeline has made itself, and their end."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from taktline.transport.distributed import Distributed

__all__ = ["Groups", "forget_meshes"]


class Groups:
    """Groups that live as long as what uses them does, unless they are closed before."""

    def __init__(self, groups: Iterable[ProcessGroup] = ()) -> None:
        self._end = finalize(self, _destroy, tuple(groups))
        self._end.atexit = False  # then all groups of the process end anyway

    def keep_for(self, *users: object) -> None:
        """Let these keep the groups alive, too: stages and schedules may outlive their pipeline."""
        for user in users:
            _kept[user] = self

    def close(self) -> None:
        """End them now."""
        self._end()


_kept: WeakKeyDictionary[object, Groups] = WeakKeyDictionary()


def _destroy(groups: tuple[ProcessGroup, ...]) -> None:
    for group in groups:
        Distributed.forget(group)
        with suppress(ValueError):  # torch knows it no more: the program has ended all groups
            if "nccl" in dist.get_backend_config(group):
                # Aborted once its work is done: to destroy it, nccl waits for the other ranks.
                torch.cuda.synchronize()
                dist.distributed_c10d._abort_process_group(group)
            else:
                dist.destroy_process_group(group)
    if groups:
        forget_meshes()


def forget_meshes() -> None:
    """Let DTensor forget what it knows of meshes: it would use ended groups for equal meshes."""
    if "torch.distributed.tensor" in sys.modules:
        # Python may collect a pipeline while that is being imported: then it knows nothing yet.
        with suppress(ImportError):
            from torch.distributed.tensor import debug

            debug._clear_sharding_prop_cache()
