"""Files of tensors in the safetensors format: a header in JSON, then the bytes of each tensor.

Files are read through a memory map, so that a process never holds more of a file than it uses. The
checksums are in the manifest, one for each block of the file.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from io import BufferedReader, FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from taktline.checks import conform, read
from taktline.errors import CheckpointError, JsonError

_BLOCK = 1 << 16
"""The bytes of one checksum: reading a part of a file checks only that part."""
_LONGEST_HEADER = 100_000_000
"""The format's own limit."""
_LARGE = 1 << 20
"""The fewest bytes of a tensor that the disk begins to write at once."""

_KINDS = {
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
_NAMES = {dtype: name for name, dtype in _KINDS.items()}


def require_regular(path: Path) -> None:
    """Raise for a pipe, a socket or a device, which may block for ever, and for a folder."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file")


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read it."""
    require_regular(path)
    return open(path, "rb")


def require_writable(tensor: torch.Tensor, name: str) -> None:
    """Raise unless the format can hold such a tensor.

    >>> require_writable(torch.ones(2).to_sparse(), "mask")
    Traceback (most recent call last):
    taktline.errors.CheckpointError: mask is a tensor of torch.sparse_coo, which cannot be saved
    """
    strided = tensor.layout is torch.strided
    if not strided or tensor.dtype not in _NAMES or tensor.is_meta:
        kind = "no values" if tensor.is_meta else tensor.dtype if strided else tensor.layout
        raise CheckpointError(f"{name} is a tensor of {kind}, which cannot be saved")


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a file, and flush it to disk; returns its size and its checksums.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp(), "some.safetensors")
    >>> write(path, {"weight": torch.ones(2, 3)})
    {'bytes': 104, 'crc32': '0ee85a4c'}
    >>> TensorFile(path).view("weight").sum()
    tensor(6.)
    """
    # The largest elements first, so that all of them are aligned.
    ordered = dict(sorted(tensors.items(), key=lambda each: -each[1].element_size()))
    header, end = {}, 0
    for name, tensor in ordered.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        kind, shape = _NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    checksums: defaultdict[int, int] = defaultdict(int)
    with open(path, "wb", buffering=0) as file:
        _add(file, memoryview(len(text).to_bytes(8, "little") + text), checksums)
        for tensor in ordered.values():
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            _add(file, plain.reshape(-1).view(torch.uint8).numpy().data, checksums)
        os.fsync(file.fileno())
        found = "".join(f"{each:08x}" for each in checksums.values())
        return {"bytes": file.tell(), "crc32": found}


def _add(file: FileIO, data: memoryview, checksums: defaultdict[int, int]) -> None:
    """Write bytes, and add them to the checksums of their blocks."""
    start, count = file.tell(), len(data)
    for block in range(start // _BLOCK, -(-(start + count) // _BLOCK)):
        part = data[max(0, block * _BLOCK - start) : (block + 1) * _BLOCK - start]
        checksums[block] = zlib.crc32(part, checksums[block])
    while data:
        data = data[file.write(data) :]
    if count >= _LARGE and hasattr(os, "posix_fadvise"):
        # Let the disk begin now, and not only when all is written.
        os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)


class _Stored(NamedTuple):
    """The place of a tensor in a file: its first byte, and the one after its last."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """A file that is read through a memory map: only the parts that are used are read."""

    def __init__(self, path: Path, checksums: str = "") -> None:
        self.path, self._checksums = path, checksums
        self._checked: set[int] = set()
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                    raise CheckpointError(f"{path} is not a safetensors file, or is truncated")
                text = file.read(length)
                # Copy on write: torch takes only memory that can be written.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self.tensors = _stored(text, 8 + length, size, path)

    def view(self, name: str) -> torch.Tensor:
        """A tensor in the memory of the map; its bytes are read when they are used."""
        stored = self.tensors[name]
        count = prod(stored.shape)
        if not count:
            return torch.empty(stored.shape, dtype=stored.dtype)
        data, start = self._map, stored.begin
        if start % stored.dtype.itemsize:  # files of other writers may be unaligned
            data, start = bytearray(self._map[stored.begin : stored.end]), 0
        flat = torch.frombuffer(data, dtype=stored.dtype, count=count, offset=start)
        return flat.reshape(stored.shape)

    def check(self, name: str, part: Sequence[slice]) -> None:
        """Raise unless the bytes from the first to the last element of a part are as written."""
        begin, end = self._span(name, part)
        with memoryview(self._map) as data:
            for block in range(begin // _BLOCK, -(-end // _BLOCK)):
                if block in self._checked:
                    continue
                found = zlib.crc32(data[block * _BLOCK : (block + 1) * _BLOCK])
                if f"{found:08x}" != self._checksums[8 * block : 8 * block + 8]:
                    raise CheckpointError(
                        f"{self.path} is damaged, somewhere in bytes {block * _BLOCK:,} to "
                        f"{(block + 1) * _BLOCK:,}, where {name} is; load an earlier save"
                    )
                self._checked.add(block)
        self.release(name)

    def _span(self, name: str, part: Sequence[slice]) -> tuple[int, int]:
        """The bytes in the file from the first to the last element of a part."""
        dtype, shape, begin, _ = self.tensors[name]
        if not prod(shape):
            return begin, begin
        first = last = 0  # the numbers of these elements
        for each, size in zip(part, shape, strict=True):
            first, last = first * size + each.start, last * size + each.stop - 1
        return begin + first * dtype.itemsize, begin + (last + 1) * dtype.itemsize

    def release(self, name: str) -> None:
        """Free the memory of a tensor that was read."""
        stored = self.tensors[name]
        begin = stored.begin // mmap.PAGESIZE * mmap.PAGESIZE
        if stored.end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, stored.end - begin)


_ENTRY = {"dtype": str, "shape": [int], "data_offsets": (int, int)}


def _stored(text: bytes, start: int, size: int, path: Path) -> dict[str, _Stored]:
    """The tensors of a header, if they lie in the file."""
    try:
        header = read(text.rstrip(), {str: object}, what=str(path))
        header.pop("__metadata__", None)
        entries = conform(header, {str: _ENTRY}, what=str(path))
    except JsonError as error:
        raise CheckpointError(f"{error}; it is not a safetensors file, or is damaged") from None
    found: dict[str, _Stored] = {}
    for name, entry in entries.items():
        dtype, shape = _KINDS.get(entry["dtype"]), tuple(entry["shape"])
        begin, end = (start + offset for offset in entry["data_offsets"])
        if dtype is None:
            raise CheckpointError(f"{path}: {name} is of the unknown type {entry['dtype'][:40]!r}")
        if min(shape, default=0) < 0 or not start <= begin <= end <= size:
            raise CheckpointError(f"{path}: {name} is not within the file; it is damaged")
        if end - begin != prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path} is damaged: the size of {name} does not fit its shape")
        found[name] = _Stored(dtype, shape, begin, end)
    return found
