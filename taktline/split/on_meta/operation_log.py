"""A log of the operations with which a constructor makes tensors, to carry out a part of it later.

To make the values of a few tensors, a replay runs the operations that change memory which they
need. It also runs the random operations before these, as later draws depend on them, and drops
their results at once::

    a = empty(4)       runs                      asked for: b
    b = empty(9)       runs
    a.normal_()        runs, and is dropped
    b.normal_()        runs
    c = b * 2          left out
    d.normal_()        left out, as no later draw is needed
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from taktline import pytree
from taktline.errors import StateError
from taktline.split.arguments import Args, Kwargs, aliased, tensors_in


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """One operation that draws random numbers."""

    generator: torch.Generator
    begin: _Draw | torch.Tensor | None
    """Where the generator stands: behind another draw, in a state, or (None) where it was left."""


class _DrawLog:
    """The delayed draws from one generator.

    Each delayed draw moves the generator by one number, so that it has another state after each. A
    generator in another state than that was seeded (an unknown state), or set back (a known one)::

        draw 0 ─ draw 1 ─ seed(7) ─ draw 2 ─ set back ─ draw 3
           └───────┴─────────────────────────────┴────────┘   3 goes on where 1 ended
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._left = b""
        """The state in which the last draw has left the generator."""
        self._ends: dict[bytes, _Draw] = {}

    def add(self) -> _Draw:
        """Note a draw that is delayed."""
        state = self._generator.get_state()
        digest = _digest(state)
        draw = _Draw(
            self._generator, None if digest == self._left else self._ends.get(digest, state)
        )
        torch.rand((), generator=self._generator)
        self._left = _digest(self._generator.get_state())
        self._ends[self._left] = draw
        return draw


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class _Ref:
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
class _Operation:
    """One operation; its tensors are written as references."""

    op: OpOverload
    args: Args
    kwargs: Kwargs
    made: tuple[_Ref | None, ...]
    """The tensors that it returns; None for one whose memory is not new."""
    reads: frozenset[int]
    writes: frozenset[int]
    """The memory that it changes or allocates."""
    dtype: torch.dtype
    """The default type when it was called."""
    draw: _Draw | None


