"""A stage at work: what each compute action does, from taking its values to giving its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from taktline.errors import LossError, SignatureError
from taktline.meta import Signature, as_arguments, flatten
from taktline.runtime.feed import Feed
from taktline.runtime.ports import In, Out
from taktline.runtime.seeds import seeded
from taktline.stage import PipelineStage

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
        loss_scale: float = 1.0,
        seed: int | None = None,
        trains: bool = True,
        checks: bool = False,
    ) -> None:
        self._stage = stage
        self._module = stage.submod
        self._feed = feed
        self._activations_in = activations_in
        self._activations_out = activations_out
        self._gradients_in = gradients_in
        self._gradients_out = gradients_out
        self._loss_fn = loss_fn
        self._loss_scale = loss_scale
        self._seed = seed
        self._trains = trains
        self._checks = checks

    def forward(self, microbatch: int) -> None:
        """F."""
        leaves: Sequence[Any] = ()
        if self._activations_in is None:
            arguments = self._feed.arguments[microbatch]
        else:
            leaves, spec = self._activations_in.take(microbatch)
            arguments = leaves if spec is None else pytree.tree_unflatten(leaves, spec)
        if self._checks:
            _check(self._stage.expected_input, arguments, "input", "input_args")
        output = self._call(microbatch, arguments)
        if self._checks:
            _check(self._stage.expected_output, as_arguments(output), "output", "output_args")
        if self._activations_out is None:
            results: Sequence[Any] = self._finish(microbatch, output)
        else:
            results, spec = flatten(as_arguments(output))
            self._activations_out.give(microbatch, results, spec)
        if self._trains:
            self._stage.keep(microbatch, _differentiable(leaves), _differentiable(results))

    def backward(self, microbatch: int) -> None:
        """B."""
        self._return(microbatch, self._stage.backward(microbatch, self._gradients(microbatch)))

    def backward_input(self, microbatch: int) -> None:
        """I."""
        gradients = self._gradients(microbatch)
        self._return(microbatch, self._stage.backward_input(microbatch, gradients))

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        self._stage.backward_weight(microbatch)

    def _call(self, microbatch: int, arguments: Sequence[Any]) -> Any:
        keywords = self._feed.keywords[microbatch]
        if self._seed is None:
            return self._module(*arguments, **keywords)
        key = (self._seed, self._feed.number, self._stage.stage_index, microbatch)
        with seeded(key, self._stage.device):
            return self._module(*arguments, **keywords)

    def _finish(self, microbatch: int, output: Any) -> Sequence[torch.Tensor]:
        """Keep the output if it is asked for, and compute the loss: the backward's root."""
        feed = self._feed
        if feed.outputs is not None:
            feed.outputs[microbatch] = pytree.tree_map_only(
                torch.Tensor, torch.Tensor.detach, output
            )
        if self._loss_fn is None or feed.targets is None:
            return ()
        loss = self._loss_fn(output, feed.targets[microbatch], **feed.loss_keywords)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise LossError(f"loss_fn must give one number as a tensor, not {_told(loss)}")
        if self._trains and not loss.requires_grad:
            raise LossError(
                "the loss depends on nothing that requires a gradient; is every parameter "
                "frozen, or the output detached? To run forward only, call eval()"
            )
        # A copy: torch's mse_loss gives a scalar in a storage as large as the output.
        feed.losses[microbatch] = loss.detach().clone()
        return (loss,)

    def _gradients(self, microbatch: int) -> Sequence[torch.Tensor | None]:
        if self._gradients_in is not None:
            gradients = self._gradients_in.take(microbatch)[0]
            # They answer what was sent for this micro-batch, so that has arrived.
            if self._activations_out is not None:
                self._activations_out.settle(microbatch)
            return gradients
        return [torch.full_like(self._feed.losses[microbatch], self._loss_scale)]

    def _return(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        if self._gradients_out is not None:
            self._gradients_out.give(microbatch, gradients, None)


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


def _told(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
