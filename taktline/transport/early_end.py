"""Word of a process that ends before it has a control plane, for those that wait for it."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from taktline.transport.exit_hooks import planes
from taktline.transport.listener import NOWHERE
from taktline.transport.own_host import hosts_of

_CALL_SECONDS = 1.0


def store_name() -> str:
    """Under which name processes tell their addresses in the store."""
    return f"taktline/control/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def leave_word() -> None:
    """Leave word in the store, where others look for the address of this process."""
    group = dist.group.WORLD
    if group is None or group in planes:  # whose end others notice by themselves
        return
    with suppress(Exception):  # the store may be gone
        store = group.get_group_store()
        if (there := next(hosts_of(store), None)) is not None:
            # If it is gone, torch would write a warning with its whole stack.
            socket.create_connection(there, _CALL_SECONDS).close()
        PrefixStore(store_name(), store).set(str(group.rank()), json.dumps(NOWHERE))
