"""Numbers that a forward asks tensors for: what it does may depend on them, in every stage.

A stage that has the data notes the numbers, and they go to the next one with all else. So a stage
that has not the data gets the number, and takes the same branch::

    forward of the model:   x = layer0(x)   if x.mean() > 0:   x = layer1(x)
    stage 0:                real            0.7 > 0: noted     ▶ leave, with [True]
    stage 1:                placeholder     True, as noted     ▶ real

Before anything has run, numbers are guessed: a walk through the forward takes all for 0, others for
1, or one of them alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.named.placeholder import Placeholder, Scene, here, resolved

__all__ = ["NUMBERS", "Guess", "Number", "Numbers"]

Number = bool | int | float
NUMBERS = (bool, int, float)

_BY_ITSELF = 16
"""How many numbers are tried each by itself."""
_ENDLESS = 256
"""A loop that has asked for so many numbers goes on until the guess is another one."""

_Tensor = torch.Tensor
_TYPES: dict[Any, type[Number] | None] = {
    _Tensor.__bool__: bool,
    _Tensor.is_nonzero: bool,
    torch.is_nonzero: bool,
    _Tensor.equal: bool,
    torch.equal: bool,
    _Tensor.allclose: bool,
    torch.allclose: bool,
    _Tensor.__int__: int,
    _Tensor.__index__: int,
    _Tensor.__float__: float,
    _Tensor.item: None,
    _Tensor.tolist: None,
}
"""What asks a tensor for a number, and which; None: one of the tensor's own type."""


class Guess(NamedTuple):
    """What all numbers are taken for, but for one, which is the other of 0 and 1."""

    usual: int
    but: int | None = None

    @classmethod
    def others(cls, places: Sequence[int]) -> list[Guess]:
        """Guesses to be tried after that of 0 for all, for the numbers at places by themselves."""
        few = places[:_BY_ITSELF]
        return [cls(1), *(cls(usual, place) for place in few for usual in (0, 1))]

    def at(self, place: int) -> int:
        """The number at a place."""
        return self.usual ^ (place == self.but or place >= _ENDLESS)


class Numbers(TorchFunctionMode):
    """The numbers that a forward has asked for by now, outside of its units.

    Args:
        scene: the forward.
        came: those that earlier stages have noted, in the order in which they were asked for.
        guess: what to take for those that are not known; None if that is an error.
    """

    def __init__(
        self, scene: Scene, came: torch.Tensor | None = None, guess: Guess | None = None
    ) -> None:
        super().__init__()
        self._scene = scene
        self._came = _read(came)
        self._guess = guess
        self._noted: list[int] = []
        self.guessed: list[int] = []
        """The places of those that were not known."""

    def __len__(self) -> int:
        return len(self._noted)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        scene: Any = self._scene
        if func not in _TYPES or here.scene is not scene or scene.is_inside:
            return func(*args, **kwargs)
        args, kwargs = resolved((args, kwargs))
        tensors = [part for part in pytree.tree_leaves((args, kwargs)) if isinstance(part, _Tensor)]
        unknown = next((tensor for tensor in tensors if isinstance(tensor, Placeholder)), None)
        if unknown is None:
            answer = func(*args, **kwargs)
            return pytree.tree_map(self.note, answer)
        scene.note_asked(unknown)
        kind = _TYPES[func] or _type_of(unknown)
        if func is not _Tensor.tolist:
            return self.take(kind, unknown.maker)
        parts = [self.take(kind, unknown.maker) for _ in range(unknown.numel())]
        return _nested(parts, list(unknown.shape))

    def note(self, value: Any) -> Any:
        """Note a value that is known here, if it is a number.

        Returns the one that an earlier stage has noted, if any: random numbers differ.
        """
        if type(value) not in NUMBERS:
            return value
        if len(self._noted) < len(self._came):
            return self.take(type(value), "")
        self._noted.append(_written(value))
        return value

    def take(self, kind: type[Number], maker: str) -> Any:
        """The next number, of a type, that was made of data which is not here."""
        place = len(self._noted)
        if place < len(self._came):
            number = self._came[place]
        elif self._guess is not None and place < 4 * _ENDLESS:
            self.guessed.append(place)
            number = _written(kind(self._guess.at(place)))
        else:
            raise PartitionError(
                f"the forward asks for {place + 1} numbers and more, this one of the data of "
                f"{maker!r}, which this stage has not; let a submodule do what takes so many"
            )
        self._noted.append(number)
        return struct.unpack("d", struct.pack("q", number))[0] if kind is float else kind(number)

    def sent(self, room: int, device: torch.device) -> torch.Tensor:
        """All of them for the next stage, in as much room as it expects."""
        if len(self._noted) > room:
            raise PartitionError(
                f"the forward has asked for {len(self._noted)} numbers that depend on data, where "
                f"the example has shown {room}; every micro-batch must ask for at most as many"
            )
        return torch.tensor(self._noted + [0] * (room - len(self._noted)), device=device)


def _read(came: torch.Tensor | None) -> Sequence[int]:
    if came is None:
        return ()
    return [0] * len(came) if came.is_meta or isinstance(came, FakeTensor) else came.tolist()


def _written(number: Number) -> int:
    """A number as a whole one, of 64 bits."""
    if isinstance(number, float):
        return struct.unpack("q", struct.pack("d", number))[0]
    return int(number)


def _type_of(tensor: torch.Tensor) -> type[Number]:
    if tensor.is_complex():
        raise PartitionError("the forward asks for a complex number, which no other stage has")
    if tensor.is_floating_point():
        return float
    return bool if tensor.dtype is torch.bool else int


def _nested(parts: list[Any], shape: list[int]) -> Any:
    """Numbers as lists in lists."""
    if not shape:
        return parts[0]
    size = len(parts) // shape[0] if shape[0] else 0
    return [_nested(parts[at * size : (at + 1) * size], shape[1:]) for at in range(shape[0])]
