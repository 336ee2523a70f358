"""Files of tensors in the safetensors format: a header in JSON, then the bytes of each tensor.

They are written one tensor at a time, and read through a map of the file, so that a process never
holds more of one than it uses. Checksums are kept outside, one for each block of a tensor.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from taktline.checks import read
from taktline.errors import CheckpointError, JsonError

__all__ = ["BLOCK", "KINDS", "Stored", "TensorFile", "blocks", "require_writable", "write"]

BLOCK = 1 << 16
"""So many bytes have a checksum of their own: who needs a part of a tensor checks that part."""

_LONGEST_HEADER = 100_000_000
"""The format's own limit."""

KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in KINDS.items()}


def require_writable(tensor: torch.Tensor, name: str) -> None:
    """Raise unless the format has a place for such a tensor.

    >>> require_writable(torch.ones(2).to_sparse(), "mask")
    Traceback (most recent call last):
    taktline.errors.CheckpointError: mask is a tensor of torch.sparse_coo, which cannot be saved
    """
    strided = tensor.layout is torch.strided
    if not strided or tensor.dtype not in _NAMES or tensor.is_meta:
        kind = "no values" if tensor.is_meta else tensor.dtype if strided else tensor.layout
        raise CheckpointError(f"{name} is a tensor of {kind}, which cannot be saved")


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write a file, and see it onto the disk; returns the checksums of each tensor.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp(), "some.safetensors")
    >>> write(path, {"weight": torch.ones(2, 3)})
    {'weight': '29dd1225'}
    >>> TensorFile(path).view("weight").sum()
    tensor(6.)
    """
    header: dict[str, Any] = {}
    end = 0
    # The largest elements first: then all of them are aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    checksums: dict[str, str] = {}
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for name in order:
            data = _bytes(tensors[name])
            checksums[name] = _checksums(data)
            _write_all(file.fileno(), data)
        os.fsync(file.fileno())
    return checksums


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, its elements in order."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _checksums(data: memoryview) -> str:
    parts = (data[at : at + BLOCK] for at in range(0, len(data), BLOCK))
    return "".join(f"{zlib.crc32(part):08x}" for part in parts)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """The first byte, from the beginning of the file."""
    end: int


class TensorFile:
    """A file that is read through a map of it: what nobody looks at is not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                    raise CheckpointError(f"{path} is no safetensors file, or is cut off")
                text = file.read(length)
                # A copy on writing: torch takes no memory that cannot be written.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self.tensors = _stored(text, 8 + length, size, path)

    def view(self, name: str) -> torch.Tensor:
        """A tensor that lies in the file; it is read where it is looked at."""
        stored = self.tensors[name]
        count = prod(stored.shape)
        if not count:
            return torch.empty(stored.shape, dtype=stored.dtype)
        if stored.begin % stored.dtype.itemsize:  # files of others may have it so
            data = bytearray(self._map[stored.begin : stored.end])
            return torch.frombuffer(data, dtype=stored.dtype).reshape(stored.shape)
        flat = torch.frombuffer(self._map, dtype=stored.dtype, count=count, offset=stored.begin)
        return flat.reshape(stored.shape)

    def check(self, name: str, checksums: str, wanted: np.ndarray) -> None:
        """Raise unless the wanted blocks of a tensor are as they were written."""
        stored = self.tensors[name]
        with memoryview(self._map) as data:
            for block in np.flatnonzero(wanted).tolist():
                at = stored.begin + block * BLOCK
                found = zlib.crc32(data[at : min(at + BLOCK, stored.end)])
                if f"{found:08x}" != checksums[8 * block : 8 * block + 8]:
                    raise CheckpointError(
                        f"{self.path} is damaged: the checksum of {name} is another one than when "
                        "it was written; load an earlier save"
                    )
        self.release(name)

    def release(self, name: str) -> None:
        """Let go of what was read of a tensor; its memory counts as this process's until then."""
        stored = self.tensors[name]
        begin = stored.begin // mmap.PAGESIZE * mmap.PAGESIZE
        if stored.end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, stored.end - begin)


_ENTRY = {"dtype": str, "shape": [int], "data_offsets": (int, int)}


def _stored(text: bytes, start: int, size: int, path: Path) -> dict[str, Stored]:
    """The tensors of a header, if they lie in the file."""
    try:
        header = read(text.rstrip(), {str: object}, what=str(path))
        header.pop("__metadata__", None)
        entries = read(json.dumps(header), {str: _ENTRY}, what=str(path))
    except JsonError as error:
        raise CheckpointError(f"{error}; this is no safetensors file, or it is damaged") from None
    found: dict[str, Stored] = {}
    for name, entry in entries.items():
        dtype, shape = KINDS.get(entry["dtype"]), tuple(entry["shape"])
        begin, end = (start + offset for offset in entry["data_offsets"])
        if dtype is None:
            raise CheckpointError(f"{path}: {name} is of the unknown type {entry['dtype'][:40]!r}")
        if min(shape, default=0) < 0 or not start <= begin <= end <= size:
            raise CheckpointError(f"{path}: {name} does not lie in the file; it is damaged")
        if end - begin != prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path}: {name} has another size than its shape; it is damaged")
        found[name] = Stored(dtype, shape, begin, end)
    return found


def blocks(shape: Sequence[int], part: Sequence[slice], itemsize: int) -> np.ndarray:
    """Which blocks of a tensor's bytes hold a part of it: a flag for each.

    >>> blocks([4, 1 << 14], [slice(1, 3), slice(0, 1 << 14)], 4)
    array([False,  True,  True, False])
    """
    strides = [itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    whole = len(shape)
    while whole and (part[whole - 1].start, part[whole - 1].stop) == (0, shape[whole - 1]):
        whole -= 1
    # The bytes lie in runs: from dimension ``whole - 1`` on, each is in one piece.
    starts = np.zeros(1, np.int64)
    for dim in range(max(whole - 1, 0)):
        steps = np.arange(part[dim].start, part[dim].stop) * strides[dim]
        starts = (starts[:, None] + steps).ravel()
    run = itemsize * prod(shape)
    if whole:
        last = part[whole - 1]
        starts = starts + last.start * strides[whole - 1]
        run = (last.stop - last.start) * strides[whole - 1]
    marks = np.zeros(-(-itemsize * prod(shape) // BLOCK) + 1, np.int64)
    np.add.at(marks, starts // BLOCK, 1)
    np.add.at(marks, (starts + run - 1) // BLOCK + 1, -1)
    return np.cumsum(marks)[:-1] > 0
