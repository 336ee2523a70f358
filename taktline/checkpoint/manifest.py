"""A checkpoint on disk: the manifest with its contents, their files, and checksums of everything.

::

    {"crc32": "…", "content": {
        "format": "taktline checkpoint", "version": 1, "written_by": {"taktline": …, "torch": …},
        "step": 300,
        "files": {"rank-00000.safetensors": {"bytes": 104, "crc32": "…, one for each 64 KiB"}},
        "tensors": {"model/0.weight": {"dtype": "float32", "shape": [2, 3],
                                       "pieces": [{"file": …, "start": [0, 0], "size": [2, 3]}]}},
        "aliases": {…}, "optimizers": […], "values": {…}}}

Each process writes its part in the same form, without the first two lines of the content.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from taktline.checkpoint.model_state import joined
from taktline.checkpoint.tensor_file import TensorFile, open_file, require_regular
from taktline.checks import conform, read, shown
from taktline.errors import CheckpointError, JsonError
from taktline.meta import DTYPES
from taktline.sharding import is_sharded, local
from taktline.transport.plain import NotPlainError, pack, unpack

MANIFEST = "manifest.json"
_FORMAT = "taktline checkpoint"
_VERSION = 1
"""Of the format; newer ones are refused."""
MOST_STEPS = 2**53
"""The largest step that all programs can read from JSON."""

_PIECE = {"file": str, "start": [int], "size": [int]}
_GROUP = {"names": [str], "options": {str: object}}
_PART = {
    "files": {str: {"bytes": int, "crc32": str}},
    "tensors": {str: {"dtype": str, "shape": [int], "pieces": [_PIECE]}},
    "aliases": {str: str},
    "optimizers": [{"class": str, "groups": [_GROUP], "state": {str: {str: object}}}],
    "values": {str: object},
}
_SHAPE = {"format": str, "version": int, "written_by": {str: str}, "step": int, **_PART}


class Region(NamedTuple):
    """A part of a tensor: the first index and how many, along each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def meets(self, other: Region) -> Region | None:
        """The region that two regions have in common.

        >>> Region((0, 0), (4, 4)).meets(Region((2, 0), (4, 2)))
        Region(start=(2, 0), size=(2, 2))
        """
        start = tuple(map(max, self.start, other.start))
        mine, theirs = (map(sum, zip(*region, strict=True)) for region in (self, other))
        size = tuple(min(ends) - first for first, *ends in zip(start, mine, theirs, strict=True))
        return Region(start, size) if min(size, default=1) > 0 else None

    def inside(self, other: Region) -> tuple[slice, ...]:
        """The slices of this region in a tensor that covers another one.

        >>> Region((2, 0), (2, 2)).inside(Region((2, 0), (4, 2)))
        (slice(0, 2, None), slice(0, 2, None))
        """
        starts = [mine - base for mine, base in zip(self.start, other.start, strict=True)]
        return tuple(slice(at, at + count) for at, count in zip(starts, self.size, strict=True))


def _cover(parts: Sequence[Region], whole: Region) -> bool:
    """Whether parts of a region make up all of it.

    >>> _cover([Region((0,), (2,)), Region((2,), (2,))], Region((0,), (4,)))
    True
    """
    if sum(prod(part.size) for part in parts) < prod(whole.size):
        return False
    there = torch.zeros(whole.size, dtype=torch.bool)
    for part in parts:
        there[part.inside(whole)] = True
    return bool(there.all())


def shard_of(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Region]:
    """The shard of a tensor in this process, and its region; of a plain tensor, all of it."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor, Region((0,) * tensor.dim(), tuple(tensor.shape))
    try:
        chunks = tensor.__create_chunk_list__()
    except RuntimeError as error:  # a part of a sum
        raise CheckpointError(f"{name} cannot be saved or loaded in its layout: {error}") from error
    if len(chunks) != 1:
        raise CheckpointError(f"{name} has {len(chunks)} parts on this rank; only one can be saved")
    return local(tensor), Region(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


class Entry(NamedTuple):
    """A tensor of a checkpoint: its pieces, each with the name of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[tuple[str, Region]]


