"""A stage at work: what each compute action does, from taking its values to giving its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from taktline.aside import Aside, Skip, handed_on, opened, require_number
from taktline.errors import LossError, SignatureError
from taktline.meta import Signature, as_arguments, flatten
from taktline.runtime.feed import Feed
from taktline.runtime.ports import In, Out, Values
from taktline.runtime.seeds import seeded
from taktline.sharding import is_sharded, root_gradient
from taktline.stage import PipelineStage
from taktline.stage.engine import outside_autocast

__all__ = ["Work"]


class Work:
    """One stage with its ports; a port is None at the ends of the model.

    ::

        activations in ──▶ F ──▶ activations out
        gradients out ◀── B, I ◀── gradients in
                             W
    """

    def __init__(
        self,
        stage: PipelineStage,
        feed: Feed,
        *,
        activations_in: In | None,
        activations_out: Out | None,
        gradients_in: In | None = None,
        gradients_out: Out | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        seed: int | None = None,
        trains: bool = True,
        checks: bool = False,
        routes: Mapping[str, int] | None = None,
    ) -> None:
        """``routes`` tells the last stage that gets each skip; None: they go to the end."""
        self._stage = stage
        self._index = stage.stage_index
        self._module = stage.submod
        self._feed = feed
        self._activations_in = activations_in
        self._activations_out = activations_out
        self._gradients_in = gradients_in
        self._gradients_out = gradients_out
        self._loss_fn = loss_fn
        self._seed = seed
        self._trains = trains
        self._checks = checks
        self._routes = routes
        self.got: set[str] = set()
        """The skips that the stage has got so far."""
        self._asides: dict[int, Aside] = {}
        self._own_gradients: dict[int, list[torch.Tensor | None]] = {}
        """Of this stage's own losses, with which its backward begins."""

    def forward(self, microbatch: int) -> None:
        """F."""
        leaves: Sequence[Any] = ()
        skips: dict[str, Skip] = {}
        if self._activations_in is None:
            arguments = self._feed.arguments[microbatch]
        else:
            leaves, spec = self._activations_in.take(microbatch)
            arguments = leaves
            if spec is not None:
                arguments, skips = opened(pytree.tree_unflatten(leaves, spec))
        if self._checks:
            _check(self._stage.expected_input, arguments, "input", "input_args")
        with Aside(self._index, skips) as aside:
            output = self._call(microbatch, arguments)
        if self._checks:
            _check(self._stage.expected_output, as_arguments(output), "output", "output_args")
        results: Sequence[Any] = ()
        if self._activations_out is None:
            aside.finish()
            losses = self._finish(microbatch, output)
        else:
            losses = []
            arguments = handed_on(as_arguments(output), aside.skips, self._routes, self._index)
            results, spec = flatten(arguments)
            self._activations_out.give(microbatch, results, spec)
        if aside.losses:
            losses += self._added(microbatch, aside.losses)
        if self._trains:
            self._keep(microbatch, _differentiable(leaves), _differentiable(results), losses)
            if aside.skips or aside.losses or aside.observed:
                self._asides[microbatch] = aside
        if aside.observed:
            self._feed.observed.append(aside.observed)
        if aside.got:
            self.got |= aside.got

    def backward(self, microbatch: int) -> None:
        """B."""
        with outside_autocast(self._stage.device):
            self._run_backward(microbatch, self._stage.backward)

    def backward_input(self, microbatch: int) -> None:
        """I."""
        with outside_autocast(self._stage.device):
            self._run_backward(microbatch, self._stage.backward_input)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        with outside_autocast(self._stage.device):
            self._stage.backward_weight(microbatch)

    @contextmanager
    def noting(self, note: Callable[[], None]) -> Iterator[None]:
        """Inside, ``note`` is called whenever an action has waited for its values."""
        ports = self._activations_in, self._gradients_in
        self._activations_in, self._gradients_in = (
            None if port is None else _Noting(port, note) for port in ports
        )
        try:
            yield
        finally:
            self._activations_in, self._gradients_in = ports

    def _call(self, microbatch: int, arguments: Sequence[Any]) -> Any:
        keywords = self._feed.keywords[microbatch]
        if self._seed is None:
            return self._module(*arguments, **keywords)
        key = (self._seed, self._feed.number, self._index, microbatch)
        with seeded(key, self._stage.device):
            return self._module(*arguments, **keywords)

    def _keep(
        self,
        microbatch: int,
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        losses: Sequence[tuple[torch.Tensor, float]],
    ) -> None:
        if losses:
            # A micro-batch that does not count is left out: its loss may well be nan.
            self._own_gradients[microbatch] = [
                root_gradient(loss, scale * self._feed.grad_scale) if scale else None
                for loss, scale in losses
            ]
            results = [*results, *(loss for loss, _ in losses)]
        self._stage.keep(microbatch, inputs, results)

    def _finish(self, microbatch: int, output: Any) -> list[tuple[torch.Tensor, float]]:
        """Keep the output if it is asked for, and compute the loss, with what it counts."""
        feed = self._feed
        if feed.outputs is not None:
            feed.outputs[microbatch] = pytree.tree_map_only(
                torch.Tensor, torch.Tensor.detach, output
            )
        if self._loss_fn is None or feed.targets is None:
            return []
        loss = self._loss_fn(output, feed.targets[microbatch], **feed.loss_keywords)
        require_number(loss, "loss_fn must give")
        if self._trains and not loss.requires_grad:
            raise LossError(
                "the loss depends on nothing that requires a gradient; is every parameter "
                "frozen, or the output detached? To run forward only, call eval()"
            )
        feed.losses[microbatch] = _value(loss)
        return [(loss, feed.scale if feed.scales is None else feed.scales[microbatch])]

    def _added(
        self, microbatch: int, losses: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, float]]:
        """Note the losses that the forward has added; gives those that have gradients."""
        feed = self._feed
        total = feed.aux_losses.get(microbatch)
        for loss in losses:
            total = _value(loss) if total is None else total + _value(loss)
            feed.aux_losses[microbatch] = total
        scale = feed.scale if feed.row_scales is None else feed.row_scales[microbatch]
        return [(loss, scale) for loss in losses if loss.requires_grad]

    def _run_backward(self, microbatch: int, run: Callable[..., list[torch.Tensor | None]]) -> None:
        gradients = self._gradients(microbatch)
        aside = self._asides.pop(microbatch, None)
        if aside is None:
            found = run(microbatch, gradients)
        else:
            aside.replays = True
            with aside:
                found = run(microbatch, gradients)
        if self._gradients_out is not None:
            self._gradients_out.give(microbatch, found, None)

    def _gradients(self, microbatch: int) -> Sequence[torch.Tensor | None]:
        """What the backward begins with: what came back, and what its own losses count."""
        own = self._own_gradients.pop(microbatch, ())
        if self._gradients_in is None:
            return own
        gradients = self._gradients_in.take(microbatch)[0]
        # They answer what was sent for this micro-batch, so that has arrived.
        if self._activations_out is not None:
            self._activations_out.settle(microbatch)
        return [*gradients, *own] if own else gradients


class _Noting:
    """Where values come from, with a note when they are here."""

    def __init__(self, port: In, note: Callable[[], None]) -> None:
        self._port = port
        self._note = note

    def take(self, microbatch: int) -> Values:
        """The values of a micro-batch, once they are here."""
        values = self._port.take(microbatch)
        self._note()
        return values


def _value(loss: torch.Tensor) -> torch.Tensor:
    """A loss as a number for the user."""
    loss = loss.detach().reshape(())
    if loss.is_floating_point() and loss.dtype.itemsize == 1:
        loss = loss.float()  # eight bits are for storage: they cannot be added up
    # A copy: torch's mse_loss gives a scalar in a storage as large as the output.
    return loss.full_tensor() if is_sharded(loss) else loss.clone()


def _differentiable(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _check(expected: Signature | None, arguments: Sequence[Any], name: str, given: str) -> None:
    if expected is None:
        return
    difference = expected.difference(
        *flatten(arguments), any_batch=True, gradients=False, name=name
    )
    if difference:
        raise SignatureError(f"{difference}; {given} of this stage says {expected}")
