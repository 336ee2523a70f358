"""A copy of a model without data, in which a forward can be recorded.

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
from collections.abc import Callable, Collection, Iterator, Sequence
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
    filled,
    mapped,
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
        _require_own_hooks(model)
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


def _require_own_hooks(model: nn.Module) -> None:
    """Raise if a hook has the model itself, or what it keeps: the recorded copy has others."""
    kept = {id(module): "the model" for module in model.modules() if module._modules}
    for module in model.modules():
        own = {key: vars(module)[key] for key in vars(module).keys() - vars(nn.Module()).keys()}
        kept |= {id(v): repr(key) for key, v in own.items() if isinstance(v, (dict, list))}
    for name, module in model.named_modules():
        for hook in (hook for table in _HOOKS[:2] for hook in getattr(module, table).values()):
            found = None
            for cell in getattr(hook, "__closure__", None) or ():
                with suppress(ValueError):  # a name that has no value
                    found = found or kept.get(id(cell.cell_contents))
            if found:
                raise PartitionError(
                    f"a hook of {name!r} refers to {found}, of which its stage has only a part; "
                    "let the hook keep what it needs in an attribute of its own module, the first "
                    "argument of hooks"
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
        found: Any = nn.Parameter(made, tensor.requires_grad)
        state: Any = getattr(tensor, "quant_state", None)
        if state is not None:  # of bitsandbytes: what the numbers stand for
            found.quant_state = copy.copy(state)
        return found
    return made.requires_grad_(tensor.requires_grad)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, or the value itself if it cannot be copied, such as a lock."""
    with suppress(Exception):
        return copy.deepcopy(value, memo)
    return value


_WHAT = "a recorded forward"
NeedsData = private("torch._subclasses.fake_tensor.DataDependentOutputException", _WHAT)
NeedsSizes = private("torch._subclasses.fake_tensor.DynamicOutputShapeException", _WHAT)
_FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor", _WHAT)
_FakeMode = private("torch._subclasses.fake_tensor.FakeTensorMode", _WHAT)
_with_data = private("torch._subclasses.fake_tensor.unset_fake_temporarily", _WHAT)
_DispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode", _WHAT)
is_transformed: Callable[[torch.Tensor], bool] = private(
    "torch._C._functorch.is_functorch_wrapped_tensor", _WHAT, otherwise=lambda tensor: False
)
"""Whether a tensor is one of ``torch.vmap`` and the like."""


def true_entries(mask: torch.Tensor) -> int:
    """How many entries of a mask are true."""
    return int(torch.count_nonzero(mask))


def has_data(tensors: Sequence[Any]) -> bool:
    """Whether all of these have data."""
    return not any(is_fake(t) or (isinstance(t, torch.Tensor) and t.is_meta) for t in tensors)


def is_fake(tensor: Any) -> bool:
    """Whether this is a tensor without data."""
    return isinstance(tensor, _FakeTensor)


