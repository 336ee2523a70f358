"""The compute actions of a stage (F, B, I, W), and the random numbers that they draw."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from taktline import pytree
from taktline.errors import LossError
from taktline.meta import Signature, as_arguments, flatten, is_sharded, local, root_gradient
from taktline.plan import Plan
from taktline.runtime.microbatch import Feed
from taktline.side_values import SideValues, check_loss, with_skips, without_skips
from taktline.stage import PipelineStage
from taktline.transport import Transport

Values: TypeAlias = tuple[Sequence[Any], pytree.TreeSpec | None]
"""Leaves with their tree; None: the leaves are the arguments themselves."""

OwnLosses: TypeAlias = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]
"""A stage's own losses, and their root gradients."""

_NO_LOSS: OwnLosses = ((), ())
_AS_IT_IS = nullcontext()

_NOT_KEPT: tuple[Sequence[torch.Tensor | None], SideValues | None] = (), None
"""What B or I needs of a forward: root gradients of its own losses, and its side values."""


@dataclass(frozen=True, slots=True)
class Binding:
    """All that the program of a step is made from."""

    plan: Plan
    stages: Mapping[int, PipelineStage]
    transport: Transport
    feed: Feed
    loss_fn: Callable[..., torch.Tensor] | None
    seed: int | None
    trains: bool
    sends_may_wait: bool
    """Whether the plan cannot deadlock where a send waits until its receive is posted."""
    most_sends: int | None
    """How many messages of a rank may be under way; None: any number."""
    alone: bool
    """Whether all stages run in this thread."""
    draws: bool
    """Whether a first step has drawn random numbers: these depend on the order of actions."""
    check_finite: bool = False
    """Whether to raise where a value is not finite."""
    any_order: bool = False
    """Whether forwards may run in any order: none changes what another one reads."""


@dataclass(slots=True)
class Signatures:
    """The values that cross this rank's boundaries: for each stage, a signature per micro-batch."""

    arriving: dict[int, list[Signature]] = field(default_factory=dict)
    leaving: dict[int, list[Signature]] = field(default_factory=dict)
    routes: Mapping[str, int] = field(default_factory=dict)
    """The last stage that gets each skip."""

    def along(self, routes: Mapping[str, int]) -> Signatures:
        """The same signatures with skips that end at their route, and not at the last stage."""
        return Signatures(
            {s: [_without(x, routes, s - 1) for x in table] for s, table in self.arriving.items()},
            {s: [_without(x, routes, s) for x in table] for s, table in self.leaving.items()},
            routes,
        )


def _without(signature: Signature, routes: Mapping[str, int], stage: int) -> Signature:
    """The signature of a stage's output, without skips that no later stage gets."""
    if signature.spec is None:
        return signature
    arguments, skips = without_skips(pytree.tree_unflatten(signature.leaves, signature.spec))
    leaves, spec = flatten(with_skips(arguments, skips, routes, stage))
    return Signature(tuple(leaves), spec)


class Handover:
    """Hands values over between two stages on one rank, without a copy."""

    def __init__(self, *, detached: bool) -> None:
        """Activations are ``detached`` from their graph, unless one backward runs through all."""
        self._detached = detached
        self._waiting: dict[int, Values] = {}

    def give(self, microbatch: int, leaves: Sequence[Any], spec: pytree.TreeSpec | None) -> None:
        """Keep the values."""
        if self._detached:
            leaves = [_detached(leaf) for leaf in leaves]
        self._waiting[microbatch] = leaves, spec

    def take(self, microbatch: int) -> Values:
        """Return the values, and forget them."""
        return self._waiting.pop(microbatch)

    def discard(self, microbatch: int) -> None:
        """Forget the values."""
        self._waiting.pop(microbatch, None)

    def settle(self, microbatch: int) -> None:
        """Nothing: the values arrive at once."""


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    detached = leaf.detach()
    return detached.requires_grad_() if leaf.requires_grad else detached


@dataclass(slots=True)
class Ports:
    """Where the values of a stage come from and go to; None at the ends of the model.

    Each is a :class:`Handover`, or an end of a channel (:mod:`taktline.runtime.ports`).
    """

    activations_in: Any = None
    activations_out: Any = None
    gradients_in: Any = None
    gradients_out: Any = None


