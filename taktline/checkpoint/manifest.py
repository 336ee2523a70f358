"""The manifest of a checkpoint: its contents, their files, and checksums of everything.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from taktline.checkpoint.model_state import joined
from taktline.checkpoint.shards import Region
from taktline.checkpoint.tensor_file import BLOCK
from taktline.checks import conform, loads, read, shown
from taktline.errors import CheckpointError, JsonError
from taktline.meta import DTYPES
from taktline.transport.plain import NotPlainError, pack, unpack

MANIFEST = "manifest.json"
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
_SHAPE = {"format": str, "version": int, "written_by": {str: str}, "step": int, **_PART}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint: its pieces, each with the name of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Region], ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint but its tensors."""

    path: Path
    step: int
    files: Mapping[str, dict[str, Any]]
    tensors: Mapping[str, Entry]
    aliases: Mapping[str, str]
    """Further names in the model for a weight that the checkpoint has under another name."""
    optimizers: list[dict[str, Any]]
    values: Mapping[str, Any]
    """All other values, packed."""

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest of a checkpoint; raises if the checkpoint is not whole."""
        file = path / MANIFEST
        try:
            content = loads(file.read_bytes(), what=str(file))
            content = conform(content, {"crc32": str, "content": object}, what=str(file))
            found, content = content["crc32"], content["content"]
            version = content.get("version") if isinstance(content, dict) else None
            if isinstance(version, int) and version > _VERSION:
                raise CheckpointError(
                    f"{path} has version {version} of the format, and this Taktline reads up to "
                    f"{_VERSION}; install the one that has written it, or a newer one"
                )
            if found != _checksum(content):
                raise CheckpointError(f"{file} is damaged; load an earlier save")
            conform(content, _SHAPE, what=str(file))
        except OSError as error:
            reason = f"{file}: {error.strerror}"
            raise CheckpointError(f"{path} is not a checkpoint: {reason}") from error
        except JsonError as error:
            raise CheckpointError(f"{error}; {path} is not a checkpoint, or is damaged") from error
        for name, known in content["files"].items():
            _require_file(path / name, name, known)
        entries, files = content["tensors"], content["files"]
        tensors = {name: _entry(name, each, files, path) for name, each in entries.items()}
        aliases = joined(content["aliases"])
        rest = content["optimizers"], content["values"]
        return cls(path, content["step"], files, tensors, aliases, *rest)


def _require_file(file: Path, name: str, known: dict[str, Any]) -> None:
    """Raise unless a file is there, in its size, and has as many checksums as blocks."""
    size, found = known["bytes"], None
    if Path(name).name == name and file.is_file():
        found = file.stat().st_size
    if found != size:
        state = "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
        raise CheckpointError(f"{file} {state}; load an earlier save")
    if len(known["crc32"]) != 8 * -(-size // BLOCK):
        raise CheckpointError(f"{file} lacks checksums in {MANIFEST}; load an earlier save")


def _checksum(content: Any) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _entry(name: str, entry: dict[str, Any], files: Mapping[str, Any], path: Path) -> Entry:
    unknown = [each["file"][:40] for each in entry["pieces"] if each["file"] not in files]
    if unknown:
        raise CheckpointError(
            f"{path}: {name} is in {unknown[0]!r}, which the manifest does not list"
        )
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: {name} is of the unknown type {entry['dtype'][:40]!r}")
    pieces = (
        (each["file"], Region(tuple(each["start"]), tuple(each["size"])))
        for each in entry["pieces"]
    )
    return Entry(dtype, tuple(entry["shape"]), tuple(pieces))


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
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{json.dumps(value)[:80]} is not what was packed") from error


def sealed(content: Any) -> str:
    """The text of a manifest, with the checksum of its content."""
    return json.dumps({"crc32": _checksum(content), "content": content})


def read_part(path: Path) -> dict[str, Any]:
    """Read the part of one process."""
    return read(path.read_bytes(), _PART, what=str(path))


def merged(parts: Iterable[dict[str, Any]], step: int) -> dict[str, Any]:
    """The content of a manifest, from the parts of all processes."""
    # The package is not imported: it is above this room.
    by = {"taktline": sys.modules["taktline"].__version__, "torch": str(torch.__version__)}
    whole: dict[str, Any] = {key: type(shape)() for key, shape in _PART.items()}
    whole |= {"format": _FORMAT, "version": _VERSION, "written_by": by, "step": step}
    for part in parts:
        whole["files"] |= part["files"]
        whole["values"] |= part["values"]
        whole["aliases"] = joined(whole["aliases"], part["aliases"])
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
