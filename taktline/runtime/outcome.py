"""How a step went, as numbers that the ranks exchange at its end: failures, losses and more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from taktline.runtime.step_data import Feed
from taktline.transport.exchange import as_floats, as_integers

__all__ = ["Outcome"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The types that losses are shared in."""
_NO_LOSS = -1


class Outcome:
    """What one rank says of a step.

    >>> feed = Feed(losses={0: torch.tensor(0.5), 1: torch.tensor(2.0)})
    >>> mine = Outcome.of(feed, failed=False, skips=False, shares=2)
    >>> Outcome.share([mine, Outcome.of(Feed(), failed=False, skips=False, shares=2)], feed)
    >>> feed.losses[1]
    tensor(2.)
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.failed = bool(numbers[0])
        self.skips = bool(numbers[1])
        self.preempted = bool(numbers[2])

    @classmethod
    def of(
        cls,
        feed: Feed,
        *,
        failed: bool,
        skips: bool,
        shares: int,
        relayed: bool = False,
        preempted: bool = False,
    ) -> Outcome:
        """This rank's own; ``shares`` is the number of micro-batches whose losses it tells.

        ``relayed`` says that the main ones go another way, since to read them would take a wait.
        """
        numbers = [int(failed), int(skips), int(preempted)]
        if shares:
            # A rank that has failed may lack some; then nobody looks at them.
            losses = {} if failed else feed.losses
            aux = {} if failed else feed.aux_losses
            numbers += [_code(losses[0].dtype) if losses else _NO_LOSS, int(bool(aux))]
            main = _values({} if relayed else losses, shares)
            scales = (None if failed else feed.scales) or [0.0] * shares
            for values in (main, _values(aux, shares), scales):
                numbers += as_integers(values)
        return cls(numbers)

    @staticmethod
    def share(outcomes: Sequence[Outcome], feed: Feed, relayed: torch.Tensor | None = None) -> None:
        """Put every rank's losses into the feed: the main ones, and the sums of added ones.

        With the main ones, how much each of them counts.
        """
        dtype, losses, aux = None, {}, {}
        for outcome in outcomes:
            code, has_aux, *bits = outcome.numbers[3:]
            values = as_floats(bits)
            count = len(values) // 3
            if code != _NO_LOSS:
                dtype, losses = _DTYPES[code], dict(enumerate(values[:count]))
                feed.scales = values[2 * count :] if any(values[2 * count :]) else None
            if has_aux:
                added = enumerate(values[count : 2 * count])
                aux = {m: aux.get(m, 0.0) + value for m, value in added}
        feed.losses, feed.aux_losses = _tensors(losses, dtype), _tensors(aux, dtype)
        if relayed is not None and losses:
            feed.losses = dict(enumerate(relayed.to(dtype).unbind()))


def _code(dtype: torch.dtype) -> int:
    """The type that losses of a type are shared in; counts are whole numbers, which it holds."""
    return _DTYPES.index(dtype if dtype in _DTYPES else torch.float64)


def _values(losses: dict[int, torch.Tensor], count: int) -> list[float]:
    """Losses as numbers with all their digits, 0 where there are none."""
    if not losses:
        return [0.0] * count
    if len(losses) < count:
        losses = dict.fromkeys(range(count), torch.zeros((), device="cpu")) | losses
    values = [losses[m] for m in range(count)]
    if len({(value.dtype, value.device) for value in values}) > 1:
        values = [value.to(values[0].device, torch.float64) for value in values]
    # Together, so that a GPU is waited for once.
    return torch.stack(values).double().tolist()


def _tensors(values: dict[int, float], dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
    if not values:
        return {}
    together = torch.tensor(list(values.values()), dtype=dtype, device="cpu")
    return dict(zip(values, together.unbind(), strict=True))
