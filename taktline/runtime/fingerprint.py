"""A fingerprint of a batch's data, by which ranks find out that they were given different ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from taktline import pytree
from taktline.sharding import local

__all__ = ["DataWatch", "Fingerprint", "Look", "due"]

_SAMPLED = 4096
"""How many elements of a tensor are looked at."""
_PLACE_BITS = 28
"""A place in a tensor is a fraction of its length with that many bits; 12 say which of the 4,096
parts it lies in, the others where in it."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""
_LARGEST = 2**63 - 1


def due(step: int) -> bool:
    """Whether the data of a step is compared: in the first five, then in every 16th.

    >>> [step for step in range(40) if due(step)]
    [0, 1, 2, 3, 4, 16, 32]
    """
    return step < 5 or step % 16 == 0


class Fingerprint:
    """What stands for the values of a batch, as a number from 1 to 2**63 - 1.

    Bit-equal values have the same one, whatever their strides and devices and in every process. It
    depends on names, order, types and shapes, on up to 4,096 elements of each tensor, spread all
    over it, and on numbers and strings; of other objects on their type alone.

    On a GPU it is computed and copied to the host without waiting: it is :attr:`ready` some time
    after :meth:`start`.

    >>> batch = torch.arange(12).reshape(3, 4)
    >>> Fingerprint.start({"x": batch}).read() == Fingerprint.start({"x": batch.clone()}).read()
    True
    >>> Fingerprint.start({"x": batch}).read() == Fingerprint.start({"x": batch.flip(0)}).read()
    False
    """

    def __init__(self, known: int, coming: list[_Coming]) -> None:
        self._known = known
        self._coming = coming

    @classmethod
    def start(cls, values: Any) -> Fingerprint:
        """Begin with the fingerprint of a tree of values."""
        known, elsewhere = 0, dict[torch.device, torch.Tensor]()
        # Not in the caller's inference mode: what is kept for later must serve outside of it too.
        with torch.inference_mode(False), torch.no_grad():
            for path, leaf in _leaves(values):
                salt = _digest(path, *_words(leaf))
                known += salt
                if not isinstance(leaf, torch.Tensor) or (data := _sampled(leaf)) is None:
                    continue
                if data.device.type == "cpu":
                    known += int(data) * (salt | 1)
                else:
                    term = data * _signed(salt | 1)
                    found = elsewhere.get(data.device)
                    elsewhere[data.device] = term if found is None else found + term
            return cls(known, [_Coming.of(total) for total in elsewhere.values()])

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` returns at once."""
        return all(coming.event.query() for coming in self._coming)

    def read(self) -> int:
        """The number; waits until it is ready."""
        for coming in self._coming:
            coming.event.synchronize()
        total = self._known + sum(int(coming.number) for coming in self._coming)
        return total % 2**64 % _LARGEST + 1


class Look(NamedTuple):
    """What was seen of the data of one call."""

    looked_at: int = 0
    """The number of the call; 0: nothing was seen."""
    arguments: int = 0
    """The fingerprint of its arguments, 0 if there were none."""
    targets: int = 0
    """The same of its target."""


class DataWatch:
    """Looks at the data of some calls without waiting for it.

    >>> watch = DataWatch()
    >>> look = watch.look(1, torch.ones(2), None)
    >>> look.looked_at, look.arguments > 0, look.targets
    (1, True, 0)
    """

    def __init__(self) -> None:
        self._pending: tuple[int, list[Fingerprint | None]] | None = None

    def look(self, call: int, arguments: Any, targets: Any) -> Look:
        """What is known by now: of this call or, from a GPU, of an earlier one."""
        known, self._pending = self._pending, None
        if due(call - 1):
            given = (arguments, targets)
            found = [None if data is None else Fingerprint.start(data) for data in given]
            if _ready(found):
                known = (call, found)
            else:
                self._pending = (call, found)
        if known is None:
            return Look()
        if not _ready(known[1]):
            self._pending = self._pending or known
            return Look()
        return Look(known[0], *(0 if each is None else each.read() for each in known[1]))


def _ready(found: list[Fingerprint | None]) -> bool:
    return all(each is None or each.ready for each in found)


class _Coming(NamedTuple):
    """A number on its way from a device."""

    number: torch.Tensor
    event: torch.Event

    @classmethod
    def of(cls, total: torch.Tensor) -> _Coming:
        number = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
        number.copy_(total, non_blocking=True)
        event = torch.Event(total.device)
        event.record(torch.accelerator.current_stream(total.device))
        return cls(number, event)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a tree holds, and where: by the key in a mapping, so that its order does not matter."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}[{'='.join(_words(key))}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        leaves = pytree.tree_leaves(value)
        yield from ((f"{path}.{index}", leaf) for index, leaf in enumerate(leaves))


def _words(leaf: Any) -> tuple[str, str]:
    """The type of a value, and the value; of a tensor, its type and its shape."""
    if isinstance(leaf, torch.Tensor):
        # The lengths in a nested one have names that count up within a process.
        return str(leaf.dtype), "nested" if leaf.is_nested else str(list(leaf.shape))
    kind = type(leaf)
    if kind is int:
        text = hex(leaf)  # str() refuses large ones
    elif kind is float:
        text = leaf.hex()
    elif kind is str:
        text = leaf
    else:
        text = repr(leaf) if kind in (bool, complex, bytes, torch.dtype) else ""
    return kind.__qualname__, text


def _digest(*words: str) -> int:
    text = "".join(f"{len(word)}:{word}" for word in words)
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the int64 with the same bits."""
    return number - 2**64 if number >= 2**63 else number


def _sampled(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum of a tensor's sampled elements, each times a number of its own, modulo 2**64."""
    tensor = local(tensor.detach())
    opaque = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    if opaque or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        return None
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype.itemsize > 8:  # complex128
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_INTEGERS[tensor.dtype.itemsize])
    places, weights = _constants(tensor.device)
    if (count := bits.numel()) > _SAMPLED:
        bits = bits.take((places * count) >> _PLACE_BITS)
    bits = bits.flatten()
    if bits.dtype is torch.int64:
        # In halves: the last bits of many float64 are zeros, and a product keeps them.
        bits = bits.contiguous().view(torch.int32)
    return (bits * weights[: bits.numel()]).sum()


@lru_cache(maxsize=16)
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where to look in a tensor, and odd numbers to multiply with; the same in every process.

    One place in each of equally long parts, but nowhere at equal distances: these might always
    meet the same column.
    """
    drawn = np.frombuffer(_noise(8 * 3 * _SAMPLED), dtype="<i8")
    within = drawn[:_SAMPLED] & (2**_PLACE_BITS // _SAMPLED - 1)
    places = np.arange(_SAMPLED) * (2**_PLACE_BITS // _SAMPLED) + within
    weights = drawn[_SAMPLED:] | 1
    return torch.tensor(places, device=device), torch.tensor(weights, device=device)


def _noise(count: int) -> bytes:
    """Bytes without any order, always the same."""
    return b"".join(
        blake2b(index.to_bytes(8, "little"), digest_size=64).digest()
        for index in range(count // 64)
    )
