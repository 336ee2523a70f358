"""What one step works on: the micro-batches that go in, the outputs and losses that come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Facts", "Feed"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank knows of its part of a batch."""

    size: int = 0
    """0 if there is nothing to cut."""
    target: int = 0
    look: int = 0
    """A fingerprint of shapes and types."""
    shares: bool = False
    """Whether every rank shall have the losses."""
    arguments: Any = None
    """What all ranks that were given arguments must have been given; None: nothing."""
    targets: Any = None
    """The same of targets."""


@dataclass(slots=True)
class Feed:
    """The micro-batches of a step on one rank, and what it keeps of their results."""

    arguments: Sequence[Sequence[Any]] = ()
    keywords: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    loss_keywords: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 0
    """The size of the batch along its micro-batches, agreed on by all ranks; 0: nobody knows."""
    microbatches: int = 0
    outputs: dict[int, Any] | None = None
    """Outputs of the last stage; None if they are not asked for."""
    scale: float = 1.0
    """What the gradient of every micro-batch's loss counts."""
    scales: Sequence[float] | None = None
    """The same for each loss of the loss function, where they count differently."""
    row_scales: Sequence[float] | None = None
    """The same for each loss that stages add, where micro-batches differ in size."""
    grad_scale: float = 1.0
    """What every gradient is multiplied with, for those that would vanish in half precision."""
    counts: torch.Tensor | None = None
    """All of that for each micro-batch, in a buffer on the device: for the loss, and for those that
    stages add. Only for a step that is captured, and replayed with other numbers."""
    wants_losses: bool = False
    """Whether anybody asks for the losses."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    aux_losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """The sum of what this rank's stages have added in each micro-batch."""
    observed: list[list[tuple[Any, Any]]] = field(default_factory=list)
    """What the modules of each forward have noted, for the end of the step."""
    number: int = 0
    """Which training step this is, for seeds."""

    def clear(self) -> None:
        """Let go of everything."""
        self.arguments = ()
        self.keywords = ()
        self.targets = None
        self.loss_keywords = {}
        self.rows = 0
        self.microbatches = 0
        self.outputs = None
        self.scale = 1.0
        self.scales = None
        self.row_scales = None
        self.grad_scale = 1.0
        self.wants_losses = False
        self.losses = {}
        self.aux_losses = {}
        self.observed = []
