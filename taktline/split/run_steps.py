"""What the written function of a stage calls, beside units and functions of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.nested import Path, at_path
from taktline.stage.names import unwrapped


class Differs(Exception):
    """A number that the forward reads from its arguments is not the one that was recorded."""


class OtherTypes(Exception):
    """A unit returns another type than in the record, as one in FSDP does."""

    def __init__(self, recorded: torch.dtype, found: torch.dtype) -> None:
        super().__init__(recorded, found)
        self.recorded, self.found = recorded, found


def check_type(value: Any, dtype: torch.dtype) -> None:
    """Raise if a value has another type than in the record."""
    if isinstance(value, torch.Tensor) and value.dtype is not dtype:
        raise OtherTypes(dtype, value.dtype)


def differs(found: Any, expected: Any) -> None:
    """Raise if what was read is not what was recorded."""
    if not same(found, expected):
        raise Differs


def require_same(found: Any, expected: Any, line: str) -> None:
    """Raise if a random number, or the like, decides otherwise than it did in the record."""
    if not same(found, expected):
        raise PartitionError(
            f"{line} reads {found!r}, where it has read {expected!r} before: what the forward does "
            "depends on a random number, which stages cannot decide by themselves; turn that off "
            "(a layerdrop of 0), or move it into a submodule"
        )


def same(found: Any, expected: Any) -> bool:
    """Whether two values that were read are equal."""
    try:
        return bool(found == expected)
    except Exception:  # arrays, which compare element by element
        return bool((found == expected).all())


def tensor_of(stage: nn.Module, *names: str) -> torch.Tensor:
    """A parameter or buffer of a stage, by one of the names that it has in the model."""
    for name in names:
        path, _, key = name.rpartition(".")
        try:
            return getattr(stage.get_submodule(path), key)
        except AttributeError:
            continue  # a tied weight, which this stage has under another name
    raise PartitionError(
        f"the forward uses {names[0]!r}, which is in another stage; call by_names with example=, "
        "the arguments of the model"
    )


def attribute(unit: nn.Module, module: str, path: Path) -> Any:
    """What a unit has left in an attribute of a module in it."""
    return at_path(_inside(unit, module), path)


def _inside(unit: nn.Module, path: str) -> nn.Module:
    """A module inside of a unit, through the wrappers of modules."""
    found = unwrapped(unit)
    for key in path.split(".") if path else ():
        found = unwrapped(found._modules[key])  # pyright: ignore[reportArgumentType]
    return found


def captured(unit: nn.Module, places: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a unit; returns outputs of modules inside of it, and its own output."""
    found: list[Any] = [None] * len(places)
    calls: dict[str, int] = {}
    handles = []

    def note(path: str) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            call = calls[path] = calls.get(path, -1) + 1
            for at, (module, which, place) in enumerate(places):
                if module == path and which == call:
                    found[at] = at_path(output, place)

        return hook

    for path in {module for module, _, _ in places}:
        handles.append(_inside(unit, path).register_forward_hook(note(path)))
    try:
        output = unit(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found), output
