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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from taktline import pytree
from taktline.errors import StateError
from taktline.private import private
from taktline.split.arguments import Args, Kwargs, aliased, tensors_in

Operator = Any
"""An operation of torch for arguments of certain types; torch has no public type for these."""

without_torch_functions = private("torch._C.DisableTorchFunction", "deferred()")
_without_modes = private("torch.utils._python_dispatch._disable_current_modes", "deferred()")


class _Draw(NamedTuple):
    """Random numbers that an operation will draw in a replay.

    Until then the generator moves a little, so that it has another state behind each draw, of this
    generator or another one. The state before a draw shows where that goes on, also if it was
    seeded or set back::

        draw 0 ─ draw 1 ─ seed(7) ─ draw 2 ─ set back ─ draw 3
           └───────┴─────────────────────────────┴────────┘   3 goes on where 1 ended
    """

    generator: torch.Generator
    begin: int | torch.Tensor
    """The end of another draw, or the state to which the generator was seeded."""
    end: int
    """The state behind it, as a number."""


@dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor: its view of a numbered storage."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def view(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class _Operation:
    """One operation; its tensors are written as references."""

    op: Operator
    args: Args
    kwargs: Kwargs
    made: tuple[_Ref, ...]
    """The tensors that it returns."""
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
        self._ends: set[int] = set()
        """Of the draws so far."""
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
        offset = int(tensor.storage_offset())
        return _Ref(number, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)

    def on_meta(self, value: Any) -> Any:
        """The value; for a tensor with data, which is copied, one on the meta device."""
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return value
        copied = value.detach().clone()
        made = torch.empty_like(copied, device="meta")
        self.constants[self._number(made)] = copied
        return made

    def real(self, value: Any) -> Any:
        """The value; for a tensor on the meta device, one with its data."""
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        with _without_modes():
            return self.replay([value])[0]

    def add(self, op: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Add an operation, unless it returns a view."""
        draw = self._draw(args, kwargs) if torch.Tag.nondeterministic_seeded in op.tags else None
        reads = frozenset(self.ref(tensor).memory for tensor in tensors_in((args, kwargs)))
        writes = {self.ref(tensor).memory for tensor in written(op, args, kwargs)}
        known, results = len(self._numbers), tensors_in(result)
        writes.update(number for number in map(self._number, results) if number >= known)
        if writes or draw:
            args, kwargs = pytree.tree_map(self._write, (args, kwargs))
            made, dtype = tuple(map(self.ref, results)), torch.get_default_dtype()
            self.operations.append(
                _Operation(op, args, kwargs, made, reads, frozenset(writes), dtype, draw)
            )

    def replay(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of tensors, on the CPU.

        Tensors that share memory in the log share it here. Generators stay as they are.
        """
        refs = [self.ref(tensor) for tensor in tensors]
        dtype = torch.get_default_dtype()
        draws = [operation.draw for operation in self.operations if operation.draw]
        states = {draw.generator: draw.generator.get_state() for draw in draws}
        try:
            with without_torch_functions(), torch.no_grad():
                memories = _Replay(self).run({ref.memory for ref in refs})
                return [ref.view(memories[ref.memory]) for ref in refs]
        finally:
            torch.set_default_dtype(dtype)
            for generator, state in states.items():
                generator.set_state(state)

    def _number(self, tensor: torch.Tensor) -> int:
        memory = StorageWeakRef(tensor.untyped_storage())
        return self._numbers.setdefault(memory, len(self._numbers))

    def _draw(self, args: Args, kwargs: Kwargs) -> _Draw:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator))
        generator = next(given, torch.default_generator)
        state = generator.get_state()
        begin, end = _hash(state), None
        while end is None or end in self._ends:  # of the same seed
            torch.rand(len(self._ends) if end else 1, generator=generator)
            end = _hash(generator.get_state())
        draw = _Draw(generator, begin if begin in self._ends else state, end)
        self._ends.add(end)
        return draw

    def _write(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.ref(value)
        # Values are made on the CPU, and moved later.
        return torch.device("cpu") if isinstance(value, torch.device) else value


def _hash(state: torch.Tensor) -> int:
    return hash(state.numpy().tobytes())


class _Replay:
    """The memory of a replay, and the states of generators behind each draw."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._memories: dict[int, torch.UntypedStorage] = {}
        self._ends: dict[int, torch.Tensor] = {}

    def run(self, asked: set[int]) -> dict[int, torch.UntypedStorage]:
        """Carry out the operations that some memory depends on."""
        operations = self._log.operations
        kept = _kept(operations, asked)
        last_draw = max((at for at in kept if operations[at].draw), default=-1)
        for at, operation in enumerate(operations):
            if at in kept:
                self._do(operation)
                for memory in kept[at]:
                    del self._memories[memory]
            elif operation.draw and at < last_draw:
                self._do(operation, scratch=True)
        return {memory: self._memory(memory) for memory in asked}

    def _do(self, operation: _Operation, *, scratch: bool = False) -> None:
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
        if draw is not None:
            begin = self._ends[draw.begin] if isinstance(draw.begin, int) else draw.begin
            draw.generator.set_state(begin)
        result = operation.op(*args, **kwargs)
        if draw is not None:
            self._ends[draw.end] = draw.generator.get_state()
        if scratch:
            return
        for ref, tensor in zip(operation.made, tensors_in(result), strict=True):
            if ref.memory not in self._memories:
                if tensor.stride() != ref.stride:  # the CPU may choose others
                    strided = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)
                    tensor = strided.copy_(tensor)
                self._memories[ref.memory] = tensor.untyped_storage()

    def _memory(self, number: int) -> torch.UntypedStorage:
        if number not in self._memories:
            self._memories[number] = self._log.constants[number].clone().untyped_storage()
        return self._memories[number]


def _kept(operations: Sequence[_Operation], asked: set[int]) -> dict[int, frozenset[int]]:
    """The places of the operations that some memory depends on, with what each uses last."""
    needed, has_draw = set(asked), False
    kept: dict[int, frozenset[int]] = {}
    for at, operation in reversed(list(enumerate(operations))):
        draws = operation.draw is not None
        # How much an operation draws may depend on the values that it reads.
        is_forced = has_draw and draws and operation.reads - operation.writes
        if is_forced or operation.writes & needed:
            uses = operation.reads | operation.writes
            kept[at] = uses - needed
            needed |= uses
            has_draw = has_draw or draws
    return kept


_logs: list[Log] = []


def keep(log: Log) -> None:
    """Keep a log while one of its tensors is alive."""
    _logs[:] = [*(known for known in _logs if known.alive()), log]


def find_log(tensor: torch.Tensor) -> Log | None:
    """The log that has a tensor."""
    return next((log for log in reversed(_logs) if tensor in log), None)


def written(op: Operator, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """The tensors that an operation changes in place."""
    return tensors_in(list(aliased(op, args, kwargs, written=True)))
