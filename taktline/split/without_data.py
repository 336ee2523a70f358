"""Tensors without data: what the units of a model compute while its forward is recorded."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.errors import PartitionError
from taktline.private import private
from taktline.split.kinds import Absent
from taktline.split.nested import Node, Object, is_object, mapped, tensors_with_paths
from taktline.split.operations import OperationCounter

_WHAT = "a recorded forward"
NeedsData = private("torch._subclasses.fake_tensor.DataDependentOutputException", _WHAT)
NeedsSizes = private("torch._subclasses.fake_tensor.DynamicOutputShapeException", _WHAT)
_FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor", _WHAT)
_FakeMode = private("torch._subclasses.fake_tensor.FakeTensorMode", _WHAT)
_with_data = private("torch._subclasses.fake_tensor.unset_fake_temporarily", _WHAT)
_DispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode", _WHAT)
_is_wrapped = private("torch._C._functorch.is_functorch_wrapped_tensor", _WHAT, otherwise=None)
_Change = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def no_data() -> Iterator[None]:
    """Without what torch writes of operations that cannot run without data."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def has_data(tensors: Sequence[Any]) -> bool:
    """Whether all of these have data."""
    return not any(
        isinstance(t, _FakeTensor) or (isinstance(t, torch.Tensor) and t.is_meta) for t in tensors
    )


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of ``torch.vmap`` and the like."""
    return _is_wrapped is not None and _is_wrapped(tensor)


class Fakes:
    """The tensors without data of one recorded forward, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.mode = _FakeMode(allow_non_fake_inputs=True)
        self.device = device
        self._fakes: dict[int, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Held, since another one may get the address of one that is freed."""
        self._same: dict[int, int] = {}
        self._written: set[int] = set()
        self._first_versions: dict[int, int] = {}
        """Of tensors without data; making one may already count as a change."""

    def is_fake(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no data."""
        return isinstance(tensor, _FakeTensor)

    def memory(self, tensor: torch.Tensor) -> int:
        """The memory of a tensor; views have the same."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and the like
            return id(tensor)
        found: int = storage._cdata
        self._storages[found] = storage
        return self._same.get(found, found)

    def empty(self, tensor: torch.Tensor | Absent) -> torch.Tensor:
        """A tensor without data like another one."""
        with self.mode:
            if isinstance(tensor, Absent):
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a recorded forward has in the place of a tensor of the model."""
        if tensor.is_meta or isinstance(tensor, nn.Parameter):
            return self.empty(tensor)
        return tensor.detach().to(self.device, copy=True)

    def argument(self, given: torch.Tensor | Absent) -> torch.Tensor:
        """What a recorded forward gets as an argument."""
        if isinstance(given, Absent) or given.is_meta or isinstance(given, _FakeTensor):
            return self.empty(given)
        return given.detach().clone().requires_grad_(given.requires_grad)

    def as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without data in the place of one that has some; the same each time."""
        if isinstance(tensor, _FakeTensor):
            return tensor
        if id(tensor) not in self._fakes:
            fake = self._new_fake(tensor)
            self._fakes[id(tensor)] = fake
            self._originals[id(fake)] = tensor
            self._kept += [tensor, fake]
            self._first_versions[id(fake)] = fake._version
            self._same[fake.untyped_storage()._cdata] = self.memory(tensor)
        return self._fakes[id(tensor)]

    def _new_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_nested:
            raise PartitionError(
                "a nested tensor cannot go from stage to stage; return its values() and offsets()"
            )
        fake = self.mode.from_tensor(tensor.detach())
        return fake.requires_grad_() if tensor.requires_grad else fake

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with data that one without data stands for, or that itself."""
        return self._originals.get(id(tensor), tensor)

    def have_data(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all tensors have data, and it is right."""
        return not any(
            isinstance(each, _FakeTensor) or self.memory(each) in self._written for each in tensors
        )

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any, given: Any) -> Any:
        """Call a function, with data if all that it gets has some."""
        if self.have_data(given):
            return func(*args, **kwargs)
        args, kwargs = built(mapped((args, kwargs), self.as_fake))
        return self.restored(func(*args, **kwargs))

    def run_filled(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function whose result has a size that depends on data, which is made up."""
        args, kwargs = built(mapped((args, kwargs), self.as_fake))
        with self.mode, _Filled(self, 1):
            return func(*args, **kwargs)

    def restored(self, output: Any) -> Any:
        """An output with the tensors that have data, where it is one of those."""
        if isinstance(output, torch.Tensor):
            return self.original(output)
        if any(id(tensor) in self._originals for _, tensor in tensors_with_paths(output)):
            return built(mapped(output, self.original))
        return output

    @contextmanager
    def noting_writes(self, given: Sequence[torch.Tensor]) -> Iterator[list[int]]:
        """Note the memory that is changed meanwhile."""
        pairs = [(each, each) for each in given]
        pairs += [(each, self._fakes[id(each)]) for each in given if id(each) in self._fakes]
        before = [(each, used, used._version) for each, used in pairs if not used.is_inference()]
        known = {id(used) for _, used in pairs}
        found: list[int] = []
        yield found
        for each in given:
            used = self._fakes.get(id(each))
            if used is not None and id(used) not in known:
                before.append((each, used, self._first_versions[id(used)]))
        for each, used, version in before:
            if used._version != version:
                found.append(self.memory(each))
                if used is not each:
                    self._written.add(self.memory(each))

    def depends_on_data(self, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether the data of its arguments decides the shape of what a function returns."""
        try:
            with torch.no_grad(), self.mode:
                func(*built(mapped(args, self._new_fake)), **built(mapped(kwargs, self._new_fake)))
        except (NeedsData, NeedsSizes):
            return True
        except Exception:
            return False
        return False

    def run_unit(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, bool, int]:
        """Call a unit without data.

        Also returns whether the sizes of its output depend on data, and what it costs.

        What needs data runs on ones, and once more on zeros. If that fails, the unit runs with
        made-up data, such as one that sorts tokens.
        """
        try:
            with self.mode, OperationCounter() as counter, _Filled(self, 1) as filled:
                output = self._run_unit(call, args, kwargs)
            is_sized = filled.used and self._is_sized(output, call, args, kwargs)
            return output, is_sized, counter.cost
        except PartitionError:
            raise
        except Exception as error:
            # Whatever a module raises that needs data; if it fails with data, too, that counts.
            first = error
        try:
            with OperationCounter() as counter:
                output = self._run_with_data(module, call, args, kwargs)
            return output, False, counter.cost
        except PartitionError:
            raise
        except Exception as error:
            raise error from first

    def _is_sized(self, output: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether an output has other sizes if other numbers are in what it is made of."""
        try:
            with self.mode, _Filled(self, 0), torch.no_grad():
                given = built(mapped((args, kwargs), lambda one: self.as_fake(one).clone()))
                # What collects outputs, such as router logits, must not see this.
                other = Context().run(call, *given[0], **given[1])
        except Exception:
            return False
        one, two = tensors_with_paths(output), tensors_with_paths(other)
        return [t.shape for _, t in one] != [t.shape for _, t in two]

    def _run_with_data(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        tables: list[dict[str, Any]] = [
            t for m in module.modules() for t in (m._parameters, m._buffers, vars(m))
        ]
        before = [dict(table) for table in tables]
        made: dict[int, torch.Tensor] = {}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, _FakeTensor):
                return tensor
            if id(tensor) not in made:
                made[id(tensor)] = _made_up(tensor)
            return made[id(tensor)]

        try:
            for table in tables:
                for key, tensor in table.items():
                    if isinstance(tensor, torch.Tensor):
                        table[key] = real(tensor)
            new_args, new_kwargs = built(mapped((args, kwargs), real))
            output = call(*new_args, **new_kwargs)
        finally:
            for table, items in zip(tables, before, strict=True):
                table.clear()
                table.update(items)
        back = {id(value): key for key, value in made.items()}
        fakes = {id(t): t for _, t in tensors_with_paths((args, kwargs))}

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            known = fakes.get(back.get(id(tensor), 0))
            return self._new_fake(tensor.detach()) if known is None else known

        return built(mapped(output, fake))

    def _run_unit(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        real = [t for _, t in tensors_with_paths((args, kwargs)) if not isinstance(t, _FakeTensor)]
        if not real:
            return call(*args, **kwargs)
        new_args, new_kwargs = built(mapped((args, kwargs), self.as_fake))
        output = call(*new_args, **new_kwargs)
        self._follow((args, kwargs), (new_args, new_kwargs))
        return output

    def _follow(self, old: Any, new: Any) -> Any:
        """Let lists, dicts and objects have what a unit has changed in their copies."""
        if isinstance(new, torch.Tensor):
            return self.original(new)
        if old is new or type(old) is not type(new):
            return new
        if type(new) in (dict, OrderedDict, defaultdict):
            found = {key: self._follow(old.get(key), part) for key, part in new.items()}
            old.clear()
            old.update(found)
        elif type(new) in (list, deque):
            parts = [self._follow(one, other) for one, other in zip_longest(old, new)][: len(new)]
            old.clear()
            old.extend(parts)
        elif isinstance(new, tuple):
            for one, other in zip(old, new, strict=False):
                self._follow(one, other)
        elif is_object(new):
            found = {key: self._follow(vars(old).get(key), p) for key, p in vars(new).items()}
            vars(old).update(found)
        return old


def built(template: Any) -> Any:
    """The nested value that a template describes, with the parts that are in it."""
    if isinstance(template, Object):
        return Object(template.kind, {k: built(v) for k, v in template.attributes.items()}).build()
    if isinstance(template, Node):
        return Node(template.spec, [built(part) for part in template.parts]).build()
    kind = type(template)
    if kind is tuple:
        return tuple([built(part) for part in template])
    if kind is list:
        return [built(part) for part in template]
    if kind is dict:
        return {key: built(part) for key, part in template.items()}
    return template


class _Filled(_DispatchMode):
    """Runs on one number everywhere what cannot run without data."""

    supports_higher_order_operators = True

    def __init__(self, fakes: Fakes, number: int) -> None:
        super().__init__()
        self._fakes, self._number = fakes, number
        self.used = False
        """Whether anything needed data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            self.used = True
            with _with_data():
                args, kwargs = pytree.tree_map_only(torch.Tensor, self._full, (args, kwargs))
                output = func(*args, **kwargs)
            if output is True:  # such as "any is infinite", "this is none of them"
                return self._number == 0
            return pytree.tree_map_only(torch.Tensor, self._fakes.mode.from_tensor, output)

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        shape, number = tuple(tensor.shape), self._number
        return torch.full(shape, number, dtype=tensor.dtype, device=tensor.device)


def _made_up(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with small random numbers in the place of one without data."""
    shape, device = tuple(tensor.shape), tensor.device
    if not tensor.is_floating_point() and not tensor.is_complex():
        made = torch.zeros(shape, dtype=tensor.dtype, device=device)
    else:
        made = torch.randn(shape, device=device).mul_(0.02).to(tensor.dtype)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