class Work:
    """One stage with its ports.

    ::

        activations in ──▶ F ──▶ activations out
        gradients out ◀── B, I ◀── gradients in
                             W

    These run once for each stage and micro-batch of a step, so features that a stage does not use
    (skips, losses of its own, a seed, containers) cost next to nothing.
    """

    redraws = False
    """Whether a recomputed forward has drawn random numbers."""

    def __init__(
        self, binding: Binding, known: Signatures | None, stage: int, ports: Ports
    ) -> None:
        """Without ``known`` signatures, values are checked, and skips go to the last stage."""
        self._binding = binding
        self._stage = binding.stages[stage]
        self._streamed = self._stage.streamed
        self._index = stage
        self._feed = binding.feed
        self.ports = ports
        self._checks = known is None
        self._routes = None if known is None else known.routes
        self.arrived: Callable[[], object] | None = None
        """Called whenever the values of an action have arrived, while there is a trace."""
        self.flattens = True
        """Whether values are handed on as leaves; otherwise as they are, within the graph."""
        self.got: set[str] = set()
        """The names of the skips that the stage has got so far."""
        self._blank = SideValues(self._index, {})
        """The side values of the next forward; replaced once a forward has used it."""
        self._kept = [_NOT_KEPT] * binding.plan.microbatches
        """For each micro-batch, from F to B or I."""

    def forward(self, microbatch: int) -> None:
        """F."""
        inputs, results, (losses, gradients), side = self.compute(microbatch)
        if self._binding.trains:
            self._kept[microbatch] = gradients, side
            roots = [*_differentiable(results), *losses]
            self._stage.keep(microbatch, _differentiable(inputs), roots)

    def compute(
        self, microbatch: int
    ) -> tuple[Sequence[Any], Sequence[Any], OwnLosses, SideValues | None]:
        """Run the module, and hand its output on.

        Returns what has arrived, what was handed on, the losses of the stage, and its side values,
        if it has any.
        """
        side, inputs, ports = self._blank, (), self.ports
        if ports.activations_in is None:
            arguments = self._feed.arguments[microbatch]
        else:
            inputs, spec = ports.activations_in.take(microbatch)
            if self.arrived is not None:
                self.arrived()
            arguments, skips = without_skips(
                inputs if spec is None else pytree.tree_unflatten(inputs, spec)
            )
            side = SideValues(self._index, skips) if skips else side
        if self._streamed is not None:
            self._streamed.arrive()
        if self._checks:
            _check(self._stage.expected_input, arguments, "input", "input_args")
        with side, self._seeded(self._index, microbatch):
            output = self._stage.submod(*arguments, **self._feed.keywords[microbatch])
        if self._binding.check_finite:
            made = [skip.value for skip in side.skips.values() if skip.stage == self._index]
            if ports.activations_out is not None or self._feed.targets is None:
                made.append(output)  # otherwise its loss is checked
            _require_finite("the output", made, masks=True)
            _require_finite("the loss", side.losses)
        values, results, own = as_arguments(output), (), _NO_LOSS
        if self._checks:
            _check(self._stage.expected_output, values, "output", "output_args")
        used = side.used
        if used and side is self._blank:
            self._blank = SideValues(self._index, {})
        if ports.activations_out is None:
            own = self._finish(microbatch, output, side)
        else:
            if side.skips:
                values = with_skips(values, side.skips, self._routes, self._index)
            results, spec = flatten(values) if self.flattens else (values, None)
            ports.activations_out.give(microbatch, results, spec)
        if used:
            own = self._note(microbatch, side, own)
        return inputs, results, own, side if used else None

    def backward(self, microbatch: int) -> None:
        """B."""
        uncast(self._stage.device, self._backward, microbatch, self._stage.backward)

    def backward_input(self, microbatch: int) -> None:
        """I."""
        uncast(self._stage.device, self._backward, microbatch, self._stage.backward_input)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        if self._streamed is not None:
            self._streamed.arrive()
        uncast(self._stage.device, self._stage.backward_weight, microbatch)

    def _seeded(self, part: int, microbatch: int) -> AbstractContextManager[None]:
        """The random numbers of a stage, or of LOSS, for a micro-batch."""
        seed = self._binding.seed
        if seed is None:
            return _AS_IT_IS
        return seeded((seed, self._feed.call.number, part, microbatch), self._stage.device)

    def _finish(self, microbatch: int, output: Any, side: SideValues) -> OwnLosses:
        """Keep the output if wanted, and compute the loss with its root gradient."""
        feed, loss_fn = self._feed, self._binding.loss_fn
        if side.skips:
            side.finish()
        if feed.outputs is not None:
            feed.outputs[microbatch] = pytree.tree_map_only(
                torch.Tensor, torch.Tensor.detach, output
            )
        if loss_fn is None or feed.targets is None:
            return _NO_LOSS
        target = feed.targets[microbatch]
        with self._seeded(LOSS, microbatch):
            loss = loss_fn(output, target, **feed.call.loss_keywords)
        check_loss(loss, "loss_fn must return")
        scale = feed.scales[microbatch]
        if self._binding.check_finite and scale:
            _require_finite("the loss", loss)
        if feed.call.wants_losses:
            feed.losses[microbatch] = _value(loss)
        if not self._binding.trains:
            return _NO_LOSS
        if not loss.requires_grad:
            raise LossError(
                "the loss depends on nothing that requires a gradient; is every parameter "
                "frozen, or the output detached? To run forward only, call eval()"
            )
        return (loss,), (self._root_gradient(loss, scale, (0, microbatch)),)

    def _note(self, microbatch: int, side: SideValues, own: OwnLosses) -> OwnLosses:
        """Collect the side values of a forward; returns the losses with the added ones."""
        feed = self._feed
        if side.observed:
            feed.observed.append(side.observed)
        self.got |= side.got
        if not side.losses:
            return own
        total = feed.aux_losses.get(microbatch)
        for loss in side.losses:
            total = _value(loss) if total is None else total + _value(loss)
            feed.aux_losses[microbatch] = total
        scale = feed.added_scales[microbatch]
        added = [loss for loss in side.losses if loss.requires_grad]
        losses, gradients = own
        roots = (self._root_gradient(x, scale, (1, microbatch)) for x in added)
        return (*losses, *added), (*gradients, *roots)

    def _root_gradient(
        self, loss: torch.Tensor, scale: float, place: tuple[int, int]
    ) -> torch.Tensor | None:
        """The gradient that the backward of a loss begins with; ``place`` is that in ``counts``."""
        if not scale:
            return None  # a micro-batch without weight is left out: its loss may be nan
        counts = self._feed.counts
        return root_gradient(
            loss, scale * self._feed.call.grad_scale if counts is None else counts[place]
        )

    def _backward(self, microbatch: int, run: Callable[..., list[torch.Tensor | None]]) -> None:
        gradients, side = self._kept[microbatch]
        self._kept[microbatch] = _NOT_KEPT
        ports = self.ports
        if ports.gradients_in is not None:
            found = ports.gradients_in.take(microbatch)[0]
            if self.arrived is not None:
                self.arrived()
            gradients = [*found, *gradients] if gradients else found
            if found:  # a gradient shows that the activations of its micro-batch have arrived
                ports.activations_out.settle(microbatch)
        if self._stage.away:
            self._stage.arrive(microbatch)
        if self._streamed is not None:
            self._streamed.arrive()
        if side is None:
            found = run(microbatch, gradients)
        else:
            side.replays = True
            with side:
                found = run(microbatch, gradients)
        if ports.gradients_out is not None:
            ports.gradients_out.give(microbatch, found, None)


