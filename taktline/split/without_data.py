"""A copy of a model without data, in which a forward can be recorded, and what runs its operators.

::

    model                 container: an ancestor of a cut
    ├── embed_tokens      unit: a step of the forward
    ├── layers            container
    │   ├── 0             unit
    │   └── 1             unit; a cut begins a stage here
    ├── rotary_emb        free: has no state, so what it computes are steps
    └── norm              unit
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.errors import PartitionError
from taktline.private import private
from taktline.split.steps import (
    Absent,
    Call,
    Cut,
    all_tensors,
    arguments_of_forward,
)
from taktline.stage.names import unwrapped

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def joined(path: str, key: str) -> str:
    """The full name of a member of a module."""
    return ".".join(filter(None, (path, key)))


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Let attributes have other values for a while."""
    before = {name: vars(holder)[name] for name in values if name in vars(holder)}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name in values:  # at no time without it: other threads may use it
            if name in before:
                setattr(holder, name, before[name])
            else:
                delattr(holder, name)


def ancestors(name: str) -> list[str]:
    """The names of the modules around a module, from the model on."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts))]


class EmptyModel:
    """A model without data: its parameters, and the buffers of its units, are on the meta device.

    Args:
        model: stays as it is.
        cuts: what is around these is opened.
        opened: more modules to open.
        counter: a context around the run of a unit, which has a ``cost`` in the end.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[Cut],
        opened: Collection[str] = (),
        counter: Callable[[], Any] = nullcontext,
    ) -> None:
        require_python(model)
        self.kind, self.counter = type(model), counter
        units = _units_of(model, cuts, opened)
        inside = {id(part) for name in units for part in model.get_submodule(name).modules()}
        memo: dict[int, Any] = {}
        for module in model.modules():
            inner = unwrapped(module)
            memo[id(module)] = memo.setdefault(id(inner), object.__new__(type(inner)))
            for tensor in (t for _, tensors in _tables_of(module) for t in tensors.values()):
                if id(module) in inside or isinstance(tensor, nn.Parameter):
                    memo[id(tensor)] = _empty(tensor)
        for module in model.modules():
            if unwrapped(module) is module:
                made = memo[id(module)]
                made.__dict__ = {k: _copied(v, memo) for k, v in vars(module).items()}
                made.__dict__["_compiled_call_impl"] = None
        _require_own_hooks(model, memo)
        self.model: nn.Module = memo[id(model)]
        self.modules = {name: self.model.get_submodule(name) for name in units}
        if "use_cache" not in arguments_of_forward(self.kind):
            for part in self.model.modules():
                config: Any = vars(part).get("config")
                if getattr(config, "use_cache", False):  # no stage has the cache of all layers
                    vars(part)["config"] = config = copy.copy(config)
                    config.use_cache = False
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        self.parameters = frozenset(parameters)
        insides = tuple(f"{name}." for name in units)
        self.own = [name for name in (*parameters, *buffers) if not name.startswith(insides)]
        """The parameters and buffers that are in no unit."""
        self.seen: set[int] = set()
        """The lines of forwards that were recorded twice."""

    def __deepcopy__(self, memo: dict[int, Any]) -> EmptyModel:
        return self

    @contextmanager
    def filled(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Replace all parameters, buffers and other tensors in attributes for a while."""
        before = [table for module in self.model.modules() for table in _tables_of(module)]
        every = {id(tensor): tensor for _, tensors in before for tensor in tensors.values()}
        made = {key: change(tensor) for key, tensor in every.items()}
        for table, tensors in before:
            table.update((key, made[id(tensor)]) for key, tensor in tensors.items())
        try:
            yield
        finally:
            for table, tensors in before:
                table.update(tensors)


def require_python(model: nn.Module) -> None:
    """Raise if a module is one of TorchScript."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise PartitionError(
                f"{repr(name) if name else 'the model'} is a module of TorchScript, which cannot "
                "be recorded; use the module that it was made from, or pass a list of stages"
            )


