"""The manifest of a checkpoint: what is in it, in which files, with checksums of everything."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from taktline.checkpoint.box import Box
from taktline.checkpoint.names import joined
from taktline.checks import conform, loads
from taktline.errors import CheckpointError, JsonError
from taktline.meta import DTYPES

__all__ = ["MANIFEST", "Entry", "Manifest", "Part", "Piece", "merged"]

MANIFEST = "manifest.json"
VERSION = 1
"""Of the format; a reader takes none that is newer."""

_PIECE = {"file": str, "start": [int], "size": [int], "crc32": str}
_ENTRY = {"dtype": str, "shape": [int], "pieces": [_PIECE]}
_GROUP = {"names": [str], "options": {str: object}}
_OPTIMIZER = {"class": str, "groups": [_GROUP], "state": {str: {str: object}}}
_SHAPE = {
    "format": str,
    "version": int,
    "written_by": {str: str},
    "step": int,
    "files": {str: int},
    "tensors": {str: _ENTRY},
    "aliases": {str: str},
    "optimizers": [_OPTIMIZER],
    "values": {str: object},
}
_PART = {
    "file": str,
    "bytes": int,
    "tensors": {str: _ENTRY},
    "aliases": {str: str},
    "optimizers": [_OPTIMIZER],
    "values": {str: object},
}
_FORMAT = "taktline checkpoint"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor, in one file."""

    file: str
    box: Box
    checksums: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Part:
    """What one process adds to a checkpoint; written beside its file, until all are there."""

    file: str
    bytes: int = 0
    tensors: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Part:
        """The part that another process has written."""
        try:
            fields = conform(loads(path.read_bytes(), what=str(path)), _PART, what=str(path))
        except OSError as error:
            raise CheckpointError(
                f"{path} is not there: do all hosts have the same folder? ({error.strerror})"
            ) from error
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint but its tensors."""

    path: Path
    step: int
    files: Mapping[str, int]
    """Their bytes."""
    tensors: Mapping[str, Entry]
    aliases: Mapping[str, str]
    """Further names of the model for a weight that is in the checkpoint by another one."""
    optimizers: list[dict[str, Any]]
    values: Mapping[str, Any]
    """What is no tensor, packed."""

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """That of a checkpoint, if it is whole."""
        file = path / MANIFEST
        try:
            content = loads(file.read_bytes(), what=str(file))
            content = conform(content, {"crc32": str, "content": object}, what=str(file))
            found, content = content["crc32"], content["content"]
            version = content.get("version") if isinstance(content, dict) else None
            if isinstance(version, int) and version > VERSION:
                raise CheckpointError(
                    f"{path} has version {version} of the format, and this Taktline reads up to "
                    f"{VERSION}; install the one that has written it, or a newer one"
                )
            if found != _checksum(content):
                raise CheckpointError(f"{file} is damaged; load an earlier save")
            conform(content, _SHAPE, what=str(file))
        except OSError as error:
            raise CheckpointError(f"{path} is no checkpoint: {file}: {error.strerror}") from error
        except JsonError as error:
            raise CheckpointError(f"{error}; {path} is no checkpoint, or is damaged") from error
        tensors = {name: _entry(name, entry, path) for name, entry in content["tensors"].items()}
        return cls(
            path,
            content["step"],
            content["files"],
            tensors,
            joined(content["aliases"]),
            content["optimizers"],
            content["values"],
        ).checked()

    def checked(self) -> Manifest:
        """This, if all files are there in their sizes."""
        for name, size in self.files.items():
            file = self.path / name
            found = file.stat().st_size if file.is_file() and Path(name).name == name else None
            if found != size:
                state = "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
                raise CheckpointError(f"{file} {state}; load an earlier save")
        return self


def _checksum(content: Any) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _entry(name: str, entry: dict[str, Any], path: Path) -> Entry:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: {name} is of the unknown type {entry['dtype'][:40]!r}")
    pieces = tuple(
        Piece(piece["file"], Box(tuple(piece["start"]), tuple(piece["size"])), piece["crc32"])
        for piece in entry["pieces"]
    )
    return Entry(dtype, tuple(entry["shape"]), pieces)


def merged(parts: Iterable[Part], step: int) -> str:
    """The text of the manifest, from what all processes have written."""
    content: dict[str, Any] = {
        "format": _FORMAT,
        "version": VERSION,
        "written_by": {
            # Not imported: it is above this room.
            "taktline": sys.modules["taktline"].__version__,
            "torch": str(torch.__version__),
        },
        "step": step,
        "files": {},
        "tensors": {},
        "aliases": {},
        "optimizers": [],
        "values": {},
    }
    for part in parts:
        if part.tensors:
            content["files"][part.file] = part.bytes
        for name, entry in part.tensors.items():
            known = content["tensors"].setdefault(name, {**entry, "pieces": []})
            known["pieces"] += entry["pieces"]
        for index, optimizer in enumerate(part.optimizers):
            if index == len(content["optimizers"]):
                content["optimizers"].append({**optimizer, "groups": [], "state": {}})
            _add_optimizer(content["optimizers"][index], optimizer)
        content["values"] |= part.values
        content["aliases"] = joined(content["aliases"], part.aliases)
    for name, entry in content["tensors"].items():
        held = sum(prod(piece["size"]) for piece in entry["pieces"])
        if held != prod(entry["shape"]):
            raise CheckpointError(
                f"of {name}, {held:,} of {prod(entry['shape']):,} elements are on the ranks that "
                "save; let all ranks that hold a shard of it take part"
            )
    return json.dumps({"crc32": _checksum(content), "content": content})


def _add_optimizer(known: dict[str, Any], more: dict[str, Any]) -> None:
    """Groups with the same options are one, whatever their numbers on the ranks."""
    groups = {json.dumps(group["options"], sort_keys=True): group for group in known["groups"]}
    for group in more["groups"]:
        key = json.dumps(group["options"], sort_keys=True)
        if key not in groups:
            groups[key] = {"names": [], "options": group["options"]}
            known["groups"].append(groups[key])
        names = dict.fromkeys((*groups[key]["names"], *group["names"]))
        groups[key]["names"] = list(names)
    for name, values in more["state"].items():
        known["state"].setdefault(name, values)
