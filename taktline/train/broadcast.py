"""Broadcasts values of one rank: outputs of the last stage, batches of the first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from taktline import pytree
from taktline.errors import SignatureError, TaktlineError
from taktline.meta import Signature
from taktline.sharding import is_sharded
from taktline.train.ranks import Ranks
from taktline.transport import Transport, transport_of
from taktline.transport.base import bytes_of
from taktline.transport.describe import decode, encode
from taktline.transport.exchange import exchange_or_raise, share_texts
from taktline.transport.wire import Layout


def broadcast_output(output: Any, ranks: Ranks, owner: int) -> Any:
    """The output of the owner, on all ranks of the pipeline; a sharded tensor arrives whole."""
    if ranks.group is None:
        return output
    try:
        return broadcast(output, ranks.group, ranks.device, owner, "return_outputs=True")
    except SignatureError as error:
        raise SignatureError(f"the output: {error}; or pass return_outputs='last'") from None


def broadcast(
    value: Any, group: dist.ProcessGroup, device: torch.device, owner: int, what: str
) -> Any:
    """The value of the owner, on all ranks of a group; if it cannot be sent, all raise why.

    ``what`` names the call, for errors.
    """
    if group.size() == 1:
        return value
    transport, here = transport_of(group, device), group.rank() == owner
    leaves, spec = pytree.tree_flatten([value if here else None])
    leaves = [leaf.full_tensor() if is_sharded(leaf) else leaf for leaf in leaves]
    signature = _agreed(leaves, spec, transport, owner, what)
    layout = Layout(signature.tensors, device)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    buffer = layout.pack(tensors).buffer if tensors else layout.empty()
    if layout.tensors:
        dist.broadcast(bytes_of(buffer), dist.get_global_rank(group, owner), group)
    if here:
        return value
    assert signature.spec is not None
    return pytree.tree_unflatten(signature.filled(layout.unpack(buffer)), signature.spec)[0]


def _agreed(
    leaves: list[Any], spec: pytree.TreeSpec, transport: Transport, owner: int, what: str
) -> Signature:
    """The signature of the owner's value, on every rank."""
    text, signature, error = "", None, None
    try:
        text = encode(Signature.of(leaves, spec)).decode() if transport.rank == owner else ""
    except TaktlineError as raised:
        error = raised
    if sent := share_texts(transport, text, what)[owner]:
        try:
            signature = decode(sent.encode())
        except TaktlineError as raised:
            error = raised
    # If a rank does not know a container, the owner must not send its contents.
    exchange_or_raise(transport, error, what)
    assert signature is not None
    return signature
