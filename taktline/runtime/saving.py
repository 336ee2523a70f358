"""The actions that save memory: OFFLOAD and RELOAD (see ``stage/offload.py``), and RECOMPUTE.

::

    F            what it saves is dropped at once; kept is what it began with
    RECOMPUTE    begins with the same again, and keeps what B or I needs; then all is as before it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from taktline import pytree
from taktline.errors import OffloadError
from taktline.plan import Kind
from taktline.runtime.stage_actions import (
    Binding,
    Handover,
    Ports,
    Signatures,
    Values,
    Work,
    random_states,
)
from taktline.stage import PipelineStage
from taktline.stage.offload import Activations

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


class SavingWork(Work):
    """The work of a stage in a plan with such actions."""

    def __init__(
        self,
        binding: Binding,
        known: Signatures | None,
        stage: int,
        ports: Ports,
        leaving: list[Activations],
    ) -> None:
        """``leaving`` is what the rank copies to the host at the moment."""
        super().__init__(binding, known, stage, ports)
        self._leaving = leaving
        rows = binding.plan.rows
        self._offloaded, self._recomputed = (
            set(rows.microbatch[(rows.stage == stage) & (rows.kind == kind)].tolist())
            for kind in (Kind.OFFLOAD, Kind.RECOMPUTE)
        )
        self._again: dict[int, Again] = {}
        """What recomputed forwards have begun with, from F to RECOMPUTE."""

    def forward(self, microbatch: int) -> None:
        """F."""
        if microbatch in self._offloaded:
            with self._stage.noting(microbatch):
                super().forward(microbatch)
        elif microbatch in self._recomputed:
            self._forward_briefly(microbatch)
        else:
            super().forward(microbatch)

    def run(self, kind: Kind, microbatch: int) -> None:
        """OFFLOAD, RELOAD or RECOMPUTE."""
        if kind == Kind.RECOMPUTE:
            self._recompute(microbatch)
            return
        while self._leaving:  # the copies of the rank before have ended, and their memory is free
            self._leaving.pop().release()
        if kind == Kind.OFFLOAD:
            self._leaving.append(self._stage.leave(microbatch))
        else:
            self._stage.away[microbatch].come_back()

    def _forward_briefly(self, microbatch: int) -> None:
        """Keep what has arrived, and not what the backward needs."""
        into, feed, values = self.ports.activations_in, self._feed, None
        if into is not None:
            values = into.take(microbatch)
            if self.arrived is not None:
                self.arrived()
        given = [feed.keywords[microbatch], values[0] if values else feed.arguments[microbatch]]
        again = Again(self._stage, values, given, draws=self._binding.seed is None)
        with self._between(microbatch, values, self.ports.activations_out), dropping():
            self.compute(microbatch)
        self.redraws |= again.learn()
        self._again[microbatch] = again

    def _recompute(self, microbatch: int) -> None:
        """Run the same forward, which counts nothing and hands nothing on."""
        again, feed, out = self._again.pop(microbatch), self._feed, self.ports.activations_out
        self._feed = replace(feed, outputs=None, losses={}, aux_losses={}, observed=[])
        nowhere = None if out is None else Handover(detached=False)
        try:
            with again.as_before(), self._between(microbatch, again.values, nowhere):
                super().forward(microbatch)
        finally:
            self._feed = feed

    @contextmanager
    def _between(self, microbatch: int, values: Values | None, out: Any) -> Iterator[None]:
        """Inside, the values arrive again, and the output goes to ``out``."""
        ports, into = self.ports, None
        if values is not None:
            into = Handover(detached=False)
            into.give(microbatch, *values)
        self.ports = replace(ports, activations_in=into, activations_out=out)
        try:
            yield
        finally:
            self.ports = ports


def saving_works(
    binding: Binding, known: Signatures | None, ports: Mapping[int, Ports]
) -> dict[int, SavingWork]:
    """The work of all stages here."""
    rank_of, leaving = binding.plan.placement.rank_of, defaultdict[int, list[Activations]](list)
    return {
        stage: SavingWork(binding, known, stage, ports[stage], leaving[rank_of[stage]])
        for stage in binding.stages
    }


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
    return [(inner, name) for inner in module.modules() for name in inner._buffers]


def _copies(buffers: Sequence[tuple[nn.Module, str]]) -> list[_Buffer]:
    found = ((module, name, module._buffers[name]) for module, name in buffers)
    return [(m, name, buffer, buffer.clone()) for m, name, buffer in found if buffer is not None]


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


def _is_captured(stage: PipelineStage) -> bool:
    """Whether a CUDA graph is being captured: its steps draw no random numbers here."""
    return stage.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
