"""The fixed memory of a captured step: its batch, its results, and its gradients."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from operator import gt
from typing import Any, TypeAlias

import torch
from torch import nn

from taktline import pytree
from taktline.errors import ScheduleError
from taktline.meta import local
from taktline.private import for_all
from taktline.runtime.capture.state import count_users
from taktline.runtime.microbatch import Batch, Feed
from taktline.stage.split_backward import add_to_grads

_copy_all = for_all("torch._foreach_copy_", torch.Tensor.copy_)
_zero_all = for_all("torch._foreach_zero_", torch.Tensor.zero_)

_PLAIN = (bool, int, float, str, type(None))
_MOST = 16 * 2**20
"""The most bytes of gradients that wait to be added."""


def leaves_of(feed: Feed) -> tuple[list[Any], Hashable]:
    """The values of a batch, and how they are nested."""
    leaves = [*chain(*feed.arguments), *(feed.targets or [None])]
    usual = not any(feed.keywords) and not feed.call.loss_keywords
    if usual and {torch.Tensor, type(None)}.issuperset(map(type, leaves)):
        # Without a pytree, which would take longer than all else before a replay.
        return leaves, (*map(len, feed.arguments), feed.targets is None)
    leaves, spec = pytree.tree_flatten(_tree(feed))
    return leaves, str(spec)


def _tree(feed: Feed) -> tuple[Any, ...]:
    targets = None if feed.targets is None else list(feed.targets)
    return list(feed.arguments), list(feed.keywords), targets, dict(feed.call.loss_keywords)


def counts_of(feed: Feed) -> list[float]:
    """The weight of each micro-batch's loss, and then of the losses that stages add."""
    return [scale * feed.call.grad_scale for scale in (*feed.scales, *feed.added_scales)]


def kind_of(feed: Feed, leaves: Sequence[Any]) -> Hashable:
    """What a graph depends on, besides the nesting: not values of tensors, or weights of losses."""
    kinds = tuple(
        (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
        for leaf in leaves
    )
    counted = tuple(map(bool, counts_of(feed)))
    return kinds, counted, feed.outputs is None, feed.call.wants_losses


def refusal_of(leaves: Sequence[Any], device: torch.device) -> str | None:
    """Why a step with such a batch cannot be captured; None if it can."""
    for leaf in leaves:
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


class Static:
    """The buffers of a captured program, for its batch and its results."""

    def __init__(self, feed: Feed, device: torch.device) -> None:
        """Buffers for steps of the kind of ``feed``."""
        arguments, keywords, targets, given = pytree.tree_map_only(
            torch.Tensor, torch.empty_like, _tree(feed)
        )
        shape = 2, len(feed.scales)
        self._counts = torch.empty(shape, dtype=torch.float64, device=device)
        self._counted: list[float] = []
        self.feed = replace(
            feed,
            call=replace(feed.call, batch=Batch(), loss_keywords=given),
            arguments=arguments,
            keywords=keywords,
            targets=targets,
            counts=self._counts,
        )
        self._leaves = leaves_of(self.feed)[0]

    def fill(self, feed: Feed, leaves: Sequence[Any]) -> None:
        """Copy a batch, whose values are ``leaves``, into the buffers."""
        pairs: defaultdict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]]
        pairs = defaultdict(list)
        for mine, theirs in zip(self._leaves, leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                pairs[mine.dtype].append((mine, theirs))
        for found in pairs.values():
            _copy_all(*zip(*found, strict=True))
        counts = counts_of(feed)
        if counts != self._counted:
            self._counted = counts
            self._counts.copy_(torch.tensor(counts, dtype=torch.float64).view(2, -1))

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


Buffers: TypeAlias = dict[nn.Parameter, torch.Tensor]
"""The buffers of gradients, which all graphs share: a graph adds to ``.grad`` itself."""


def make(buffers: Buffers, parameters: Sequence[nn.Parameter]) -> None:
    """Make buffers for the parameters of a graph; a gradient that is there becomes one."""
    for p in parameters:
        if p not in buffers:
            zeros = partial(torch.zeros_like, dtype=p.grad_dtype, requires_grad=False)
            buffers[p] = zeros(p) if p.grad is None else p.grad


def begin(buffers: Buffers, parameters: Sequence[nn.Parameter]) -> None:
    """Before a replay: gradients that are not there begin at zero; others are copied."""
    fresh = [local(buffers[p]) for p in parameters if p.grad is None]
    if fresh:
        _zero_all(fresh)
    for p in parameters:
        if p.grad is not None and p.grad is not buffers[p]:  # from an eager step
            buffers[p].copy_(p.grad)
        p.grad = buffers[p]


def fit(buffers: Buffers, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the buffers are ``.grad``, or can be: nobody holds the memory of either."""
    usual = _usual()
    return all(
        p.grad is buffers[p] or not any(map(gt, _uses(buffers, p), usual)) for p in parameters
    )


def _uses(buffers: Buffers, parameter: nn.Parameter) -> list[int]:
    """How often a buffer and ``.grad`` are referred to, and their memory.

    That is unknown for wrappers, such as shards.
    """
    found: list[int] = []
    for tensor in (buffers[parameter], parameter.grad):
        if tensor is None:
            found += 0, 0
            continue
        known = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        users = count_users(tensor.untyped_storage()._cdata) if known else 0
        found += sys.getrefcount(tensor), users
    return found


@cache
def _usual() -> list[int]:
    """The uses of a buffer and of a gradient that nobody else holds."""
    leaf = nn.Parameter(torch.zeros(1))
    leaf.grad = torch.zeros(1)
    return _uses({leaf: torch.zeros(1)}, leaf)


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
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Mapping[nn.Parameter, torch.Tensor],
        sharded: Collection[nn.Parameter] = (),
    ) -> None:
        """``buffers`` are those of the parameters that get gradients.

        To those of ``sharded`` ones FSDP adds what it has reduced.
        """
        self._parameters = [p for p in parameters if p.requires_grad]
        self._sharded = {p for p in self._parameters if p in sharded and p in buffers}
        self._buffers: dict[torch.Tensor, torch.Tensor] = {**buffers}
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}
        self._bytes = 0
        self._taken: set[torch.Tensor] = {*self._sharded}
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
            for parameter in self._sharded:
                parameter.grad = self._buffers[parameter]
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

    def put_back(self) -> None:
        """Let ``.grad`` be what was added up so far, for a reduction; taken after that action."""
        self.take_all()
        self.add()
        for parameter, buffer in self._buffers.items():
            parameter.grad = buffer

    def add(self) -> None:
        """Add all gradients that wait, those of a type together."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        with self.in_turn():
            for dtype in dict.fromkeys(gradient.dtype for gradient in waiting.values()):
                alike = [p for p, gradient in waiting.items() if gradient.dtype == dtype]
                later = [parameter.grad for parameter in alike]  # may be new ones, yet to be taken
                for parameter in alike:
                    parameter.grad = self._buffers[parameter]
                add_to_grads(alike, [waiting[parameter] for parameter in alike])
                for parameter, gradient in zip(alike, later, strict=True):
                    parameter.grad = gradient

    def __call__(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter, if it has one."""
        gradient = parameter.grad
        if gradient is None:
            return
        buffer = self._buffers.get(parameter)
        if gradient is buffer and parameter in self._sharded:
            return
        parameter.grad = None
        if gradient is buffer:  # it was put back
            return
        self._taken.add(parameter)
        if parameter not in self._buffers:
            return
        if parameter in self._waiting:
            self.add()
        self._waiting[parameter] = gradient
        self._bytes += gradient.nbytes
        if self._bytes > _MOST:
            self.add()
