"""What is known of the tensors at the boundaries of a stage, in torch's terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from taktline.errors import PipeliningMetadataError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

__all__ = [
    "GetMeshCallback",
    "InferenceMode",
    "MeshCacheKey",
    "TensorMeta",
    "_DTensorMeta",
    "_MeshCache",
    "_StageBackwardMeta",
    "_StageForwardMeta",
    "_StageMeta",
    "_TensorMeta",
    "_derive_grad_metas",
    "_make_tensor_from_meta",
    "extract_tensor_meta",
    "extract_tensor_metas",
]

MeshCacheKey: TypeAlias = tuple[tuple[str, ...], Any]
"""The names of a mesh's dimensions, and its layout."""


@dataclass(frozen=True, slots=True)
class _TensorMeta:
    """A tensor without its values.

    >>> one, other = torch.zeros(2, 3), torch.zeros(2, 4)
    >>> _TensorMeta.from_tensor(one).get_diff(_TensorMeta.from_tensor(other))[0]
    'shape mismatch: torch.Size([2, 3]) vs torch.Size([2, 4])'
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> _TensorMeta:
        """What there is to know of a tensor."""
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> torch.Tensor:
        """A tensor like it, with any values."""
        return _make_tensor_from_meta(self, device).requires_grad_(self.requires_grad)

    def get_diff(self, other: _TensorMeta) -> list[str]:
        """Each difference in words; whether a gradient is wanted is none."""
        return _differences(self, other, ("shape", "stride", "dtype"))


@dataclass(frozen=True, slots=True)
class _DTensorMeta(_TensorMeta):
    """The same of a DTensor: shape and stride are those of this rank's shard."""

    global_shape: torch.Size = field(default_factory=lambda: torch.Size([]))
    global_stride: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_layout: Any = None

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> _DTensorMeta:
        """What there is to know of a DTensor."""
        shard, mesh = dtensor._local_tensor, dtensor.device_mesh
        return _DTensorMeta(
            shape=shard.shape,
            stride=shard.stride(),
            dtype=dtensor.dtype,
            requires_grad=dtensor.requires_grad,
            global_shape=dtensor.shape,
            global_stride=dtensor.stride(),
            placements=tuple(dtensor.placements),
            mesh_dim_names=tuple(mesh.mesh_dim_names or ()),
            mesh_layout=getattr(mesh, "_layout", None),
        )

    @property
    def mesh_cache_key(self) -> MeshCacheKey:
        """By which its mesh is found."""
        return self.mesh_dim_names, self.mesh_layout

    def to_dtensor(self, device: torch.device | str, mesh: DeviceMesh) -> DTensor:
        """A DTensor like it on a mesh, with any values."""
        made = DTensor.from_local(
            _make_tensor_from_meta(self, device),
            mesh,
            self.placements,
            run_check=False,
            shape=self.global_shape,
            stride=self.global_stride,
        )
        made.requires_grad_(self.requires_grad)
        return made

    def get_diff(self, other: _TensorMeta) -> list[str]:
        """Each difference in words."""
        if not isinstance(other, _DTensorMeta):
            return [f"type: {type(self).__name__} vs {type(other).__name__}"]
        own = [f.name for f in fields(self) if f.name != "requires_grad"]
        return _differences(self, other, own)


TensorMeta: TypeAlias = _TensorMeta | _DTensorMeta


def _differences(one: object, other: object, names: Iterable[str]) -> list[str]:
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    return [f"{name} mismatch: {a} vs {b}" for name, a, b in pairs if a != b]


