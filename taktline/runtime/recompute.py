"""Forwards that run again before their backward, with the same values and random numbers.

::

    F            what it saves is dropped at once; kept is what it began with
    RECOMPUTE    begins with the same again, and keeps what B or I needs; then all is as before it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from taktline import pytree
from taktline.errors import OffloadError
from taktline.stage import PipelineStage

Values: TypeAlias = tuple[Sequence[Any], pytree.TreeSpec | None]
"""Leaves with their tree; None: the leaves are the arguments themselves."""

_Buffer: TypeAlias = tuple[nn.Module, str, torch.Tensor, torch.Tensor]
"""A buffer of a module, by its name, with a copy of its numbers."""


def dropping() -> AbstractContextManager[object]:
    """A block for a forward that saves nothing."""
    return saved_tensors_hooks(lambda _: None, _refuse)


def _refuse(_: object) -> NoReturn:
    raise OffloadError(
        "a forward that is recomputed calls a backward itself, but what that needs was not saved; "
        "offload its stage instead"
    )


class Again:
    """What a forward begins with."""

    def __init__(
        self, stage: PipelineStage, values: Values | None, given: Any, *, draws: bool
    ) -> None:
        """``values`` have arrived; ``given`` are all arguments; ``draws``: random numbers count."""
        self._stage, self.values = stage, values
        tensors = (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))
        self._given = [(each, each._version) for each in tensors if not each.is_inference()]
        self._states = random_states(stage.device) if draws and not _is_captured(stage) else []
        buffers = _buffers_of(stage.submod)
        self._modes = tuple(module.training for module, _ in buffers)
        self._buffers = _copies(stage.changing.get(self._modes, buffers))

    def learn(self) -> bool:
        """After the forward: find which buffers it changes; returns whether it has drawn numbers.

        Only the first forward is compared with what was before it: that waits for a GPU.
        """
        if self._modes not in self._stage.changing:
            self._buffers = [
                (module, name, buffer, numbers)
                for module, name, buffer, numbers in self._buffers
                if module._buffers[name] is not buffer or not torch.equal(buffer, numbers)
            ]
            self._stage.changing[self._modes] = [each[:2] for each in self._buffers]
        if self._states and all(map(torch.equal, self._states, random_states(self._stage.device))):
            self._states = []
        return bool(self._states)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """A block for the same forward; afterwards buffers and generators are as they were."""
        if any(tensor._version != version for tensor, version in self._given):
            raise OffloadError(
                "an argument of a forward that is recomputed was changed in place since; change a "
                "copy, or offload the stage instead"
            )
        device = self._stage.device
        buffers = _copies([each[:2] for each in self._buffers])
        states = random_states(device) if self._states else []
        _put_back(self._buffers, self._states, device)
        try:
            yield
        finally:
            _put_back(buffers, states, device)


def _buffers_of(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (inner, name)
        for inner in module.modules()
        for name, buffer in inner._buffers.items()
        if buffer is not None
    ]


def _copies(buffers: Sequence[tuple[nn.Module, str]]) -> list[_Buffer]:
    found = ((module, name, module._buffers[name]) for module, name in buffers)
    return [
        (module, name, buffer, buffer.clone())
        for module, name, buffer in found
        if buffer is not None
    ]


def _put_back(
    buffers: Sequence[_Buffer], states: Sequence[torch.Tensor], device: torch.device
) -> None:
    for module, name, buffer, numbers in buffers:
        module._buffers[name] = buffer
        buffer.data.copy_(numbers)  # not a change for autograd: other micro-batches are under way
    if states:
        torch.default_generator.set_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that stages draw from."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _is_captured(stage: PipelineStage) -> bool:
    """Whether a CUDA graph is being captured: its steps draw no random numbers here."""
    return stage.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
