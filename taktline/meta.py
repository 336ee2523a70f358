"""Descriptions of the values that cross a boundary between stages: shapes and types, no data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch

from taktline import pytree
from taktline.errors import SignatureError
from taktline.sharding import Sharding, is_sharded, local
from taktline.text import counted

Constant: TypeAlias = bool | int | float | str | None
"""A value that is part of a signature, and is not sent as data."""


def name_of(dtype: torch.dtype) -> str:
    """The name of a type of elements.

    >>> name_of(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {
    name_of(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
"""Every type of elements, by its name."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and type of a tensor, and whether a gradient comes back for it.

    >>> print(TensorMeta.of(torch.zeros(4, 16)))
    float32[4, 16]
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    sharding: Sharding | None = None
    """How a DTensor lies on its mesh; ``shape`` is then that of this rank's shard."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The description of a tensor."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else "sparse"
            raise SignatureError(
                f"a {kind} tensor cannot be sent to another stage; pass the dense tensors that it "
                "is made of"
            )
        if is_sharded(tensor):
            shard, sharding = local(tensor.detach()), Sharding.of(tensor)
            return cls(tuple(shard.shape), tensor.dtype, tensor.requires_grad, sharding)
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """The size of the data in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def describes(self, value: object) -> bool:
        """Whether a value is such a tensor."""
        if self.sharding is not None or is_sharded(value):
            return isinstance(value, torch.Tensor) and TensorMeta.of(value) == self
        return (
            isinstance(value, torch.Tensor)
            and value.shape == self.shape
            and value.dtype is self.dtype
            and value.requires_grad is self.requires_grad
        )

    @property
    def of_gradient(self) -> TensorMeta:
        """The description of the gradient that comes back."""
        sharding = None if self.sharding is None else self.sharding.of_gradient
        return TensorMeta(self.shape, self.dtype, sharding=sharding)

    def __str__(self) -> str:
        shape = f"{name_of(self.dtype)}{list(self.shape)}"
        return shape if self.sharding is None else f"{shape} ({self.sharding})"


Leaf: TypeAlias = TensorMeta | Constant


@dataclass(frozen=True, slots=True)
class Signature:
    """The description of all values that a stage sends: leaves and, if they are nested, their tree.

    >>> signature = Signature.of([torch.zeros(2, 3), 7])
    >>> print(signature)
    (float32[2, 3], 7)
    >>> print(signature.difference([torch.zeros(2, 4), 7]))
    output 0 is float32[2, 4], not float32[2, 3]
    """

    leaves: tuple[Leaf, ...]
    spec: pytree.TreeSpec | None = None

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: pytree.TreeSpec | None = None) -> Signature:
        """The signature of flattened arguments."""
        return cls(
            tuple(TensorMeta.of(x) if isinstance(x, torch.Tensor) else x for x in leaves), spec
        )

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        """The tensors among the leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))

    @property
    def gradients(self) -> tuple[TensorMeta, ...]:
        """The gradients that come back: one for each tensor that requires it."""
        return tuple(tensor.of_gradient for tensor in self.tensors if tensor.requires_grad)

    def filled(self, tensors: Iterable[Any]) -> list[Any]:
        """The leaves, with tensors in the places of their descriptions.

        >>> Signature.of([torch.zeros(1), 3]).filled([torch.ones(1)])
        [tensor([1.]), 3]
        """
        given = iter(tensors)
        return [next(given) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves]

    def describes(self, leaves: Sequence[object], spec: pytree.TreeSpec | None = None) -> bool:
        """Whether flattened arguments have this signature."""
        return (
            len(leaves) == len(self.leaves)
            and spec == self.spec
            and all(
                meta.describes(leaf) if isinstance(meta, TensorMeta) else _same(meta, leaf)
                for meta, leaf in zip(self.leaves, leaves, strict=True)
            )
        )

    def difference(
        self,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec | None = None,
        *,
        is_example: bool = False,
        name: str = "output",
    ) -> str:
        """A text on the arguments that differ from the signature; empty if none does.

        Args:
            leaves: the flattened arguments, or their descriptions.
            spec: their tree.
            is_example: whether this is the signature of an example. Then dimension 0 may have
                another size, and it does not matter which tensors require a gradient.
            name: the word for an argument.
        """
        if len(leaves) != len(self.leaves):
            verb = "is" if len(leaves) == 1 else "are"
            return f"there {verb} {counted(len(leaves), name)}, not {len(self.leaves)}"
        if spec != self.spec:
            return f"the {name}s are arranged as {spec}, not as {self.spec}"
        words: list[str] = []
        for index, (expected, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            actual = TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf
            if not _fits(expected, actual, is_example):
                found, wanted = _text_of(actual, expected), _text_of(expected, actual)
                words.append(f"{name} {index} is {found}, not {wanted}")
        return "; ".join(words)

    def misfit(self, leaves: Sequence[Any], text: str) -> SignatureError:
        """An error with this text, which says whether shapes or types differ."""
        error = SignatureError(text)
        for one, other in zip(self.leaves, leaves, strict=False):
            if isinstance(one, TensorMeta) and hasattr(other, "shape"):
                if one.shape != tuple(other.shape):
                    error.differs = "shape"
                elif one.dtype is not other.dtype:
                    error.differs = error.differs or "dtype"
        return error

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.leaves))})"


def _same(expected: object, actual: object) -> bool:
    """Whether constants are the same, bit for bit: nan equals nan, but 0.0 does not equal -0.0."""
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, float) and isinstance(actual, float):
        return expected.hex() == actual.hex()
    return expected == actual


def _fits(expected: object, actual: object, is_example: bool) -> bool:
    if not isinstance(expected, TensorMeta) or not isinstance(actual, TensorMeta):
        return _same(expected, actual)
    return _of_any_batch(expected) == _of_any_batch(actual) if is_example else expected == actual


def _of_any_batch(tensor: TensorMeta) -> object:
    """What the tensors of all batches have in common."""
    shape, sharding = tensor.shape, tensor.sharding
    placed = sharding and (sharding.names, sharding.placements)
    return len(shape), shape[1:], tensor.dtype, placed


def _text_of(leaf: object, other: object) -> str:
    """The text of a leaf, with its gradient if only that differs from the other one."""
    if isinstance(leaf, TensorMeta) and str(leaf) == str(other):
        return f"{leaf} {'with' if leaf.requires_grad else 'without'} gradient"
    return repr(leaf) if isinstance(leaf, str) else str(leaf)


def as_arguments(output: Any) -> Sequence[Any]:
    """A stage's output as arguments of the next stage: a tuple or a list is several arguments.

    A named tuple, or another container with a type of its own, is one argument.
    """
    return output if type(output) is tuple or type(output) is list else (output,)


def flatten(arguments: Sequence[Any]) -> tuple[Sequence[Any], pytree.TreeSpec | None]:
    """The leaves of a stage's arguments, and their tree if they are nested."""
    for argument in arguments:
        if not isinstance(argument, torch.Tensor):
            break
    else:
        return arguments, None
    leaves, spec = pytree.tree_flatten(tuple(arguments))
    return (arguments, None) if all(x.is_leaf() for x in spec.children()) else (leaves, spec)
