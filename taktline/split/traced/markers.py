"""The marks in the graph of a trace at which it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect

from taktline.errors import PartitionError
from taktline.text import did_you_mean

_library = torch.library.Library("taktline", "DEF")
_library.define("pipe_split() -> ()")
# It has no tensor for the dispatcher.
_library.impl("pipe_split", lambda: None, "BackendSelect")
_OP = torch.ops.taktline.pipe_split.default
has_side_effect(_OP)  # so that no pass removes it as dead code

# Models that were marked for torch's own pipelining can be cut as they are.
_PEER_OP = "pippy._pipe_split.default"
_PEER_FUNCTION = ("torch.distributed.pipelining._IR", "pipe_split")

_is_tracing = False

_REGIONS = {
    "wrap_with_set_grad_enabled": "torch.no_grad() or torch.enable_grad()",
    "wrap_with_autocast": "torch.autocast()",
    "cond": "torch.cond()",
    "while_loop": "torch.while_loop()",
}


class SplitPoint(Enum):
    """Whether a model is cut before or after a submodule.

    >>> import taktline as tl
    >>> tl.SplitPoint.BEGINNING
    <SplitPoint.BEGINNING: 1>
    """

    BEGINNING = 1
    END = 2


def pipe_split():
    """Begin a new stage here, inside a forward; does nothing unless :func:`pipeline` traces it.

    >>> import taktline as tl
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
    ...
    ...     def forward(self, x):
    ...         x = self.first(x)
    ...         tl.pipe_split()
    ...         return self.second(x)
    >>> tl.pipeline(Model(), (torch.zeros(2, 4),)).num_stages
    2
    """
    if _is_tracing:
        _OP()


@contextmanager
def tracing() -> Iterator[None]:
    """Make :func:`pipe_split` leave its mark."""
    global _is_tracing
    before, _is_tracing = _is_tracing, True
    try:
        yield
    finally:
        _is_tracing = before


def is_marker(node: fx.Node) -> bool:
    """Whether a node is where a stage ends and the next one begins."""
    if node.op != "call_function":
        return False
    if node.target is _OP or node.target is pipe_split or str(node.target) == _PEER_OP:
        return True
    named = (getattr(node.target, "__module__", ""), getattr(node.target, "__name__", ""))
    return named == _PEER_FUNCTION


def require_outside(traced: fx.GraphModule) -> None:
    """Raise if a mark lies inside of a region, which is one operation of the graph."""
    for node in traced.graph.nodes:
        for part in node.all_input_nodes:
            if part.op == "get_attr" and _has_marker(attrgetter(str(part.target))(traced)):
                kind = getattr(node.target, "__name__", str(node.target))
                region = _REGIONS.get(kind, kind)
                raise PartitionError(
                    f"a split point is inside a region that cannot be cut ({region}); move the "
                    "split point before or after the region"
                )


def _has_marker(inner: Any) -> bool:
    modules = inner.modules() if isinstance(inner, fx.GraphModule) else ()
    parts = [part for part in modules if isinstance(part, fx.GraphModule)]
    return any(is_marker(node) for part in parts for node in part.graph.nodes)


@contextmanager
def marked(module: nn.Module, spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Let calls of submodules leave marks; at the end the module is as before."""
    called: set[str] = set()
    with ExitStack() as patches:
        for name, point in spec.items():
            submodule = _find(module, name)
            split = _split(submodule.forward, name, point, called)
            patches.enter_context(patch.object(submodule, "forward", split))
        yield
    missing = [name for name in spec if name not in called]
    if missing:
        listed = ", ".join(map(repr, missing))
        raise PartitionError(
            f"the forward does not call {listed}, so there is nothing to split at; name submodules "
            "in split_spec that the forward calls, or call pipe_split() in the forward"
        )


def _find(module: nn.Module, name: str) -> nn.Module:
    names = [known for known, _ in module.named_modules(remove_duplicate=False) if known]
    if name not in names:
        raise PartitionError(
            f"split_spec names {name!r}, but {type(module).__name__} has no such submodule; "
            f"{did_you_mean(name, names)}"
        )
    return module.get_submodule(name)


def _split(
    forward: Callable[..., Any], name: str, point: SplitPoint, called: set[str]
) -> Callable[..., Any]:
    """A forward that leaves a mark, and notes that it is called."""
    if not isinstance(point, SplitPoint) and getattr(point, "name", "") in SplitPoint.__members__:
        point = SplitPoint[getattr(point, "name")]  # noqa: B009  (torch's own)
    if not isinstance(point, SplitPoint):
        raise PartitionError(
            f"split_spec[{name!r}] must be SplitPoint.BEGINNING or SplitPoint.END, not {point!r}"
        )

    def split(*args: Any, **kwargs: Any) -> Any:
        called.add(name)
        if point is SplitPoint.BEGINNING:
            pipe_split()
        output = forward(*args, **kwargs)
        if point is SplitPoint.END:
            pipe_split()
        return output

    return split
