"""What a rank keeps from step to step, until one of them does not end well."""

from __future__ import annotations

from collections.abc import Sequence

from taktline.runtime.bind import Bound, Signatures
from taktline.runtime.capture import Captures
from taktline.runtime.step_data import Feed
from taktline.stage import PipelineStage

__all__ = ["Kept"]

_REMEMBERED = 8
"""For how many kinds of batches the signatures are kept."""


class Kept:
    """The step that is running, and what is known of those before it."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self.feed = Feed()
        self.captures: Captures | None = None
        self._stages = stages
        # By mode and by what the inputs of all ranks look like; the same on every rank.
        self._known: dict[tuple[int, ...], Signatures | Bound] = {}

    def take(self, kind: tuple[int, ...]) -> Signatures | Bound | None:
        """What is known of a kind of steps; it is kept anew if this one ends well."""
        return self._known.pop(kind, None)

    def keep(self, kind: tuple[int, ...], known: Signatures | Bound) -> None:
        """Remember a kind of steps, and forget the one that was not used for longest."""
        # Put last, so that the first one is always the longest unused.
        self._known[kind] = known
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def forget(self) -> None:
        """Let go of a step that did not end well, and of what may be wrong because of it."""
        self.feed.clear()
        self._known.clear()
        if self.captures is not None:
            self.captures.forget()
        for stage in self._stages:
            stage.clear()
