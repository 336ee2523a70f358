"""A log carried out: the values of a few of its tensors, and of nothing else.

Going back from what is asked for, an operation is kept if it changes memory that is still needed.
Random ones that are not kept are made all the same, as the draws behind them depend on them; what
they draw is dropped at once::

    a = empty(4)       kept                      asked for: b's memory
    b = empty(9)       kept
    a.normal_()        drawn and dropped
    b.normal_()        kept
    c = b * 2          left out
    d.normal_()        left out, as no draw behind it is kept
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from taktline import pytree
from taktline.split.on_meta.log import Call, Draw, Log, Ref, tensors_in

__all__ = ["replay"]


def replay(log: Log, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values of tensors that are in a log, on the CPU.

    Tensors that share memory there share it here. Generators are left as they are.
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
    """The memory that holds values at one moment, and the generators."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._memories: dict[int, torch.UntypedStorage] = {}
        self._generators: dict[torch.Generator, torch.Generator] = {}
        self._states: dict[tuple[torch.Generator, object], torch.Tensor] = {}
        """Where generators stood after some of their draws, to which others come back."""
        for generator, draw_log in log.draw_logs.items():
            is_default = generator is torch.default_generator
            self._generators[generator] = generator if is_default else torch.Generator()
            self._generators[generator].set_state(draw_log.start)
            self._states[generator, 0] = draw_log.start
        draws = (call.draw for call in log.calls if call.draw)
        self._returns = {(draw.generator, draw.begin) for draw in draws if type(draw.begin) is int}

    def run(self, asked: set[int]) -> dict[int, torch.UntypedStorage]:
        """Carry out what is needed for some memory."""
        calls, kept = self._log.calls, _kept(self._log.calls, asked)
        last = {memory: at for at in sorted(kept) for memory in calls[at].reads | calls[at].writes}
        drawing = max((at for at in kept if calls[at].draw), default=-1)
        for at, call in enumerate(calls):
            if at not in kept and not (call.draw and at < drawing):
                continue
            self._do(call, scratch=at not in kept)
            for memory in (call.reads | call.writes) - asked if at in kept else ():
                if last[memory] == at:
                    del self._memories[memory]
        return {memory: self._memory(memory) for memory in asked}

    def _do(self, call: Call, *, scratch: bool) -> None:
        """Carry out one operation; as scratch, on memory of its own."""

        def real(value: Any) -> Any:
            if isinstance(value, Ref):
                if scratch:
                    return torch.empty_strided(
                        value.size, value.stride, dtype=value.dtype, device="cpu"
                    )
                return value.view(self._memory(value.memory))
            return self._generators[value] if isinstance(value, torch.Generator) else value

        torch.set_default_dtype(call.dtype)
        args, kwargs = pytree.tree_map(real, (call.args, call.kwargs))
        with self._drawing(call.draw) if call.draw else nullcontext():
            result = call.op(*args, **kwargs)
        if scratch:
            return
        for ref, tensor in zip(call.made, tensors_in(result), strict=True):
            if ref is not None:
                self._memories[ref.memory] = _laid_out(tensor, ref).untyped_storage()

    def _memory(self, number: int) -> torch.UntypedStorage:
        if number not in self._memories:
            self._memories[number] = self._log.constants[number].clone().untyped_storage()
        return self._memories[number]

    @contextmanager
    def _drawing(self, draw: Draw) -> Iterator[None]:
        """Set a generator to where a draw begins; keep where it ends, if another comes back."""
        generator = self._generators[draw.generator]
        if isinstance(draw.begin, torch.Tensor):
            generator.set_state(draw.begin)
        elif draw.begin is not None:
            generator.set_state(self._states[draw.generator, draw.begin])
        yield
        if (draw.generator, draw.number) in self._returns:
            self._states[draw.generator, draw.number] = generator.get_state()


def _kept(calls: Sequence[Call], asked: set[int]) -> set[int]:
    """Which operations some memory depends on."""
    needed, kept, drawing = set(asked), set[int](), False
    for at in reversed(range(len(calls))):
        call = calls[at]
        # What a draw reads may decide how much it draws.
        forced = drawing and call.draw is not None and call.reads - call.writes
        if forced or call.writes & needed:
            kept.add(at)
            needed |= call.reads
            drawing = drawing or call.draw is not None
    return kept


def _laid_out(tensor: torch.Tensor, ref: Ref) -> torch.Tensor:
    """A result as the log has it: an operation may lay it out in another way on the CPU."""
    if (tensor.stride(), tensor.storage_offset()) == (ref.stride, ref.offset):
        return tensor
    reach = ref.offset + sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True)) + 1
    memory = torch.empty(max(reach, 0), dtype=ref.dtype, device="cpu").untyped_storage()
    return ref.view(memory).copy_(tensor)
