"""Outputs of the last stage, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from taktline.errors import SignatureError, TaktlineError
from taktline.meta import Signature, TensorMeta
from taktline.sharding import is_sharded
from taktline.train.ranks import Ranks
from taktline.transport.control import share_error, share_texts
from taktline.transport.describe import decode, encode
from taktline.transport.wire import Layout

__all__ = ["shared_output"]


def shared_output(output: Any, ranks: Ranks, owner: int) -> Any:
    """What the owner has, on all ranks of the pipeline; a tensor in shards arrives whole."""
    group = ranks.group
    if group is None or ranks.size == 1:
        return output
    here = group.rank() == owner
    leaves, spec = pytree.tree_flatten([output])
    leaves = [leaf.full_tensor() if is_sharded(leaf) else leaf for leaf in leaves]
    signature = _agreed(Signature.of(leaves, spec) if here else None, ranks, owner)
    layout = Layout(signature.tensors, ranks.device)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    buffer = layout.pack(tensors).buffer if here else layout.empty()
    dist.broadcast(buffer, dist.get_global_rank(group, owner), group)
    if here:
        return output
    arrived = iter(layout.unpack(buffer))
    values = [next(arrived) if isinstance(leaf, TensorMeta) else leaf for leaf in signature.leaves]
    assert signature.spec is not None  # given above
    return pytree.tree_unflatten(values, signature.spec)[0]


def _agreed(mine: Signature | None, ranks: Ranks, owner: int) -> Signature:
    """The owner's signature; if it cannot be told, every rank raises why."""
    text, error = "", None
    try:
        text = "" if mine is None else encode(mine).decode()
    except TaktlineError as raised:
        error = SignatureError(f"the output: {raised}; or pass return_outputs='last'")
    told = share_texts(ranks.transport, text, "return_outputs=True")[owner]
    if not told:
        raise share_error(ranks.transport, error) or SignatureError("the output cannot be told")
    return decode(told.encode())
