"""Loss, speed, bubble and memory of recent steps."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from typing import Any

import torch

__all__ = ["Metrics"]

_WINDOW = 21
"""Speeds are averaged over 20 steps: so many ends."""


class Metrics:
    """What is noted in each step, at the price of a look at the clock."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        """When a step ended, with its rows and its tokens."""
        self.loss: torch.Tensor | None = None
        self.bubble: float | None = None
        """Of the latest step that was measured."""

    def note(self, args: tuple[Any, ...], loss: torch.Tensor | None) -> None:
        """A step has ended."""
        first = next((value for value in args if isinstance(value, torch.Tensor)), None)
        rows = 0 if first is None or not first.dim() else first.shape[0]
        counts = first is not None and first.dim() > 1 and not first.is_floating_point()
        tokens = first.numel() if first is not None and counts else 0
        self._ends.append((time.perf_counter(), rows, tokens))
        self.loss = loss

    def read(self, steps: int, replicas: int, device: torch.device) -> dict[str, float]:
        """What is known by now; waits for the loss."""
        found: dict[str, float] = {"step": steps, "peak_memory": _peak(device)}
        if self.loss is not None:
            found["loss"] = self.loss.item()
        if self.bubble is not None:
            found["bubble"] = self.bubble
        if len(self._ends) > 1:
            later = list(self._ends)[1:]
            seconds = max(later[-1][0] - self._ends[0][0], 1e-9)
            found["step_ms"] = 1e3 * seconds / len(later)
            for place, name in ((1, "rows_per_s"), (2, "tokens_per_s")):
                if total := sum(end[place] for end in later):
                    found[name] = replicas * total / seconds
        return found


def _peak(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
