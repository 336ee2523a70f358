"""Records the steps of a forward, without the data of its layers.

Arguments of the model have data, and so has what the forward computes from them alone; what its
layers return has none. Each call of a unit is a step, and so is each function of torch between
them, with all that it does inside.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from taktline.errors import PartitionError
from taktline.split.arguments import Args, Kwargs
from taktline.split.empty_model import EmptyModel, joined
from taktline.split.nested import Path, mapped, objects_in, tensors_with_paths, walk
from taktline.split.steps import Cut, Extra, Kind, Modes, Region, State, Step, Value
from taktline.split.torch_functions import EFFECTS, METADATA, SIZES
from taktline.split.user_code import line_of_user
from taktline.split.without_data import Fakes, NeedsData, NeedsSizes, built, is_transformed

Casts = Mapping[torch.dtype, torch.dtype]


class Recorder(TorchFunctionMode):
    """Records one forward."""

    def __init__(
        self, empty: EmptyModel, fakes: Fakes, devices: tuple[str, ...], casts: Casts
    ) -> None:
        super().__init__()
        self.empty, self.fakes, self.devices = empty, fakes, devices
        self.casts = casts
        """The types that units return, where they differ from those of the empty model."""
        self.sized: set[int] = set()
        """The tensors whose sizes depend on data."""
        self.is_inside = False
        """Whether a unit or a function runs, whose own calls are not steps."""
        self.thread = threading.get_ident()
        self.steps: list[Step] = []
        self.values: dict[int, Value] = {}
        self.kept: list[Any] = []
        self.memory: dict[Value, int] = {}
        self.names: dict[Value, str] = {}
        self.metas: dict[Value, Any] = {}
        self.unknown: set[Value] = set()
        """Values that do not depend on arguments alone."""
        self.regions: tuple[Region, ...] = ()
        self.region_count = 0
        self.calls: Counter[str] = Counter()
        self.inner_outputs: dict[int, tuple[Step, str, Path, int]] = {}
        self.inner_calls: Counter[str] = Counter()
        self.last_step: dict[str, Step] = {}
        self.changes_buffers: set[str] = set()
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """Those of the user's own, with their states before."""
        self.costs: dict[Cut, int] = {}
        self.runs: Counter[str] = Counter()
        named = (
            *empty.model.named_parameters(remove_duplicate=False),
            *empty.model.named_buffers(remove_duplicate=False),
        )
        self.states: dict[int, State] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}
        for name, tensor in named:
            first = self.states.setdefault(id(tensor), State(name)).name
            self.aliases[first] = (*self.aliases.get(first, ()), name)
        self.state_memory = {name: self.fakes.memory(tensor) for name, tensor in named}
        self.unit_names = {id(module): name for name, module in reversed(empty.modules.items())}
        self.units_of_inner = {
            id(part): (name, path)
            for name, module in (("", empty.model), *empty.modules.items())
            for path, part in module.named_modules()
        }

    def is_here(self) -> bool:
        """Whether this thread runs the forward."""
        return threading.get_ident() == self.thread

    # What tensors are called

    def value(self, tensor: torch.Tensor, name: str = "") -> Value:
        """The value of a new tensor."""
        if id(tensor) not in self.values:
            made = Value(len(self.values))
            self.values[id(tensor)] = made
            self.kept.append(tensor)
            self.memory[made] = self.fakes.memory(tensor)
            self.names[made] = name
            self.metas[made] = (tuple(tensor.shape), tensor.dtype)
        return self.values[id(tensor)]

    def reference(self, tensor: torch.Tensor) -> Any:
        """What stands for a tensor in a step: a value, a state, or a constant tensor."""
        tensor = self.fakes.original(tensor)
        found = self.values.get(id(tensor)) or self.states.get(id(tensor))
        if found is not None:
            return found
        if is_transformed(tensor):
            raise PartitionError(
                f"{line_of_user()} is inside of torch.vmap or another transform of functions, in "
                "which steps cannot be recorded; use it inside of a submodule"
            )
        if self.fakes.is_fake(tensor):
            return self._left_by_unit(tensor)
        self.kept.append(tensor)
        return tensor

    def template(self, nested: Any) -> Any:
        """Nested values with references in the places of tensors."""
        try:
            return mapped(nested, self.reference)
        except TypeError as error:
            raise PartitionError(f"{line_of_user()}: {error}") from None

    def require_no_modules(self, nested: Any) -> None:
        """Raise if a module is among arguments: that of the recorded copy has no data."""
        for _, leaf in walk(nested):
            owner = getattr(leaf, "__self__", leaf)
            if isinstance(owner, nn.Module) and next(iter(owner.state_dict()), None) is not None:
                raise PartitionError(
                    f"{line_of_user()} passes on a submodule ({type(owner).__name__}), which the "
                    "stage of that call may not have; pass its parameters, or move the call into a "
                    "submodule that one stage runs as a whole"
                )

    def _left_by_unit(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor that a unit has left elsewhere than in its output."""
        found = self.inner_outputs.get(id(tensor))
        if found is not None:
            step, module, path, call = found
            extra = Extra(self.value(tensor), "inside", module, path, call)
        else:
            step, module, path = self._attribute_with(tensor)
            extra = Extra(self.value(tensor), "attribute", module, path)
        self.names[extra.value] = f"{step.target} (inside of it)"
        step.extras.append(extra)
        self.unknown.add(extra.value)
        return extra.value

    def _attribute_with(self, tensor: torch.Tensor) -> tuple[Step, str, Path]:
        """The attribute of a unit that holds a tensor: the unit's last call, module and path."""
        for name, step in self.last_step.items():
            for module, part in self.empty.modules[name].named_modules():
                for key in vars(part).keys() - _TABLES:
                    for path, leaf in walk(vars(part)[key]):
                        if leaf is tensor:
                            return step, module, (("attribute", key), *path)
        raise PartitionError(
            f"{line_of_user()} uses a tensor that was made inside of a submodule or in an earlier "
            "call, and that is neither in the output of a module, nor in an attribute; return it "
            "from the submodule, or keep it in an attribute of it"
        )

    def differs_in_each_call(self, value: Value, buffer: str) -> bool:
        """Whether a value depends on arguments, on what units compute, or on a buffer."""
        makers = {made: step for step in reversed(self.steps) for made in step.makes}
        waiting, seen = [value], set[Value]()
        while waiting:
            each = waiting.pop()
            step = makers.get(each)
            if each in self.unknown or step is None or State(buffer) in step.states:
                return True
            seen.add(each)
            waiting += [part for part in step.reads if part not in seen]
        return False

    # Functions of torch

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_inside or not self.is_here():
            return func(*args, **kwargs)
        return self.function(func, args, kwargs)

    def function(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Call a function of the forward, and record it."""
        with self.unrecorded():
            return self._function(func, args, kwargs)

    def _function(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        given = [tensor for _, tensor in tensors_with_paths((args, kwargs))]
        name = _name_of(func)
        if name in METADATA and given:
            if name in SIZES and any(id(tensor) in self.sized for tensor in given):
                raise self._needs_data(func, name)
            return func(*args, **kwargs)
        if name == "data_ptr":
            raise self._needs_data(func, name)
        template = self.template((args, kwargs)) if given else (args, kwargs)
        own = kwargs.get("generator")
        if own is not None and id(own) not in self.generators:
            self.generators[id(own)] = (own, own.get_state())
        before = self._random_state() if self.fakes.have_data(given) else None
        with self.fakes.noting_writes(given) as writes:
            try:
                output = self._run(func, name, args, kwargs, given)
            except NeedsData as error:
                read = self._with_numbers((args, kwargs))
                if read is None:
                    raise self._needs_data(func, name) from error
                return self._function(func, *read)
        tensors = [tensor for _, tensor in tensors_with_paths(output)]
        if not (tensors or writes or name in EFFECTS):
            if given:
                self._note_read(func, name, template, output, given)
            return output
        draws = before is not None and before != self._random_state()
        if func is torch.manual_seed or (not tensors and not given):
            return output
        step = self.add_step(Kind.CALL, func, *template, writes=frozenset(writes))
        step.draws = draws or name in EFFECTS or own is not None
        is_free = not step.draws and not any(v in self.unknown for v in step.reads)
        step.output = mapped(output, self.reference_new(step, name))
        if any(id(tensor) in self.sized for tensor in given):
            self._note_sized(tensors)
        if not is_free:
            self.unknown.update(step.makes)
        if given and tensors and not writes and self.fakes.have_data([*given, *tensors]):
            self._note_sizes(func, args, kwargs, tensors, is_free)
        return output

    def _run(self, func: Any, name: str, args: Args, kwargs: Kwargs, given: Any) -> Any:
        """Call a function; if data decides the size of its result, that is not known any more."""
        try:
            return self.fakes.run(func, args, kwargs, given)
        except NeedsSizes:
            output = self.fakes.run_filled(func, args, kwargs)
            self._note_sized([tensor for _, tensor in tensors_with_paths(output)])
            return output
        except Exception as error:
            if any(id(tensor) in self.sized for tensor in given):
                raise self._needs_data(func, name) from error
            raise

    def _with_numbers(self, nested: Any) -> Any:
        """Arguments with numbers in the places of whole numbers that are tensors with data.

        The forward has read them then, such as sizes for ``interpolate``. None if there are none.
        """
        found: list[int] = []

        def number(tensor: torch.Tensor) -> Any:
            if tensor.ndim or tensor.is_floating_point() or not self.fakes.have_data([tensor]):
                return tensor
            found.append(int(tensor))
            self._note_read(int, "int", ((self.reference(tensor),), {}), found[-1], [tensor])
            return found[-1]

        read = built(mapped(nested, number))
        return read if found else None

    def _note_sized(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors whose sizes depend on data, which the forward must not read."""
        tensors = list(tensors)
        self.kept += tensors
        self.sized.update(map(id, tensors))

    def reference_new(self, step: Step, name: str) -> Callable[[torch.Tensor], Any]:
        """A function that returns the value of a tensor that a step makes."""

        def reference(tensor: torch.Tensor) -> Any:
            tensor = self.fakes.original(tensor)
            state = self.states.get(id(tensor))
            return state or self.value(tensor, f"{name} ({step.line})")

        return reference

    def add_step(
        self, kind: Kind, target: Any, args: Any, kwargs: Any, writes: frozenset[int] = frozenset()
    ) -> Step:
        """Add a step in the present modes."""
        modes = Modes.now(self.devices)
        step = Step(kind, target, args, kwargs, None, modes, line_of_user(), self.regions, writes)
        self.steps.append(step)
        return step

    def _note_read(self, func: Any, name: str, template: Any, output: Any, given: Any) -> None:
        """Record what was read, to compare it with what later calls read."""
        if not self.fakes.have_data(given):
            return  # a function that can run without data reads none
        if isinstance(output, torch.Size) or output is None:
            return
        step = self.add_step(Kind.READ, func, *template)
        step.output = output
        step.is_known = not any(value in self.unknown for value in step.reads)

    def _note_sizes(
        self, func: Any, args: Args, kwargs: Kwargs, made: list[torch.Tensor], is_free: bool
    ) -> None:
        """Compare the sizes of an output in later calls if the data decides them.

        Those that depend on random numbers cannot be compared beforehand, nor may they be read.
        """
        if not self.fakes.depends_on_data(func, args, kwargs):
            return
        if not is_free:
            self._note_sized(made)
            return
        for tensor in made:
            step = self.add_step(Kind.READ, size_of, (self.reference(tensor),), {})
            step.output = tuple(tensor.shape)

    def _needs_data(self, func: Any, name: str) -> PartitionError:
        return PartitionError(
            f"{line_of_user()}: {name} needs the data of a value that submodules have computed, "
            "which decides what the forward does next or how large its values are; move it into a "
            "submodule that one stage runs as a whole, or use torch.where"
        )

    def _random_state(self) -> Any:
        with torch.random.fork_rng([], enabled=False):
            state = torch.default_generator.get_state().numpy().tobytes()
        if "cuda" in self.devices and torch.cuda.is_initialized():
            return state, torch.cuda.get_rng_state().numpy().tobytes()
        return state

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Let nothing that runs meanwhile be a step."""
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    # Units

    def unit(self, module: nn.Module, call: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Call a unit without data, and record it."""
        if self.is_inside or not self.is_here():
            return call(*args, **kwargs)
        with self.unrecorded():
            return self._unit(module, call, args, kwargs)

    def _unit(self, module: nn.Module, call: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        name = self.unit_names[id(module)]
        self.require_no_modules((args, kwargs))
        template = self.template((args, kwargs))
        step, count = self.add_step(Kind.UNIT, name, *template), len(self.values)
        step.call = self.calls[name]
        self.calls[name] += 1
        self.last_step.pop(name, None)
        self.last_step[name] = step
        self.inner_calls.clear()
        given = [tensor for _, tensor in tensors_with_paths((args, kwargs))]
        buffers = [(b, b._version) for b in module.buffers()]
        plain = [o for o in objects_in((args, kwargs)) if not tensors_with_paths(o[0])]
        with self.fakes.noting_writes(given) as writes:
            output = self._run_unit(step, module, call, args, kwargs)
        changed = [(each, before) for each, before in plain if _differ(vars(each), before)]
        if changed:
            step.args, step.kwargs = self._as_before((args, kwargs), changed)
        step.writes = frozenset(writes)
        if any(buffer._version != version for buffer, version in buffers):
            self.changes_buffers.add(name)
        step.output = self._unit_output(step, output)
        self._note_arguments(step, (args, kwargs))
        self.unknown.update(value for value in step.makes if value.number >= count)
        return self.fakes.restored(output)

    def _as_before(self, given: Any, changed: list[tuple[Any, dict[str, Any]]]) -> Any:
        """The template of arguments in which a unit has changed objects."""
        after = [dict(vars(each)) for each, _ in changed]
        for each, before in changed:
            vars(each).clear()
            vars(each).update(before)
        template = mapped(given, self.reference, {id(each) for each, _ in changed})
        for (each, _), attributes in zip(changed, after, strict=True):
            vars(each).update(attributes)
        return template

    def _run_unit(self, step: Step, module: Any, call: Any, args: Any, kwargs: Any) -> Any:
        back = {after: before for before, after in self.casts.items()}
        if back:
            args, kwargs = self._cast((args, kwargs), back)
        output, is_sized, cost = self.fakes.run_unit(module, call, args, kwargs)
        self.costs[Cut(step.target, step.call)] = cost
        if self.casts:
            output = self._cast(output, self.casts)
        given = [tensor for _, tensor in tensors_with_paths((args, kwargs))]
        if is_sized or any(id(tensor) in self.sized for tensor in given):
            self._note_sized(tensor for _, tensor in tensors_with_paths(output))
        return output

    def _cast(self, nested: Any, casts: Mapping[torch.dtype, torch.dtype]) -> Any:
        """Nested values with tensors of other types."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            wanted = casts.get(tensor.dtype)
            return tensor if wanted is None else self.fakes.as_fake(tensor).to(wanted)

        return built(mapped(nested, cast))

    def _unit_output(self, step: Step, output: Any) -> Any:
        def reference(tensor: torch.Tensor) -> Any:
            tensor = self.fakes.original(tensor)
            if not self.fakes.is_fake(tensor) and id(tensor) not in self.values:
                tensor = self.fakes.as_fake(tensor)
            state = self.states.get(id(tensor))
            return state or self.value(tensor, f"{step.target} (its output)")

        return mapped(output, reference)

    def _note_arguments(self, step: Step, given: Any) -> None:
        """Find tensors that a unit has put into lists and dicts among its arguments."""
        for path, tensor in tensors_with_paths(given):
            tensor = self.fakes.original(tensor)
            if id(tensor) in self.values or id(tensor) in self.states:
                continue
            value = self.value(tensor, f"{step.target} (in its arguments)")
            step.extras.append(Extra(value, "arguments", "", path))

    def note_inner(self, module: nn.Module, output: Any) -> None:
        """Note the output of a module inside of a unit."""
        name, path = self.units_of_inner[id(module)]
        self.runs[joined(name, path)] += 1
        step = self.last_step.get(name)
        if step is None or not self.is_inside or not path:
            return
        call = self.inner_calls[path]
        self.inner_calls[path] += 1
        for at, tensor in tensors_with_paths(output):
            self.inner_outputs.setdefault(id(tensor), (step, path, at, call))
            self.kept.append(tensor)

    # Around functions of torch

    @contextmanager
    def region(self, preserves_rng: bool) -> Iterator[None]:
        """Steps inside of a checkpoint."""
        if self.is_inside or not self.is_here():
            yield
            return
        before = self.regions
        self.regions = (*before, Region(self.region_count, preserves_rng))
        self.region_count += 1
        try:
            yield
        finally:
            self.regions = before


_TABLES = frozenset(vars(nn.Module()))


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() != other.keys() or any(one[key] is not other[key] for key in one)


def size_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, where its sizes depend on data."""
    return tuple(tensor.shape)


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name
