"""The files of a save: a manifest of its contents, and tensors in the safetensors format.

::

    {"crc32": "…", "content": {
        "format": "taktline checkpoint", "version": 1, "written_by": {"taktline": …, "torch": …},
        "step": 300,
        "files": {"rank-00000.safetensors": {"bytes": 104, "crc32": "…, one for each 64 KiB"}},
        "tensors": {"model/0.weight": {"dtype": "float32", "shape": [2, 3],
                                       "pieces": [{"file": …, "start": [0, 0], "size": [2, 3]}]}},
        "aliases": {…}, "optimizers": […], "values": {…}}}

Each process writes its part in the same form, without the first two lines of the content. A file
of tensors is a header in JSON, then the bytes of each tensor. They are written and read one by one,
so that a process never holds more than one tensor beside its own.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias

import numpy as np
import torch

from taktline.checkpoint.model_state import joined
from taktline.checks import conform, read, shown
from taktline.errors import CheckpointError
from taktline.meta import DTYPES, is_sharded, local
from taktline.transport.codec import NotPlainError, pack, unpack

MANIFEST = "manifest.json"
LOCK = ".lock"
_FORMAT = "taktline checkpoint"
_VERSION = 1
"""Of the format; newer ones are refused."""
_PIECE = {"file": str, "start": [int], "size": [int]}
_GROUP = {"names": [str], "options": {str: object}}
_PART = {
    "files": {str: {"bytes": int, "crc32": str}},
    "tensors": {str: {"dtype": str, "shape": [int], "pieces": [_PIECE]}},
    "aliases": {str: str},
    "optimizers": [{"class": str, "groups": [_GROUP], "state": {str: {str: object}}}],
    "values": {str: object},
}
_CONTENT = {"format": str, "version": int, "written_by": {str: str}, "step": int, **_PART}

_HEADER = {"dtype": str, "shape": [int], "data_offsets": (int, int)}
"""The entry of a tensor in the header of its file."""
_LONGEST_HEADER = 100_000_000
"""The limit of the safetensors format."""
_BLOCK = 1 << 16
"""The bytes of one checksum: reading a part of a file checks only that part."""
_KINDS = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (64, 32, 16, 8)},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"BF16": torch.bfloat16, "C64": torch.complex64, "BOOL": torch.bool},
}
_NAMES = {dtype: name for name, dtype in _KINDS.items()}
_log = logging.getLogger("taktline")


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read it; a pipe or a device may block for ever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    return open(path, "rb")


def lock(folder: Path) -> TextIO:
    """Lock a folder until the file is closed; raises if another job has locked it.

    The first process of a job holds the lock (``flock``) while a save is written, so it ends with
    that process, whatever ends it.
    """
    file = open(folder / LOCK, "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError(
            f"another job is saving to {folder}; use a folder of its own for each job, or end one "
            "of them"
        ) from None
    except OSError as error:  # of a file system without locks
        _log.warning("%s cannot be locked: %s", folder, error.strerror)
    return file


def unlock(file: TextIO) -> None:
    """Unlock a folder, also if a forked process has the file open, too."""
    with suppress(OSError):  # of a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def write_text(path: Path, text: str) -> None:
    """Write a file so that it appears whole or not at all, and flush it to disk."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb", buffering=0) as file:
        file.write(text.encode())
        os.fsync(file.fileno())
    new.rename(path)


