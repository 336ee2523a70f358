"""What a function that takes the place of an action gets to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from taktline.compat.torch_pipelining._action import _Action

if TYPE_CHECKING:
    from taktline.compat.torch_pipelining._runtime.base import _PipelineSchedule

__all__ = ["_CustomFunctionProtocol", "_PipelineContext"]


@dataclass
class _PipelineContext:
    """A step: its schedule, and the micro-batches on this rank.

    >>> _PipelineContext(None).arg_mbs
    """

    schedule_ref: _PipelineSchedule
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


class _CustomFunctionProtocol(Protocol):
    """Does what an action says."""

    def __call__(self, action: _Action, ctx: _PipelineContext) -> None: ...
