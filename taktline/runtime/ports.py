"""The ports of a stage: its values come from and go to a stage on this rank, or a channel.

::

    stage ──give──▶ Handover ──take──▶ stage                               on one rank
    stage ──give──▶ Outgoing ──send──▶ channel ──▶ Incoming ──take──▶ stage
                                                      ▲ post

Values are a flat list of leaves with their tree (None: the leaves are the arguments themselves).
In a first step their signature is not known yet, so each message describes itself::

    [status, bytes of text, bytes of data]   text   data

A rank receives such a message when it needs values, in the order of the posts.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from taktline.errors import SignatureError, TransportError
from taktline.meta import Signature, TensorMeta
from taktline.plan import Kind, Plan
from taktline.pytree import TreeSpec
from taktline.runtime.stage_actions import Binding, Handover, Ports, Signatures, Values
from taktline.stage import PipelineStage
from taktline.transport import Channel, Handle, Post
from taktline.transport.codec import decode, encode
from taktline.transport.wire import Layout, Parcel

_CPU = torch.device("cpu")
_UNDER_WAY = 2
"""How many messages of a boundary may be under way where no reply tells that they arrived."""
_HEAD = struct.Struct("<3q")
_MOST_TEXT = 1 << 24
"""Longer than the description of any values."""
_DONE, _FAILED = 0x7A4B0001, 0x7A4B0002
"""The first number of a message: its sender has worked, or failed."""


class PeerFailed(Exception):
    """The sender of a message has failed; it reports why at the end of the step."""


_Message: TypeAlias = tuple[Signature, torch.Tensor] | SignatureError | PeerFailed
"""A message; an error if it cannot be read, or comes from a rank that has failed."""
Queue: TypeAlias = dict[tuple[int, int], _Message | None]
"""The messages of a channel in a first step, by stage and micro-batch; None: not received yet."""


class BrokenChannel(TransportError):
    """Messages cannot be read any more, so that the step cannot be played to its end."""

    recoverable = "restart"


class Sends:
    """Messages under way, with their buffers; before one too many, the oldest is waited for."""

    def __init__(self, limit: float = inf) -> None:
        self._limit = limit
        self._sent: dict[tuple[Channel, int, int], list[tuple[Handle, Layout, Parcel]]] = {}

    def add(
        self, key: tuple[Channel, int, int], post: Post, layout: Layout, parcels: Sequence[Parcel]
    ) -> None:
        """Send the parts of a message, once there is room."""
        while self._sent:
            first = next(iter(self._sent))
            left = all(handle.done for handle, *_ in self._sent[first])
            if not left and len(self._sent) < self._limit:
                break
            self.settle(first)
        self._sent[key] = [(post(each.buffer, each.marks), layout, each) for each in parcels]

    def settle(self, key: tuple[Channel, int, int]) -> None:
        """Wait until a message has left, and recycle its buffers."""
        for handle, layout, parcel in self._sent.pop(key, ()):
            handle.wait()
            layout.recycle(parcel)

    def settle_all(self) -> None:
        """Wait until every message has left."""
        for key in list(self._sent):
            self.settle(key)


class Outgoing:
    """The sending end of a boundary: one message for each micro-batch."""

    def __init__(
        self,
        place: tuple[Channel, int],
        post: Post,
        sends: Sends,
        device: torch.device = _CPU,
        layouts: Sequence[Layout] | None = None,
        signatures: Sequence[Signature] | None = None,
        shown: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """``place`` is the channel and the stage.

        Without ``layouts`` each message describes itself. Gradients have no ``signatures``. Of
        activations, ``shown`` has those that have arrived if the gradient of a micro-batch has.
        """
        self._place, self._post, self.sends, self._device = place, post, sends, device
        self._shown = shown
        self._layouts, self._signatures = layouts, signatures
        self.learned: dict[int, Signature] = {}
        """The signatures of messages that describe themselves."""
        self._packed: dict[int, tuple[Layout, list[Parcel]]] = {}

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None:
        """Pack the values; missing gradients become zeros."""
        if self._layouts is None:
            self._packed[microbatch] = self._described(microbatch, leaves, spec)
            return
        if self._signatures is not None:
            signature = self._signatures[microbatch]
            if difference := signature.difference(leaves, spec):
                raise signature.misfit(
                    leaves,
                    f"{difference}, as it was for inputs of the same shapes before; if the output "
                    "depends on their values, pass dynamic_shapes=True to the schedule",
                )
            leaves = _tensors(leaves)
        layout = self._layouts[microbatch]
        self._packed[microbatch] = layout, [layout.pack(leaves)]

    def send(self, microbatch: int) -> None:
        """Send the packed values."""
        layout, parcels = self._packed.pop(microbatch)
        self.sends.add((*self._place, microbatch), self._post, layout, parcels)

    def fail(self, microbatch: int) -> None:
        """Report a failure instead."""
        if self._layouts is None:
            parts = Layout(()), [self._parcel(_HEAD.pack(_FAILED, 0, 0))]
        else:
            parts = self._layouts[microbatch], [self._layouts[microbatch].failure()]
        self._packed[microbatch] = parts
        self.send(microbatch)

    def settle(self, microbatch: int) -> None:
        """Free what has left, once the gradient of a micro-batch shows what has arrived."""
        for each in self._shown.get(microbatch, (microbatch,)):
            self.sends.settle((*self._place, each))

    def _described(
        self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None
    ) -> tuple[Layout, list[Parcel]]:
        signature = self.learned[microbatch] = Signature.of(leaves, spec)
        layout, text = Layout(signature.tensors, self._device), encode(signature)
        data = layout.pack(_tensors(leaves))
        head = _HEAD.pack(_DONE, len(text), data.buffer.nbytes)
        return layout, [self._parcel(head), self._parcel(text), replace(data, marks=b"")]

    def _parcel(self, data: bytes) -> Parcel:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        return Parcel(buffer, b"", [])


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class Incoming:
    """The receiving end of a boundary."""

    def __init__(
        self,
        post: Post,
        stage: PipelineStage,
        queue: Queue,
        layouts: Sequence[Layout] | None = None,
        signatures: Sequence[Signature] = (),
    ) -> None:
        """Without ``layouts`` each message describes itself.

        Stages that share a channel share its ``queue``.
        """
        self._post, self._stage, self._queue = post, stage, queue
        self._layouts, self._signatures = layouts, signatures
        self.learned: dict[int, Signature] = {}
        """The signatures of messages that describe themselves."""
        self._posted: dict[int, tuple[Handle, torch.Tensor, bytearray]] = {}

    def post(self, microbatch: int) -> None:
        """Post the receive; of a message of unknown size, only note that it comes next."""
        if self._layouts is None:
            self._queue[self._stage.stage_index, microbatch] = None
            return
        layout = self._layouts[microbatch]
        buffer, marks = layout.empty(), bytearray(layout.unmarked)
        self._posted[microbatch] = (self._post(buffer, marks), buffer, marks)

    def take(self, microbatch: int) -> Values:
        """Wait for the values."""
        if self._layouts is None:
            return self._described(microbatch)
        handle, buffer, marks = self._posted.pop(microbatch)
        handle.wait()
        layout = self._layouts[microbatch]
        if layout.failed(marks):
            raise PeerFailed
        leaves: list[Any] = layout.unpack(buffer)
        if marks != layout.unmarked:
            for index in layout.missing(marks):
                leaves[index] = None
        signature = self._signatures[microbatch]
        if len(leaves) < len(signature.leaves):  # some leaves do not travel
            leaves = signature.filled(leaves)
        return leaves, signature.spec

    def discard(self, microbatch: int) -> None:
        """Receive the values unless they were taken, and forget them."""
        if microbatch in self._posted:
            self._posted.pop(microbatch)[0].wait()
        elif (self._stage.stage_index, microbatch) in self._queue:
            self._message(microbatch)

    def _described(self, microbatch: int) -> Values:
        message = self._message(microbatch)
        if isinstance(message, Exception):
            raise message
        signature, data = message
        self.learned[microbatch] = signature
        tensors = Layout(signature.tensors, data.device, self._stage.mesh_for).unpack(data)
        return signature.filled(tensors), signature.spec

    def _message(self, microbatch: int) -> _Message:
        queue, key = self._queue, (self._stage.stage_index, microbatch)
        while (message := queue[key]) is None:
            first = next(key for key, early in queue.items() if early is None)
            queue[first] = self._receive()
        del queue[key]
        return message

    def _receive(self) -> _Message:
        """The next message of the channel."""
        device = self._stage.device
        status, text_size, data_size = _HEAD.unpack(self._bytes(_HEAD.size))
        if status == _FAILED:
            return PeerFailed()
        known = 0 < text_size <= _MOST_TEXT and 0 <= data_size <= _memory(device)
        if status != _DONE or not known:
            raise BrokenChannel(
                "what has arrived is not a message, or is larger than the memory of this rank; "
                "restart all ranks, with one version of Taktline"
            )
        text = self._bytes(text_size)
        try:
            signature = decode(text)
            layout = Layout(signature.tensors, device)
            if layout.nbytes != data_size:
                raise SignatureError(f"a received message is not as long as {signature}")
        except SignatureError as error:
            self._buffer(data_size)  # the next message begins behind it
            return error
        data = layout.empty()
        self._post(data).wait()
        return signature, data

    def _bytes(self, count: int) -> bytes:
        return self._buffer(count).cpu().numpy().tobytes()

    def _buffer(self, count: int) -> torch.Tensor:
        buffer = torch.empty(count, dtype=torch.uint8, device=self._stage.device)
        self._post(buffer).wait()
        return buffer


class Silent:
    """A boundary that no gradient crosses, as all before it is frozen: nothing is sent."""

    def take(self, microbatch: int) -> Values:
        """No gradients."""
        return (), None

    def give(self, *_: object) -> None:
        """Nothing."""

    post = send = fail = discard = give


def ports_of(binding: Binding, known: Signatures | None) -> dict[int, Ports]:
    """The ports of this rank's stages; without known signatures each message describes itself."""
    stages, trains, transport = binding.stages, binding.trains, binding.transport
    rank_of, here = binding.plan.placement.rank_of, transport.rank
    limited = binding.most_sends is not None and binding.sends_may_wait
    shared = Sends(binding.most_sends or 0) if limited else None
    made: dict[object, Layout] = {}
    queues: defaultdict[Channel, Queue] = defaultdict(dict)

    def laid_out(stage: int, values: Iterable[tuple[TensorMeta, ...]]) -> list[Layout]:
        owner, found = stages[stage], list[Layout]()
        for tensors in values:
            # Stages share layouts and buffers, unless they may lie on different meshes.
            sharded = any(tensor.sharding for tensor in tensors)
            key = (tensors, owner.device, stage if sharded else None)
            if key not in made:
                made[key] = Layout(tensors, owner.device, owner.mesh_for)
            found.append(made[key])
        return found

    def crosses_back(signatures: Sequence[Signature]) -> bool:
        return any(signature.gradients for signature in signatures)

    def incoming(stage: int, channel: Channel) -> Incoming | Silent:
        port = partial(Incoming, transport.receiver(channel), stages[stage], queues[channel])
        if known is None:
            return port()
        signatures = known.arriving.get(stage, [])
        if channel.gradients:
            if not crosses_back(known.leaving[stage]):
                return Silent()
            signatures = [Signature(s.gradients) for s in known.leaving[stage]]
        return port(laid_out(stage, [s.tensors for s in signatures]), signatures)

    def outgoing(stage: int, channel: Channel) -> Outgoing | Silent:
        post, device = transport.sender(channel, eager=known is None), stages[stage].device
        if known is None:
            return Outgoing((channel, stage), post, Sends(), device)
        # In training, the gradient of a micro-batch shows that its activations have arrived.
        table = known.arriving if channel.gradients else known.leaving
        if not (crosses := crosses_back(table[stage])) and channel.gradients:
            return Silent()
        answered = trains and not channel.gradients and crosses
        unlimited = answered or not binding.sends_may_wait
        port = partial(
            *(Outgoing, (channel, stage), post),
            shared or Sends(inf if unlimited else _UNDER_WAY),
            device,
        )
        if channel.gradients:
            return port(laid_out(stage, [s.gradients for s in known.arriving[stage]]))
        leaving = known.leaving[stage]
        shown = _shown(binding.plan, stage + 1) if answered else {}
        return port(laid_out(stage, [s.tensors for s in leaving]), leaving, shown)

    found = {stage: Ports() for stage in stages}
    for stage, ports in found.items():
        if stage + 1 in stages:  # both on this rank
            ports.activations_out = Handover(detached=True)
            found[stage + 1].activations_in = ports.activations_out
            ports.gradients_in = found[stage + 1].gradients_out = Handover(detached=False)
        elif stage + 1 < len(rank_of):
            there = rank_of[stage + 1]
            ports.activations_out = outgoing(stage, Channel(here, there, False))
            if trains:
                ports.gradients_in = incoming(stage, Channel(there, here, True))
        if stage > 0 and stage - 1 not in stages:
            there = rank_of[stage - 1]
            ports.activations_in = incoming(stage, Channel(there, here, False))
            if trains:
                ports.gradients_out = outgoing(stage, Channel(here, there, True))
    return found


def _shown(plan: Plan, stage: int) -> dict[int, list[int]]:
    """By micro-batch: the activations that a stage has taken first before this gradient is sent."""
    rows = plan.rows_of(plan.placement.rank_of[stage])
    found, new = dict[int, list[int]](), list[int]()
    for row in np.flatnonzero(rows.stage == stage):
        if rows.kind[row] == Kind.F:
            new.append(int(rows.microbatch[row]))
        elif rows.kind[row] in (Kind.B, Kind.I):
            found[int(rows.microbatch[row])], new = new, []
    return found


def _memory(device: torch.device) -> int:
    """The bytes of a device's memory: no message is larger."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):
        return 1 << 46
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
