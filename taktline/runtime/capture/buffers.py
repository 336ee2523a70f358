"""The fixed memory of a captured step: its batch, its results, and its gradients."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.errors import ScheduleError
from taktline.private import for_all
from taktline.runtime.capture.state import count_users
from taktline.runtime.microbatch import Batch, Feed
from taktline.stage.split_backward import add_to_grads

_copy_all = for_all("torch._foreach_copy_", torch.Tensor.copy_)
_zero_all = for_all("torch._foreach_zero_", torch.Tensor.zero_)

_PLAIN = (bool, int, float, str, type(None))
_MOST = 16 * 2**20
"""The most bytes of gradients that wait to be added."""


class Inputs:
    """The batch of one step as leaves."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        targets = None if feed.targets is None else list(feed.targets)
        loss_keywords = dict(feed.call.loss_keywords)
        self.tree = list(feed.arguments), list(feed.keywords), targets, loss_keywords
        self.leaves: list[Any] = [*chain(*feed.arguments), *(targets or [None])]
        self._structure: Hashable = (*map(len, feed.arguments), targets is None)
        usual = not any(feed.keywords) and not loss_keywords
        if not usual or not {torch.Tensor, type(None)}.issuperset(map(type, self.leaves)):
            # Only now: a pytree would take longer than all else before a replay.
            self.leaves, spec = pytree.tree_flatten(self.tree)
            self._structure = str(spec)
        self.counts = [x * feed.call.grad_scale for x in (*feed.scales, *feed.added_scales)]
        """The weight of each micro-batch's loss, and then of the losses that stages add."""

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
        kinds = tuple(
            (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
            for leaf in self.leaves
        )
        counted, feed = tuple(bool(count) for count in self.counts), self.feed
        return self._structure, kinds, counted, feed.outputs is None, feed.call.wants_losses


class Static:
    """The buffers of a captured program, for its batch and its results."""

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        """Buffers for steps of one kind."""
        self._leaves = [
            torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in inputs.leaves
        ]
        spec = pytree.tree_structure(inputs.tree)
        arguments, keywords, targets, given = pytree.tree_unflatten(self._leaves, spec)
        call = replace(inputs.feed.call, batch=Batch(), loss_keywords=given)
        shape = 2, len(inputs.counts) // 2
        self._counts = torch.empty(shape, dtype=torch.float64, device=device)
        self._counted: list[float] = []
        self.feed = replace(
            inputs.feed,
            call=call,
            arguments=arguments,
            keywords=keywords,
            targets=targets,
            counts=self._counts,
        )

    def fill(self, inputs: Inputs) -> None:
        """Copy a batch into the buffers."""
        pairs: defaultdict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]]
        pairs = defaultdict(list)
        for mine, theirs in zip(self._leaves, inputs.leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                pairs[mine.dtype].append((mine, theirs))
        for found in pairs.values():
            _copy_all(*zip(*found, strict=True))
        if inputs.counts != self._counted:
            self._counted = inputs.counts
            self._counts.copy_(torch.tensor(inputs.counts, dtype=torch.float64).view(2, -1))

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


def _copies(losses: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    if len({loss.dtype for loss in losses.values()}) != 1:
        return {microbatch: loss.clone() for microbatch, loss in losses.items()}
    copied = torch.stack(list(losses.values())).unbind()  # by one operation
    return dict(zip(losses, copied, strict=True))


class Gradients:
    """The buffers of gradients, which all graphs share: a graph adds to ``.grad`` itself."""

    def __init__(self) -> None:
        self.buffers: dict[nn.Parameter, torch.Tensor] = {}

    def make(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make buffers for the parameters of a graph; a gradient that is there becomes one."""
        for p in parameters:
            if p not in self.buffers:
                zeros = partial(torch.zeros_like, dtype=p.grad_dtype, requires_grad=False)
                self.buffers[p] = zeros(p) if p.grad is None else p.grad

    def fit(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the buffers are ``.grad``, or can be: nobody holds the memory of either."""
        buffers, (usual, usual_gradient) = self.buffers, _usual()
        return all(
            p.grad is buffers[p]
            or not (_exceed(_uses(buffers[p]), usual) or _exceed(_uses(p.grad), usual_gradient))
            for p in parameters
        )

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before a replay: gradients that are not there begin at zero; others are copied."""
        fresh = [self.buffers[p] for p in parameters if p.grad is None]
        if fresh:
            _zero_all(fresh)
        for p in parameters:
            if p.grad is not None and p.grad is not self.buffers[p]:  # from an eager step
                self.buffers[p].copy_(p.grad)
            p.grad = self.buffers[p]


def _uses(tensor: torch.Tensor | None) -> tuple[int, int]:
    """How often a tensor is referred to, and its memory; unknown for wrappers, such as shards."""
    if tensor is None:
        return 0, 0
    known = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    users = count_users(tensor.untyped_storage()._cdata) if known else 0
    return sys.getrefcount(tensor), users


def _exceed(uses: tuple[int, int], usual: tuple[int, int]) -> bool:
    return uses[0] > usual[0] or uses[1] > usual[1]


@cache
def _usual() -> tuple[tuple[int, int], tuple[int, int]]:
    """The uses of a buffer and of a gradient that nobody else holds."""
    leaf, buffers = nn.Parameter(torch.zeros(1)), [torch.zeros(1)]
    leaf.grad = torch.zeros(1)
    return _uses(buffers[0]), _uses(leaf.grad)


class Adding:
    """Gradients that wait to be added, those of a parameter in the order of arrival.

    Small ones are added many at a time. Autograd adds each one by itself: in a model with small
    parameters, a third of all kernels of a graph, each of which takes longer to launch than to run.

    >>> layer, buffer = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> with Adding([layer.weight], {layer.weight: buffer}).instead():
    ...     layer(torch.ones(1, 1)).backward()
    >>> buffer, layer.weight.grad
    (tensor([[2.]]), None)
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], buffers: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._buffers: dict[torch.Tensor, torch.Tensor] = {**buffers}
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}
        self._bytes = 0
        self._taken: set[torch.Tensor] = set()
        self.in_turn: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context in which gradients are added."""

    @contextmanager
    def instead(self) -> Iterator[Adding]:
        """Inside, new gradients are taken from ``.grad``; afterwards ``.grad`` is as before.

        Raises unless exactly those with a buffer get a gradient.
        """
        before = [(p, p.grad) for p in self._parameters]
        hooks = [p.register_post_accumulate_grad_hook(self) for p in self._parameters]
        try:
            for parameter in self._parameters:
                parameter.grad = None
            yield self
            self.take_all()
            self.add()
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, gradient in before:
                parameter.grad = gradient
        if self._taken != self._buffers.keys():
            raise ScheduleError("other parameters get gradients than in the step before")

    def take_all(self) -> None:
        """Take gradients that did not come by autograd, such as those of W; after each action."""
        for parameter in self._parameters:
            self(parameter)

    def add(self) -> None:
        """Add all gradients that wait, those of a type together."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        with self.in_turn():
            for dtype in dict.fromkeys(gradient.dtype for gradient in waiting.values()):
                alike = [p for p, gradient in waiting.items() if gradient.dtype == dtype]
                for parameter in alike:
                    parameter.grad = self._buffers[parameter]
                add_to_grads(alike, [waiting[parameter] for parameter in alike])
                for parameter in alike:
                    parameter.grad = None

    def __call__(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter, if it has one."""
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        self._taken.add(parameter)
        if parameter not in self._buffers:
            return
        if parameter in self._waiting:
            self.add()
        self._waiting[parameter] = gradient
        self._bytes += gradient.nbytes
        if self._bytes > _MOST:
            self.add()
