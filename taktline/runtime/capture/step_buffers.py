"""Fixed buffers for the batch and the results of a captured step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from taktline import pytree
from taktline.private import for_all
from taktline.runtime.step_data import Feed

_copy_all = for_all("torch._foreach_copy_", torch.Tensor.copy_)

_PLAIN = (bool, int, float, str, type(None))


class Inputs:
    """The batch of one step as leaves."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._tree = (
            list(feed.arguments),
            list(feed.keywords),
            None if feed.targets is None else list(feed.targets),
            dict(feed.loss_keywords),
        )
        self.leaves, self._structure = _taken_apart(self._tree)
        self.counts = _counts(feed)

    def refusal(self, device: torch.device) -> str | None:
        """Why a step with such a batch cannot be captured; None if it can."""
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                if type(leaf) is not torch.Tensor or leaf.layout != torch.strided:
                    return f"an argument is {type(leaf).__name__} ({leaf.layout})"
                if leaf.device.type != device.type:
                    return f"an argument is on {leaf.device}, where a replay would not read it"
                if leaf.requires_grad:
                    return "an argument requires a gradient"
            elif type(leaf) not in _PLAIN:
                return f"an argument is {type(leaf).__name__}, which may change by itself"
        return None

    @property
    def kind(self) -> tuple[object, ...]:
        """All that a graph depends on: not the values of tensors, nor the weights of losses."""
        feed = self._feed
        kinds = tuple(
            (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
            for leaf in self.leaves
        )
        counted = tuple(bool(count) for count in self.counts)
        return (self._structure, kinds, counted, feed.outputs is None, feed.wants_losses)

    def static(self, device: torch.device) -> Static:
        """Buffers for steps of this kind."""
        made: dict[int, torch.Tensor] = {}
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
                made[id(leaf)] = torch.empty_like(leaf)
        leaves = [made.get(id(leaf), leaf) for leaf in self.leaves]
        spec = pytree.tree_structure(self._tree)
        arguments, keywords, targets, loss_keywords = pytree.tree_unflatten(leaves, spec)
        feed = replace(
            self._feed,
            arguments=arguments,
            keywords=keywords,
            targets=targets,
            loss_keywords=loss_keywords,
            counts=torch.empty(2, len(self.counts) // 2, dtype=torch.float64, device=device),
        )
        return Static(feed, leaves)


class Static:
    """The buffers of a captured program, for its batch and its results."""

    def __init__(self, feed: Feed, leaves: Sequence[Any]) -> None:
        self.feed = feed
        self._leaves = leaves
        self._counts: list[float] = []

    def fill(self, inputs: Inputs, number: int) -> None:
        """Copy a batch into the buffers, for the training step of this number."""
        self.feed.number = number
        pairs: dict[torch.dtype, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for mine, theirs in zip(self._leaves, inputs.leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                pairs.setdefault(mine.dtype, {})[id(mine)] = (mine, theirs)
        for found in pairs.values():
            mine, theirs = zip(*found.values(), strict=True)
            _copy_all(mine, theirs)
        if inputs.counts != self._counts and self.feed.counts is not None:
            self._counts = inputs.counts
            self.feed.counts.copy_(torch.tensor(inputs.counts, dtype=torch.float64).view(2, -1))

    def begin(self) -> None:
        """Drop earlier results; part of the captured program."""
        self.feed.losses, self.feed.aux_losses, self.feed.observed = {}, {}, []
        if self.feed.outputs is not None:
            self.feed.outputs = {}

    def hand_over(self, feed: Feed) -> None:
        """Copy the results to the feed of a step: the next replay overwrites them."""
        mine = self.feed
        feed.losses, feed.aux_losses = _copies(mine.losses), _copies(mine.aux_losses)
        feed.observed = mine.observed
        feed.outputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, mine.outputs)


def _taken_apart(tree: tuple[Any, ...]) -> tuple[list[Any], Hashable]:
    """The leaves of a batch, and its structure."""
    arguments, keywords, targets, loss_keywords = tree
    leaves = [*chain(*arguments), *([None] if targets is None else targets)]
    usual = not any(keywords) and not loss_keywords
    if usual and {torch.Tensor, type(None)}.issuperset(map(type, leaves)):
        # A pytree would take longer than all else before a replay.
        return leaves, (*map(len, arguments), targets is None)
    leaves, spec = pytree.tree_flatten(tree)
    return leaves, str(spec)


def _counts(feed: Feed) -> list[float]:
    """The weight of each micro-batch's loss, and then of the losses that stages add."""
    found = [
        feed.scale if scales is None else scales[microbatch]
        for scales in (feed.scales, feed.row_scales)
        for microbatch in range(feed.microbatches)
    ]
    return [scale * feed.grad_scale for scale in found]


def _copies(losses: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    if not losses:
        return {}
    if len({loss.dtype for loss in losses.values()}) > 1:
        return {microbatch: loss.clone() for microbatch, loss in losses.items()}
    copied = torch.stack(list(losses.values())).unbind()  # by one operation
    return dict(zip(losses, copied, strict=True))