def uncast(device: torch.device, run: Callable[..., None], *arguments: Any) -> None:
    """Run without autocast: a backward uses the types of its forward, as in plain training."""
    if not torch.is_autocast_enabled(device.type):
        run(*arguments)
        return
    with torch.autocast(device.type, enabled=False):
        run(*arguments)


def _value(loss: torch.Tensor) -> torch.Tensor:
    """A loss as a scalar for the user."""
    loss = loss.detach()
    if loss.dim():
        loss = loss.reshape(())
    if loss.dtype.itemsize == 1 and loss.is_floating_point():
        loss = loss.float()  # 8-bit floats cannot be added up
    # A copy: torch's mse_loss returns a scalar in a storage as large as the output.
    return loss.full_tensor() if is_sharded(loss) else loss.clone()


def _differentiable(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _check(expected: Signature | None, arguments: Sequence[Any], name: str, given: str) -> None:
    if expected is None:
        return
    difference = expected.difference(*flatten(arguments), is_example=True, name=name)
    if difference:
        text = f"{difference}; {given} of this stage is {expected}"
        raise expected.misfit(flatten(arguments)[0], text)


def _require_finite(what: str, value: Any, *, masks: bool = False) -> None:
    """Raise if a value of a stage is not finite; waits for a GPU.

    With ``masks``, tensors without a gradient may be infinite.
    """
    for tensor in pytree.tree_leaves(value):
        if not isinstance(tensor, torch.Tensor):
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        numbers = local(tensor.detach())
        if numbers.dtype.itemsize == 1:
            numbers = numbers.float()  # 8-bit floats have few operations
        nan = torch.isnan(numbers)
        wrong = nan if masks and not tensor.requires_grad else ~torch.isfinite(numbers)
        if bool(wrong.any()):
            kind = "nan" if bool(nan.any()) else "inf"
            raise FloatingPointError(
                f"{what} has {kind} ({int(wrong.sum()):,} of {numbers.numel():,} numbers), and "
                "earlier stages gave none: look at the parameters of this stage and, if it is the "
                "first, at the batch"
            )


# Random numbers.

LOSS = -1
"""Stands for ``loss_fn`` among the stages of seeds: its numbers do not depend on the cuts."""


@contextmanager
def seeded(key: tuple[int, int, int, int], device: torch.device) -> Iterator[None]:
    """Inside, random numbers depend on the (seed, step, stage, micro-batch) alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        torch.default_generator.manual_seed(seed)
        for each in devices:
            module = torch.get_device_module(each)
            with module.device(each):
                module.manual_seed(seed)
        yield


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that stages draw from."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
