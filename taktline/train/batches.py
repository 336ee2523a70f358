"""How a batch is cut, as far as the example shows it; and the loss that a model returns itself.

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

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from taktline.errors import BatchError, LossError
from taktline.runtime.microbatch import Batch, Cutter, Replicate, TensorChunkSpec, describe
from taktline.split.arguments import arguments_of

_Key: TypeAlias = int | str
"""The place of an argument, or its name."""
_Pair: TypeAlias = tuple[int, int]
"""A size in the example, and in the batch."""
_Dims: TypeAlias = dict[_Key, int | None]
"""Which dimension is the batch; None: the argument is whole for each micro-batch."""


class BatchDims:
    """The cutter for each batch, with the batch dimensions that were found so far."""

    def __init__(self, example: Any, cutter: Cutter) -> None:
        self._cutter = cutter
        given = cutter.args_spec is not None or cutter.kwargs_spec is not None
        self._example = {} if given or example is None else _tensors(*arguments_of(example))
        self.compares = bool(self._example)
        """Whether there is an example to compare batches with."""
        self._dims: _Dims = {}

    def fitted(self, batch: Batch) -> Cutter:
        """The cutter for a batch; raises if it is unclear how to cut."""
        given = _tensors(batch.args, batch.kwargs)
        pairs = {
            key: list(zip(example.shape, given[key].shape, strict=True))
            for key, example in self._example.items()
            if key in given and example.ndim == given[key].ndim > 0
        }
        try:
            found = _dims(pairs, self._cutter.microbatches, self._dims)
        except _UnclearError as unclear:
            (key,) = unclear.args
            raise _refusal(key, self._example[key], given[key]) from None
        self._dims |= found  # for batches that have as many rows as the example
        dims = {key: self._dims.get(key, 0) for key in given}
        if not any(dim != 0 for dim in dims.values()):
            return self._cutter
        return replace(
            self._cutter,
            args_spec=tuple(_spec(dims.get(place, 0)) for place in range(len(batch.args))),
            kwargs_spec={key: _spec(dims.get(key, 0)) for key in batch.kwargs},
        )

    def __str__(self) -> str:
        """A sentence on the arguments that are not cut along dimension 0, if there are any."""
        if not any(dim != 0 for dim in self._dims.values()):
            return ""
        whole = [_named(key) for key, dim in self._dims.items() if dim is None]
        parts = [f"{', '.join(whole)} whole for each micro-batch"] if whole else []
        for key, dim in self._dims.items():
            if dim:
                parts.append(f"{_named(key)} along dimension {dim}")
        return f"batches are cut along dimension 0, but {'; '.join(parts)} (by the example)"


class _UnclearError(Exception):
    """It is unclear how the argument of this key is to be cut."""


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[_Key, torch.Tensor]:
    """The arguments that are tensors; tensors in containers are cut along dimension 0."""
    found: dict[_Key, Any] = {**dict(enumerate(args)), **kwargs}
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def _dims(pairs: Mapping[_Key, list[_Pair]], microbatches: int, known: _Dims) -> _Dims:
    """The dimension of each argument that is the batch; empty if nothing new was found."""
    rows = _rows(pairs, microbatches, known)
    if rows is None:
        return {}
    found: _Dims = {}
    for key, sizes in pairs.items():
        places = [dim for dim, size in enumerate(sizes) if size == rows]
        if len(places) > 1:
            raise _UnclearError(key)
        found[key] = places[0] if places else None
    grown = {size for key, dim in found.items() if dim is not None for size in pairs[key]} - {rows}
    for key, dim in found.items():
        first = pairs[key][0][0]
        # As many as the rows of a micro-batch: more likely a mistake than a table of that length.
        mistaken = first == rows[0] > 1
        explained = all(size in grown or size[0] == size[1] for size in pairs[key])
        if dim is None and (mistaken or not explained):
            raise _UnclearError(key)
    return found


def _rows(pairs: Mapping[_Key, list[_Pair]], microbatches: int, known: _Dims) -> _Pair | None:
    """How many rows there are in the example and in the batch; None if nothing has grown."""
    firsts = {key: sizes[0] for key, sizes in pairs.items() if sizes[0][0] != sizes[0][1]}
    grown = set(firsts.values())
    if len(grown) > 1:
        # A table of positions is as long as the texts, and grows with them.
        grown -= {size for key in firsts for size in pairs[key][1:]}
        if len(grown) != 1:
            rows = next(iter(firsts.values()))
            raise _UnclearError(next(key for key, size in firsts.items() if size != rows))
    if grown:
        return grown.pop()
    for key, sizes in pairs.items():
        times = any(mine * microbatches == theirs != mine for mine, theirs in sizes[1:])
        if times and key not in known:
            raise _UnclearError(key)  # the batch dimension is not the first, or texts are longer
    return None


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


def _spec(dim: int | None) -> Replicate | TensorChunkSpec | None:
    if dim is None:
        return Replicate()
    return TensorChunkSpec(dim) if dim else None


def _named(key: _Key) -> str:
    return f"argument {key}" if isinstance(key, int) else key


_OWN = "the model's own loss"
"""Stands in the place of a target."""

_NEEDED = (
    "step() trains, so it needs a loss: Pipeline(…, loss_fn=…) for an output and a target, or a "
    "model that returns one itself, as those of transformers do with labels=…"
)


def with_own_loss(target: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The target and the options of a call to a pipeline without ``loss_fn``.

    A function for ``loss_weights`` is called with the labels of a micro-batch.
    """
    if target is not None or options.get("target_mbs") is not None:
        return target, options
    weights = options.get("loss_weights")
    if not callable(weights):
        return (_OWN, None), options
    weighed = {**options, "loss_weights": lambda own: weights(own[1])}
    return (_OWN, options.get("labels")), weighed


def loss_in_output(output: Any, target: Any) -> torch.Tensor:
    """The loss in the output of a model: itself, its ``loss``, or the only number in a tuple.

    >>> float(loss_in_output({"loss": torch.tensor(2.0)}, (_OWN, None)))
    2.0
    >>> float(loss_in_output((torch.zeros(3, 4), torch.tensor(2.0)), (_OWN, None)))
    2.0
    """
    if not (isinstance(target, tuple) and target and isinstance(target[0], str)):
        raise LossError(f"there is a target, but no loss_fn; {_NEEDED}")
    if isinstance(output, torch.Tensor):
        found = [output]
    elif isinstance(output, Mapping):
        found = [output.get("loss")]
    elif hasattr(output, "loss"):
        found = [output.loss]
    else:
        found = output if isinstance(output, tuple | list) else []
    numbers = [x for x in found if isinstance(x, torch.Tensor) and x.numel() == 1]
    if len(numbers) != 1:
        several = "several numbers" if numbers else "no loss"
        raise LossError(f"the model returns {several} in its {type(output).__name__}; {_NEEDED}")
    return numbers[0]
