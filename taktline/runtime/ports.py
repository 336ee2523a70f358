"""The ports of a stage: its values come from and go to a stage on this rank, or a channel.

::

    stage ──give──▶ Handover ──take──▶ stage          on one rank: activations,
    stage ◀──take── Handback ◀──give── stage          and their gradients

    stage ──give──▶ Outgoing ──send──▶ channel ──▶ Incoming ──take──▶ stage
                                                      ▲ post

Over a channel, activations and gradients take the same ports. Values are a flat list of leaves with
their tree (None: the leaves are the arguments themselves).

If their signature is not known yet, each message describes itself: it is a head of fixed size, with
three numbers and the text of the signature, and its data. Text that does not fit into the head
comes between::

    [status, bytes of text, bytes of data, text …]   (more text …)   data …

The size of such a message is unknown before its head, so a rank receives when it needs the values,
message after message in the channel's order.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, Protocol, TypeAlias

import torch

from taktline.errors import SignatureError, TransportError
from taktline.meta import Signature, TensorMeta
from taktline.plan import Kind
from taktline.pytree import TreeSpec
from taktline.runtime.program import PeerFailed
from taktline.runtime.step_data import Binding, Signatures
from taktline.stage import PipelineStage
from taktline.transport import Channel, Handle, Post
from taktline.transport.describe import decode, encode
from taktline.transport.wire import Layout, Parcel

Values: TypeAlias = tuple[Sequence[Any], TreeSpec | None]

_UNDER_WAY = 2
"""How many messages of a boundary may be under way where no reply tells that they arrived."""
_NUMBERS = struct.Struct("<3q")
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

_Message: TypeAlias = tuple[Signature, torch.Tensor] | SignatureError | None
"""A message; an error if it cannot be read, None from a rank that has failed."""


class BrokenChannel(TransportError):
    """Messages cannot be read any more, so that the step cannot be played to its end."""

    recoverable = "restart"


class In(Protocol):
    """The source of a stage's values."""

    def take(self, microbatch: int) -> Values: ...


class Out(Protocol):
    """The destination of a stage's values; ``settle`` frees those that have arrived."""

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None: ...
    def settle(self, microbatch: int) -> None: ...


class Handback:
    """Hands over gradients between two stages on one rank, as they are."""

    def __init__(self) -> None:
        self._waiting: dict[int, Values] = {}

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None:
        """Keep the values."""
        self._waiting[microbatch] = leaves, spec

    def take(self, microbatch: int) -> Values:
        """Return the values, and forget them."""
        return self._waiting.pop(microbatch)

    def settle(self, microbatch: int) -> None:
        """Nothing: the values arrive at once."""


class Handover(Handback):
    """Hands over activations between two stages on one rank, without a copy."""

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None:
        """Keep the values, detached from their graph."""
        self._waiting[microbatch] = [_detached(leaf) for leaf in leaves], spec


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    detached = leaf.detach()
    return detached.requires_grad_() if leaf.requires_grad else detached


class Outgoing:
    """The sending end of a boundary whose signature is known: one message a micro-batch."""

    def __init__(
        self,
        post: Post,
        layouts: Sequence[Layout],
        signatures: Sequence[Signature] | None = None,
        *,
        limit: float = inf,
        sends: Sends | None = None,
    ) -> None:
        """``limit`` is how many messages may be under way before the next one waits.

        ``sends`` has those of all ports, if there is a limit for all of them.
        """
        self._post = post
        self._layouts = layouts
        self._signatures = signatures
        self._limit = limit
        self._sends = sends
        self._packed: dict[int, Parcel] = {}
        self._sent: dict[int, tuple[Handle, Parcel]] = {}

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None:
        """Pack the values; missing gradients become zeros."""
        if self._signatures is not None:
            signature = self._signatures[microbatch]
            if not signature.describes(leaves, spec):
                raise signature.misfit(
                    leaves,
                    f"{signature.difference(leaves, spec)}, as it was for inputs of the same "
                    "shapes before; if the output depends on their values, pass "
                    "dynamic_shapes=True to the schedule",
                )
            leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._packed[microbatch] = self._layouts[microbatch].pack(leaves)

    def send(self, microbatch: int) -> None:
        """Send the packed values."""
        self._dispatch(microbatch, self._packed.pop(microbatch))

    def fail(self, microbatch: int) -> None:
        """Report a failure instead."""
        self._packed.pop(microbatch, None)
        self._dispatch(microbatch, self._layouts[microbatch].failure())

    def settle(self, microbatch: int) -> None:
        """Wait until a message has left, and recycle its buffer."""
        sent = self._sent.pop(microbatch, None)
        if sent is not None:
            handle, parcel = sent
            handle.wait()
            self._layouts[microbatch].recycle(parcel)

    def settle_all(self) -> None:
        """Wait until every message has left."""
        for microbatch in list(self._sent):
            self.settle(microbatch)

    def is_under_way(self, microbatch: int) -> bool:
        """Whether a message was sent, and may not have left."""
        return microbatch in self._sent

    def _dispatch(self, microbatch: int, parcel: Parcel) -> None:
        while self._sent:
            first = next(iter(self._sent))
            if not self._sent[first][0].done and len(self._sent) < self._limit:
                break
            self.settle(first)
        if self._sends is not None:
            self._sends.add(self, microbatch)
        handle = self._post(parcel.buffer, parcel.marks)
        if handle.done:
            self._layouts[microbatch].recycle(parcel)
        else:
            self._sent[microbatch] = handle, parcel


