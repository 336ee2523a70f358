"""Models without memory for their tensors, which get values stage by stage.

Operations on the meta device are logged. A replay runs those that the wanted tensors depend on. It
also runs the random ones before these, as later draws depend on them, and drops their results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from taktline import pytree
from taktline.checks import known_keywords, refuse, require_instance
from taktline.device import require_usable_device
from taktline.errors import StateError
from taktline.private import private
from taktline.split.arguments import Args, Kwargs, tensors_in, written_by
from taktline.stage.names import declared

_Mode = private("torch.utils._python_dispatch.TorchDispatchMode", "deferred()")
_without_modes = private("torch.utils._python_dispatch._disable_current_modes", "deferred()")
_without_functions = private("torch._C.DisableTorchFunction", "deferred()")

M = TypeVar("M", bound=nn.Module)
_Memories = dict[int, torch.UntypedStorage]
_Run = Callable[[_Memories, dict[int, Any]], None]
_DEVICE, _IS_META = (getattr(torch.Tensor, name).__get__ for name in ("device", "is_meta"))
_READERS = {getattr(torch.Tensor, name) for name in ("__array__", "__format__", "numpy", "tolist")}
"""Functions that read data without an operation."""
_NEW = torch.ops.aten.lift_fresh.default
_NEED_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@contextmanager
def deferred() -> Iterator[None]:
    """Build a model without memory for its parameters.

    All tensors created inside are on the meta device. :func:`materialise` gives a stage the values
    that it would have if the model were built as usual, on the CPU, from the same seed. Code inside
    sees tensors on the CPU, and may read their values. The global generator advances, but less
    than usual.

    >>> with deferred():
    ...     model = nn.Linear(10000, 10000)
    >>> model.weight.device
    device(type='meta')
    """
    try:
        with _Disguise(), _Log():
            yield
    except RuntimeError as error:
        if "meta" in str(error).lower():
            error.add_note("deferred() cannot record this: read with item(), or build it outside")
        raise


@known_keywords
def materialise(
    piece: M, device: torch.device | str, *, state_dict: Mapping[str, torch.Tensor] | None = None
) -> M:
    """Set the values of one stage of a model on the meta device.

    Args:
        piece: a module; its parameters stay the same objects, which an optimizer may have.
        device: the device of the values.
        state_dict: the values, by their names in the piece; a tied weight may have any of its
            names. Only these names are looked up, so it may read them from a file. Without it, and
            for buffers that are not in it, the model must be built in :func:`deferred`.

    A tensor that several pieces share stays one in a process. The global generator does not move.

    >>> with deferred():
    ...     model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> materialise(model[1], "cpu").running_var, model[0].bias.device
    (tensor([1., 1.]), device(type='meta'))
    """
    require_instance("piece", piece, nn.Module, "an nn.Module")
    device = require_usable_device(device)
    if state_dict is not None and not hasattr(state_dict, "__getitem__"):
        refuse("state_dict", "a mapping from names to tensors", state_dict)
    names = {} if device.type == "meta" else _names_on_meta(piece)
    values = _values(piece, names, state_dict, device)
    for tensor, value in values.items():
        _install(piece, tensor, names[tensor], value)
    return piece.to(device)


def _names_on_meta(piece: nn.Module) -> dict[torch.Tensor, list[str]]:
    """The tensors of a piece that are on the meta device, with their names."""
    names: dict[torch.Tensor, list[str]] = {}
    for prefix, module in piece.named_modules(remove_duplicate=False):
        for key, value in {**module._parameters, **module._buffers, **vars(module)}.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                names.setdefault(value, []).append(f"{prefix}.{key}" if prefix else key)
    return names


def _values(
    piece: nn.Module, names: dict[torch.Tensor, list[str]], state: Any, device: torch.device
) -> dict[torch.Tensor, torch.Tensor]:
    """The values of tensors: of another piece, from a state dict, or as in the constructor."""
    values: dict[torch.Tensor, torch.Tensor] = {}
    logs: dict[Any, list[torch.Tensor]] = {}
    ties = [{name for _, name in tie.uses} for tie in declared(piece)]
    for tensor, own in names.items():
        known = getattr(tensor, "taktline_value", lambda: None)()
        tied = [name for tie in ties if tie & set(own) for name in tie]
        name = next((name for name in [*own, *tied] if name in (state or ())), None)
        if known is not None and known.device == device:
            values[tensor] = known
        elif name is not None and state is not None:
            value, shape = state[name], tensor.shape
            if value.shape != shape:
                text = f"{name} has the shape {list(value.shape)} in the state dict, {list(shape)}"
                raise StateError(f"{text} here; build the model as it was saved", names=[name])
            values[tensor] = torch.empty_like(tensor, device=device).copy_(value)
        elif (log := _mark(tensor)[0]) and (state is None or not isinstance(tensor, nn.Parameter)):
            logs.setdefault(log, []).append(tensor)
    for log, tensors in logs.items():
        made = log.replay(tensors)
        while made:  # one at a time, so that few are on two devices at once
            values[tensors.pop()] = made.pop().to(device)
    unknown = [own[0] for tensor, own in names.items() if tensor not in values]
    if unknown:
        text = "the values are unknown of" if state is None else "the state dict lacks"
        more = f" and {len(unknown) - 9} more" if len(unknown) > 9 else ""
        raise StateError(
            f"{text} {', '.join(unknown[:9])}{more}; build the model in taktline.split.deferred(), "
            "and do not replace its tensors; a state dict needs all parameters, by the model's "
            "names",
            names=unknown,
        )
    return values


def _install(piece: nn.Module, tensor: Any, names: list[str], value: Any) -> None:
    """Give a tensor its value, wherever it is used."""
    if isinstance(tensor, nn.Parameter) and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        value.__class__ = type(tensor)
        value.__dict__.update(vars(tensor))
        with suppress(RuntimeError):  # if something has a weak reference to it, as an LSTM does
            return torch.utils.swap_tensors(tensor, value)
    for prefix, _, key in (name.rpartition(".") for name in names):
        setattr(piece.get_submodule(prefix), key, value)
    vars(tensor)["taktline_value"] = weakref.ref(value)


@dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor: its view of a numbered memory."""

    memory: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def real(self, memories: _Memories) -> torch.Tensor:
        """The tensor with data; in memory of its own, if there is none for it."""
        if self.memory not in memories:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(memories[self.memory], self.offset, self.size, self.stride)


