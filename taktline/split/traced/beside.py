"""What a forward hands over beside its output, in a trace: losses and skip connections.

A skip connection is a value like any other there, and crosses boundaries as such. A loss leaves its
mark in the graph, and the piece that computes it adds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch.fx.node import has_side_effect

from taktline.side_values import Aside, add_loss

__all__ = ["recording", "with_losses"]

_library = torch.library.Library("taktline", "FRAGMENT")
_library.define("add_loss(Tensor loss) -> ()")
_library.impl("add_loss", lambda loss: None, "CompositeExplicitAutograd")
_OP = torch.ops.taktline.add_loss.default
has_side_effect(_OP)


class _Recorder(Aside):
    """The aside of a forward that is traced."""

    def add(self, loss: torch.Tensor) -> None:
        """Leave a mark."""
        _OP(loss)


@contextmanager
def recording() -> Iterator[None]:
    """Record what a forward adds; what it puts, it must get."""
    with _Recorder(0, {}) as aside:
        yield
    aside.finish()


def with_losses(traced: fx.GraphModule) -> fx.GraphModule:
    """The graph, adding losses where it has marks."""
    for part in traced.modules():
        if isinstance(part, fx.GraphModule):
            marks = [node for node in part.graph.nodes if node.target is _OP]
            for node in marks:
                node.target = add_loss
            if marks:
                part.recompile()
    return traced
