"""What the ranks of a pipeline agree on together: how a step went, and one error for all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from taktline.checks import read
from taktline.errors import BatchError, MismatchError, TaktlineError, restore, text_of
from taktline.runtime.executor import Failure
from taktline.runtime.kept import Kept
from taktline.runtime.outcome import Outcome
from taktline.runtime.relay import Relay
from taktline.runtime.replicas import Replicas
from taktline.transport import Transport
from taktline.transport.exchange import share_error, share_texts

__all__ = ["Accord"]


class Accord:
    """The ranks of one pipeline, and after them its replicas, who hear of everything.

    Args:
        transport: the ranks.
        replicas: those who share the work of this rank's stages.
        kept: what this rank lets go of where a step does not end well.
    """

    def __init__(self, transport: Transport, replicas: Replicas, kept: Kept) -> None:
        self._transport = transport
        self._replicas = replicas
        self._kept = kept
        self._feed = kept.feed
        self.relay: Relay | None = None
        """How losses reach the other ranks where to read them would take a wait."""
        self.asks_to_stop: Callable[[], bool] | None = None
        """Whether this rank shall end after the step that is running."""
        self.preempted = False
        """Whether any rank was to, at the end of the latest step."""

    @contextmanager
    def with_replicas(self, what: str) -> Iterator[None]:
        """What is raised inside, in one replica, is raised at its end in all."""
        try:
            yield
        except TaktlineError as raised:
            raise self._replicas.agree(raised, what) or raised from raised.__cause__
        if (elsewhere := self._replicas.agree(None, what)) is not None:
            self._kept.forget()
            raise elsewhere

    def conclude(
        self, failure: Failure | None, what: str, *, skips: bool = False, shares: bool = False
    ) -> bool:
        """Agree on the outcome, and on losses that are shared; returns if there are skips."""
        with self.with_replicas(what):
            outcomes = self._exchanged(failure, what, skips, shares)
            self.preempted = any(outcome.preempted for outcome in outcomes)
            if any(outcome.failed for outcome in outcomes):
                self._kept.forget()
                self.raise_first(None if failure is None else failure.error)
        return any(outcome.skips for outcome in outcomes)

    def _exchanged(
        self, failure: Failure | None, what: str, skips: bool, shares: bool
    ) -> list[Outcome]:
        shares &= self._transport.size > 1  # one process has them all, and nobody needs to wait
        microbatches, relay, relayed = self._feed.microbatches, self.relay, None
        if shares and relay is not None:
            relayed = relay.share({} if failure else self._feed.losses, microbatches)
        mine = Outcome.of(
            self._feed,
            failed=failure is not None,
            skips=skips,
            shares=microbatches if shares else 0,
            relayed=relayed is not None,
            preempted=self.asks_to_stop is not None and self.asks_to_stop(),
        )
        outcomes = [Outcome(row) for row in self._transport.exchange(mine.numbers, what)]
        if relay is not None:
            relay.settle()
        if shares and not any(outcome.failed for outcome in outcomes):
            Outcome.share(outcomes, self._feed, relayed)
        return outcomes

    def routes(self, got: Mapping[int, Sequence[str]]) -> dict[str, int]:
        """The last stage of all ranks that gets each skip; ``got`` is what each one here gets."""
        routes: dict[str, int] = {}
        mine = json.dumps(list(got.items()))
        for rank, text in enumerate(share_texts(self._transport, mine, "skips of a step")):
            told = read(text, [(int, [str])], what=f"the skips that rank {rank} gets")
            for stage, names in told:
                routes |= {name: max(stage, routes.get(name, 0)) for name in names}
        return routes

    def raise_first(self, error: TaktlineError | None) -> NoReturn:
        """Raise the same error on every rank: that of the first one that has any."""
        self._feed.clear()
        shared = share_error(self._transport, error)
        if shared is None:
            raise MismatchError("a rank failed without saying why; look at the other ranks' output")
        raise shared

    def told(self, error: Exception) -> TaktlineError:
        """What went wrong before or after everything was run, with its rank."""
        rank = f"rank {self._transport.rank}: " if self._transport.size > 1 else ""
        if isinstance(error, TaktlineError):
            told = restore(type(error), (f"{rank}{text_of(error)}",), vars(error))
        else:
            told = BatchError(f"{rank}{type(error).__name__}: {text_of(error)}")
        told.__cause__ = error
        return told
