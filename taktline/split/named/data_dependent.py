"""Numbers that a forward reads from tensors: its branches may depend on them, in every stage.

A stage that has the data notes the numbers, and sends them to the next stage, which takes the same
branch without the data::

    forward of the model:   x = layer0(x)   if x.mean() > 0:   x = layer1(x)
    stage 0:                runs            0.7 > 0: noted     ▶ leave, with [True]
    stage 1:                placeholder     True, as noted     ▶ runs

A dry run has no numbers. It guesses 0 for all of them; others guess 1, or 1 for a single one.

The size of a tensor is such a number if it depends on data, as in ``x[x > 0]``: a stage without the
data makes a placeholder of that size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from taktline import pytree
from taktline.errors import PartitionError
from taktline.private import private
from taktline.split.arguments import NUMBER_READERS, NUMBERS, Args, Number, tensors_in
from taktline.split.named.placeholder import (
    Placeholder,
    PlaceholderContext,
    here,
    resolved,
    size_depends_on_data,
)

_Mode = private("torch.utils._python_dispatch.TorchDispatchMode", "a split by names")
_FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor", "a split by names")

_BY_ITSELF = 16
"""How many numbers get a guess of their own."""
_ENDLESS = 256
"""After so many numbers the guess changes, to end a loop that waits for another one."""


class Guess(NamedTuple):
    """A guess of all numbers: 0 or 1, and the other one at a single place."""

    usual: int
    but: int | None = None

    @classmethod
    def others(cls, places: Sequence[int]) -> list[Guess]:
        """The guesses after that of 0 for all; some differ at one of these places."""
        few = places[:_BY_ITSELF]
        return [cls(1), *(cls(usual, place) for place in few for usual in (0, 1))]

    def at(self, place: int) -> int:
        """The guess for the number at a place."""
        return self.usual ^ (place == self.but or place >= _ENDLESS)


class Numbers(TorchFunctionMode):
    """The numbers that a forward reads outside of its units.

    Args:
        context: the forward.
        came: the numbers that earlier stages have noted, in the order in which they were read.
        guess: a guess of unknown numbers; without it, they are an error.
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
        """The places of the numbers that were guessed."""
        self.is_sized = False
        """Whether a size was guessed."""

    def __len__(self) -> int:
        return len(self._noted)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        context: Any = self._context
        if func not in NUMBER_READERS or here.context is not context or context.is_inside:
            return func(*args, **kwargs)
        args, kwargs = resolved((args, kwargs))
        tensors = tensors_in((args, kwargs))
        unknown = next((tensor for tensor in tensors if isinstance(tensor, Placeholder)), None)
        if unknown is None:
            answer = func(*args, **kwargs)
            return pytree.tree_map(self.note, answer)
        context.note_asked(unknown)
        kind = NUMBER_READERS[func] or _type_of(unknown)
        if func is not torch.Tensor.tolist:
            return self.take(kind, unknown.maker)
        parts = [self.take(kind, unknown.maker) for _ in range(unknown.numel())]
        return np.array(parts, dtype=object).reshape(unknown.shape).tolist()

    def note(self, value: Any) -> Any:
        """Note a value if it is a number.

        Returns the number of an earlier stage if there is one: random numbers differ.
        """
        if type(value) not in NUMBERS:
            return value
        if len(self._noted) < len(self._came):
            return self.take(type(value), "")
        self._noted.append(_written(value))
        return value

    def take(self, kind: type[Number], maker: str) -> Any:
        """The next number, which depends on data of another stage."""
        place = len(self._noted)
        if place < len(self._came):
            number = self._came[place]
        elif self._guess is not None and place < 4 * _ENDLESS:
            self.guessed.append(place)
            number = _written(kind(self._guess.at(place)))
        else:
            raise PartitionError(
                f"the forward reads {place + 1} or more numbers from data, this one from "
                f"{maker!r}, which this stage does not have; read so many in a submodule"
            )
        self._noted.append(number)
        return struct.unpack("d", struct.pack("q", number))[0] if kind is float else kind(number)

    def note_sizes(self, output: Any) -> None:
        """Note the sizes of tensors that an operation has returned."""
        for part in tensors_in(output):
            # Sizes of placeholders come from earlier stages, or were guessed.
            if not isinstance(part, Placeholder):
                for size in part.shape:
                    self.note_size(size)

    def note_size(self, size: int) -> None:
        """Note a size; raises if an earlier stage has noted another one."""
        if self.note(size) != size:
            raise PartitionError(
                f"a tensor has the size {size} here, but {self._noted[-1]} in an earlier stage; "
                "make tensors of random size in a submodule"
            )

    def take_size(self, likely: Sequence[int], maker: str) -> int:
        """The next size of a tensor of another stage; ``likely`` are two guesses."""
        if self._guess is None or len(self._noted) < len(self._came):
            return self.take(int, maker)
        self.is_sized = True
        self._noted.append(likely[self._guess.usual])
        return self._noted[-1]

    def require_all_taken(self, stage: int) -> None:
        """Raise unless the stage before has noted as many numbers."""
        if self._count is not None and len(self._noted) != self._count:
            raise PartitionError(
                f"the forward reads {len(self._noted)} numbers from data before stage {stage} "
                f"begins, but {self._count} in the stage before; what it reads must depend on its "
                "data only"
            )

    def sent(self, room: int, device: torch.device) -> torch.Tensor:
        """All numbers for the next stage, padded to the length that it expects."""
        if len(self._noted) > room:
            raise PartitionError(
                f"the forward reads {len(self._noted)} numbers that depend on data, but only "
                f"{room} with the example; every micro-batch must read at most as many"
            )
        count = len(self._noted)
        return torch.tensor([count, *self._noted, *[0] * (room - count)], device=device)


class Sizes(_Mode):
    """Notes the sizes that depend on data in results of operations outside of units."""

    def __init__(self, context: PlaceholderContext) -> None:
        super().__init__()
        self._context: Any = context

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        context = self._context
        is_outside = here.context is context and not context.is_inside
        if is_outside and size_depends_on_data(func, args):
            context.numbers.note_sizes(output)
        return output


def _read(came: torch.Tensor | None) -> tuple[int | None, Sequence[int]]:
    """The count of the numbers that came, or None without data, and the numbers."""
    if came is None:
        return None, ()
    if came.is_meta or isinstance(came, _FakeTensor):
        return None, [0] * (len(came) - 1)
    count, *numbers = came.tolist()
    return count, numbers[:count]


def _written(number: Number) -> int:
    """A number as an integer of 64 bits."""
    if isinstance(number, float):
        return struct.unpack("q", struct.pack("d", number))[0]
    return int(number)


def _type_of(tensor: torch.Tensor) -> type[Number]:
    if tensor.is_complex():
        raise PartitionError("the forward reads a complex number, which no other stage has")
    if tensor.is_floating_point():
        return float
    return bool if tensor.dtype is torch.bool else int