class Checkpoint:
    """What a checkpoint contains; of its tensors only the parts that are used are read."""

    def __init__(self, path: Path) -> None:
        """Read the manifest; raises if the checkpoint is not whole."""
        content = _content(path)
        self.path = path
        self.step: int = content["step"]
        self.aliases: dict[str, str] = content["aliases"]
        """Further names in the model for a weight that the checkpoint has under another name."""
        self.optimizers: list[dict[str, Any]] = content["optimizers"]
        self.values: dict[str, Any] = content["values"]
        """All other values, packed."""
        self._listed: dict[str, dict[str, Any]] = content["files"]
        self._files: dict[str, TensorFile] = {}
        self.tensors: dict[str, Entry] = {}
        for name, known in self._listed.items():
            _require_file(path / name, name, known["bytes"])
        for name, entry in content["tensors"].items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{path}: {name} is of an unknown type")
            pieces = [
                (each["file"], Region(tuple(each["start"]), tuple(each["size"])))
                for each in entry["pieces"]
            ]
            for file, _ in pieces:
                if file not in self._listed:
                    raise CheckpointError(
                        f"{path}: {name} is in {file[:40]!r}, which the manifest does not list"
                    )
            self.tensors[name] = Entry(DTYPES[entry["dtype"]], tuple(entry["shape"]), pieces)

    def _pieces(self, name: str, region: Region) -> Iterator[tuple[TensorFile, Region, Region]]:
        """The pieces of a tensor that meet a region: file, piece, and what both have in common."""
        for file, piece in self.tensors[name].pieces:
            common = piece.meets(region)
            if common is not None:
                if file not in self._files:
                    checksums = self._listed[file]["crc32"]
                    self._files[file] = TensorFile(self.path / file, checksums)
                yield self._files[file], piece, common

    def check(self, name: str, like: torch.Tensor) -> None:
        """Raise unless all bytes for a tensor are there, and as they were written."""
        _, region = shard_of(like, name)
        covered: list[Region] = []
        for file, piece, common in self._pieces(name, region):
            stored = file.tensors.get(name)
            expected = self.tensors[name].dtype, piece.size
            if stored is None or (stored.dtype, stored.shape) != expected:
                raise CheckpointError(f"{file.path} does not have {name} as the manifest says")
            file.check(name, common.inside(piece))
            covered.append(common)
        if covered != [region] and not _cover(covered, region):
            raise CheckpointError(f"{self.path} lacks a part of {name}")

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a tensor that has been checked."""
        tensor, region = shard_of(tensor, name)
        for file, piece, common in self._pieces(name, region):
            tensor[common.inside(region)].copy_(file.view(name)[common.inside(piece)])
            file.release(name)

    def value(self, name: str) -> Any:
        """A value that belongs neither to the model nor to an optimizer; None if there is none."""
        return unpacked(self.values.get(name), self._read)

    def _read(self, name: str) -> torch.Tensor:
        dtype, shape, _ = self.tensors[f"values/{name}"]
        self.check(f"values/{name}", torch.empty(shape, dtype=dtype, device="meta"))
        tensor = torch.empty(shape, dtype=dtype)
        self.fill(f"values/{name}", tensor)
        return tensor


def _content(path: Path) -> Any:
    """What the manifest of a checkpoint says, if it is as it was written."""
    file = path / MANIFEST
    try:
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
        if not 0 <= conform(content, _SHAPE, what=str(file))["step"] <= MOST_STEPS:
            raise CheckpointError(f"{file}: the step is {content['step']}, not a number of steps")
        return content
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: {file}: {error.strerror}") from error
    except JsonError as error:
        raise CheckpointError(f"{error}; {path} is not a checkpoint, or is damaged") from error


def _require_file(file: Path, name: str, size: int) -> None:
    """Raise unless a file is there, in its size."""
    if Path(name).name != name or not file.exists():
        raise CheckpointError(f"{file} is missing; load an earlier save")
    require_regular(file)
    if (found := file.stat().st_size) != size:
        raise CheckpointError(f"{file} has {found:,} bytes, not {size:,}; load an earlier save")


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


def unpacked(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """The value that was packed; ``fetch`` finds a tensor by its name."""
    try:
        return unpack(value, fetch)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{json.dumps(value)[:80]} is not what was packed") from error


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
            _add_optimizer(whole["optimizers"][index], optimizer)
    for name, entry in whole["tensors"].items():
        held = sum(prod(piece["size"]) for piece in entry["pieces"])
        if held != prod(entry["shape"]):
            raise CheckpointError(
                f"only {held:,} of {prod(entry['shape']):,} elements of {name} are on the ranks "
                "that save; save on all ranks with a shard of it"
            )
    return whole


def _add_optimizer(known: dict[str, Any], more: dict[str, Any]) -> None:
    """Groups with the same options are one, whatever their numbers on the ranks."""
    groups = {json.dumps(group["options"], sort_keys=True): group for group in known["groups"]}
    for group in more["groups"]:
        key = json.dumps(group["options"], sort_keys=True)
        if key not in groups:
            groups[key] = {"names": [], "options": group["options"]}
            known["groups"].append(groups[key])
        groups[key]["names"] = list(dict.fromkeys((*groups[key]["names"], *group["names"])))
    known["state"] = more["state"] | known["state"]
