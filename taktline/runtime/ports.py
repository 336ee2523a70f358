"""Where a stage's values come from and go to: its neighbour on this rank, or a channel.

::

    stage ──give──▶ Handover ──take──▶ stage          on one rank: activations,
    stage ◀──take── Handback ◀──give── stage          and their gradients

    stage ──give──▶ Outgoing ──send──▶ channel ──▶ Incoming ──take──▶ stage
                                                      ▲ post

Over a channel, activations and gradients take the same ports. A value that crosses is a flat list
of leaves with the tree that they came from (None: they are the arguments themselves).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from taktline.errors import TransportError
from taktline.meta import Signature, TensorMeta
from taktline.pytree import TreeSpec
from taktline.transport import Handle, Post
from taktline.transport.wire import Layout, Parcel

__all__ = [
    "BrokenChannel",
    "Handback",
    "Handover",
    "In",
    "Incoming",
    "Out",
    "Outgoing",
    "PeerFailed",
    "Values",
]

Values: TypeAlias = tuple[Sequence[Any], TreeSpec | None]


class PeerFailed(Exception):
    """The rank that should have sent something has failed; it tells why at the end of the step."""


class BrokenChannel(TransportError):
    """What arrives cannot be understood any more, so nothing can be played on."""

    recoverable = "restart"


class In(Protocol):
    """Where values come from."""

    def take(self, microbatch: int) -> Values:
        """The values of a micro-batch, once they are here."""
        ...


class Out(Protocol):
    """Where values go."""

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None:
        """Hand over the values of a micro-batch."""
        ...

    def settle(self, microbatch: int) -> None:
        """Note that the values have arrived."""
        ...


class Handback:
    """Of gradients between two stages on one rank: they are handed over as they are."""

    def __init__(self) -> None:
        self._waiting: dict[int, Values] = {}

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None:
        """Keep the values."""
        self._waiting[microbatch] = leaves, spec

    def take(self, microbatch: int) -> Values:
        """The values, which are forgotten here."""
        return self._waiting.pop(microbatch)

    def settle(self, microbatch: int) -> None:
        """Nothing: what is handed over is there at once."""


class Handover(Handback):
    """Of activations between two stages on one rank: nothing is copied."""

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None:
        """Keep the values, cut off from the graph that made them."""
        self._waiting[microbatch] = [_cut_off(leaf) for leaf in leaves], spec


def _cut_off(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    cut = leaf.detach()
    return cut.requires_grad_() if leaf.requires_grad else cut


class Outgoing:
    """The sending end of a boundary whose signature is known: one message a micro-batch."""

    def __init__(
        self,
        post: Post,
        layouts: Sequence[Layout],
        signatures: Sequence[Signature] | None = None,
        *,
        limit: int | None = None,
    ) -> None:
        """``limit`` is how many messages may be under way before the next one waits."""
        self._post = post
        self._layouts = layouts
        self._signatures = signatures
        self._limit = limit
        self._packed: dict[int, Parcel] = {}
        self._sent: dict[int, tuple[Handle, Parcel]] = {}

    def give(self, microbatch: int, leaves: Sequence[Any], spec: TreeSpec | None) -> None:
        """Pack the values; without signatures (gradients) a missing one becomes zeros."""
        if self._signatures is not None:
            signature = self._signatures[microbatch]
            if not signature.describes(leaves, spec):
                raise signature.misfit(
                    leaves,
                    f"{signature.difference(leaves, spec)}, as it was for inputs of the same "
                    "shapes before; if what a stage gives depends on their values, give the "
                    "schedule dynamic_shapes=True",
                )
            leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._packed[microbatch] = self._layouts[microbatch].pack(leaves)

    def send(self, microbatch: int) -> None:
        """Send what was packed."""
        self._dispatch(microbatch, self._packed.pop(microbatch))

    def fail(self, microbatch: int) -> None:
        """Send word of a failure instead."""
        self._packed.pop(microbatch, None)
        self._dispatch(microbatch, self._layouts[microbatch].failure())

    def settle(self, microbatch: int) -> None:
        """Wait until a message is out, and take its buffer back."""
        sent = self._sent.pop(microbatch, None)
        if sent is not None:
            handle, parcel = sent
            handle.wait()
            self._layouts[microbatch].recycle(parcel)

    def settle_all(self) -> None:
        """Wait until every message is out."""
        for microbatch in list(self._sent):
            self.settle(microbatch)

    def _dispatch(self, microbatch: int, parcel: Parcel) -> None:
        if self._limit is not None and len(self._sent) >= self._limit:
            self.settle(next(iter(self._sent)))
        self._sent[microbatch] = (self._post(parcel.buffer), parcel)


class Incoming:
    """The receiving end of a boundary whose signature is known."""

    def __init__(
        self, post: Post, layouts: Sequence[Layout], signatures: Sequence[Signature]
    ) -> None:
        self._post = post
        self._layouts = layouts
        self._constants = [_constants(signature) for signature in signatures]
        self._specs = [signature.spec for signature in signatures]
        self._posted: dict[int, tuple[Handle, torch.Tensor]] = {}

    def post(self, microbatch: int) -> None:
        """Get ready to receive."""
        buffer = self._layouts[microbatch].empty()
        self._posted[microbatch] = (self._post(buffer), buffer)

    def take(self, microbatch: int) -> Values:
        """Wait for the values."""
        handle, buffer = self._posted.pop(microbatch)
        handle.wait()
        layout = self._layouts[microbatch]
        if layout.failed(buffer):
            raise PeerFailed
        leaves: list[Any] = layout.unpack(buffer)
        for index in layout.missing(buffer):
            leaves[index] = None
        for index, value in self._constants[microbatch]:
            leaves.insert(index, value)
        return leaves, self._specs[microbatch]

    def discard(self, microbatch: int) -> None:
        """Wait for the values, if they were not taken, and forget them."""
        posted = self._posted.pop(microbatch, None)
        if posted is not None:
            posted[0].wait()


def _constants(signature: Signature) -> list[tuple[int, Any]]:
    """The leaves that do not travel, and where they belong."""
    return [
        (index, leaf)
        for index, leaf in enumerate(signature.leaves)
        if not isinstance(leaf, TensorMeta)
    ]
