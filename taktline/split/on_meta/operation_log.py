"""A log of the operations with which a constructor makes tensors, none of them carried out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from taktline import pytree
from taktline.errors import StateError
from taktline.split.arguments import Args, Kwargs, aliased, tensors_in

__all__ = ["Draw", "Log", "Operation", "Ref", "find_log", "keep", "written"]


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One operation that draws random numbers."""

    generator: torch.Generator
    number: int
    """Which draw of this generator it is, from 1 up."""
    begin: int | torch.Tensor | None
    """Where the generator stands: None where it was, or after which draw, or in which state."""


class DrawLog:
    """The delayed draws from one generator.

    Each delayed draw moves the generator by one number, so that it has another state after each. A
    generator in another state than that was seeded (an unknown state), or set back (a known one)::

        draw 0 ─ draw 1 ─ seed(7) ─ draw 2 ─ set back ─ draw 3
           └───────┴─────────────────────────────┴────────┘   3 goes on where 1 ended
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.start = generator.get_state()
        self._state = _digest(self.start)
        self._draws = {self._state: 0}
        """The draws after which the generator had a state."""
        self._count = 0

    def add(self) -> Draw:
        """Note a draw that is delayed."""
        state = self.generator.get_state()
        digest = _digest(state)
        begin = None if digest == self._state else self._draws.get(digest, state)
        self._count += 1
        torch.rand((), generator=self.generator)
        self._state = _digest(self.generator.get_state())
        self._draws[self._state] = self._count
        return Draw(self.generator, self._count, begin)


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor: its view of a numbered storage."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool = False
    negative: bool = False

    def view(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        tensor = empty.set_(memory, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch.ops.aten._neg_view.default(tensor) if self.negative else tensor


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation; its tensors are written as Ref."""

    op: OpOverload
    args: Args
    kwargs: Kwargs
    made: tuple[Ref | None, ...]
    """The tensors that it returns; None for one whose memory is not new."""
    reads: frozenset[int]
    writes: frozenset[int]
    """The memory that it changes or allocates."""
    dtype: torch.dtype
    """The default type when it was called."""
    draw: Draw | None


class Log:
    """The operations, and the constants that they use.

    Tensors are known by their memory: ``.data`` and ``nn.Parameter`` make new tensors of the same
    memory without an operation.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.constants: dict[int, torch.Tensor] = {}
        """The bytes of memory that had values from the start."""
        self.draw_logs: dict[torch.Generator, DrawLog] = {}
        self._numbers: dict[StorageWeakRef, int] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._numbers

    def alive(self) -> bool:
        """Whether any of its tensors is alive."""
        return any(not memory.expired() for memory in self._numbers)

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The reference to a tensor."""
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
        """A tensor on the meta device for one with values, which are copied."""
        memory = StorageWeakRef(value.untyped_storage())
        if memory not in self._numbers:
            self.constants[self._number(memory)] = _bytes(value).clone()
        ref = self.ref(value)
        whole = torch.empty(self.constants[ref.memory].numel(), dtype=torch.uint8, device="meta")
        self._numbers[StorageWeakRef(whole.untyped_storage())] = ref.memory
        return ref.view(whole.untyped_storage())

    def add(self, op: OpOverload, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Add an operation, unless it returns a view."""
        draw = self._draw(kwargs) if torch.Tag.nondeterministic_seeded in op.tags else None
        reads = frozenset(self.ref(tensor).memory for tensor in tensors_in((args, kwargs)))
        writes = {self.ref(tensor).memory for tensor in written(op, args, kwargs)}
        made = tuple(self._made(tensor) for tensor in tensors_in(result))
        writes.update(ref.memory for ref in made if ref is not None)
        if writes or draw:
            args, kwargs = pytree.tree_map(self._write, (args, kwargs))
            dtype = torch.get_default_dtype()
            self.operations.append(
                Operation(op, args, kwargs, made, reads, frozenset(writes), dtype, draw)
            )

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
        return self.draw_logs[generator].add()

    def _write(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.ref(value)
        # Values are made on the CPU, and moved later.
        return torch.device("cpu") if isinstance(value, torch.device) else value


_logs: list[Log] = []


def keep(log: Log) -> None:
    """Keep a log while one of its tensors is alive."""
    _logs[:] = [*(known for known in _logs if known.alive()), log]


def find_log(tensor: torch.Tensor) -> Log | None:
    """The log that has a tensor."""
    return next((log for log in reversed(_logs) if tensor in log), None)


def written(op: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """The tensors that an operation changes in place."""
    return tensors_in(list(aliased(op, args, kwargs, written=True)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
