"""Values of one rank on all ranks: outputs of the last stage, and batches that one rank reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from taktline import pytree
from taktline.errors import DataError, SignatureError, TaktlineError, text_of
from taktline.meta import Signature
from taktline.sharding import is_sharded
from taktline.train.ranks import Ranks
from taktline.transport import Transport, transport_of
from taktline.transport.base import bytes_of
from taktline.transport.codec import decode, encode
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


_CALL = "pipe.loader(…)"


class SharedLoader:
    """The batches of a loader, read by one rank of each replica; made by :meth:`Pipeline.loader`.

    All ranks create it, and iterate over it together. Each gets the same batch, with its tensors on
    the pipeline's device. All ranks stop at the end, and all raise an error in reading.

    >>> import taktline as tl
    >>> pipe = tl.Pipeline([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], microbatches=2, ranks=2)
    >>> data = [(torch.ones(2) * i, i) for i in range(6)]
    >>> loader = pipe.loader(torch.utils.data.DataLoader(data, batch_size=4))
    >>> len(loader), [y.tolist() for x, y in loader]
    (2, [[0, 1, 2, 3], [4, 5]])
    """

    def __init__(self, batches: Iterable[Any] | None, ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        # Tensor-parallel ranks of a stage need the same batch as well.
        self._within = [
            group for name, group in ranks.groups.items() if name not in ranks.data_dims
        ]
        self._reads = all(group.rank() == 0 for group in self._within)
        (self._length,) = self._agreed(lambda: [length_of(_checked(batches))], "the loader")

    def __len__(self) -> int:
        length = length_of(self._batches) if self._reads else self._length
        if length is None:
            raise TypeError("the loader that is read has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        rest: Iterator[Any] | None = None

        def read() -> list[Any]:
            nonlocal rest
            if rest is None:
                rest = iter(_checked(self._batches))
            try:
                return [_on_device(next(rest), self._ranks.device)]
            except StopIteration:
                return []

        number = 0
        while batch := self._agreed(read, f"batch {number}"):
            yield batch[0]
            number += 1

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the loader that is read, its sampler and its dataset."""
        inner, names = self._batches, ("sampler", "batch_sampler", "dataset")
        for part in (inner, *(getattr(inner, name, None) for name in names)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def _agreed(self, read: Callable[[], list[Any]], what: str) -> list[Any]:
        """The list that the reading rank reads, on every rank; an error is raised on every rank.

        The list has one value, or none at the end.
        """
        ranks, cause, error = self._ranks, None, None
        found: list[Any] | str = []
        if self._reads:
            try:
                found = read()
            except Exception as raised:
                kind = "" if isinstance(raised, DataError) else f"{type(raised).__name__}: "
                found, cause = f"{kind}{text_of(raised, 4000)}", raised
        for group in self._within:
            try:
                found = broadcast(found, group, ranks.device, 0, _CALL)
            except SignatureError as refused:
                found = str(refused)
        if isinstance(found, str):
            replica = f" of replica {ranks.replica}" if ranks.replicas > 1 else ""
            error, found = DataError(f"rank 0{replica}, {what}: {found}"), []
        if ranks.replicas > 1:
            count, why = len(found), partial(_different, what)
            error = ranks.agreed(error, _CALL, lambda _: [count], why, DataError)
        if error is not None:
            raise error from cause
        return found


def _different(what: str, noun: str, _: Transport, rows: list[list[int]]) -> str | None:
    """Why replicas cannot go on together; they have so many batches, 0 or 1."""
    if all(row == rows[0] for row in rows):
        return None
    return (
        f"the replicas have different numbers of batches: {what} exists in some, but not in "
        "others; use the same number in all, for example with DistributedSampler(dataset, "
        "pipe.replicas, pipe.replica)"
    )


def _checked(batches: Any) -> Iterable[Any]:
    """The batches; raises unless they can be iterated over."""
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise DataError(
            f"{type(batches).__name__} has samples, not batches; pass a DataLoader(dataset, "
            "batch_size=…)"
        )
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise DataError(
            f"{type(batches).__name__} has no batches; pass a DataLoader, or any iterable of "
            "batches, on the rank that reads"
        )
    return batches


def length_of(batches: Any) -> int | None:
    """How many batches there are; None if that is unknown."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


def _on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device; mappings that pytree does not know become dicts."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        # Such as transformers' BatchEncoding.
        return _on_device(dict(leaf), device) if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(moved, batch)
