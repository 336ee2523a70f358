"""Tensors without data: what the units of a model compute while its forward is recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from taktline import pytree
from taktline.errors import PartitionError
from taktline.private import private
from taktline.split.arguments import Args, Call, Kwargs
from taktline.split.costs import OperationCounter
from taktline.split.nested import Absent, all_tensors, children_of, swapped, walk

_WHAT = "a recorded forward"
NeedsData = private("torch._subclasses.fake_tensor.DataDependentOutputException", _WHAT)
NeedsSizes = private("torch._subclasses.fake_tensor.DynamicOutputShapeException", _WHAT)
_FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor", _WHAT)
_FakeMode = private("torch._subclasses.fake_tensor.FakeTensorMode", _WHAT)
_with_data = private("torch._subclasses.fake_tensor.unset_fake_temporarily", _WHAT)
_DispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode", _WHAT)
_is_wrapped = private("torch._C._functorch.is_functorch_wrapped_tensor", _WHAT, otherwise=None)

Casts = Mapping[torch.dtype, torch.dtype]


def has_data(tensors: Sequence[Any]) -> bool:
    """Whether all of these have data."""
    return not any(is_fake(t) or (isinstance(t, torch.Tensor) and t.is_meta) for t in tensors)


def is_fake(tensor: Any) -> bool:
    """Whether this is a tensor without data."""
    return isinstance(tensor, _FakeTensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of ``torch.vmap`` and the like."""
    return _is_wrapped is not None and _is_wrapped(tensor)


