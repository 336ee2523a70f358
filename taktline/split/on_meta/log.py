"""How tensors are made: the operations of a constructor, in order, none of them carried out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from taktline import pytree
from taktline.errors import StateError
from taktline.split.example import Args, Kwargs

__all__ = ["Call", "Draw", "Log", "Ref", "find_log", "keep", "tensors_in", "written"]


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One operation that draws random numbers."""

    generator: torch.Generator
    number: int
    """Which draw of this generator it is, from 1 up."""
    begin: int | torch.Tensor | None
    """None to go on; else after which draw, or from which state."""


class DrawLog:
    """The draws from one generator that are put off.

    A generator stands still while nothing is drawn from it. Here it takes one step for each draw,
    so that every place on its way looks different. A generator that is found elsewhere was seeded
    (a state not seen before), or set back to where it had been (a state that was)::

        draw 0 ─ draw 1 ─ seed(7) ─ draw 2 ─ set back ─ draw 3
           └───────┴─────────────────────────────┴────────┘   3 goes on where 1 ended
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.start = generator.get_state()
        self._place = _digest(self.start)
        self._places = {self._place: 0}
        self._count = 0

    def put_off(self) -> Draw:
        """Note a draw that is not made now."""
        state = self.generator.get_state()
        place = _digest(state)
        begin = None if place == self._place else self._places.get(place, state)
        self._count += 1
        torch.rand((), generator=self.generator)
        self._place = _digest(self.generator.get_state())
        self._places[self._place] = self._count
        return Draw(self.generator, self._count, begin)


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor: where it lies in a piece of memory, which has a number."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool = False
    negative: bool = False

    def view(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in its memory."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        tensor = empty.set_(memory, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch.ops.aten._neg_view.default(tensor) if self.negative else tensor


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One operation; tensors in it are written as Ref."""

    op: OpOverload
    args: Args
    kwargs: Kwargs
    made: tuple[Ref | None, ...]
    """Of each tensor that it returns: what it is known as later, if its memory is new."""
    reads: frozenset[int]
    writes: frozenset[int]
    """The memory that it changes or makes."""
    dtype: torch.dtype
    """The default type at the time."""
    draw: Draw | None


class Log:
    """The operations that were called, and the values that they began with.

    Tensors are known by their memory, as ``.data`` and ``nn.Parameter`` make new tensors of the
    same memory without an operation.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.constants: dict[int, torch.Tensor] = {}
        """The bytes of memory that came with its values."""
        self.draw_logs: dict[torch.Generator, DrawLog] = {}
        self._numbers: dict[StorageWeakRef, int] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._numbers

    def alive(self) -> bool:
        """Whether there is still a tensor in it that is alive."""
        return any(not memory.expired() for memory in self._numbers)

    def ref(self, tensor: torch.Tensor) -> Ref:
        """How a tensor is written."""
        number = self._numbers.get(StorageWeakRef(tensor.untyped_storage()))
        if number is None:
            raise StateError(
                f"a tensor of shape {list(tensor.shape)} on the meta device comes from outside of "
                "deferred(), so its values are unknown; make it inside"
            )
        return Ref(
            number,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def constant(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor on the meta device that stands for one with values; these are copied."""
        memory = StorageWeakRef(value.untyped_storage())
        if memory not in self._numbers:
            self.constants[self._number(memory)] = _bytes(value).clone()
        ref = self.ref(value)
        whole = torch.empty(self.constants[ref.memory].numel(), dtype=torch.uint8, device="meta")
        self._numbers[StorageWeakRef(whole.untyped_storage())] = ref.memory
        return ref.view(whole.untyped_storage())

    def add(self, op: OpOverload, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Write down an operation, unless it only looks at memory in another way."""
        draw = self._draw(kwargs) if torch.Tag.nondeterministic_seeded in op.tags else None
        reads = frozenset(self.ref(tensor).memory for tensor in tensors_in((args, kwargs)))
        writes = {self.ref(tensor).memory for tensor in written(op, args, kwargs)}
        made = tuple(self._made(tensor) for tensor in tensors_in(result))
        writes.update(ref.memory for ref in made if ref is not None)
        if writes or draw:
            args, kwargs = pytree.tree_map(self._write, (args, kwargs))
            dtype = torch.get_default_dtype()
            self.calls.append(Call(op, args, kwargs, made, reads, frozenset(writes), dtype, draw))

    def _number(self, memory: StorageWeakRef) -> int:
        return self._numbers.setdefault(memory, len(self._numbers))

    def _made(self, tensor: torch.Tensor) -> Ref | None:
        if tensor in self:
            return None
        self._number(StorageWeakRef(tensor.untyped_storage()))
        return self.ref(tensor)

    def _draw(self, kwargs: Kwargs) -> Draw:
        generator = kwargs.get("generator") or torch.default_generator
        if generator not in self.draw_logs:
            self.draw_logs[generator] = DrawLog(generator)
        return self.draw_logs[generator].put_off()

    def _write(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.ref(value)
        # Values are made on the CPU, wherever they go then.
        return torch.device("cpu") if isinstance(value, torch.device) else value


_logs: list[Log] = []


def keep(log: Log) -> None:
    """Keep a log for as long as one of its tensors is alive."""
    _logs[:] = [*(known for known in _logs if known.alive()), log]


def find_log(tensor: torch.Tensor) -> Log | None:
    """The log of how a tensor is made."""
    return next((log for log in reversed(_logs) if tensor in log), None)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def written(op: OpOverload, args: Args, kwargs: Kwargs) -> Iterator[torch.Tensor]:
    """The tensors that an operation changes in place."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