class Sends:
    """The messages of a rank that are under way; the oldest are waited for, if there are many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sent: list[tuple[Outgoing, int]] = []

    def add(self, port: Outgoing, microbatch: int) -> None:
        """Wait until one more may be under way."""
        self._sent = [(sender, m) for sender, m in self._sent if sender.is_under_way(m)]
        while len(self._sent) >= self._limit:
            first, earlier = self._sent.pop(0)
            first.settle(earlier)
        self._sent.append((port, microbatch))


class Incoming:
    """The receiving end of a boundary whose signature is known."""

    def __init__(
        self, post: Post, layouts: Sequence[Layout], signatures: Sequence[Signature]
    ) -> None:
        self._post = post
        self._layouts = layouts
        self._signatures = signatures
        self._posted: dict[int, tuple[Handle, torch.Tensor, bytearray]] = {}

    def post(self, microbatch: int) -> None:
        """Post the receive."""
        layout = self._layouts[microbatch]
        buffer, marks = layout.empty(), bytearray(layout.unmarked)
        self._posted[microbatch] = (self._post(buffer, marks), buffer, marks)

    def take(self, microbatch: int) -> Values:
        """Wait for the values."""
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
        posted = self._posted.pop(microbatch, None)
        if posted is not None:
            posted[0].wait()


class KnownPorts:
    """Makes the ports of channels whose signatures are known."""

    def __init__(self, binding: Binding, signatures: Signatures) -> None:
        self._binding = binding
        self._transport = binding.transport
        self._signatures = signatures
        limited = binding.most_sends is not None and binding.sends_may_wait
        self._sends = Sends(binding.most_sends or 0) if limited else None
        self._layouts: dict[object, Layout] = {}

    def incoming(self, stage: int, channel: Channel) -> Incoming:
        """The receiving end for a stage."""
        signatures = (
            [Signature(s.gradients) for s in self._signatures.leaving[stage]]
            if channel.gradients
            else self._signatures.arriving[stage]
        )
        layouts = [self._layout(stage, s.tensors) for s in signatures]
        return Incoming(self._transport.receiver(channel), layouts, signatures)

    def outgoing(self, stage: int, channel: Channel) -> Outgoing:
        """The sending end for a stage."""
        post = self._transport.sender(channel)
        # In training, the gradient of a micro-batch shows that its activations have arrived.
        answered = self._binding.trains and not channel.gradients
        limit = inf if answered or not self._binding.sends_may_wait else _UNDER_WAY
        if channel.gradients:
            arriving = self._signatures.arriving[stage]
            layouts = [self._layout(stage, s.gradients) for s in arriving]
            return Outgoing(post, layouts, limit=limit, sends=self._sends)
        leaving = self._signatures.leaving[stage]
        layouts = [self._layout(stage, s.tensors) for s in leaving]
        return Outgoing(post, layouts, leaving, limit=limit, sends=self._sends)

    def _layout(self, stage: int, tensors: tuple[TensorMeta, ...]) -> Layout:
        owner = self._binding.stages[stage]
        # Stages share layouts and buffers, unless they may lie on different meshes.
        sharded = any(tensor.sharding for tensor in tensors)
        key = (tensors, owner.device, stage if sharded else None)
        if key not in self._layouts:
            self._layouts[key] = Layout(tensors, owner.device, owner.mesh_for)
        return self._layouts[key]


class Inbox:
    """The receiving end of a channel: takes messages in their order, keeps early ones."""

    def __init__(self, post: Post, order: Sequence[tuple[int, int]], device: torch.device) -> None:
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
        status, text_size, data_size = _NUMBERS.unpack_from(head)
        self._check(status, text_size, data_size)
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

    def _check(self, status: int, text: int, data: int) -> None:
        """Raise if a head is invalid: nothing after it can be read."""
        if (
            status in (_DONE, _FAILED)
            and 0 <= text <= _MOST_TEXT
            and 0 <= data <= _memory(self._device)
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

    def __init__(self, post: Post, device: torch.device) -> None:
        self._post = post
        self._device = device
        self._given: dict[int, tuple[Signature, torch.Tensor]] = {}
        self._sent: deque[tuple[Handle, torch.Tensor]] = deque()
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
        self._dispatch(microbatch, head, *more, data)

    def fail(self, microbatch: int) -> None:
        """Report a failure instead."""
        self._given.pop(microbatch, None)
        self._dispatch(microbatch, self._head(_FAILED, 0, 0, b""))

    def settle(self, microbatch: int) -> None:
        """Free what has left, of any micro-batch."""
        while self._sent and self._sent[0][0].done:
            self._sent.popleft()[0].wait()

    def settle_all(self) -> None:
        """Wait until every message has left."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _dispatch(self, microbatch: int, *buffers: torch.Tensor) -> None:
        self.settle(microbatch)
        self._sent += [(self._post(buffer), buffer) for buffer in buffers]

    def _head(self, status: int, text_size: int, data_size: int, text: bytes) -> torch.Tensor:
        numbers = _NUMBERS.pack(status, text_size, data_size)
        return self._written((numbers + text).ljust(_HEAD, b"\0"))

    def _written(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)


class DescribedPorts:
    """Makes the ports of channels whose messages describe themselves."""

    def __init__(self, binding: Binding) -> None:
        self._stages = binding.stages
        self._transport = binding.transport
        self._plan = binding.plan
        self._inboxes: dict[Channel, Inbox] = {}

    def incoming(self, stage: int, channel: Channel) -> DescribedIncoming:
        """The receiving end for a stage."""
        owner = self._stages[stage]
        if channel not in self._inboxes:
            post = self._transport.receiver(channel)
            self._inboxes[channel] = Inbox(post, self._order(channel), owner.device)
        return DescribedIncoming(self._inboxes[channel], owner)

    def outgoing(self, stage: int, channel: Channel) -> DescribedOutgoing:
        """The sending end for a stage."""
        post = self._transport.sender(channel, eager=True)
        return DescribedOutgoing(post, self._stages[stage].device)

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
