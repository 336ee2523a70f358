"""What crosses a boundary between stages, without its data: shapes, types, and places on a mesh.

Of a DTensor, each rank sends and receives its own shard.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import nn

from taktline import pytree
from taktline.errors import SignatureError
from taktline.text import counted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Constant: TypeAlias = bool | int | float | str | None
"""A value that is part of a signature, and is not sent as data."""

GetMesh: TypeAlias = Callable[[tuple[str, ...], Any], "DeviceMesh | None"]
"""Finds a mesh by the names of its dimensions. The second argument, torch's layout, is None."""

_Numbers: TypeAlias = tuple[int, ...]
_PLACEMENT = re.compile(r"R|S\((-?\d+)\)|P\((\w+)\)")


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor; there are none unless their module was imported."""
    if type(value) is torch.Tensor:  # the usual case, asked for often
        return False
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor lies on a mesh; the ranks of the mesh differ from stage to stage."""

    names: tuple[str, ...]
    """Of the mesh's dimensions."""
    sizes: _Numbers
    placements: tuple[str, ...]
    """``S(dim)`` for a shard, ``R`` for a replica, ``P(sum)`` for a part of a sum."""
    shape: _Numbers
    """Of the whole tensor."""
    stride: _Numbers

    @classmethod
    def of(cls, tensor: DTensor) -> Sharding:
        """How a DTensor lies on its mesh."""
        return cls(
            *_names_and_sizes(tensor.device_mesh),
            tuple(_text_of_placement(placement) for placement in tensor.placements),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )

    @property
    def of_gradient(self) -> Sharding:
        """How the gradient is placed: as its tensor, but replicated where that is partial."""
        placements = ("R" if text.startswith("P") else text for text in self.placements)
        return replace(self, placements=tuple(placements))

    def assemble(self, shard: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """The DTensor of this rank's shard."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            shard,
            mesh,
            _placements(self.placements),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    def __str__(self) -> str:
        return f"{', '.join(self.placements)} over {self.mesh_text}"

    @property
    def mesh_text(self) -> str:
        """The names and sizes of the mesh's dimensions."""
        names = self.names or tuple(map(str, range(len(self.sizes))))
        return ", ".join(f"{n} ({s})" for n, s in zip(names, self.sizes, strict=True))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, or all of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a stage's input, placed as :attr:`Sharding.of_gradient` says."""
    gradient = tensor.grad
    if gradient is None or not is_sharded(tensor):
        return gradient
    wanted = _placements(Sharding.of(tensor).of_gradient.placements)
    return gradient.redistribute(placements=wanted) if is_sharded(gradient) else gradient


def root_gradient(loss: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """The gradient that the backward of a loss begins with."""
    if not is_sharded(loss):
        return _filled(loss, scale)
    sharding = Sharding.of(loss).of_gradient
    return sharding.assemble(_filled(local(loss.detach()), scale), loss.device_mesh)


def _filled(like: torch.Tensor, value: float | torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):  # reading it would wait for the device
        return torch.empty_like(like, requires_grad=False).copy_(value)
    return torch.full_like(like, value)


def find_mesh(sharding: Sharding, module: nn.Module, get_mesh: GetMesh | None) -> DeviceMesh:
    """The mesh for a tensor that arrives: from ``get_mesh``, or that of the stage's parameters."""
    if get_mesh is not None:
        mesh = get_mesh(sharding.names, None)
        if mesh is not None and tuple(mesh.shape) == sharding.sizes:
            return mesh
        answer = "None" if mesh is None else f"a mesh of {list(mesh.shape)}"
        raise SignatureError(
            f"get_mesh returns {answer} for the mesh {sharding.mesh_text} of a received tensor; it "
            "must return a mesh of that shape with this rank in it"
        )
    for tensor in (*module.parameters(), *module.buffers()):
        mesh = tensor.device_mesh if is_sharded(tensor) else None
        if mesh is not None and _names_and_sizes(mesh) == (sharding.names, sharding.sizes):
            return mesh
    raise SignatureError(
        f"a tensor arrives in shards over the mesh {sharding.mesh_text}, and no parameter of this "
        "stage is on such a mesh; pass get_mesh=lambda names, layout: mesh to the stage"
    )


def _names_and_sizes(mesh: DeviceMesh) -> tuple[tuple[str, ...], _Numbers]:
    return tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)


def _text_of_placement(placement: Placement) -> str:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    if type(placement) is Partial:
        return f"P({placement.reduce_op})"
    raise SignatureError(
        f"a tensor that is placed as {placement} cannot be sent to another rank; redistribute it "
        "to Shard, Replicate or Partial"
    )


def _placements(texts: tuple[str, ...]) -> list[Placement]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    found: list[Placement] = []
    for text in texts:
        match = _PLACEMENT.fullmatch(text)
        if match is None:
            raise SignatureError(f"{text!r} is not a placement")
        dim, reduction = match.groups()
        found.append(Shard(int(dim)) if dim else Partial(reduction) if reduction else Replicate())
    return found


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