class _Log(_Mode):
    """Runs operations on the meta device instead of the CPU, and keeps them.

    Tensors are known by a mark on their memory, which keeps the log alive: ``.data`` and
    ``nn.Parameter`` make new tensors of the same memory without an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[_Run, set[int], set[int], torch.Generator | None]] = []
        """Each with the memory that it reads, that it changes or makes, and its generator."""
        self._memories = 0
        self._states: dict[int, torch.Tensor | None] = {}
        """The states of generators before draws; None if it is the end of another draw."""

    def replay(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The values of tensors on the CPU; those that share memory share it here."""
        refs = [self._ref(tensor) for tensor in tensors]
        needed: list[tuple[_Run, set[int] | None]] = []
        used, later_draw = {ref.memory for ref in refs}, None
        for run, reads, writes, draw in reversed(self._operations):
            # How many numbers are drawn may depend on the values that are read.
            if writes & used or (draw and later_draw and reads - writes):
                needed.append((run, (reads | writes) - used))
                used |= reads | writes
                later_draw = later_draw or draw
            elif draw and later_draw:
                needed.append((run, None))
        before = [(draw, draw.get_state()) for draw in {op[3] for op in self._operations} if draw]
        dtype, states, memories = torch.get_default_dtype(), dict(self._states), {}
        try:
            with _without_functions(), torch.no_grad():
                for run, unused in reversed(needed):
                    run({} if unused is None else memories, states)
                    for memory in unused or ():
                        del memories[memory]
                return [ref.real(memories) for ref in refs]
        finally:
            torch.set_default_dtype(dtype)
            for generator, state in before:
                generator.set_state(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _without_functions():
            return self._record(func, args, dict(kwargs or {}))

    def _record(self, op: Any, args: Args, kwargs: Kwargs) -> Any:
        if str(op) == "aten._conj.default":  # memory does not show what is such a view
            op = torch.ops.aten.conj_physical.default
        given = tensors_in((args, kwargs))
        draws = torch.Tag.nondeterministic_seeded in op.tags
        if given and not draws and not any(tensor.is_meta for tensor in given):
            return self._on_meta(given[0]) if op is _NEW else op(*args, **kwargs)
        written = tensors_in(list(written_by(op, args, kwargs)))
        if not all(tensor.is_meta for tensor in written):
            raise StateError(f"{op} changes a tensor from outside of deferred(); make it inside")
        args, kwargs = pytree.tree_map(self._on_meta, (args, kwargs))
        if any(argument.name == "device" for argument in op._schema.arguments):
            kwargs["device"] = torch.device("meta")
        with suppress(NotImplementedError):
            if not _NEED_DATA & set(op.tags):
                result, writes = op(*args, **kwargs), {self._ref(each).memory for each in written}
                self._add(op, (args, kwargs), result, writes, draws)
                return result
        if draws or written:
            raise StateError(f"deferred() cannot record {op}; build what calls it outside")
        args, kwargs = pytree.tree_map(_real, (args, kwargs))
        return pytree.tree_map(self._on_meta, op(*args, **kwargs))

    def _on_meta(self, value: Any) -> Any:
        """The value; for a tensor with data, which is copied, one on the meta device."""
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return value
        copied = value.detach().clone()
        made = torch.empty_like(copied, device="meta")
        self._add(torch.clone, ((copied,), {}), made, set(), draws=False)
        return made

    def _add(self, op: Any, call: Any, result: Any, writes: set[int], draws: bool) -> None:
        """Log an operation, unless it returns a view."""

        def stored(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_meta:
                return self._ref(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        def run(memories: _Memories, states: dict[int, Any]) -> None:
            args, kwargs = pytree.tree_map_only(_Ref, lambda ref: ref.real(memories), call)
            torch.set_default_dtype(dtype)
            if generator:
                generator.set_state(states[begin])
            results = tensors_in(op(*args, **kwargs))
            if generator:
                states[end] = generator.get_state()
            for ref, tensor in zip(made, results, strict=True):
                if ref.memory not in memories:
                    if tensor.stride() != ref.stride:  # the CPU may choose others
                        tensor = ref.real({}).copy_(tensor)
                    memories[ref.memory] = tensor.untyped_storage()

        call, dtype = pytree.tree_map(stored, call), torch.get_default_dtype()
        for tensor in tensors_in(result):
            if _mark(tensor)[0] is None:
                self._memories += 1
                vars(tensor.untyped_storage())["taktline_log"] = self, self._memories
                writes.add(self._memories)
        made = [self._ref(tensor) for tensor in tensors_in(result)]
        if writes or draws:
            reads = {each.memory for each in pytree.tree_leaves(call) if isinstance(each, _Ref)}
            generator, begin, end = self._draw(call) if draws else (None, 0, 0)
            self._operations.append((run, reads, writes, generator))

    def _ref(self, tensor: torch.Tensor) -> _Ref:
        (log, memory), size = _mark(tensor), tensor.shape
        if log is not self:
            text = f"a tensor of shape {list(size)} on the meta device is from outside of this"
            raise StateError(f"{text} deferred(), so its values are unknown; make it inside")
        return _Ref(memory, tensor.dtype, int(tensor.storage_offset()), size, tensor.stride())

    def _draw(self, call: Any) -> tuple[torch.Generator, int, int]:
        """Move the generator to a new state: a draw that begins there goes on behind this one."""
        given = (each for each in pytree.tree_leaves(call) if isinstance(each, torch.Generator))
        generator = next(given, torch.default_generator)
        state = generator.get_state()
        begin = end = hash(state.numpy().tobytes())
        self._states.setdefault(begin, state)
        while end in self._states:
            torch.rand(1, generator=generator)
            end = hash(generator.get_state().numpy().tobytes())
        self._states[end] = None
        return generator, begin, end


def _mark(tensor: torch.Tensor) -> tuple[Any, int]:
    """The log that has a tensor, and the number of its memory there."""
    return getattr(tensor.untyped_storage(), "taktline_log", (None, 0))


def _real(value: Any) -> Any:
    """The value; for a tensor of a log, one with its data."""
    log = _mark(value)[0] if isinstance(value, torch.Tensor) else None
    with _without_modes():
        return value if log is None else log.replay([value])[0]


class _Disguise(TorchFunctionMode):
    """Shows tensors of a log as if they were on the CPU: some code skips the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if func == _IS_META or (func == _DEVICE and args[0].is_meta):
            return False if func == _IS_META else torch.device("cpu")
        args = pytree.tree_map(_real, args) if func in _READERS else args
        return func(*args, **(kwargs or {}))
