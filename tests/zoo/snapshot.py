"""All that a model is: its modules, their attributes, tensors, hooks and random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def snapshot(model: nn.Module) -> list[tuple[str, Any]]:
    """What a model consists of, as values that compare; the same each time for the same model."""
    found: list[tuple[str, Any]] = [("random numbers", torch.get_rng_state().tolist())]
    _add("model", model, found, set())
    return found


def _add(path: str, value: Any, found: list[tuple[str, Any]], seen: set[int]) -> None:
    """Add a part of a model, and the parts of it; each once, with what it is."""
    found.append((path, (type(value), id(value) if _has_identity(value) else repr(value))))
    if id(value) in seen or not _has_identity(value):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        found.append((path, (value.dtype, value.shape, value.stride(), value._version)))
        found.append((path, value.detach().cpu().to(torch.complex128).tolist()))
        return
    if isinstance(value, dict):
        parts = [(f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"[{at}]", part) for at, part in enumerate(value)]
    else:
        parts = []
    parts += [(f".{key}", part) for key, part in getattr(value, "__dict__", {}).items()]
    for key, part in parts:
        _add(f"{path}{key}", part, found, seen)


def _has_identity(value: Any) -> bool:
    return not isinstance(value, (int, float, complex, str, bytes, type(None), torch.dtype))