def _make_tensor_from_meta(meta: _TensorMeta, device: torch.device | str) -> torch.Tensor:
    """A plain tensor with its shape, stride and type."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def extract_tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    """What there is to know of a tensor, whole or in shards."""
    if isinstance(tensor, DTensor):
        return _DTensorMeta.from_dtensor(tensor)
    return _TensorMeta.from_tensor(tensor)


def extract_tensor_metas(
    tensors: Sequence[torch.Tensor | None] | None, *, allow_none: bool = False
) -> tuple[TensorMeta | None, ...] | None:
    """The same of several; None where there is none, if that is allowed.

    >>> extract_tensor_metas((torch.zeros(2), None), allow_none=True)[0].shape
    torch.Size([2])
    """
    if tensors is None:
        return None
    metas = tuple(extract_tensor_meta(t) if isinstance(t, torch.Tensor) else None for t in tensors)
    if None in metas and not allow_none:
        raise PipeliningMetadataError(
            "None values are not allowed in tensor metadata tuples. Use allow_none=True for "
            "optional values."
        )
    return metas


def _derive_grad_metas(tensor_metas: Sequence[TensorMeta]) -> tuple[TensorMeta | None, ...]:
    """Of the gradients of plain tensors; how that of a DTensor is placed cannot be told."""
    return tuple(
        _TensorMeta(meta.shape, meta.stride, meta.dtype, False)
        if meta.requires_grad and not isinstance(meta, _DTensorMeta)
        else None
        for meta in tensor_metas
    )


@dataclass(frozen=True, slots=True)
class _StageForwardMeta:
    """What one stage tells the next of its outputs."""

    forward_metas: tuple[TensorMeta, ...]


@dataclass(frozen=True, slots=True)
class _StageBackwardMeta:
    """What one stage tells the one before of the gradients of its inputs."""

    backward_metas: tuple[TensorMeta | None, ...]


@dataclass(slots=True)
class _StageMeta:
    """All that is known of a stage's boundaries; None for what is not known yet."""

    inputs: tuple[TensorMeta, ...] | None = None
    outputs: tuple[TensorMeta, ...] | None = None
    input_grads: tuple[TensorMeta | None, ...] | None = None
    output_grads: tuple[TensorMeta | None, ...] | None = None

    def has_any(self) -> bool:
        """Whether anything is known."""
        return any(getattr(self, f.name) is not None for f in fields(self))

    def has_dtensors(self) -> bool:
        """Whether an input or output is in shards."""
        metas = (*(self.inputs or ()), *(self.outputs or ()))
        return any(isinstance(meta, _DTensorMeta) for meta in metas)

    def is_complete_for_forward(self) -> bool:
        """Whether a forward can be prepared from it."""
        return self.inputs is not None and self.outputs is not None


class InferenceMode(Enum):
    """Whether shapes were given with the stage, or are learned from a first micro-batch."""

    STATIC = "static"
    DYNAMIC = "dynamic"

    @staticmethod
    def needs_dynamic(meta: _StageMeta, stage_has_backward: bool) -> bool:
        """Whether something has to be learned.

        >>> InferenceMode.needs_dynamic(_StageMeta(), stage_has_backward=False)
        True
        """
        if not meta.is_complete_for_forward():
            return True
        known = meta.input_grads is not None and meta.output_grads is not None
        return stage_has_backward and meta.has_dtensors() and not known


class GetMeshCallback(Protocol):
    """Finds a mesh by the names of its dimensions and its layout."""

    def __call__(self, mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> DeviceMesh:
        """The mesh."""
        ...


class _MeshCache:
    """The meshes that are known, and how to find others."""

    def __init__(self, get_mesh_cb: GetMeshCallback | None = None) -> None:
        self._cache: dict[MeshCacheKey, DeviceMesh] = {}
        self._get_mesh_cb = get_mesh_cb

    def get_mesh(self, key: MeshCacheKey) -> DeviceMesh:
        """The mesh of a key."""
        if key in self._cache:
            return self._cache[key]
        names, layout = key
        wanted = f"mesh_dim_names={names}, mesh_layout={layout}"
        if self._get_mesh_cb is None:
            raise PipeliningMetadataError(
                f"Mesh not found in cache for {wanted}, and no get_mesh callback provided. "
                "Provide a get_mesh callback or use DTensors in static mode."
            )
        mesh = self._get_mesh_cb(names, layout)
        if mesh is None:
            raise PipeliningMetadataError(
                f"Mesh lookup failed: callback returned None for {wanted}. "
                "Ensure all stages use meshes from the same universe."
            )
        self._cache[key] = mesh
        return mesh

    def put(self, key: MeshCacheKey, mesh: DeviceMesh) -> None:
        """Remember a mesh."""
        self._cache[key] = mesh

    def update_from_tensors(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Remember the meshes of DTensors."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                self.put(_DTensorMeta.from_dtensor(tensor).mesh_cache_key, tensor.device_mesh)
