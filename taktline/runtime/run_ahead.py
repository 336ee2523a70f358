"""Steps without an exchange: a rank begins the next one while others still compute this one.

::

    waiting      rank 0   F F F F I I W I W I W W         │ F F …
                 rank 1     F F F I F I W I W I W W       │   F …       all ranks end together
                 rank 2       F F I F I F I W I W W W     │     …

    run_ahead    rank 0   F F F F I I W I W I W W F F …
                 rank 1     F F F I F I W I W I W W F …
                 rank 2       F F I F I F I W I W W W …

The ranks know the kind of such a step: every rank gets the whole batch, and its shapes are those of
the latest step, on which the ranks agreed. At the end each rank posts its outcome, and goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from taktline import pytree
from taktline.errors import MismatchError
from taktline.private import private
from taktline.runtime.agreement import Call
from taktline.runtime.losses import mean_of
from taktline.runtime.program import Failure
from taktline.runtime.step_data import Feed
from taktline.text import by_rank
from taktline.transport.posts import Posts

_log = logging.getLogger("taktline")

_without_torch_functions = private(
    "torch._C.DisableTorchFunctionSubclass", "a late loss", nullcontext
)


class _Agreed(NamedTuple):
    """A step on which the ranks agreed by an exchange."""

    call: Call
    kind: tuple[int, ...]
    rows: int


class RunAhead:
    """Finds out whether the next step of a schedule needs no exchange; ``with`` it, one may run."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether the user allows it."""
        self.running: tuple[Posts, Call] | None = None
        """The running step, if it has no exchange: where its outcome is posted, and its call."""
        self._latest: _Agreed | None = None
        self._warned = False
        self._usual_loss: torch.Tensor | None = None
        """A loss of the type and on the device of others."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running is not None:
            self.running[0].end()
            self.running = None

    def begin(self, posts: Posts, call: Call) -> None:
        """Begin a step without an exchange."""
        self.running = posts, call
        posts.begin()

    def require(self, failure: Failure | None) -> None:
        """Raise if a step without an exchange has failed: other ranks may have ended it."""
        if failure is not None and self.running is not None:
            error = failure.error or MismatchError(
                "another rank has failed in this step; look at its output, and call reconnect()"
            )
            error.recoverable = "reconnect"
            raise error

    def note(self, calls: Sequence[Call], rank: int, kind: tuple[int, ...], rows: int) -> None:
        """Note a training step on which the ranks agreed."""
        if not self.wanted:
            return
        whole = [call.whole for call in calls]
        same = whole[0] != 0 and len(set(whole)) == 1
        self._latest = _Agreed(calls[rank], kind, rows) if same else None
        if not same and not self._warned:
            self._warned = True
            batches = by_rank(["a batch" if digest else "none" for digest in whole])
            _log.warning(
                "run_ahead has no effect: pass the whole batch, with its target, on every rank; "
                "ranks got %s",
                batches if 0 in whole else "batches of different shapes",
            )

    def known(self, call: Call) -> _Agreed | None:
        """The step that this call repeats; None if the ranks have to agree."""
        latest = self._latest
        if latest is None or call.traces:  # the ranks compare their clocks in a traced step
            return None
        return latest if call.kind == latest.call.kind else None

    def forget(self) -> None:
        """Let the ranks agree on the next step."""
        self._latest = None

    def mean_loss(self, feed: Feed) -> torch.Tensor | None:
        """The mean loss of a step; on a rank that does not know it yet, a :class:`LateLoss`."""
        late = feed.late
        if late is None or feed.losses:
            self._usual_loss = mean_of(feed.losses, feed.scales)
            return self._usual_loss
        if self._usual_loss is None:
            return _late_mean(late)
        return LateLoss.like(self._usual_loss, partial(_late_mean, late))


class LateLoss(torch.Tensor):
    """The loss of a step that other ranks may still compute; its first use waits for them.

    >>> loss = LateLoss.like(torch.zeros(()), lambda: torch.tensor(0.5))
    >>> float(loss), loss + 1
    (0.5, tensor(1.5000))
    """

    _plain: torch.Tensor
    _read: Callable[[], torch.Tensor] | None

    @classmethod
    def like(cls, known: torch.Tensor, read: Callable[[], torch.Tensor]) -> LateLoss:
        """A loss of the type and on the device of a known one."""
        plain = torch.empty_like(known)
        made = plain.as_subclass(cls)
        made._plain, made._read = plain, read
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with _without_torch_functions():
            given = pytree.tree_map_only(LateLoss, _value, (tuple(args), kwargs or {}))
            return func(*given[0], **given[1])

    # Not all of torch asks the former: torch.tensor(loss) does not.
    __torch_dispatch__ = __torch_function__


def _late_mean(late: Callable[[Feed], None]) -> Any:
    """The mean of the losses of all ranks; waits for them."""
    feed = Feed()
    late(feed)
    return mean_of(feed.losses, feed.scales)


def _value(loss: LateLoss) -> torch.Tensor:
    """The loss as a plain tensor; waits until it is known."""
    if loss._read is not None:
        loss._plain.copy_(loss._read())
        loss._read = None
    return loss._plain