class Log:
    """The operations, and the constants that they use.

    Tensors are known by their memory: ``.data`` and ``nn.Parameter`` make new tensors of the same
    memory without an operation.
    """

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.constants: dict[int, torch.Tensor] = {}
        """The values of memory that had some from the start."""
        self._draws: dict[torch.Generator, _DrawLog] = {}
        self._numbers: dict[StorageWeakRef, int] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._numbers

    def alive(self) -> bool:
        """Whether any of its tensors is alive."""
        return any(not memory.expired() for memory in self._numbers)

    def ref(self, tensor: torch.Tensor) -> _Ref:
        """The reference to a tensor."""
        number = self._numbers.get(StorageWeakRef(tensor.untyped_storage()))
        if number is None:
            raise StateError(
                f"a tensor of shape {list(tensor.shape)} on the meta device comes from outside of "
                "deferred(), so its values are unknown; make it inside"
            )
        return _Ref(
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
        copied = value.detach().clone()
        made = torch.empty_like(copied, device="meta")
        self.constants[self._number(made)] = copied
        return made

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
                _Operation(op, args, kwargs, made, reads, frozenset(writes), dtype, draw)
            )

    def replay(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of tensors, on the CPU.

        Tensors that share memory in the log share it here. Generators stay as they are.
        """
        refs = [self.ref(tensor) for tensor in tensors]
        dtype = torch.get_default_dtype()
        states = {generator: generator.get_state() for generator in self._draws}
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                memories = _Replay(self).run({ref.memory for ref in refs})
                return [ref.view(memories[ref.memory]) for ref in refs]
        finally:
            torch.set_default_dtype(dtype)
            for generator, state in states.items():
                generator.set_state(state)

    def _number(self, tensor: torch.Tensor) -> int:
        memory = StorageWeakRef(tensor.untyped_storage())
        return self._numbers.setdefault(memory, len(self._numbers))

    def _made(self, tensor: torch.Tensor) -> _Ref | None:
        if tensor in self:
            return None
        self._number(tensor)
        return self.ref(tensor)

    def _draw(self, kwargs: Kwargs) -> _Draw:
        generator = kwargs.get("generator") or torch.default_generator
        if generator not in self._draws:
            self._draws[generator] = _DrawLog(generator)
        return self._draws[generator].add()

    def _write(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.ref(value)
        # Values are made on the CPU, and moved later.
        return torch.device("cpu") if isinstance(value, torch.device) else value


class _Replay:
    """The memory of a replay."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._memories: dict[int, torch.UntypedStorage] = {}
        begins = (operation.draw.begin for operation in log.operations if operation.draw)
        self._ends = {begin: torch.empty(0) for begin in begins if isinstance(begin, _Draw)}
        """The states of generators behind the draws to which the log sets them back."""

    def run(self, asked: set[int]) -> dict[int, torch.UntypedStorage]:
        """Carry out the operations that some memory depends on."""
        operations = self._log.operations
        kept = _kept(operations, asked)
        uses = [operation.reads | operation.writes for operation in operations]
        last = {memory: at for at in sorted(kept) for memory in uses[at]}
        last_draw = max((at for at in kept if operations[at].draw), default=-1)
        for at, operation in enumerate(operations):
            if at not in kept and not (operation.draw and at < last_draw):
                continue
            self._do(operation, scratch=at not in kept)
            for memory in uses[at] - asked if at in kept else ():
                if last[memory] == at:
                    del self._memories[memory]
        return {memory: self._memory(memory) for memory in asked}

    def _do(self, operation: _Operation, *, scratch: bool) -> None:
        """Carry out one operation; with ``scratch``, on memory that is dropped."""

        def real(value: Any) -> Any:
            if not isinstance(value, _Ref):
                return value
            if scratch:
                return torch.empty_strided(
                    value.size, value.stride, dtype=value.dtype, device="cpu"
                )
            return value.view(self._memory(value.memory))

        torch.set_default_dtype(operation.dtype)
        args, kwargs = pytree.tree_map(real, (operation.args, operation.kwargs))
        draw = operation.draw
        if draw is not None and draw.begin is not None:
            begin = draw.begin
            draw.generator.set_state(self._ends[begin] if isinstance(begin, _Draw) else begin)
        result = operation.op(*args, **kwargs)
        if draw is not None and draw in self._ends:
            self._ends[draw] = draw.generator.get_state()
        if scratch:
            return
        for ref, tensor in zip(operation.made, tensors_in(result), strict=True):
            if ref is not None:
                self._memories[ref.memory] = _laid_out(tensor, ref).untyped_storage()

    def _memory(self, number: int) -> torch.UntypedStorage:
        if number not in self._memories:
            self._memories[number] = self._log.constants[number].clone().untyped_storage()
        return self._memories[number]


def _kept(operations: Sequence[_Operation], asked: set[int]) -> set[int]:
    """The places of the operations that some memory depends on."""
    needed, kept, has_draw = set(asked), set[int](), False
    for at, operation in reversed(list(enumerate(operations))):
        draws = operation.draw is not None
        # How much an operation draws may depend on the values that it reads.
        is_forced = has_draw and draws and operation.reads - operation.writes
        if is_forced or operation.writes & needed:
            kept.add(at)
            needed |= operation.reads
            has_draw = has_draw or draws
    return kept


def _laid_out(tensor: torch.Tensor, ref: _Ref) -> torch.Tensor:
    """A result with the strides of the log: on the CPU an operation may use others."""
    if (tensor.stride(), tensor.storage_offset()) == (ref.stride, ref.offset):
        return tensor
    reach = ref.offset + sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True)) + 1
    memory = torch.empty(max(reach, 0), dtype=ref.dtype, device="cpu").untyped_storage()
    return ref.view(memory).copy_(tensor)


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
