"""Records the steps of a forward, without the data of its layers.

Arguments of the model have data, and so has what the forward computes from them alone; what its
layers return has none. Each call of a unit is a step, and so is each function of torch between
them, with all that it does inside.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from taktline.errors import PartitionError
from taktline.split.arguments import Args, Call, Kwargs
from taktline.split.empty_model import EmptyModel
from taktline.split.nested import (
    Path,
    State,
    Value,
    all_tensors,
    filled,
    is_object,
    line_of_user,
    mapped,
    walk,
)
from taktline.split.patches import (
    EFFECTS,
    METADATA,
    PIPE_SPLIT,
    REFUSED,
    SIZES,
    STATISTICS,
    name_of,
    replaced,
)
from taktline.split.steps import CheckpointRegion, Cut, Extra, Modes, Record, Step, StepKind
from taktline.split.without_data import Fakes, NeedsData, is_fake, is_transformed

_CALL = nn.Module.__call__
OWN_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that each module has."""
_TRANSFORMED = (
    "is inside of torch.vmap or another transform of functions, in which steps cannot be recorded; "
    "use it inside of a submodule"
)
_NUMBERS = (bool, int, float, str)


class Recorder(TorchFunctionMode):
    """Records one forward."""

    def __init__(self, empty: EmptyModel, fakes: Fakes, devices: tuple[str, ...]) -> None:
        super().__init__()
        self.empty, self.fakes, self.devices = empty, fakes, devices
        self.is_inside: bool | str = False
        """Whether a function or a unit (its name) runs, whose own calls are not steps."""
        self.refusal: PartitionError | None = None
        """The first one, also if the user's code has caught it."""
        self.thread = threading.get_ident()
        self.values: dict[int, Value] = {}
        self.unknown: set[Value] = set()
        """Values that do not depend on arguments alone."""
        self.regions: tuple[CheckpointRegion, ...] = ()
        self.inner_outputs: dict[int, tuple[Step, str, Path, int]] = {}
        self.inner_calls: Counter[str] = Counter()
        self.last_step: dict[str, Step] = {}
        """The last call of each unit."""
        self.random_state = self._random_state()
        """That of torch, after the last step."""
        self.constants: set[int] = set()
        """The ids of tensors that were made before, or by functions that are no steps."""
        self.handles: set[int] = set()
        """The ids of the handles of hooks of tensors."""
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """Those of the user's own, with their states before."""
        self.states: dict[int, State] = {}
        named = [
            *empty.model.named_parameters(remove_duplicate=False),
            *empty.model.named_buffers(remove_duplicate=False),
        ]
        self.kept: list[Any] = [tensor for _, tensor in named]
        """Those whose ids are noted, which others must not get."""
        self.shared: set[int] = set()
        """The ids of tensors that units get from each other as skips."""
        aliases: dict[str, tuple[str, ...]] = {}
        for name, tensor in named:
            first = self.states.setdefault(id(tensor), State(name)).name
            aliases[first] = (*aliases.get(first, ()), name)
        self.unit_names = {id(module): name for name, module in reversed(empty.modules.items())}
        self.module_names = {id(module): name for name, module in empty.model.named_modules()}
        self.unit_of: dict[int, str] = {}
        """The unit that each module is in."""
        for name, unit in empty.modules.items():
            self.unit_of |= {id(part): name for part in unit.modules()}
        self.changed: dict[str, str] = {}
        """The units in which the forward has changed an attribute, and where it did so."""
        self.inner_names: dict[int, str] = {}
        """The names of the modules inside of the unit that runs."""
        self.record = Record(
            given=((), {}),
            steps=[],
            result=None,
            modes=Modes.all_now(devices),
            memory={},
            state_memory={name: fakes.memory(tensor) for name, tensor in named},
            aliases=aliases,
            is_parameter=empty.parameters,
            names={},
        )

    @property
    def is_recording(self) -> bool:
        """Whether what this thread calls now is a step."""
        return not self.is_inside and threading.get_ident() == self.thread

    def mark(self) -> None:
        """Note that the forward calls ``pipe_split()``."""
        if threading.get_ident() != self.thread:
            return
        if self.is_inside is True:
            self.refuse(
                "has a split point inside a region that cannot be cut, a function of torch such as "
                "torch.cond; move the split point before or after it"
            )
        if self.is_inside:
            self.record.marked_units.add(self.is_inside)
        else:
            self.record.marks.append(len(self.record.steps))

    @contextmanager
    def _inside(self, given: Call, unit: bool | str = True) -> Iterator[None]:
        """Let no steps be recorded meanwhile, and keep a refusal."""
        if any(map(is_transformed, all_tensors(given))):
            self.refuse(_TRANSFORMED)
        self.is_inside = unit
        try:
            self.require_same_draws()
            yield
        except PartitionError as error:
            self.refusal = self.refusal or error
            raise
        finally:
            self.random_state = self._random_state()
            self.is_inside = False

    def region(self, preserves_rng: bool) -> AbstractContextManager[None]:
        """Let steps be inside of a checkpoint."""
        region = CheckpointRegion(len(self.record.steps), preserves_rng)
        return replaced(self, regions=(*self.regions, region))

    # What tensors are called

    def value(self, tensor: torch.Tensor, name: str) -> Value:
        """The value of a tensor, which may be new."""
        if id(tensor) not in self.values:
            made = self.values[id(tensor)] = Value(len(self.values))
            self.kept.append(tensor)
            self.record.memory[made] = self.fakes.memory(tensor)
            self.record.names[made] = name
            self.record.metas[made] = (tuple(tensor.shape), tensor.dtype)
        return self.values[id(tensor)]

    def known(self, tensor: torch.Tensor) -> Value | State | None:
        """What a tensor is called, if it has a name."""
        tensor = self.fakes.original(tensor)
        return self.values.get(id(tensor)) or self.states.get(id(tensor))

    def outputs(self, output: Any, name: str) -> Any:
        """What a step returns, with values in the places of tensors."""

        def reference(tensor: torch.Tensor) -> Any:
            return self.known(tensor) or self.value(self.fakes.original(tensor), name)

        return mapped(output, reference)

    def reference(self, tensor: torch.Tensor) -> Any:
        """What stands for a tensor in a step: a value, a state, or a constant tensor."""
        tensor = self.fakes.original(tensor)
        if found := self.known(tensor):
            return found
        if is_fake(tensor):
            return self._left_by_unit(tensor)
        self.kept.append(tensor)
        self.constants.add(id(tensor))
        return tensor

    def _left_by_unit(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor that a unit has left elsewhere than in its output."""
        step, module, path, call = self.inner_outputs.get(id(tensor)) or self._attribute(tensor)
        value = self.value(tensor, f"{step.target} (inside of it)")
        step.extras.append(Extra(value, path, module, call))
        self.unknown.add(value)
        return value

    def _attribute(self, tensor: torch.Tensor) -> tuple[Step, str, Path, None]:
        """The attribute of a unit that holds a tensor: the unit's last call, module and path."""
        for name, step in self.last_step.items():
            for module, part in self.empty.modules[name].named_modules():
                own = {key: v for key, v in vars(part).items() if key not in OWN_OF_MODULES}
                for path, found in walk(own):
                    if found is tensor:
                        return step, module, (("attribute", path[0][1]), *path[1:]), None
        raise PartitionError(
            f"{line_of_user()} uses a tensor that was made inside of a submodule or in an earlier "
            "call, and that is neither in the output of a module, nor in an attribute; return it "
            "from the submodule, or keep it in an attribute of it"
        )

    def add_step(self, kind: StepKind, target: Any, given: Call) -> Step:
        """Add a step in the present modes."""
        (args, kwargs), modes = mapped(given, self.reference), Modes.all_now(self.devices)
        step = Step(kind, target, args, kwargs, None, modes, line_of_user(), self.regions)
        self.record.steps.append(step)
        return step

    # Functions of torch

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        return self.function(func, args, kwargs or {})

    def function(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Call a function, and record it if the forward itself calls it."""
        if name_of(func) in PIPE_SPLIT:
            return self.mark()
        if not self.is_recording:
            return func(*args, **kwargs)
        with self._inside((args, kwargs)):
            return self._function(func, args, kwargs)

    def _function(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        given, name = all_tensors((args, kwargs)), name_of(func)
        if name == "apply":  # a function of autograd, of the user's own
            require_no_modules((args, kwargs))
        if name in REFUSED:
            self.refuse(REFUSED[name])
        sized = [tensor for tensor in given if self.known(tensor) in self.record.sized]
        if name == "data_ptr" or (name in SIZES and sized):
            raise _needs_data(name)
        own = kwargs.get("generator")
        if own is not None:
            self.generators.setdefault(id(own), (own, own.get_state()))
        has_data = self.fakes.have_data(given)
        with self.fakes.noting_writes(given) as writes:
            try:
                output, is_sized = self.fakes.run(func, args, kwargs, given)
            except Exception as error:
                if not sized and not isinstance(error, NeedsData):
                    raise
                read = None if sized else self._with_numbers((args, kwargs))
                if read is None:
                    raise _needs_data(name) from error
                return self._function(func, *read)
        tensors = all_tensors(output)
        if not tensors and not writes and name not in EFFECTS:
            if (
                given
                and name not in METADATA
                and not (output is None or isinstance(output, (torch.Size, torch.dtype)))
                and self.fakes.have_data(given)
            ):
                self._note_read(func, (args, kwargs), output)
            return output
        step = self.add_step(StepKind.CALL, func, (args, kwargs))
        draws = has_data and self.random_state != self._random_state()
        step.draws = draws or name in EFFECTS or own is not None
        if name in STATISTICS:
            names = {state.name for state in step.states} - self.empty.parameters
            writes += [self.record.state_memory[name] for name in names]
        self._note_writes(step, given, writes)
        step.output = self.outputs(output, f"{name} ({step.line})")
        if name == "register_hook":
            self.handles.add(id(output))
            self.kept.append(output)
        is_free = not step.draws and self.unknown.isdisjoint(step.reads)
        if not is_free:
            self.unknown.update(step.makes)
        if given and tensors and not writes and self.fakes.have_data([*given, *tensors]):
            is_sized = self.fakes.depends_on_data(func, args, kwargs)
            if is_sized and is_free:
                # Those that depend on random numbers cannot be compared beforehand.
                for tensor in tensors:
                    self._note_read(torch.Tensor.size, ((tensor,), {}), tensor.shape)
                return output
        if sized or is_sized:
            self.record.sized.update(step.makes)
        return output

    def _with_numbers(self, given: Call) -> Call | None:
        """Arguments with numbers in the places of whole numbers that are tensors with data.

        The forward has read them then, such as sizes for ``interpolate``. None if there are none.
        """
        numbers = dict[int, int]()
        for tensor in all_tensors(given):
            if not (tensor.ndim or tensor.is_floating_point()) and self.fakes.have_data([tensor]):
                numbers[id(tensor)] = int(tensor)
                self._note_read(int, ((tensor,), {}), int(tensor))
        changed = mapped(given, lambda tensor: numbers.get(id(tensor), tensor))
        return filled(changed, {}) if numbers else None

    def _note_read(self, func: Any, given: Call, output: Any) -> None:
        """Record what was read, to compare it with what later calls read."""
        step = self.add_step(StepKind.READ, func, given)
        step.output = output
        step.is_known = self.unknown.isdisjoint(step.reads)

    def _note_writes(self, step: Step, given: Sequence[torch.Tensor], writes: list[int]) -> None:
        """Note the memory that a step changes; raise if that is of no value."""
        step.writes = frozenset(writes)
        for tensor in given if writes else ():
            is_constant = id(self.fakes.original(tensor)) in self.constants
            if is_constant and self.fakes.memory(tensor) in writes:
                if isinstance(tensor, nn.Parameter):
                    self.refuse("makes a module or parameter; make it before, in the constructor")
                self.refuse(
                    "changes a tensor that is neither a buffer nor an argument, nor made by this "
                    "forward; register it with register_buffer()"
                )

    def refuse(self, why: str) -> NoReturn:
        """Raise, also if the user's code catches it."""
        error = PartitionError(f"{line_of_user()} {why}")
        self.refusal = self.refusal or error
        raise error

    def require_same_draws(self) -> None:
        """Raise if random numbers were set or drawn between steps."""
        if self.random_state != self._random_state():
            self.refuse(
                "comes after torch's random numbers were set (manual_seed, fork_rng), which "
                "stages cannot follow; draw with a generator of its own (generator=...), or do it "
                "in a submodule that one stage runs as a whole"
            )

    def _random_state(self) -> Any:
        try:
            state = torch.default_generator.get_state().numpy().tobytes()
        except RuntimeError:
            self.refuse(_TRANSFORMED)
        if "cuda" in self.devices and torch.cuda.is_initialized():
            return state, torch.cuda.get_rng_state().numpy().tobytes()
        return state

    # Modules

    def module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module; if it is a unit, record it."""
        begin = len(self.record.steps)
        is_unit = self.is_recording and id(module) in self.unit_names
        if is_unit:
            with self._inside((args, kwargs), self.unit_names[id(module)]):
                counted = self._counted_once(partial(call, module))
                output = self._unit(module, counted, (args, kwargs))
        else:
            output = call(module, *args, **kwargs)
        # Each call once, also if its class has a __call__ of its own.
        name = self.module_names.get(id(module))
        if name is None or threading.get_ident() != self.thread:
            return output
        if not self.is_inside and (is_unit or call is _CALL):
            self.record.spans.append((name, begin, len(self.record.steps)))
        if call is _CALL:
            self.record.runs[name] += 1
            if self.is_inside and (path := self.inner_names.get(id(module))):
                self._note_inner(path, output)
        return output

    def _counted_once(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Count what a unit calls in its last run: one that needs data runs several times."""
        before = self.record.runs.copy()

        def run(*args: Any, **kwargs: Any) -> Any:
            self.inner_calls.clear()
            self.record.runs.clear()
            self.record.runs.update(before)
            return call(*args, **kwargs)

        return run

    def _unit(self, module: nn.Module, call: Callable[..., Any], given: Call) -> Any:
        record, name = self.record, self.unit_names[id(module)]
        require_no_modules(given)
        if any(id(parameter) not in self.states for parameter in module.parameters()):
            self.refuse(
                f"calls {name!r} with other parameters than its own, such as by functional_call; "
                "compute with functions of torch instead, or in a submodule"
            )
        if name in self.changed:
            self.refuse(
                f"calls {name!r}, in which {self.changed[name]} before, but the stage of that "
                "submodule does not see it; pass it on as an argument"
            )
        plain = [part for _, part in walk(given) if is_object(part) and not all_tensors(part)]
        attributes = list(walk(plain))
        opened = mapped(given, self.reference, set(map(id, plain)))
        step, known = self.add_step(StepKind.UNIT, name, given), len(self.values)
        before = self.last_step.pop(name, None)
        step.call = before.call + 1 if before is not None else 0
        self.last_step[name] = step
        self.inner_calls.clear()
        self.inner_names = {id(part): path for path, part in module.named_modules()}
        buffers = [(b, b._version) for b in module.buffers()]
        tensors = all_tensors(given)
        own = {self.known(tensor) for tensor in tensors}
        own.update(v for s in record.steps if s.target == name for v in (*s.reads, *s.makes))
        with self.fakes.noting_writes(tensors) as writes:
            uses = partial(self._require_own, name, own)
            output, is_sized, cost = self.fakes.run_unit(module, call, given, uses)
            torch.rand(())  # as if it had drawn: a state that is set back is seen
        record.costs[Cut(name, step.call)] = cost
        self._note_writes(step, tensors, writes)
        if _differ(attributes, list(walk(plain))):  # then each call has new objects
            step.args, step.kwargs = opened
        if any(buffer._version != version for buffer, version in buffers):
            record.changes_buffers.add(name)
        step.output = self.outputs(output, f"{name} (its output)")
        for path, tensor in walk(given):  # also what it has put into lists and dicts
            if isinstance(tensor, torch.Tensor) and self.known(tensor) is None:
                value = self.value(tensor, f"{name} (in its arguments)")
                step.extras.append(Extra(value, path))
        made = [value for value in step.makes if value.number >= known]
        self.unknown.update(made)
        if is_sized or not record.sized.isdisjoint(step.reads):
            record.sized.update(made)
        return output

    def _require_own(self, name: str, own: set[Any], tensor: torch.Tensor) -> None:
        """Raise if a unit uses a tensor that it was not given."""
        found = self.known(tensor)
        if found in own or id(tensor) in self.shared:
            return
        if type(found) is Value:
            self.refuse(
                f"computes with a tensor in {name!r} that the forward has made before "
                f"({self.record.names[found]}), but which is not among the arguments of that "
                "submodule; pass it on as an argument"
            )
        if type(found) is State and found.name in self.record.is_parameter:
            names = self.record.aliases[found.name]
            if not any(each.startswith(f"{name}.") for each in names):
                self.refuse(
                    f"computes with {found.name!r} in {name!r}, which is not its own, so that the "
                    "stage of that submodule may not have it; pass it on as an argument"
                )

    def attribute(self, module: nn.Module, key: str, value: Any) -> None:
        """Note that the forward changes an attribute of a unit, which runs elsewhere."""
        if self.is_recording and id(module) in self.unit_of:
            before = getattr(module, key, None)
            if before is not value and not (isinstance(value, _NUMBERS) and before == value):
                self.changed[self.unit_of[id(module)]] = f"{line_of_user()} changes {key!r}"

    def hook(self, module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of a module that the forward itself registers: it may only note outputs."""

        def noting(*args: Any, **kwargs: Any) -> None:
            if hook(*args, **kwargs) is not None:
                self.refuse(
                    "is a hook that changes what a submodule does, and that the forward registers, "
                    "but no stage has it; register it before the model is cut"
                )

        return noting if self.is_recording and id(module) in self.unit_of else hook

    def _note_inner(self, path: str, output: Any) -> None:
        """Note the output of a module inside of the unit that runs."""
        step, call = next(reversed(self.last_step.values())), self.inner_calls[path]
        self.inner_calls[path] += 1
        for at, tensor in walk(output):
            if isinstance(tensor, torch.Tensor):
                self.inner_outputs.setdefault(id(tensor), (step, path, at, call))
                self.kept.append(tensor)


def require_no_modules(given: Call) -> None:
    """Raise if a module is among arguments: that of the recorded copy has no data."""
    for _, leaf in walk(given):
        owner = getattr(leaf, "__self__", leaf)
        if isinstance(owner, nn.Module) and next(iter(owner.state_dict()), None) is not None:
            raise PartitionError(
                f"{line_of_user()} passes on a submodule ({type(owner).__name__}), which the stage "
                "of that call may not have; pass its parameters, or move the call into a submodule "
                "that one stage runs as a whole"
            )


def _differ(one: Sequence[tuple[Path, Any]], other: Sequence[tuple[Path, Any]]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) != len(other) or any(a is not b or p != q for (p, a), (q, b) in pairs)


def _needs_data(name: str) -> PartitionError:
    return PartitionError(
        f"{line_of_user()}: {name} needs the data of a value that submodules have computed, which "
        "decides what the forward does next or how large its values are; move it into a submodule "
        "that one stage runs as a whole, or use torch.where"
    )
