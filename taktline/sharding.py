"""DTensors: how a tensor lies on a mesh. Each rank sends and receives its own shard."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import nn

from taktline.errors import SignatureError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

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
            tuple(_text_of(placement) for placement in tensor.placements),
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


def _text_of(placement: Placement) -> str:
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
