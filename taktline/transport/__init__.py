"""How ranks reach each other: as processes over torch.distributed, or threads in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from taktline.transport import local
from taktline.transport.base import Alone, Channel, Handle, Post, Transport
from taktline.transport.codec import register_container
from taktline.transport.communicators import default_group
from taktline.transport.distributed import Distributed

__all__ = ["Channel", "Handle", "Post", "Transport", "local", "register_container", "transport_of"]


def transport_of(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Transport:
    """The transport of this rank: the local one inside ``local.run``, else that of the group.

    Args:
        group: the ranks; all of them by default.
        device: where the tensors are; on the CPU by default.

    >>> transport_of().size
    1
    """
    here = local.current()
    if here is not None:
        return here
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    group = group if group is not None else default_group()
    if group.size() == 1:
        return Alone()
    return Distributed.of(group, device or torch.device("cpu"))