def _units_of(model: nn.Module, cuts: Sequence[Cut], opened: Collection[str]) -> list[str]:
    """The submodules in containers that have a state, begin a stage, or have hooks.

    Containers are the ancestors of the cuts, and modules without a forward in them, such as lists.
    """
    begin, found = {cut.unit for cut in cuts}, list[str]()
    containers = {"", *opened, *(name for unit in (*begin, *opened) for name in ancestors(unit))}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and name.rpartition(".")[0] not in containers:
            continue
        if name in containers or type(unwrapped(module)).forward is nn.Module.forward:
            containers.add(name)
            _require_plain(name, module)
        elif (
            name in begin
            or any(map(_has_hooks, module.modules()))
            or next(module.parameters(), None) is not None
            or module.state_dict()
        ):
            found.append(name)
    return found


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)


def _require_plain(name: str, module: nn.Module) -> None:
    """Raise if a module that is cut has hooks, or another forward than its class."""
    who = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
    if _has_hooks(module):
        raise PartitionError(
            f"{who} has a hook, but is cut: it runs once, while it is recorded, and no stage "
            "calls it; use a hook of a submodule that is in one stage"
        )
    forward: Any = vars(module).get("forward")
    is_method = getattr(forward, "__self__", None) is module and not forward.__func__.__closure__
    if forward is not None and not is_method:
        raise PartitionError(
            f"the forward of {who} was replaced on this object, by one that may refer to the "
            "whole model; cut the model before its forward is wrapped"
        )


def _require_own_hooks(model: nn.Module, copies: dict[int, Any]) -> None:
    """Raise if a hook has the model itself, or what it keeps: the recorded copy has others."""
    for name, module in model.named_modules():
        for hook in (hook for table in _HOOKS[:2] for hook in getattr(module, table).values()):
            for cell in getattr(hook, "__closure__", None) or ():
                kept: Any = None
                with suppress(ValueError):  # a name that has no value
                    kept = cell.cell_contents
                is_part = isinstance(kept, (dict, list)) or getattr(kept, "_modules", None)
                if is_part and id(kept) in copies:
                    raise PartitionError(
                        f"a hook of {name!r} refers to the model, or to what it keeps, of which "
                        "its stage has only a part; let the hook keep what it needs in an "
                        "attribute of its own module, the first argument of hooks"
                    )


_Table = tuple[dict[str, Any], dict[str, torch.Tensor]]


def _tables_of(module: nn.Module) -> list[_Table]:
    """The tables of a module that have tensors in them, with these."""
    tables = (module._parameters, module._buffers, vars(module))
    return [(t, {k: v for k, v in t.items() if isinstance(v, torch.Tensor)}) for t in tables]


def _empty(tensor: torch.Tensor, device: torch.device | str = "meta") -> torch.Tensor:
    """A tensor of this kind, without its data."""
    options: Any = {"dtype": tensor.dtype, "device": device}
    if tensor.layout is torch.strided:
        made = torch.empty_strided(tensor.shape, tensor.stride(), **options)
    else:
        made = torch.empty(tensor.shape, **options)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, or the value itself if it cannot be copied, such as a lock."""
    with suppress(Exception):
        return copy.deepcopy(value, memo)
    return value


_WHAT = "a recorded forward"
NeedsData = private("torch._subclasses.fake_tensor.DataDependentOutputException", _WHAT)
NeedsSizes = private("torch._subclasses.fake_tensor.DynamicOutputShapeException", _WHAT)
FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor", _WHAT)
_FakeMode = private("torch._subclasses.fake_tensor.FakeTensorMode", _WHAT)
_with_data = private("torch._subclasses.fake_tensor.unset_fake_temporarily", _WHAT)
_DispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode", _WHAT)
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Those of operators that look at data, to return a number or a tensor of a size."""
_INDEXING, _MASKS = ("index", "index_put", "index_put_"), (torch.bool, torch.uint8)