class Fakes:
    """The tensors without data of one recorded forward, on one device.

    What a function gets may be partly with data, partly without; then the result has none.
    ``computes_in`` is the type of FSDP's mixed precision: of parameters, and of what units get.
    """

    def __init__(
        self,
        device: torch.device,
        computes_in: torch.dtype | None,
        made_up: int,
        counter: Callable[[], Any],
    ) -> None:
        self.mode = _FakeMode(allow_non_fake_inputs=True)
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

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return _empty(tensor, self.device)

    def fresh(self, given: torch.Tensor | Absent) -> torch.Tensor:
        """What a recorded forward has in the place of an argument."""
        if isinstance(given, Absent):
            given = torch.empty(given.shape, dtype=given.dtype, device="meta")
        if not has_data([given]):
            return self._empty(given)
        return given.detach().clone().requires_grad_(given.requires_grad)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a recorded forward has in the place of a parameter or buffer."""
        if isinstance(tensor, nn.Parameter):
            return self._cast(self._empty(tensor))
        if not has_data([tensor]):
            return self._empty(tensor)
        made = tensor.detach().to(self.device, copy=True)
        return made.requires_grad_(tensor.requires_grad)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the type in which FSDP computes."""
        if self.computes_in is None or not tensor.is_floating_point():
            return tensor
        with self.mode:
            made = tensor.to(self.computes_in)
            is_parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(made, tensor.requires_grad) if is_parameter else made

    def as_fake(self, tensor: Any) -> Any:
        """A tensor without data in the place of another; the same each time."""
        if is_fake(tensor) or isinstance(tensor, Absent):
            return tensor
        if id(tensor) not in self._fakes:
            with _with_data():
                fake = self.mode.from_tensor(tensor.detach())
            self._fakes[id(tensor)] = fake, tensor
            self._same[self.memory(fake)] = self.memory(tensor)
        return self._fakes[id(tensor)][0]

    def have_data(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all tensors have data, and it is right."""
        return not any(is_fake(each) or self.memory(each) in self._written for each in tensors)

    def run(
        self, func: Any, call: Call, given: Sequence[Any], number: Callable[..., Any]
    ) -> tuple[Any, set[int]]:
        """Call a function, with data if all that it gets has some.

        Also returns the memory that it changes. ``number`` reads one from a tensor with data,
        beside some without.
        """
        args, kwargs = call
        if self.have_data(given):
            before = [(each, each._version) for each in given if not each.is_inference()]
            output = func(*args, **kwargs)
            return output, {self.memory(t) for t, version in before if t._version != version}
        if not kwargs:
            func, args = self._without_masks(func, args, number)
        with self.mode, _Watch(self, number=number) as watch:
            output = func(*args, **kwargs)
        self._written |= watch.writes
        return output, watch.writes

    def _without_masks(
        self, func: Any, args: tuple[Any, ...], number: Callable[..., Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """An indexing by masks that have data as one by places, whose number is read."""
        tensor = torch.Tensor
        if func in (tensor.masked_select, torch.masked_select) and self.have_data(args[1:2]):
            number(args[1], true_entries)
            shape = torch.broadcast_shapes(*(each.shape for each in args[:2]))
            places = args[1].expand(shape).nonzero().unbind(1)
            return tensor.__getitem__, (args[0].expand(shape), places)
        if func not in (tensor.__getitem__, tensor.__setitem__):
            return func, args
        found: list[Any] = []
        for each in args[1] if isinstance(args[1], tuple) else (args[1],):
            is_mask = isinstance(each, tensor) and each.dtype is torch.bool and each.dim() > 0
            if is_mask and self.have_data([each]):
                number(each, true_entries)
                found += each.nonzero().unbind(1)
            else:
                found.append(each)
        return func, (args[0], tuple(found), *args[2:])

    def depends_on_data(self, func: Callable[..., Any], call: Call, output: Any) -> bool:
        """Whether a function needs data to return a number, or a tensor of a size."""
        if isinstance(output, (torch.Size, torch.dtype)) or not self.have_data(all_tensors(output)):
            return False
        try:
            with torch.no_grad(), self.mode, _Watch(self):
                args, kwargs = filled(mapped(call, self.as_fake), {})
                func(*args, **kwargs)
        except Exception:
            return True
        return False

    def run_unit(
        self, unit: nn.Module, call: Any, given: Call, uses: Callable[[torch.Tensor], None]
    ) -> tuple[Any, bool, set[int], Any]:
        """Call a unit without data; ``uses`` sees each tensor that it computes with.

        Also returns whether some of it needs data, which is made up then, the memory that it
        changes, and the counter of what it costs. If it fails so, such as one that sorts tokens
        and counts them, it runs with made-up data as a whole.
        """
        for tensor in all_tensors(given):
            self.as_fake(tensor)  # outside of the counter
        watch = _Watch(self, uses)
        if self.computes_in is not None:
            given = pytree.tree_map_only(torch.Tensor, self._cast, given)
        args, kwargs = given
        try:
            with self.mode, self.counter() as counter, watch:
                output = call(*args, **kwargs)
        except PartitionError:
            raise
        except Exception:  # with data, its own error counts
            with self.counter() as counter:
                output = self._run_with_data(unit, call, given, watch)
        self._written |= watch.writes
        return output, watch.has_made_up, watch.writes, counter

    def _run_with_data(
        self, unit: nn.Module, call: Callable[..., Any], given: Call, watch: _Watch
    ) -> Any:
        """Call a unit with small random numbers where there is no data."""
        watch.has_made_up, random = True, torch.Generator().manual_seed(self.made_up)
        reals, fakes = dict[int, torch.Tensor](), dict[int, torch.Tensor]()

        def real(tensor: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in reals:
                made = tensor if self.have_data([tensor]) else _random(tensor, random)
                reals[id(tensor)], fakes[id(made)] = made, tensor
            return reals.get(id(tensor), tensor)

        def fake(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or id(tensor) in fakes:
                return fakes.get(id(tensor), tensor)
            made = self.mode.from_tensor(tensor.detach())
            return made.requires_grad_().clone() if tensor.requires_grad else made

        def change(to: Callable[[Any], Any]) -> None:
            for table, tensors in (each for part in unit.modules() for each in _tables_of(part)):
                table.update((key, to(tensor)) for key, tensor in tensors.items())

        args, kwargs = filled(mapped(given, real), {})
        try:
            change(real)
            output = call(*args, **kwargs)
        finally:
            change(fake)
        for tensor in all_tensors(given):
            if reals[id(tensor)] is not tensor and reals[id(tensor)]._version:
                watch.writes.add(self.memory(tensor))
        return filled(mapped(output, fake), {})


class _Watch(_DispatchMode):
    """Sees what runs without data: what it uses and changes, and what needs data.

    In a unit, which has ``uses``, that runs on one number everywhere: zeros in the first run of a
    forward, ones in others.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        fakes: Fakes,
        uses: Callable[[torch.Tensor], None] | None = None,
        number: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self._fakes, self._uses, self._number = fakes, uses, number
        self.has_made_up = False
        self.writes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # C++ asks for a device where no error may be raised: that would end the process.
        is_query = getattr(func, "namespace", "") == "prim"
        if self._uses is not None and not is_query:
            for tensor in _tensors_of(args):
                self._uses(tensor)
        is_item = getattr(func, "__name__", "") == "_local_scalar_dense.default"
        if is_item and self._number is not None and self._fakes.have_data(args):
            with _with_data():
                return self._number(args[0])
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    changed = _tensors_of([given.get(argument.name)])
                    self.writes.update(map(self._fakes.memory, changed))
        if not all(map(is_fake, _tensors_of((*args, *kwargs.values())))):
            given = pytree.tree_map_only(torch.Tensor, self._fakes.as_fake, (args, kwargs))
            args, kwargs = given
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if self._uses is None:
                raise
        self.has_made_up = True
        with _with_data():
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._full, (args, kwargs))
            output = func(*args, **kwargs)
        if output is True:  # such as "any is infinite", "this is none of them"
            return self._fakes.made_up == 0
        return pytree.tree_map_only(torch.Tensor, self._fakes.mode.from_tensor, output)

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        shape, number = tuple(tensor.shape), self._fakes.made_up
        return torch.full(shape, number, dtype=tensor.dtype, device=tensor.device)


def _random(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A tensor with small random numbers in the place of one without data."""
    shape = tuple(tensor.shape)
    made = torch.zeros(shape, dtype=tensor.dtype)
    if tensor.is_floating_point() or tensor.is_complex():
        made = (torch.randn(shape, generator=random) * 0.02).to(tensor.dtype)
    made = made.to(tensor.device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _tensors_of(given: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operator."""
    for each in given:
        for part in each if isinstance(each, (list, tuple)) else (each,):
            if isinstance(part, torch.Tensor):
                yield part
