"""What models of transformers collect from inside of their layers, such as the logits of routers.

Hooks on what is inside of a layer put it into lists of the model that is running. So it counts as
part of what the layer returns, and where that is known, lists get their part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

__all__ = [
    "INSTALLED",
    "Recorded",
    "hook",
    "hook_routers",
    "lists",
    "recorded",
    "replayed",
    "since",
]

INSTALLED = "_output_capturing_hooks_installed"
"""The attribute of a model that says that it has its hooks."""
_COLLECTING = "transformers.utils.output_capturing"


class Recorded(NamedTuple):
    """The output of a layer, and what was collected from inside of it."""

    output: Any
    collected: dict[str, list[Any]]


def hook_routers(model: nn.Module) -> None:
    """Let a model that collects the logits of routers have its hooks before it is copied."""
    collecting: Any = sys.modules.get(_COLLECTING)
    if collecting is not None and getattr(
        getattr(model, "config", None), "output_router_logits", False
    ):
        known = collecting._CAN_RECORD_REGISTRY
        hook(part for part in model.modules() if str(type(part)) in known)


def hook(models: Iterable[nn.Module]) -> None:
    """Let models have their hooks before they are copied.

    Copies would register them each by themselves, with layers that they share.
    """
    for model in models:
        sys.modules[_COLLECTING].maybe_install_capturing_hooks(model)


def _collector() -> Any:
    return getattr(sys.modules.get(_COLLECTING), "_active_collector", None)


def lists() -> dict[str, list[Any]]:
    """The lists of the model that is running, by the names of what they collect."""
    collector = _collector()
    found = None if collector is None else collector.get()
    return {} if not found else {key: part for key, part in found.items() if type(part) is list}


def since(lengths: Mapping[str, int]) -> dict[str, list[Any]]:
    """What was collected since lists had these lengths."""
    return {key: part[lengths[key] :] for key, part in lists().items() if key in lengths}


def recorded(call: Callable[[], Any]) -> Any:
    """What a call returns, with what is collected from it; the lists themselves get nothing."""
    into = lists()
    if not into:
        return call()
    lengths = {key: len(part) for key, part in into.items()}
    try:
        output = call()
        return Recorded(output, since(lengths))
    finally:
        for key, part in into.items():
            del part[lengths[key] :]


def replayed(output: Any) -> Any:
    """The output itself, with all that belongs to it in the lists."""
    if type(output) is not Recorded:
        return output
    for key, part in lists().items():
        part += output.collected.get(key, ())
    return output.output