class Fakes:
    """The tensors without data of one recorded forward, on one device.

    Args:
        device: where they are.
        casts: the types that units return, where they differ from those of the empty model.
    """

    def __init__(self, device: torch.device, casts: Casts) -> None:
        self.mode = _FakeMode(allow_non_fake_inputs=True)
        self.device, self._casts = device, casts
        self._types_inside = {after: before for before, after in casts.items()}
        self._fakes: dict[int, dict[torch.dtype, torch.Tensor]] = {}
        """What stands for a tensor, in each type that is needed."""
        self._originals: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        """Those of what stands for others, when last seen; making one may count as a change."""
        self._held: dict[int, Any] = {}
        """Storages, since another one may get the address of one that is freed."""
        self._same: dict[int, int] = {}
        self._written: set[int] = set()

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

    def _empty(self, tensor: torch.Tensor | Absent) -> torch.Tensor:
        with self.mode:
            if isinstance(tensor, Absent):
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)

    def fresh(self, given: Any, device: torch.device | None = None) -> Any:
        """What a recorded forward has in the place of an argument, or of a tensor of the model."""
        if not isinstance(given, (torch.Tensor, Absent)):
            return given
        if isinstance(given, (Absent, nn.Parameter)) or not has_data([given]):
            return self._empty(given)
        made = given.detach().to(device or given.device, copy=True)
        return made.requires_grad_(given.requires_grad)

    def _as_fake(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor without data, of some type, in the place of another; the same each time."""
        dtype = dtype or tensor.dtype
        if is_fake(tensor) and tensor.dtype is dtype:
            return tensor
        found = self._fakes.setdefault(id(tensor), {})
        if dtype not in found:
            fake = (tensor if is_fake(tensor) else self._new_fake(tensor)).to(dtype)
            found[dtype] = fake
            self._originals[id(fake)] = tensor
            self._versions[id(fake)] = fake._version
            self._same[self.memory(fake)] = self.memory(tensor)
        return found[dtype]

    def _new_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_nested:
            raise PartitionError(
                "a nested tensor cannot go from stage to stage; return its values() and offsets()"
            )
        fake = self.mode.from_tensor(tensor.detach())
        return fake.requires_grad_() if tensor.requires_grad else fake

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that one without data stands for, or that itself."""
        return self._originals.get(id(tensor), tensor)

    def have_data(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all tensors have data, and it is right."""
        return not any(is_fake(each) or self.memory(each) in self._written for each in tensors)

    @contextmanager
    def noting_writes(self, given: Sequence[torch.Tensor]) -> Iterator[list[int]]:
        """Note the memory that is changed meanwhile."""
        before = [(each, each._version) for each in given if not each.is_inference()]
        found: list[int] = []
        yield found
        for each, version in before:
            if each._version != version:
                found.append(self.memory(each))
            for fake in self._fakes.get(id(each), {}).values():
                if fake._version != self._versions[id(fake)]:
                    self._versions[id(fake)] = fake._version
                    found.append(self.memory(each))
                    self._written.add(self.memory(each))

    @contextmanager
    def _faked(self, given: Call, types: Casts | None = None) -> Iterator[Call]:
        """Let arguments have no data meanwhile, and other types."""
        types = types or {}
        try:
            yield swapped(given, lambda each: self._as_fake(each, types.get(each.dtype)))
        finally:
            swapped(given, self.original)

    def run(
        self, func: Callable[..., Any], args: Args, kwargs: Kwargs, given: Sequence[torch.Tensor]
    ) -> tuple[Any, bool]:
        """Call a function, with data if all that it gets has some.

        Also returns whether data decides the size of its result; then the size is made up.
        """
        if self.have_data(given):
            return func(*args, **kwargs), False
        is_sized = False
        with self._faked((args, kwargs)) as (args, kwargs):
            try:
                output = func(*args, **kwargs)
            except NeedsSizes:
                is_sized = True
                with self.mode, _OneNumber(self, 1):
                    output = func(*args, **kwargs)
        return swapped(output, self.original), is_sized

    def depends_on_data(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> bool:
        """Whether a function needs the data of its arguments to find a number, or a shape."""
        try:
            with torch.no_grad(), self._faked((args, kwargs)) as (args, kwargs), self.mode:
                func(*args, **kwargs)
        except Exception:
            return True
        return False

    def run_unit(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        given: Call,
        uses: Callable[[torch.Tensor], None],
    ) -> tuple[Any, bool, int]:
        """Call a unit without data; ``uses`` sees each tensor that it computes with.

        Also returns whether the sizes of its output depend on data, and what it costs.

        What needs data runs on ones, and once more on zeros. If that fails, the unit runs with
        made-up data, such as one that sorts tokens.
        """
        is_sized = False
        with self._faked(given, self._types_inside) as (args, kwargs):
            try:
                with self.mode, OperationCounter() as counter, _OneNumber(self, 1, uses) as filled:
                    output = call(*args, **kwargs)
                is_sized = filled.used and self._is_sized(output, call, (args, kwargs))
            except PartitionError:
                raise
            except Exception:
                # Whatever a module raises that needs data; if it fails with data, too, that counts.
                with OperationCounter() as counter:
                    output = self._run_with_data(module, call, (args, kwargs))
        if self._casts:
            output = swapped(output, self._cast)
        return swapped(output, self.original), is_sized, counter.cost

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._casts.get(tensor.dtype)
        return tensor if dtype is None else self._as_fake(tensor).to(dtype)

    def _is_sized(self, output: Any, call: Callable[..., Any], given: Call) -> bool:
        """Whether an output has other sizes if other numbers are in what it is made of."""
        leaves = [part for _, part in walk(given) if children_of(part) is None]
        try:
            with self.mode, _OneNumber(self, 0), torch.no_grad():
                copies = {id(x): x.clone() if isinstance(x, torch.Tensor) else x for x in leaves}
                args, kwargs = copy.deepcopy(given, copies)
                # What collects outputs, such as router logits, must not see this.
                other = Context().run(call, *args, **kwargs)
        except Exception:
            return False
        return [t.shape for t in all_tensors(output)] != [t.shape for t in all_tensors(other)]

    def _run_with_data(self, module: nn.Module, call: Callable[..., Any], given: Call) -> Any:
        """Call a unit with small random numbers where there is no data."""
        made: dict[int, torch.Tensor] = {}
        fakes: dict[int, torch.Tensor] = {}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                origin = self.original(tensor)
                known = not is_fake(origin) and self.have_data([origin])
                new = origin.detach().to(tensor.dtype, copy=True) if known else _made_up(tensor)
                made[id(tensor)] = new if is_fake(tensor) else tensor
                fakes.setdefault(id(made[id(tensor)]), tensor)
            return made[id(tensor)]

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in fakes or is_fake(tensor):
                return fakes.get(id(tensor), tensor)
            return self._new_fake(tensor.detach())

        tables = [vars(part) for part in module.modules()]
        tensors = all_tensors(given)
        try:
            args, kwargs = swapped(given, real)
            swapped(tables, real)
            output = call(*args, **kwargs)
        finally:
            swapped((given, tables), fake)
        for tensor in tensors:
            if made[id(tensor)] is not tensor and made[id(tensor)]._version:
                increment_version(tensor)
        return swapped(output, fake)


class _OneNumber(_DispatchMode):
    """Runs on one number everywhere what cannot run without data."""

    supports_higher_order_operators = True

    def __init__(
        self, fakes: Fakes, number: int, uses: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        super().__init__()
        self._fakes, self._number, self._uses = fakes, number, uses
        self.used = False
        """Whether anything needed data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._uses is not None:
            for each in args:
                for part in each if isinstance(each, (list, tuple)) else (each,):
                    if isinstance(part, torch.Tensor):
                        self._uses(part)
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
    made = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
    if tensor.is_floating_point() or tensor.is_complex():
        made = (torch.randn(made.shape, device=made.device) * 0.02).to(tensor.dtype)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
