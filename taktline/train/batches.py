"""Batches: read by one rank for all, and cut along the dimensions that the example shows.

The batch dimension of each argument is found by comparing a batch with the example, which is one
micro-batch, so that a batch has more rows. The dimension that grows with the others is the batch;
an argument that does not grow belongs to all rows::

                    example      batch
    hidden_states   [2, 16, 64]  [8, 16, 64]   rows are along dimension 0
    memory          [10, 2, 64]  [10, 8, 64]   along dimension 1
    img_ids         [16, 3]      [16, 3]       whole, for each micro-batch
    bias            [2, 2]       [8, 8]        unclear: refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from taktline import pytree
from taktline.checkpoint.model_state import ModelState
from taktline.checkpoint.saving import RandomNumbers
from taktline.errors import BatchError, DataError, SignatureError, TaktlineError, text_of
from taktline.meta import Signature, is_sharded
from taktline.runtime.microbatch import Batch, Cutter, Replicate, TensorChunkSpec, describe
from taktline.split.steps import arguments_of
from taktline.train.ranks import Ranks
from taktline.transport import transport_of
from taktline.transport.base import bytes_of
from taktline.transport.codec import decode, encode
from taktline.transport.exchange import exchange_or_raise, share_texts
from taktline.transport.wire import Layout


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors from the CPU on a device."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        on_cpu = tensor.device.type == "cpu"
        return tensor.to(device, non_blocking=True) if on_cpu else tensor

    return pytree.tree_map_only(torch.Tensor, move, batch)


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
    text, signature, error = "", None, None
    try:
        text = encode(Signature.of(leaves, spec)).decode() if here else ""
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
    assert signature.spec is not None
    layout = Layout(signature.tensors, device)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    buffer = layout.pack(tensors).buffer if tensors else layout.empty()
    if layout.tensors:
        dist.broadcast(bytes_of(buffer), dist.get_global_rank(group, owner), group)
    if here:
        return value
    return pytree.tree_unflatten(signature.filled(layout.unpack(buffer)), signature.spec)[0]


_CALL = "pipe.loader(…)"


class SharedLoader:
    """The batches of a loader, read by one rank of each replica; made by :meth:`Pipeline.loader`.

    All ranks create it, and iterate over it together. All ranks of a replica get the same batch,
    with its tensors on the pipeline's device, stop at the end, and raise an error in reading.

    >>> import taktline as tl
    >>> pipe = tl.Pipeline([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], microbatches=2, ranks=2)
    >>> data = [(torch.ones(2) * i, i) for i in range(6)]
    >>> loader = pipe.loader(torch.utils.data.DataLoader(data, batch_size=4))
    >>> len(loader), [y.tolist() for x, y in loader]
    (2, [[0, 1, 2, 3], [4, 5]])
    """

    def __init__(self, batches: Iterable[Any] | None, pipe: Any) -> None:
        self._batches: Any = batches
        self._pipe = pipe
        (self._length,) = self._shared(lambda: [length_of(_checked(batches))], "the loader")

    @property
    def _ranks(self) -> Ranks:
        return self._pipe._built.ranks

    @property
    def _model(self) -> ModelState:
        return self._pipe._built.model

    @property
    def _within(self) -> list[dist.ProcessGroup]:
        """The groups that get one batch: tensor-parallel ranks of a stage need the same, too."""
        groups = self._ranks.groups.items()
        return [group for name, group in groups if name not in self._ranks.data_dims]

    @property
    def _reads(self) -> bool:
        return all(group.rank() == 0 for group in self._within)

    def __len__(self) -> int:
        length = length_of(self._batches) if self._reads else self._length
        if length is None:
            raise TypeError("the loader that is read has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        rest: Iterator[Any] | None = None
        number, reads, start = 0, self._reads, None
        if self._pipe._elastic is not None:
            (start,) = self._shared(lambda: [self._randomness()], "the loader")

        def read() -> list[Any]:
            nonlocal rest
            if rest is None:
                rest = self._begun() if reads else self._taken_over(start, number)
            return [_plain(batch, self._ranks.device) for batch in islice(rest, 1)]

        try:
            while batch := self._shared(read, f"batch {number}"):
                yield batch[0]
                number += 1
        finally:
            self._model.loaders -= rest is not None

    def _begun(self) -> Iterator[Any]:
        """Begin to read. What this draws at random, a resumed run has drawn before it was saved."""
        numbers = RandomNumbers(self._model)
        before = numbers.state_dict()
        found = iter(_checked(self._batches))
        if self._model.resumes:
            numbers.load_state_dict(before)
        self._model.loaders, self._model.resumes = self._model.loaders + 1, False
        return found

    def _taken_over(self, start: Any, number: int) -> Iterator[Any]:
        """Go on after so many batches of a reader that is lost, with its random numbers."""
        RandomNumbers(self._model).load_state_dict(start[0])
        for generator, state in zip(self._generators(), start[1], strict=False):
            generator.set_state(state)
        found = self._begun()
        for _ in islice(found, number):
            pass
        return found

    def _randomness(self) -> list[Any]:
        """The state of all random numbers that an order may depend on."""
        states = [generator.get_state() for generator in self._generators()]
        return [RandomNumbers(self._model).state_dict(), states]

    def _generators(self) -> list[torch.Generator]:
        parts = (self._batches, getattr(self._batches, "sampler", None))
        found = (getattr(part, "generator", None) for part in parts)
        return [each for each in found if isinstance(each, torch.Generator)]

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the loader that is read, its sampler and its dataset."""
        inner, names = self._batches, ("sampler", "batch_sampler", "dataset")
        for part in (inner, *(getattr(inner, name, None) for name in names)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def state_dict(self) -> Any:
        """The position of the loader, on the rank that reads."""
        return self._batches.state_dict() if self._reads else {}

    def load_state_dict(self, state: Any) -> None:
        """Let the loader go on at a position, on the rank that reads."""
        if self._reads:
            self._batches.load_state_dict(state)

    def _shared(self, read: Callable[[], list[Any]], what: str) -> list[Any]:
        """What is agreed on; after a loss again, without reading again."""
        held: list[list[Any]] = []

        def once() -> list[Any]:
            if not held:
                held.append(read())
            return held[0]

        def run() -> list[Any]:
            held[:] = [self._agreed(once, what)]
            return held[0]

        return self._pipe._surviving(run)

    def _agreed(self, read: Callable[[], list[Any]], what: str) -> list[Any]:
        """What the reading rank reads, on every rank of the replica; an error is raised on them.

        It is a list with one value, or none at the end. If replicas have different numbers of
        batches, or one cannot read, their next call does not fit to that of the others.
        """
        ranks, cause = self._ranks, None
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
            raise DataError(f"rank 0{replica}, {what}: {found}") from cause
        return list(found)


def _checked(batches: Any) -> Any:
    """The batches; raises unless they can be iterated over."""
    samples = isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)
    if samples or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        has = "samples, not batches" if samples else "no batches"
        raise DataError(
            f"{type(batches).__name__} has {has}; pass a DataLoader(dataset, batch_size=…), or any "
            "iterable of batches, on the rank that reads"
        )
    return batches


