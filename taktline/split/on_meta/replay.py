"""Carries out a log, to get the values of a few of its tensors.

It keeps the operations that change memory which is needed. It also runs random operations before
them, as later draws depend on them, and drops their results at once::

    a = empty(4)       kept                      asked for: b's memory
    b = empty(9)       kept
    a.normal_()        drawn and dropped
    b.normal_()        kept
    c = b * 2          left out
    d.normal_()        left out, as no later draw is kept
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from taktline import pytree
from taktline.split.arguments import tensors_in
from taktline.split.on_meta.operation_log import Draw, Log, Operation, Ref

__all__ = ["replay"]


def replay(log: Log, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values of tensors of a log, on the CPU.

    Tensors that share memory in the log share it here. Generators stay as they are.
    """
    refs = [log.ref(tensor) for tensor in tensors]
    dtype, state = torch.get_default_dtype(), torch.default_generator.get_state()
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            memories = _Replay(log).run({ref.memory for ref in refs})
            return [ref.view(memories[ref.memory]) for ref in refs]
    finally:
        torch.set_default_dtype(dtype)
        torch.default_generator.set_state(state)


class _Replay:
    """The memory and the generators of a replay."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._memories: dict[int, torch.UntypedStorage] = {}
        self._generators: dict[torch.Generator, torch.Generator] = {}
        self._states: dict[tuple[torch.Generator, object], torch.Tensor] = {}
        """The states of generators after draws to which the log sets them back."""
        for generator, draw_log in log.draw_logs.items():
            is_default = generator is torch.default_generator
            self._generators[generator] = generator if is_default else torch.Generator()
            self._generators[generator].set_state(draw_log.start)
            self._states[generator, 0] = draw_log.start
        draws = (operation.draw for operation in log.operations if operation.draw)
        self._returns = {(draw.generator, draw.begin) for draw in draws if type(draw.begin) is int}

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

    def _do(self, operation: Operation, *, scratch: bool) -> None:
        """Carry out one operation; with ``scratch``, on memory that is dropped."""

        def real(value: Any) -> Any:
            if isinstance(value, Ref):
                if scratch:
                    return torch.empty_strided(
                        value.size, value.stride, dtype=value.dtype, device="cpu"
                    )
                return value.view(self._memory(value.memory))
            return self._generators[value] if isinstance(value, torch.Generator) else value

        torch.set_default_dtype(operation.dtype)
        args, kwargs = pytree.tree_map(real, (operation.args, operation.kwargs))
        with self._drawing(operation.draw) if operation.draw else nullcontext():
            result = operation.op(*args, **kwargs)
        if scratch:
            return
        for ref, tensor in zip(operation.made, tensors_in(result), strict=True):
            if ref is not None:
                self._memories[ref.memory] = _laid_out(tensor, ref).untyped_storage()

    def _memory(self, number: int) -> torch.UntypedStorage:
        if number not in self._memories:
            self._memories[number] = self._log.constants[number].clone().untyped_storage()
        return self._memories[number]

    @contextmanager
    def _drawing(self, draw: Draw) -> Iterator[None]:
        """Set a generator to the state before a draw; keep the state after it if that is needed."""
        generator = self._generators[draw.generator]
        if isinstance(draw.begin, torch.Tensor):
            generator.set_state(draw.begin)
        elif draw.begin is not None:
            generator.set_state(self._states[draw.generator, draw.begin])
        yield
        if (draw.generator, draw.number) in self._returns:
            self._states[draw.generator, draw.number] = generator.get_state()


def _kept(operations: Sequence[Operation], asked: set[int]) -> set[int]:
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


def _laid_out(tensor: torch.Tensor, ref: Ref) -> torch.Tensor:
    """A result with the strides of the log: on the CPU an operation may use others."""
    if (tensor.stride(), tensor.storage_offset()) == (ref.stride, ref.offset):
        return tensor
    reach = ref.offset + sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True)) + 1
    memory = torch.empty(max(reach, 0), dtype=ref.dtype, device="cpu").untyped_storage()
    return ref.view(memory).copy_(tensor)