def sync(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_writable(tensor: torch.Tensor, name: str) -> None:
    """Raise unless the format can hold such a tensor.

    >>> require_writable(torch.ones(2).to_sparse(), "mask")
    Traceback (most recent call last):
    taktline.errors.CheckpointError: mask is a tensor of torch.sparse_coo and ..., which cannot ...
    """
    if tensor.layout is not torch.strided or tensor.dtype not in _NAMES or tensor.is_meta:
        kind = f"{tensor.layout} and {tensor.dtype} on {tensor.device}"
        raise CheckpointError(f"{name} is a tensor of {kind}, which cannot be saved")


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a file of tensors, and flush it to disk; returns its size and its checksums.

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
        begin, end = end, end + tensor.nbytes
        kind, shape = _NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    checksums: defaultdict[int, int] = defaultdict(int)
    with open(path, "wb", buffering=0) as file:

        def add(data: memoryview) -> None:
            start, count = file.tell(), len(data)
            for block in range(start // _BLOCK, -(-(start + count) // _BLOCK)):
                part = data[max(0, block * _BLOCK - start) : (block + 1) * _BLOCK - start]
                checksums[block] = zlib.crc32(part, checksums[block])
            while data:
                data = data[file.write(data) :]
            if count >= 1 << 20 and hasattr(os, "posix_fadvise"):
                # Let the disk begin now, and not only when all is written.
                os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)

        add(memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in ordered.values():
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            add(plain.reshape(-1).view(torch.uint8).numpy().data)
        os.fsync(file.fileno())
        found = "".join(f"{each:08x}" for each in checksums.values())
        return {"bytes": file.tell(), "crc32": found}


Region: TypeAlias = tuple[range, ...]
"""A part of a tensor: its indices along each dimension."""


def region_of(start: Iterable[int], size: Iterable[int]) -> Region:
    """The region with this first element, of this shape."""
    return tuple(range(first, first + count) for first, count in zip(start, size, strict=True))


def overlap(one: Region, other: Region) -> Region | None:
    """The region that two regions have in common.

    >>> overlap((range(4), range(4)), (range(2, 6), range(2)))
    (range(2, 4), range(0, 2))
    """
    pairs = zip(one, other, strict=True)
    found = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return found if all(found) else None


def _inside(part: Region, whole: Region) -> tuple[slice, ...]:
    """The slices of a region in a tensor that covers another one."""
    pairs = zip(part, whole, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def _elements(region: Region) -> int:
    return prod(map(len, region))


def shard_of(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Region]:
    """The shard of a tensor in this process, and its region; of a plain tensor, all of it."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor, tuple(map(range, tensor.shape))
    try:
        (chunk,) = tensor.__create_chunk_list__()
    except (RuntimeError, ValueError) as error:  # a part of a sum, or several parts
        raise CheckpointError(f"{name} cannot be saved or loaded in its layout: {error}") from error
    return local(tensor), region_of(chunk.offsets, chunk.sizes)


class TensorFile:
    """A file of tensors, of which only the parts that are used are read."""

    def __init__(self, path: Path, checksums: str = "") -> None:
        self.path, self._checksums = path, checksums
        self._checked: set[int] = set()
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{path} is not a safetensors file, or is truncated")
            header = read(file.read(length).rstrip(), {str: object}, what=f"the header of {path}")
        header.pop("__metadata__", None)
        entries = conform(header, {str: _HEADER}, what=f"the header of {path}")
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
        """Types and shapes, and the places: the first byte, and the one after the last."""
        for name, entry in entries.items():
            dtype, shape = _KINDS.get(entry["dtype"]), tuple(entry["shape"])
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if dtype is None:
                kind = entry["dtype"][:40]
                raise CheckpointError(f"{path}: {name} is of the unknown type {kind!r}")
            inside = min(shape, default=0) >= 0 and 8 + length <= begin and end <= size
            if not inside or end - begin != prod(shape) * dtype.itemsize:
                raise CheckpointError(f"{path} is damaged: {name} does not fit its shape and place")
            self.tensors[name] = dtype, shape, begin, end

    def view(self, name: str) -> torch.Tensor:
        """A tensor in a map of the file; its bytes are read when they are used."""
        dtype, shape, begin, end = self.tensors[name]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        with open_file(self.path) as file:
            # Copy on write: torch takes only memory that can be written.
            data = torch.from_numpy(np.memmap(file, np.uint8, "c", begin, (end - begin,)))
        if begin % dtype.itemsize:  # files of other writers may be unaligned
            data = data.clone()
        return data.view(dtype).reshape(shape)

    def check(self, name: str, part: tuple[slice, ...]) -> None:
        """Raise unless the bytes from the first to the last element of a part are as written."""
        dtype, shape, start, _ = self.tensors[name]
        first = last = 0  # the numbers of these elements
        for each, size in zip(part, shape, strict=True):
            first, last = first * size + each.start, last * size + each.stop - 1
        begin, end = start + first * dtype.itemsize, start + (last + 1) * dtype.itemsize
        blocks = range(begin // _BLOCK, -(-end // _BLOCK) if prod(shape) else 0)
        with open_file(self.path) as file:
            for block in (each for each in blocks if each not in self._checked):
                file.seek(block * _BLOCK)
                found = zlib.crc32(file.read(_BLOCK))
                if f"{found:08x}" != self._checksums[8 * block : 8 * block + 8]:
                    raise CheckpointError(
                        f"{self.path} is damaged, somewhere in bytes {block * _BLOCK:,} to "
                        f"{(block + 1) * _BLOCK:,}, where {name} is; load an earlier save"
                    )
                self._checked.add(block)


class Entry(NamedTuple):
    """A tensor of a checkpoint: its pieces, each with the name of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[tuple[str, Region]]


class Checkpoint:
    """What a checkpoint contains; of its tensors only the parts that are used are read."""

    def __init__(self, path: Path) -> None:
        """Read the manifest; raises if the checkpoint is not whole."""
        self._understand(_content(path), path)
        self._files: dict[str, TensorFile] = {}
        for name, known in self._listed.items():
            file, size = path / name, known["bytes"]
            if Path(name).name != name or not file.is_file():
                raise CheckpointError(
                    f"{file} is missing, or is not a regular file; load an earlier save"
                )
            if (found := file.stat().st_size) != size:
                raise CheckpointError(
                    f"{file} has {found:,} bytes, not {size:,}; load an earlier save"
                )

    def _understand(self, content: dict[str, Any], path: Path) -> None:
        self.path = path
        self.step: int = content["step"]
        self.aliases: dict[str, str] = content["aliases"]
        """Further names in the model for a weight that the checkpoint has under another name."""
        self.optimizers: list[dict[str, Any]] = content["optimizers"]
        self.values: dict[str, Any] = content["values"]
        """All other values, packed."""
        self._listed: dict[str, dict[str, Any]] = content["files"]
        self.tensors: dict[str, Entry] = {
            name: Entry(
                DTYPES[each["dtype"]],
                tuple(each["shape"]),
                [(p["file"], region_of(p["start"], p["size"])) for p in each["pieces"]],
            )
            for name, each in content["tensors"].items()
        }

    def prepare(self, names: Iterable[str]) -> None:
        """Hear which tensors are about to be checked and filled."""

    def _pieces(self, name: str, region: Region) -> Iterator[tuple[TensorFile, Region, Region]]:
        """The pieces of a tensor that meet a region: file, piece, and what both have in common."""
        for file, piece in self.tensors[name].pieces:
            if (common := overlap(piece, region)) is not None:
                if file not in self._files:
                    checksums = self._listed[file]["crc32"]
                    self._files[file] = TensorFile(self.path / file, checksums)
                yield self._files[file], piece, common

    def check(self, name: str, like: torch.Tensor) -> None:
        """Raise unless all bytes for a tensor are there, and as they were written."""
        _, region = shard_of(like, name)
        covered: set[Region] = set()
        for file, piece, common in self._pieces(name, region):
            expected = self.tensors[name].dtype, tuple(map(len, piece))
            if file.tensors.get(name, ())[:2] != expected:
                raise CheckpointError(f"{file.path} does not have {name} as the manifest says")
            file.check(name, _inside(common, piece))
            covered.add(common)
        if sum(map(_elements, covered)) != _elements(region):
            raise CheckpointError(f"{self.path} lacks a part of {name}")

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a tensor that has been checked."""
        tensor, region = shard_of(tensor, name)
        for file, piece, common in self._pieces(name, region):
            tensor[_inside(common, region)].copy_(file.view(name)[_inside(common, piece)])

    def value(self, name: str) -> Any:
        """A value that belongs neither to the model nor to an optimizer; None if there is none."""

        def fetch(part: str) -> torch.Tensor:
            full = f"values/{part}"
            entry = self.tensors[full]
            self.check(full, torch.empty(entry.shape, device="meta"))  # before memory is taken
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            self.fill(full, tensor)
            return tensor

        return unpack(self.values.get(name), fetch)


def _content(path: Path) -> Any:
    """What the manifest of a checkpoint says, if it is as it was written."""
    file = path / MANIFEST
    with open_file(file) as opened:
        whole = read(opened.read(), {"crc32": str, "content": object}, what=str(file))
    content = whole["content"]
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > _VERSION:
        raise CheckpointError(
            f"{path} has version {version} of the format, and this Taktline reads up to "
            f"{_VERSION}; install the one that has written it, or a newer one"
        )
    if whole["crc32"] != _checksum(content):
        raise CheckpointError(f"{file} is damaged; load an earlier save")
    return conform(content, _CONTENT, what=str(file))


def _checksum(content: Any) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def packed(value: Any, what: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON; its tensors go into ``tensors``, under names that begin with ``what``.

    >>> packed({"fn": print}, "scheduler", {})
    Traceback (most recent call last):
    taktline.errors.CheckpointError: scheduler.fn is <built-in function print>, which cannot ...
    """
    try:
        return pack(value, what, tensors)
    except NotPlainError as error:
        where, found = error.args
        raise CheckpointError(
            f"{where} is {shown(found)}, which cannot be saved without pickle; use numbers, "
            "strings, tensors, and lists or dicts of these"
        ) from None


def sealed(content: Any) -> str:
    """The text of a manifest, with the checksum of its content."""
    return json.dumps({"crc32": _checksum(content), "content": content})


def merged(parts: Iterable[dict[str, Any]], step: int) -> dict[str, Any]:
    """The content of a manifest, from the parts of all processes."""
    # The package is not imported: it is above this room.
    by = {"taktline": sys.modules["taktline"].__version__, "torch": str(torch.__version__)}
    whole: dict[str, Any] = {key: type(shape)() for key, shape in _PART.items()}
    whole |= {"format": _FORMAT, "version": _VERSION, "written_by": by, "step": step}
    for part in parts:
        whole["files"] |= part["files"]
        whole["values"] |= part["values"]
        whole["aliases"] = joined([whole["aliases"], part["aliases"]])
        for name, entry in part["tensors"].items():
            known = whole["tensors"].setdefault(name, {**entry, "pieces": []})
            known["pieces"] += entry["pieces"]
        for index, optimizer in enumerate(part["optimizers"]):
            if index == len(whole["optimizers"]):
                whole["optimizers"].append({**optimizer, "groups": [], "state": {}})
            known = whole["optimizers"][index]
            known["groups"] += [each for each in optimizer["groups"] if each not in known["groups"]]
            known["state"] = optimizer["state"] | known["state"]
    for name, entry in whole["tensors"].items():
        held = sum(prod(piece["size"]) for piece in entry["pieces"])
        if held != prod(entry["shape"]):
            raise CheckpointError(
                f"only {held:,} of {prod(entry['shape']):,} elements of {name} are on the ranks "
                "that save; save on all ranks with a shard of it"
            )
    return whole
