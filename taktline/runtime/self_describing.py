"""Ports for boundaries whose signature is not known yet: each message describes itself.

A message is a head of fixed size, with five numbers and the text of the signature, and its data.
Text that does not fit into the head comes between::

    [status, bytes of text, bytes of data, received …, text …]   (more text …)   data …

``received`` has the numbers of messages (activations, gradients) that the sender has received from
the receiver so far: their buffers can be freed.

The size of a message is unknown before its head, so a rank receives when it needs the values,
message after message in the channel's order.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from taktline.errors import SignatureError
from taktline.meta import Signature
from taktline.plan import Kind, Plan
from taktline.pytree import TreeSpec
from taktline.runtime.ports import BrokenChannel, PeerFailed, Values
from taktline.stage import PipelineStage
from taktline.transport import Channel, Handle, Post, Transport
from taktline.transport.describe import decode, encode
from taktline.transport.wire import Layout

__all__ = ["DescribedIncoming", "DescribedOutgoing", "Inbox", "Outbox", "Peer"]

_NUMBERS = struct.Struct("<5q")
_HEAD = 512
_ROOM = _HEAD - _NUMBERS.size
"""The most text in a head, in bytes."""
_MOST_TEXT = 1 << 24
"""Longer than the description of any values."""
_MOST_DRAINED = 1 << 30
"""The most bytes of unreadable data that are taken off a channel."""
_NO_MESSAGE = (
    "what has arrived is not a message, or is larger than the memory of this rank; restart all "
    "ranks, with one version of Taktline"
)
_DONE, _FAILED = 0x7A4B0001, 0x7A4B0002
"""The first number of a message: its sender has worked, or failed."""
_KINDS = (False, True)
"""Activations, then gradients."""


_Message: TypeAlias = tuple[Signature, torch.Tensor] | SignatureError | None
"""A message; an error if it cannot be read, None from a rank that has failed."""


class Outbox:
    """The sending end of a channel: keeps each message until it is known to have arrived."""

    def __init__(self, post: Post, device: torch.device) -> None:
        self.device = device
        self._post = post
        self._sent: deque[list[tuple[Handle, torch.Tensor]]] = deque()
        self._settled = 0

    @property
    def sent(self) -> int:
        """The number of messages so far."""
        return self._settled + len(self._sent)

    def send(self, *buffers: torch.Tensor) -> None:
        """Send a message."""
        while self._sent and all(handle.done for handle, _ in self._sent[0]):
            self.arrived(self._settled + 1)
        self._sent.append([(self._post(buffer), buffer) for buffer in buffers])

    def arrived(self, count: int) -> None:
        """Free the first messages."""
        while self._settled < count:
            for handle, _ in self._sent.popleft():
                handle.wait()
            self._settled += 1

    def settle_all(self) -> None:
        """Wait until every message has left."""
        self.arrived(self.sent)


class Peer:
    """The channels from and to one other rank, by whether they carry gradients."""

    def __init__(self) -> None:
        self.inboxes: dict[bool, Inbox] = {}
        self.outboxes: dict[bool, Outbox] = {}

    @property
    def received(self) -> list[int]:
        """The number of messages of each kind from that rank."""
        return [self.inboxes[kind].received if kind in self.inboxes else 0 for kind in _KINDS]

    def may_have_received(self, counts: Sequence[int]) -> bool:
        """Whether at least ``counts`` messages of each kind were sent to that rank."""
        sent = [self.outboxes[kind].sent if kind in self.outboxes else 0 for kind in _KINDS]
        return all(0 <= count <= most for count, most in zip(counts, sent, strict=True))

    def arrived(self, counts: Sequence[int]) -> None:
        """Free messages: that rank has received the first ``counts`` of each kind."""
        for kind, count in zip(_KINDS, counts, strict=True):
            if kind in self.outboxes:
                self.outboxes[kind].arrived(count)


class Inbox:
    """The receiving end of a channel: takes messages in their order, keeps early ones."""

    def __init__(
        self, post: Post, order: Sequence[tuple[int, int]], device: torch.device, peer: Peer
    ) -> None:
        self._peer = peer
        self._post = post
        self._device = device
        self._order = order
        self.received = 0
        self._arrived: dict[tuple[int, int], _Message] = {}

    def take(self, key: tuple[int, int]) -> _Message:
        """The message for a (stage, micro-batch)."""
        while key not in self._arrived:
            self._arrived[self._order[self.received]] = self._receive()
            self.received += 1
        return self._arrived.pop(key)

    def discard(self, key: tuple[int, int]) -> None:
        """Receive a message unless it was taken, and forget it."""
        if key in self._arrived or key in self._order[self.received :]:
            self.take(key)

    def _receive(self) -> _Message:
        head = _read(self._fetch(self._bytes(_HEAD)))
        status, text_size, data_size, *received = _NUMBERS.unpack_from(head)
        self._check(status, text_size, data_size, received)
        self._peer.arrived(received)
        if status == _FAILED:
            return None
        text = head[_NUMBERS.size :][:text_size]
        if text_size > _ROOM:
            text += _read(self._fetch(self._bytes(text_size - _ROOM)))
        try:
            signature = decode(text)
            layout = Layout(signature.tensors, self._device)
            if layout.nbytes != data_size:
                raise SignatureError(f"a received message is not as long as {signature}")
        except SignatureError as error:
            # Fetch the whole message: the next one begins behind it.
            if data_size > _MOST_DRAINED:
                raise BrokenChannel(_NO_MESSAGE) from error
            self._fetch(self._bytes(data_size))
            return error
        return signature, self._fetch(layout.empty())

    def _check(self, status: int, text: int, data: int, received: Sequence[int]) -> None:
        """Raise if a head is invalid: nothing after it can be read."""
        if (
            status in (_DONE, _FAILED)
            and 0 <= text <= _MOST_TEXT
            and 0 <= data <= _memory(self._device)
            and self._peer.may_have_received(received)
        ):
            return
        raise BrokenChannel(_NO_MESSAGE)

    def _fetch(self, buffer: torch.Tensor) -> torch.Tensor:
        self._post(buffer).wait()
        return buffer

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)


class DescribedIncoming:
    """Takes the values of one stage from an inbox, and notes their signatures."""

    def __init__(self, inbox: Inbox, stage: PipelineStage) -> None:
        self._inbox = inbox
        self._stage = stage.stage_index
        self._mesh_for = stage.mesh_for
        self.learned: dict[int, Signature] = {}

    def post(self, microbatch: int) -> None:
        """Nothing: the size is unknown."""

    def take(self, microbatch: int) -> Values:
        """Wait for the values."""
        message = self._inbox.take((self._stage, microbatch))
        if message is None:
            raise PeerFailed
        if isinstance(message, SignatureError):
            raise message
        signature, data = message
        self.learned[microbatch] = signature
        tensors = Layout(signature.tensors, data.device, self._mesh_for).unpack(data)
        return signature.filled(tensors), signature.spec

    def discard(self, microbatch: int) -> None:
        """Receive the values unless they were taken, and forget them."""
        self._inbox.discard((self._stage, microbatch))


class DescribedOutgoing:
    """Sends values with their description, and notes their signatures."""

    def __init__(self, outbox: Outbox, peer: Peer) -> None:
        self._outbox = outbox
        self._peer = peer
        self._device = outbox.device
        self._given: dict[int, tuple[Signature, torch.Tensor]] = {}
        self.learned: dict[int, Signature] = {}

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None:
        """Pack the values."""
        signature = self.learned[microbatch] = Signature.of(leaves, spec)
        layout = Layout(signature.tensors, self._device)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._given[microbatch] = (signature, layout.pack(tensors).buffer)

    def send(self, microbatch: int) -> None:
        """Send the packed values."""
        signature, data = self._given.pop(microbatch)
        text = encode(signature)
        head = self._head(_DONE, len(text), data.nbytes, text[:_ROOM])
        more = [self._written(text[_ROOM:])] if len(text) > _ROOM else []
        self._outbox.send(head, *more, data)

    def fail(self, microbatch: int) -> None:
        """Report a failure instead."""
        self._given.pop(microbatch, None)
        self._outbox.send(self._head(_FAILED, 0, 0, b""))

    def settle(self, microbatch: int) -> None:
        """Nothing: replies report what has arrived."""

    def settle_all(self) -> None:
        """Wait until every message has left."""
        self._outbox.settle_all()

    def _head(self, status: int, text_size: int, data_size: int, text: bytes) -> torch.Tensor:
        numbers = _NUMBERS.pack(status, text_size, data_size, *self._peer.received)
        return self._written((numbers + text).ljust(_HEAD, b"\0"))

    def _written(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)


class DescribedPorts:
    """Makes the ports of channels whose messages describe themselves."""

    def __init__(
        self, stages: Mapping[int, PipelineStage], transport: Transport, plan: Plan
    ) -> None:
        self._stages = stages
        self._transport = transport
        self._plan = plan
        self._peers: defaultdict[int, Peer] = defaultdict(Peer)

    def incoming(self, stage: int, channel: Channel) -> DescribedIncoming:
        """The receiving end for a stage."""
        peer = self._peers[channel.sender]
        if channel.gradients not in peer.inboxes:
            peer.inboxes[channel.gradients] = Inbox(
                self._transport.receiver(channel),
                self._order(channel),
                self._stages[stage].device,
                peer,
            )
        return DescribedIncoming(peer.inboxes[channel.gradients], self._stages[stage])

    def outgoing(self, stage: int, channel: Channel) -> DescribedOutgoing:
        """The sending end for a stage."""
        peer = self._peers[channel.receiver]
        if channel.gradients not in peer.outboxes:
            post = self._transport.sender(channel, eager=True)
            peer.outboxes[channel.gradients] = Outbox(post, self._stages[stage].device)
        return DescribedOutgoing(peer.outboxes[channel.gradients], peer)

    def _order(self, channel: Channel) -> list[tuple[int, int]]:
        """The (stage, micro-batch) of each message, in the order of the plan's receives."""
        rank_of, rows = self._plan.placement.rank_of, self._plan.rows_of(channel.receiver)
        kind, step = (Kind.RECV_B, 1) if channel.gradients else (Kind.RECV_F, -1)
        return [
            (stage, microbatch)
            for row, stage, microbatch in zip(
                rows.kind.tolist(), rows.stage.tolist(), rows.microbatch.tolist(), strict=True
            )
            if row == kind and rank_of[stage + step] == channel.sender
        ]


def _memory(device: torch.device) -> int:
    """The bytes of a device's memory: no message is larger."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):
        return 1 << 46
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(buffer: torch.Tensor) -> bytes:
    return buffer.cpu().numpy().tobytes()
