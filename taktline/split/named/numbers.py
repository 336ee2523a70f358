"""Numbers that a forward asks tensors for: what it does may depend on them, in every stage.

A stage that has the data notes the numbers, and they go to the next one with all else. So a stage
that has not the data gets the number, and takes the same branch::

    forward of the model:   x = layer0(x)   if x.mean() > 0:   x = layer1(x)
    stage 0:                real            0.7 > 0: noted     ▶ leave, with [True]
    stage 1:                placeholder     True, as noted     ▶ real

Before anything has run, numbers are guessed: a walk through the forward takes all for 0, others for
1, or one of them alone.

The size of a tensor is such a number where it depends on data, as in ``x[x > 0]``: a stage that has
not the data makes a placeholder of that size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.example import Args
from taktline.split.named.operations import depends_on_data
from taktline.split.named.placeholder import Placeholder, PlaceholderContext, here, resolved

__all__ = ["NUMBERS", "Guess", "Number", "Numbers", "Sizes"]

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
        context: the forward.
        came: those that earlier stages have noted, in the order in which they were asked for.
        guess: what to take for those that are not known; None if that is an error.
    """

    def __init__(
        self,
        context: PlaceholderContext,
        came: torch.Tensor | None = None,
        guess: Guess | None = None,
    ) -> None:
        super().__init__()
        self._context = context
        self._count, self._came = _read(came)
        self._guess = guess
        self._noted: list[int] = []
        self.guessed: list[int] = []
        """The places of those that were not known."""
        self.is_sized = False
        """Whether a size was not known."""

    def __len__(self) -> int:
        return len(self._noted)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        context: Any = self._context
        if func not in _TYPES or here.context is not context or context.is_inside:
            return func(*args, **kwargs)
        args, kwargs = resolved((args, kwargs))
        tensors = [part for part in pytree.tree_leaves((args, kwargs)) if isinstance(part, _Tensor)]
        unknown = next((tensor for tensor in tensors if isinstance(tensor, Placeholder)), None)
        if unknown is None:
            answer = func(*args, **kwargs)
            return pytree.tree_map(self.note, answer)
        context.note_asked(unknown)
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

    def note_sizes(self, output: Any) -> None:
        """Note the sizes of tensors that an operation has returned, as they depend on data."""
        for part in pytree.tree_leaves(output):
            # Those of placeholders were taken from what came, or guessed.
            if isinstance(part, _Tensor) and not isinstance(part, Placeholder):
                for size in part.shape:
                    self.note_size(size)

    def note_size(self, size: int) -> None:
        """Note a size that is known here, and that earlier stages have noted, too."""
        if self.note(size) != size:
            raise PartitionError(
                f"a tensor has the size {size} here, but {self._noted[-1]} in an earlier stage; "
                "let a submodule make what has a random size"
            )

    def take_size(self, likely: Sequence[int], maker: str) -> int:
        """The next size of a tensor that is not here; ``likely`` are two guesses."""
        if self._guess is None or len(self._noted) < len(self._came):
            return self.take(int, maker)
        self.is_sized = True
        self._noted.append(likely[self._guess.usual])
        return self._noted[-1]

    def require_all_taken(self, stage: int) -> None:
        """Raise unless the stage before has noted as many numbers up to where this one begins."""
        if self._count is not None and len(self._noted) != self._count:
            raise PartitionError(
                f"the forward of stage {stage} has asked for {len(self._noted)} numbers before it "
                f"begins, that of the stage before for {self._count}; what a forward asks for must "
                "not depend on anything but its data"
            )

    def sent(self, room: int, device: torch.device) -> torch.Tensor:
        """All of them for the next stage, in as much room as it expects."""
        if len(self._noted) > room:
            raise PartitionError(
                f"the forward has asked for {len(self._noted)} numbers that depend on data, where "
                f"the example has shown {room}; every micro-batch must ask for at most as many"
            )
        count = len(self._noted)
        return torch.tensor([count, *self._noted, *[0] * (room - count)], device=device)


class Sizes(TorchDispatchMode):
    """Notes the sizes that depend on data, of what a forward makes outside of its units."""

    def __init__(self, context: PlaceholderContext) -> None:
        super().__init__()
        self._context: Any = context

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        context = self._context
        is_outside = here.context is context and not context.is_inside
        if is_outside and depends_on_data(func, args):
            context.numbers.note_sizes(output)
        return output


def _read(came: torch.Tensor | None) -> tuple[int | None, Sequence[int]]:
    """How many numbers came, and these; None if they have no data."""
    if came is None:
        return None, ()
    if came.is_meta or isinstance(came, FakeTensor):
        return None, [0] * (len(came) - 1)
    count, *numbers = came.tolist()
    return count, numbers[:count]


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