def true_entries(mask: torch.Tensor) -> int:
    """How many entries of a mask are true."""
    return int(torch.count_nonzero(mask))


def has_data(tensors: Iterable[Any]) -> bool:
    """Whether all of these have data."""
    return not any(is_fake(t) or (isinstance(t, torch.Tensor) and t.is_meta) for t in tensors)


def is_fake(tensor: Any) -> bool:
    """Whether this is a tensor without data."""
    return isinstance(tensor, FakeTensor)


class Operations(_DispatchMode):
    """Sees and runs the operators of one recorded forward: without data, if a tensor has none.

    Args:
        device: where the forward runs.
        computes_in: the type of FSDP's mixed precision: of parameters, and of what units get.
        made_up: what units read where they need data: 0 or 1.
        counter: a context around the run of a unit, which has a ``cost`` in the end.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        device: torch.device,
        computes_in: torch.dtype | None,
        made_up: int,
        counter: Callable[[], Any],
    ) -> None:
        super().__init__()
        self.fake_mode = _FakeMode(allow_non_fake_inputs=True)
        self.device, self.computes_in, self.made_up = device, computes_in, made_up
        self.counter = counter
        self._held: dict[int, Any] = {}
        """Storages, since another one may get the address of one that is freed."""
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """What stands for tensors with data, by their ids, and these."""
        self._same: dict[int, int] = {}
        """The memory with data for which one without data stands."""
        self._written: set[int] = set()
        """Memory whose data is not what the forward would have there."""
        self._begin()

    def _begin(
        self,
        uses: Callable[[torch.Tensor], None] | None = None,
        number: Callable[..., Any] | None = None,
    ) -> None:
        """Before a function or a unit, which has ``uses``."""
        self._uses, self._number = uses, number
        self.writes: set[int] = set()
        """The memory that it changes."""
        self.has_read = False
        """Whether it has looked at data."""
        self.has_made_up = False
        """Whether it has got data that is made up."""

    def memory(self, tensor: torch.Tensor) -> int:
        """The memory of a tensor; views have the same."""
        try:
            storage = tensor.untyped_storage()
            found: int = storage._cdata
            self._held[found] = storage
        except (NotImplementedError, RuntimeError):  # sparse tensors and the like
            found = id(tensor)
            self._held[found] = tensor
        return self._same.get(found, found)

    def argument(self, given: torch.Tensor | Absent) -> torch.Tensor:
        """What a recorded forward has in the place of an argument."""
        if isinstance(given, Absent):
            given = torch.empty(given.shape, dtype=given.dtype, device="meta")
        return self.own(given, given.device)

    def own(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """What a recorded forward has in the place of a parameter or buffer."""
        if has_data([tensor]) and not isinstance(tensor, nn.Parameter):
            made = tensor.detach().to(device or self.device, copy=True)
            return made.requires_grad_(tensor.requires_grad)
        with self.fake_mode:
            made = _empty(tensor, self.device)
            return self._cast(made) if isinstance(tensor, nn.Parameter) else made

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the type in which FSDP computes."""
        if self.computes_in is None or not tensor.is_floating_point():
            return tensor
        made = tensor.to(self.computes_in)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(made, tensor.requires_grad) if is_parameter else made

    def as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without data in the place of another; the same each time."""
        if is_fake(tensor):
            return tensor
        if id(tensor) not in self._fakes:
            with _with_data():
                fake = self.fake_mode.from_tensor(tensor.detach())
            self._fakes[id(tensor)] = fake, tensor
            self._same[self.memory(fake)] = self.memory(tensor)
        return self._fakes[id(tensor)][0]

    def have_data(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether all tensors have data, and it is right."""
        return not any(is_fake(each) or self.memory(each) in self._written for each in tensors)

    def run(
        self, func: Any, call: Call, given: Sequence[torch.Tensor], number: Callable[..., Any]
    ) -> Any:
        """Call a function, with data if all that it gets has some.

        ``number`` reads one from a tensor with data, beside some without.
        """
        (args, kwargs), with_data = call, self.have_data(given)
        self._begin(number=None if with_data else number)
        with nullcontext() if with_data else self.fake_mode, self:
            output = func(*args, **kwargs)
        if with_data:
            self.writes &= set(map(self.memory, given))  # not what it has made itself
        else:
            self._written |= self.writes
        return output

    def run_unit(
        self, name: str, call: Callable[..., Any], given: Call, uses: Callable[..., None]
    ) -> tuple[Any, int]:
        """Call a unit without data; ``uses`` sees each tensor that it computes with.

        Also returns what it costs. Numbers that it reads are made up: 0 in one record, 1 in others.
        """
        self._begin(uses)
        for tensor in all_tensors(given):
            self.as_fake(tensor)  # outside of the counter
        if self.computes_in is not None:
            with self.fake_mode:
                given = pytree.tree_map_only(torch.Tensor, self._cast, given)
        args, kwargs = given
        try:
            with self.fake_mode, self.counter() as counter, self:
                output = call(*args, **kwargs)
        except Exception as error:
            if isinstance(error, PartitionError) or not self.has_made_up:
                raise
            raise PartitionError(
                f"{name!r} reads numbers that depend on data, and cannot run where they are all "
                f"{self.made_up}: {type(error).__name__}: {error}; let it compute with tensors of "
                "one size, without reading numbers, or pass a list of stages, cut by hand"
            ) from error
        self._written |= self.writes
        return output, getattr(counter, "cost", 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "").partition(".")[0]
        # C++ asks for a device where no error may be raised: that would end the process.
        if self._uses is not None and getattr(func, "namespace", "") != "prim":
            for tensor in _tensors_of(args):
                self._uses(tensor)
        self._note_writes(func, args, kwargs)
        if self._uses is None and self._number is None:
            has_masks = any(each.dtype in _MASKS for each in _tensors_of(args[1:2]))
            looks = not _TAGS.isdisjoint(getattr(func, "tags", ()))
            self.has_read |= looks and (has_masks or name not in _INDEXING)
            return func(*args, **kwargs)
        if self._number is not None:
            if name == "_local_scalar_dense" and self.have_data(args):
                return self._read(args[0])
            if name in _INDEXING:
                args = (args[0], self._places(args[1]), *args[2:])
        if not all(map(is_fake, _tensors_of((*args, *kwargs.values())))):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.as_fake, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if self._uses is None:
                raise
        return self._made_up(func, args, kwargs)

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.writes.update(map(self.memory, _tensors_of([given.get(argument.name)])))

    def _read(self, tensor: torch.Tensor, *how: Any) -> Any:
        """A number from a tensor with data."""
        with _with_data():
            return self._number(tensor, *how)  # pyright: ignore[reportOptionalCall]

    def _places(self, indices: Sequence[Any]) -> list[Any]:
        """Indices, with masks that have data as places; how many these are is read."""
        found: list[Any] = []
        for each in indices:
            if each is not None and each.dtype in _MASKS and self.have_data([each]):
                self._read(each, true_entries)
                with _with_data():
                    found += each.nonzero().unbind(1)
            else:
                found.append(each)
        return found

    def _made_up(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that needs data on one number everywhere."""
        number = self.made_up

        def full(tensor: torch.Tensor) -> torch.Tensor:
            return torch.full(tuple(tensor.shape), number, dtype=tensor.dtype, device=tensor.device)

        with _with_data():
            args, kwargs = pytree.tree_map_only(torch.Tensor, full, (args, kwargs))
            output = func(*args, **kwargs)
        self.has_made_up = True
        if output is True:  # such as "any is infinite", "this is none of them"
            return number == 0
        return pytree.tree_map_only(torch.Tensor, self.fake_mode.from_tensor, output)


def _tensors_of(given: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operator."""
    for each in given:
        for part in each if isinstance(each, (list, tuple)) else (each,):
            if isinstance(part, torch.Tensor):
                yield part
