"""Fixed buffers for gradients: a graph adds to the memory that it was captured with.

Small gradients are added many at a time. Autograd adds each one by itself: in a model with small
parameters, a third of all kernels of a graph, each of which takes longer to launch than to run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn

from taktline.private import for_all
from taktline.stage import PipelineStage, autograd_engine
from taktline.stage.names import parameters_of

_zero_all = for_all("torch._foreach_zero_", torch.Tensor.zero_)

_MOST = 16 * 2**20
"""The most bytes of gradients that wait to be added."""


class Touched:
    """Finds the parameters that get gradients in an eager step."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        parameters = {p: p.grad for stage in stages for p in parameters_of(stage.submod)}
        self._before = [(p, gradient, _version(gradient)) for p, gradient in parameters.items()]

    def found(self) -> list[nn.Parameter]:
        """The parameters with new gradients."""
        return [
            p
            for p, gradient, version in self._before
            if p.grad is not None and (p.grad is not gradient or p.grad._version != version)
        ]


class _Slot:
    """A parameter and its buffer, which all graphs share."""

    __slots__ = ("buffer", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.buffer = _zeros(parameter) if parameter.grad is None else parameter.grad

    def has_place(self) -> bool:
        """Whether ``.grad`` is the buffer, or can be; otherwise the slot gets another buffer."""
        gradient = self.parameter.grad
        if gradient is self.buffer:
            return True
        if _references(self) > _ALONE:  # the user keeps the old gradient
            self.buffer = _zeros(self.parameter) if gradient is None else gradient
            return False
        if gradient is None:
            return True
        # An eager step has made the gradient; or it is a view of something larger.
        if gradient._is_view() or sys.getrefcount(gradient) > _MINE:
            self.buffer = gradient
            return False
        self.buffer.copy_(gradient)
        self.parameter.grad = self.buffer
        return True


class Pool:
    """The buffers of all parameters that graphs add gradients to."""

    def __init__(self) -> None:
        self._slots: dict[nn.Parameter, _Slot] = {}
        self._apart: dict[nn.Parameter, torch.Tensor] = {}

    def buffers(
        self, parameters: Sequence[nn.Parameter], apart: Collection[nn.Parameter]
    ) -> Buffers:
        """The buffers of some parameters.

        Most buffers are ``.grad`` itself. Parameters ``apart`` have a separate buffer, from which
        gradients are copied, because their earlier gradients are kept elsewhere.
        """
        others = set(apart)
        for parameter in parameters:
            if parameter in others:
                self._apart.setdefault(parameter, _zeros(parameter))
            elif parameter not in self._slots:
                self._slots[parameter] = _Slot(parameter)
        return Buffers(
            [self._slots[p] for p in parameters if p not in others],
            {p: self._apart[p] for p in parameters if p in others},
        )


class Buffers:
    """The gradients that one graph adds to."""

    def __init__(self, own: Sequence[_Slot], apart: dict[nn.Parameter, torch.Tensor]) -> None:
        self._own = own
        self._apart = apart
        self.are_usable()
        self._places = [slot.buffer.data_ptr() for slot in own]

    def are_usable(self) -> bool:
        """Whether gradients are where the graph was captured, or can be put there."""
        return all([slot.has_place() for slot in self._own])  # noqa: C419 -- of every one of them

    def are_same(self) -> bool:
        """Whether the buffers are those that the graph was captured with."""
        return self._places == [slot.buffer.data_ptr() for slot in self._own]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, ``.grad`` are the buffers; buffers without an earlier gradient begin at zero."""
        before = {parameter: parameter.grad for parameter in self._apart}
        fresh = [slot.buffer for slot in self._own if slot.parameter.grad is None]
        fresh += self._apart.values()
        if fresh:
            _zero_all(fresh)
        self._put()
        yield
        for parameter, buffer in self._apart.items():
            known = before[parameter]
            parameter.grad = buffer.clone() if known is None else known.add_(buffer)

    @contextmanager
    def adding(self, stages: Sequence[PipelineStage]) -> Iterator[Adding | None]:
        """Inside, gradients are added to the buffers: many at a time, or by autograd (None).

        By autograd if a stage overrides its backward.
        """
        if not all(stage.may_join for stage in stages):
            yield None
            return
        own = {slot.parameter: slot.buffer for slot in self._own}
        with Adding(own | self._apart).instead() as adding:
            yield adding

    @contextmanager
    def lent(self, stages: Sequence[PipelineStage]) -> Iterator[list[str]]:
        """Inside, ``.grad`` are the buffers, and nothing is added to them.

        Afterwards all is as before; the list has reasons against the capture.
        """
        before = {p: p.grad for stage in stages for p in parameters_of(stage.submod)}
        self._put()
        lent = {p: p.grad for p in before}
        reasons: list[str] = []
        try:
            yield reasons
            if any(p.grad is not gradient for p, gradient in lent.items()):
                reasons.append("a parameter gets a gradient that it did not get before")
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient

    def _put(self) -> None:
        for slot in self._own:
            slot.parameter.grad = slot.buffer
        for parameter, buffer in self._apart.items():
            parameter.grad = buffer


class Adding:
    """Gradients that wait to be added, those of a parameter in the order of arrival.

    >>> layer, buffer = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> with Adding({layer.weight: buffer}).instead():
    ...     layer(torch.ones(1, 1)).backward()
    >>> buffer, layer.weight.grad is buffer
    (tensor([[2.]]), True)
    """

    def __init__(self, buffers: Mapping[nn.Parameter, torch.Tensor]) -> None:
        self._buffers: dict[torch.Tensor, torch.Tensor]
        self._buffers = {p: buffer for p, buffer in buffers.items() if p.requires_grad}
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}
        self._bytes = 0
        self.in_turn: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context in which gradients are added."""

    @contextmanager
    def instead(self) -> Iterator[Adding]:
        """Inside, new gradients are taken from ``.grad``; afterwards ``.grad`` is the buffer."""
        with ExitStack() as stack:
            for parameter, buffer in self._buffers.items():
                hook = parameter.register_post_accumulate_grad_hook(self)
                stack.callback(hook.remove)
                stack.callback(setattr, parameter, "grad", buffer)
                parameter.grad = None
            yield self
            self.take_all()
            self.add()

    def take_all(self) -> None:
        """Take gradients that did not come by autograd, such as those of W; after each action."""
        for parameter in self._buffers:
            self(parameter)

    def add(self) -> None:
        """Add all gradients that wait."""
        with self.in_turn():
            _add_all([self._buffers[p] for p in self._waiting], list(self._waiting.values()))
        self._waiting.clear()
        self._bytes = 0

    def __call__(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter, if it has one."""
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        if parameter in self._waiting:
            self.add()
        self._waiting[parameter] = gradient
        self._bytes += gradient.nbytes
        if self._bytes > _MOST:
            self.add()


def _add_all(buffers: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add gradients to buffers, small ones of the same types in one operation."""
    alike: defaultdict[object, tuple[list[torch.Tensor], list[torch.Tensor]]]
    alike = defaultdict(lambda: ([], []))
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if buffer.nbytes > autograd_engine.SMALL:
            buffer.add_(gradient)
            continue
        kind = type(buffer), buffer.dtype, type(gradient), gradient.dtype
        alike[kind][0].append(buffer)
        alike[kind][1].append(gradient)
    for ours, theirs in alike.values():
        autograd_engine.add_all(ours, theirs)


def _zeros(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype, requires_grad=False)


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _references(slot: _Slot) -> int:
    """The number of references to a buffer."""
    return sys.getrefcount(slot.buffer)


def _of_a_gradient() -> int:
    """The number of references to a gradient that the user does not hold."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.grad = torch.empty(0)
    gradient = parameter.grad
    return sys.getrefcount(gradient)


_ALONE = _references(_Slot(nn.Parameter(torch.empty(0))))
_MINE = _of_a_gradient()
