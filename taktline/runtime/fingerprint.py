"""Fingerprints of a batch's data, by which ranks detect that their data differs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from taktline import pytree
from taktline.sharding import local

_SAMPLED = 4096
"""The most elements of a tensor that are read."""
_PLACE_BITS = 28
"""The bits of a place in a tensor, as a fraction of its length: 12 for one of 4,096 parts, the
others for the place in the part."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""


def digest_of(texts: Iterable[str]) -> int:
    """A number of 63 bits for some texts, the same in every process (unlike Python's hash)."""
    data = "\0".join(f"{len(text)}:{text}" for text in texts).encode(errors="surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def due(step: int) -> bool:
    """Whether the data of a step is compared: in the first five, then in every 16th.

    >>> [step for step in range(40) if due(step)]
    [0, 1, 2, 3, 4, 16, 32]
    """
    return step < 5 or step % 16 == 0


class Fingerprint:
    """A number from 1 to 2**63 - 1 for the values of a batch.

    Bit-equal values have the same number in every process, whatever their strides and devices. It
    depends on order, types and shapes, on up to 4,096 elements spread over each tensor, on numbers
    and strings, and on the types of other objects.

    A GPU computes it and copies it to the host without waiting: it is :attr:`ready` some time
    later.
    """

    def __init__(self, values: Any) -> None:
        self._known = 0
        self._coming: list[tuple[torch.Tensor, torch.Event]] = []
        # Not in the caller's inference mode: the cached constants must be usable outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for place, leaf in enumerate(pytree.tree_leaves(values)):
                salt = digest_of([str(place), *words_of(leaf)])
                self._known += salt
                if not isinstance(leaf, torch.Tensor) or (data := _sampled(leaf)) is None:
                    continue
                if data.device.type == "cpu":
                    self._known += int(data) * (salt | 1)
                else:
                    self._coming.append(_to_host(data * (salt | 1)))

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` returns at once."""
        return all(event.query() for _, event in self._coming)

    def read(self) -> int:
        """The number; waits until it is ready."""
        for _, event in self._coming:
            event.synchronize()
        total = self._known + sum(int(number) for number, _ in self._coming)
        return total % 2**64 % (2**63 - 1) + 1


def _to_host(number: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
    """A number that is being copied from a device, and the event at its end."""
    here = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
    here.copy_(number, non_blocking=True)
    event = torch.Event(number.device)
    event.record(torch.accelerator.current_stream(number.device))
    return here, event


class DataCheck:
    """Computes the fingerprints of some calls' data, without waiting for a GPU."""

    def __init__(self) -> None:
        self._pending: tuple[int, list[Fingerprint | None]] | None = None

    def fingerprints(self, call: int, *data: Any) -> tuple[int, ...]:
        """The latest call with known fingerprints, and those of its data, 0 where there is none.

        From a GPU they may be those of an earlier call.
        """
        if due(call - 1) and self._pending is None:
            self._pending = (call, [None if each is None else Fingerprint(each) for each in data])
        if self._pending is None or not all(x is None or x.ready for x in self._pending[1]):
            return 0, *[0] * len(data)
        (known, found), self._pending = self._pending, None
        return known, *(0 if each is None else each.read() for each in found)


def words_of(leaf: Any) -> tuple[str, str]:
    """The type of a value, and the value; of a tensor, its type and its shape."""
    if isinstance(leaf, torch.Tensor):
        # Symbols for the lengths in a nested tensor differ between processes.
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


def _sampled(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum of a tensor's sampled elements, each with a weight of its own, modulo 2**64."""
    tensor = local(tensor.detach())
    opaque = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    if opaque or tensor.is_meta or hasattr(tensor, "__tensor_flatten__"):
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
        # In halves: the low bits of many float64 are zeros, and stay so in a product.
        bits = bits.contiguous().view(torch.int32)
    return (bits * weights[: bits.numel()]).sum()


@lru_cache(maxsize=16)
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The sampled places in a tensor, and odd weights; the same in every process.

    One place in each of 4,096 equal parts, at unequal distances: equal ones might always hit the
    same column.
    """
    drawn = np.random.PCG64(0).random_raw(3 * _SAMPLED).view(np.int64)
    within = drawn[:_SAMPLED] & (2**_PLACE_BITS // _SAMPLED - 1)
    places = np.arange(_SAMPLED) * (2**_PLACE_BITS // _SAMPLED) + within
    weights = drawn[_SAMPLED:] | 1
    return torch.tensor(places, device=device), torch.tensor(weights, device=device)
