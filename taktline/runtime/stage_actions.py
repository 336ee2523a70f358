"""The compute actions of a stage (F, B, I, W), from taking its values to giving its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from taktline import pytree
from taktline.errors import LossError
from taktline.meta import Signature, as_arguments, flatten
from taktline.runtime.ports import In, Out, Values
from taktline.runtime.random_numbers import LOSS
from taktline.runtime.step_data import Binding, Signatures
from taktline.sharding import is_sharded, local, root_gradient
from taktline.side_values import Aside, handed_on, opened, require_number
from taktline.stage import PipelineStage
from taktline.stage.names import named_parameters

OwnLosses: TypeAlias = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]
"""A stage's own losses, and their root gradients."""

_NO_LOSS: OwnLosses = ((), ())

Keep: TypeAlias = Callable[[int, Sequence[Any], OwnLosses, Aside | None], None]
"""Keeps the stage, results, own losses and side values of a forward, for one backward of all
stages."""

_Kept: TypeAlias = tuple[Sequence[torch.Tensor | None], Aside | None]
"""The values of a forward that its backward needs: root gradients of own losses, side values."""

_NOT_KEPT: _Kept = ((), None)


class Work:
    """One stage with its ports; a port is None at the ends of the model.

    ::

        activations in ──▶ F ──▶ activations out
        gradients out ◀── B, I ◀── gradients in
                             W

    These run once for each stage and micro-batch of a step, so features that a stage does not use
    (skips, losses of its own, a seed, containers) cost next to nothing.
    """

    def __init__(
        self,
        binding: Binding,
        known: Signatures | None,
        stage: int,
        *,
        activations_in: In | None,
        activations_out: Out | None,
        gradients_in: In | None = None,
        gradients_out: Out | None = None,
        joined: Keep | None = None,
    ) -> None:
        """Without ``known`` signatures, values are checked, and skips go to the last stage.

        With ``joined``, values go to the next stage within the graph.
        """
        self._stage = binding.stages[stage]
        self._index = stage
        self._device = self._stage.device
        self._feed = binding.feed
        self._activations_in = activations_in
        self._activations_out = activations_out
        self._gradients_in = gradients_in
        self._gradients_out = gradients_out
        self._loss_fn = binding.loss_fn
        self._seed = binding.seed
        self._seeded = binding.seeded
        self._trains = binding.trains
        self._checks = known is None
        self._check_finite = binding.check_finite
        self._routes = None if known is None else known.routes
        self._joined = joined
        self.got: set[str] = set()
        """The names of the skips that the stage has got so far."""
        self._blank = Aside(self._index, {})
        """The side values of the next forward; replaced once a forward has used it."""
        self._kept = [_NOT_KEPT] * binding.plan.microbatches
        """For each micro-batch, from F to B or I."""

    def forward(self, microbatch: int) -> None:
        """F."""
        aside, inputs = self._blank, ()
        if self._activations_in is None:
            arguments = self._feed.arguments[microbatch]
        else:
            inputs, spec = self._activations_in.take(microbatch)
            arguments, skips = opened(
                inputs if spec is None else pytree.tree_unflatten(inputs, spec)
            )
            aside = Aside(self._index, skips) if skips else aside
        if self._checks:
            _check(self._stage.expected_input, arguments, "input", "input_args")
        with aside:
            output = self._call(microbatch, arguments)
        if self._check_finite:
            self._require_finite(microbatch, arguments, output, aside)
        if self._checks:
            _check(self._stage.expected_output, as_arguments(output), "output", "output_args")
        used = aside.used
        if used and aside is self._blank:
            self._blank = Aside(self._index, {})
        own, results = _NO_LOSS, ()
        if self._activations_out is None:
            own = self._finish(microbatch, output, aside)
        else:
            results, spec = self._handed_on(output, aside)
            self._activations_out.give(microbatch, results, spec)
        if used:
            own = self._note(microbatch, aside, own)
        if self._joined is not None:
            self._joined(self._index, results, own, aside if used else None)
        elif self._trains:
            losses, gradients = own
            self._kept[microbatch] = gradients, aside if used else None
            roots = [*_differentiable(results), *losses]
            self._stage.keep(microbatch, _differentiable(inputs), roots)

    def backward(self, microbatch: int) -> None:
        """B."""
        uncast(self._device.type, self._backward, microbatch, self._stage.backward)

    def backward_input(self, microbatch: int) -> None:
        """I."""
        uncast(self._device.type, self._backward, microbatch, self._stage.backward_input)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        uncast(self._device.type, self._stage.backward_weight, microbatch)

    @contextmanager
    def noting(self, note: Callable[[], None]) -> Iterator[None]:
        """Inside, ``note`` is called whenever the values of an action have arrived."""
        ports = self._activations_in, self._gradients_in
        self._activations_in, self._gradients_in = (
            None if port is None else _Noting(port, note) for port in ports
        )
        try:
            yield
        finally:
            self._activations_in, self._gradients_in = ports

    def _call(self, microbatch: int, arguments: Sequence[Any]) -> Any:
        if self._stage.around_forward is None:
            return self._run_module(microbatch, arguments)
        with self._stage.around_forward(microbatch):
            return self._run_module(microbatch, arguments)

    def _run_module(self, microbatch: int, arguments: Sequence[Any]) -> Any:
        keywords = self._feed.keywords[microbatch]
        if self._seed is None:
            return self._stage.submod(*arguments, **keywords)
        with self._seeded((self._seed, self._feed.number, self._index, microbatch), self._device):
            return self._stage.submod(*arguments, **keywords)

    def _loss(self, loss_fn: Callable[..., Any], microbatch: int, output: Any, target: Any) -> Any:
        keywords = self._feed.loss_keywords
        if self._seed is None:
            return loss_fn(output, target, **keywords)
        with self._seeded((self._seed, self._feed.number, LOSS, microbatch), self._device):
            return loss_fn(output, target, **keywords)

    def _require_finite(
        self, microbatch: int, arguments: Sequence[Any], output: Any, aside: Aside
    ) -> None:
        given = arguments, self._feed.keywords[microbatch]
        values = [skip.value for skip in aside.skips.values() if skip.stage == self._index]
        if self._activations_out is not None or self._feed.targets is None:
            values.append(output)  # otherwise its loss is checked
        _require_finite("the output", values, self._stage, given)
        for loss in aside.losses:
            _require_finite_loss(loss, self._stage, given)

    def _handed_on(self, output: Any, aside: Aside) -> Values:
        """The values for the next stage: the output, and skips that later stages get."""
        values = as_arguments(output)
        if aside.skips:
            values = handed_on(values, aside.skips, self._routes, self._index)
        return flatten(values) if self._joined is None else (values, None)

    def _finish(self, microbatch: int, output: Any, aside: Aside) -> OwnLosses:
        """Keep the output if wanted, and compute the loss with its root gradient."""
        feed = self._feed
        if aside.skips:
            aside.finish()
        if feed.outputs is not None:
            feed.outputs[microbatch] = pytree.tree_map_only(
                torch.Tensor, torch.Tensor.detach, output
            )
        if self._loss_fn is None or feed.targets is None:
            return _NO_LOSS
        loss = self._loss(self._loss_fn, microbatch, output, feed.targets[microbatch])
        require_number(loss, "loss_fn must return")
        scale = feed.scale if feed.scales is None else feed.scales[microbatch]
        if self._check_finite and scale:
            target = feed.targets[microbatch]
            _require_finite_loss(loss, self._stage, (output, target))
        if feed.wants_losses:
            feed.losses[microbatch] = _value(loss)
        if not self._trains:
            return _NO_LOSS
        if not loss.requires_grad:
            raise LossError(
                "the loss depends on nothing that requires a gradient; is every parameter "
                "frozen, or the output detached? To run forward only, call eval()"
            )
        return (loss,), (self._root_gradient(loss, scale, (0, microbatch)),)

    def _note(self, microbatch: int, aside: Aside, own: OwnLosses) -> OwnLosses:
        """Collect the side values of a forward; returns the losses with the added ones."""
        feed = self._feed
        if aside.observed:
            feed.observed.append(aside.observed)
        self.got |= aside.got
        if not aside.losses:
            return own
        total = feed.aux_losses.get(microbatch)
        for loss in aside.losses:
            total = _value(loss) if total is None else total + _value(loss)
            feed.aux_losses[microbatch] = total
        scale = feed.scale if feed.row_scales is None else feed.row_scales[microbatch]
        added = [loss for loss in aside.losses if loss.requires_grad]
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
            loss, scale * self._feed.grad_scale if counts is None else counts[place]
        )

    def _backward(self, microbatch: int, run: Callable[..., list[torch.Tensor | None]]) -> None:
        gradients, aside = self._kept[microbatch]
        self._kept[microbatch] = _NOT_KEPT
        if self._gradients_in is not None:
            found = self._gradients_in.take(microbatch)[0]
            gradients = [*found, *gradients] if gradients else found
            # A gradient shows that the activations of its micro-batch have arrived.
            if self._activations_out is not None:
                self._activations_out.settle(microbatch)
        if aside is None:
            found = run(microbatch, gradients)
        else:
            aside.replays = True
            with aside:
                found = run(microbatch, gradients)
        if self._gradients_out is not None:
            self._gradients_out.give(microbatch, found, None)


