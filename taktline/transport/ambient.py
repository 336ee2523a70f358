"""What belongs to a thread, for ranks that run in threads of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Ambient", "Random"]

_CASTS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Random:
    """Where the generators of random numbers are."""

    on_cpu: torch.Tensor
    on_cuda: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> Random:
        """Where they are now; those of CUDA only if it is initialised."""
        on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
        return cls(torch.get_rng_state(), tuple(on_cuda))

    def restore(self) -> None:
        """Put them there again."""
        torch.set_rng_state(self.on_cpu)
        torch.cuda.set_rng_state_all(self.on_cuda)

    def equals(self, other: Random) -> bool:
        """Whether the next numbers are the same."""
        mine, others = (self.on_cpu, *self.on_cuda), (other.on_cpu, *other.on_cuda)
        return len(mine) == len(others) and all(map(torch.equal, mine, others))


class Ambient:
    """What the caller's thread has set, to be set in another one: gradients, autocast, stream.

    >>> with torch.no_grad():
    ...     ambient = Ambient()
    >>> with ambient.entered():
    ...     torch.is_grad_enabled()
    False
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._casts = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in _CASTS
            if torch.is_autocast_enabled(kind)
        ]
        self._cached = torch.is_autocast_cache_enabled()
        # A stream brings its device along.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this thread has the same."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cached))
            yield