def length_of(batches: Any) -> int | None:
    """How many batches there are; None if that is unknown."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


def _plain(batch: Any, device: torch.device) -> Any:
    """A batch on a device; mappings that pytree does not know become dicts."""

    def plain(leaf: Any) -> Any:
        # Such as transformers' BatchEncoding.
        return _plain(dict(leaf), device) if isinstance(leaf, Mapping) else on_device(leaf, device)

    return pytree.tree_map(plain, batch)


_Key: TypeAlias = int | str
"""The place of an argument, or its name."""


class BatchDims:
    """The cutter for each batch, with the batch dimensions that were found so far."""

    def __init__(self, example: Any, cutter: Cutter) -> None:
        self._cutter = cutter
        given = cutter.args_spec is not None or cutter.kwargs_spec is not None
        self._example = {} if given or example is None else _tensors(*arguments_of(example))
        self.compares = bool(self._example)
        """Whether there is an example to compare batches with."""
        self._dims: dict[_Key, int | None] = {}
        """Which dimension is the batch; None: the argument is whole for each micro-batch."""

    def fitted(self, batch: Batch) -> Cutter:
        """The cutter for a batch; raises if it is unclear how to cut."""
        given = _tensors(batch.args, batch.kwargs)
        pairs = {
            key: list(zip(example.shape, given[key].shape, strict=True))
            for key, example in self._example.items()
            if key in given and example.ndim == given[key].ndim > 0
        }
        unclear = self._find(pairs)
        if unclear is not None:
            raise _refusal(unclear, self._example[unclear], given[unclear])
        specs = {
            key: Replicate() if dim is None else TensorChunkSpec(dim)
            for key, dim in self._dims.items()
            if dim != 0 and key in given
        }
        if not specs:
            return self._cutter
        return replace(
            self._cutter,
            args_spec=tuple(specs.get(place) for place in range(len(batch.args))),
            kwargs_spec={key: specs.get(key) for key in batch.kwargs},
        )

    def _find(self, pairs: Mapping[_Key, list[tuple[int, int]]]) -> _Key | None:
        """Find the dimension of each argument that is the batch; returns one that is unclear.

        ``pairs`` are the sizes of arguments in the example and in the batch.
        """
        rows = next((sizes[0] for sizes in pairs.values() if sizes[0][0] != sizes[0][1]), None)
        if rows is None:  # as many rows as in the example, or the batch is not in front
            parts, new = self._cutter.microbatches, pairs.keys() - self._dims.keys()
            return next((k for k in new if any(a * parts == b != a for a, b in pairs[k])), None)
        cut = {key: sizes.index(rows) for key, sizes in pairs.items() if rows in sizes}
        # Lengths of texts may differ, too, also in arguments that belong to all rows.
        lengths = {size for key in cut for size in pairs[key]}
        for key, sizes in pairs.items():
            # As many as the rows of a micro-batch: rather a mistake than a table of that length.
            mistaken = sizes[0][0] == rows[0] > 1
            is_whole = not mistaken and all(a == b or (a, b) in lengths for a, b in sizes)
            if sizes.count(rows) > 1 or (key not in cut and not is_whole):
                return key
        self._dims |= {key: cut.get(key) for key in pairs}
        return None

    def __str__(self) -> str:
        """A sentence on the arguments that are not cut along dimension 0, if there are any."""
        whole = [_named(key) for key, dim in self._dims.items() if dim is None]
        parts = [f"{', '.join(whole)} whole for each micro-batch"] if whole else []
        parts += [f"{_named(key)} along dimension {dim}" for key, dim in self._dims.items() if dim]
        cut = f"batches are cut along dimension 0, but {'; '.join(parts)} (by the example)"
        return cut if parts else ""


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[_Key, torch.Tensor]:
    """The arguments that are tensors; tensors in containers are cut along dimension 0."""
    found: dict[_Key, Any] = {**dict(enumerate(args)), **kwargs}
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def _refusal(key: _Key, example: torch.Tensor, batch: torch.Tensor) -> BatchError:
    if isinstance(key, int):
        given = f"args_chunk_spec=({'None, ' * key}TensorChunkSpec(dim), …)"
    else:
        given = f"kwargs_chunk_spec={{{key!r}: TensorChunkSpec(dim), …}}"
    return BatchError(
        f"it is unclear how to cut {_named(key)}, which is {describe(batch)} in this batch and "
        f"{describe(example)} in the example; pass {given} with the dimension that is the batch, "
        "or Replicate() instead for the whole in each micro-batch, and None for arguments with the "
        "batch first; or cut the batch yourself, and pass arg_mbs and kwarg_mbs"
    )


def _named(key: _Key) -> str:
    return f"argument {key}" if isinstance(key, int) else key