class _Noting:
    """A port that calls a function when values have arrived."""

    def __init__(self, port: In, note: Callable[[], None]) -> None:
        self._port = port
        self._note = note

    def take(self, microbatch: int) -> Values:
        """Wait for the values of a micro-batch."""
        values = self._port.take(microbatch)
        self._note()
        return values


def uncast(device_type: str, run: Callable[..., None], *arguments: Any) -> None:
    """Run without autocast: a backward uses the types of its forward, as in plain training."""
    if not torch.is_autocast_enabled(device_type):
        run(*arguments)
        return
    with torch.autocast(device_type, enabled=False):
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


def _require_finite(what: str, value: Any, stage: PipelineStage, given: Any) -> None:
    """Raise if a value of a stage is not finite; the program adds the stage and the micro-batch.

    Tensors without a gradient may be infinite, as masks are.
    """
    for tensor in _numbers(value):
        if text := _fault(tensor, infinite=not tensor.requires_grad):
            raise FloatingPointError(f"{what} has {text}; {_cause(stage, given)}")


def _require_finite_loss(loss: torch.Tensor, stage: PipelineStage, given: Any) -> None:
    """Raise if a loss of a stage is not finite."""
    if text := _fault(loss):
        raise FloatingPointError(f"the loss has {text}; {_cause(stage, given)}")


def _cause(stage: PipelineStage, given: Any) -> str:
    """Where a value that is not finite may come from, in words."""
    for name, parameter in named_parameters(stage.submod).items():
        if text := _fault(parameter):
            return f"parameter {name} has {text}, from before this step: load a checkpoint"
    for tensor in _numbers(given):
        if text := _fault(tensor, infinite=not stage.is_first):
            return f"what it was computed from has {text}: look at the batch"
    return "the parameters of the stage, and what it was given, are finite"


def _numbers(value: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


def _fault(tensor: torch.Tensor, *, infinite: bool = False) -> str:
    """What is wrong with a tensor, in words; waits for a GPU."""
    numbers = local(tensor.detach())
    if numbers.dtype.itemsize == 1:
        numbers = numbers.float()  # 8-bit floats have few operations
    wrong = torch.isnan(numbers) if infinite else ~torch.isfinite(numbers)
    if not bool(wrong.any()):
        return ""
    kind = "nan" if bool(torch.isnan(numbers).any()) else "inf"
    return f"{kind} ({int(wrong.sum()):,} of {numbers.numel():,} numbers)"
