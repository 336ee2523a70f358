"""Records the forward of a model without data: each call of a unit is a step, and so is each
function of torch between them, with all that it does inside.

Arguments of the model have data, and so has what the forward computes from them alone; what its
layers return has none.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from taktline.errors import PartitionError
from taktline.split.python_state import OWN_OF_MODULES, SharedState, attributes_in
from taktline.split.steps import (
    Absent,
    Args,
    Call,
    Cut,
    Kwargs,
    Modes,
    Path,
    Record,
    State,
    Step,
    Value,
    all_tensors,
    line_of_user,
    mapped,
    walk,
)
from taktline.split.without_data import (
    EmptyModel,
    Fakes,
    NeedsData,
    NeedsSizes,
    is_fake,
    is_transformed,
    joined,
    replaced,
)

_CALL = nn.Module.__call__
_REFUSED = {
    "backward": "runs a backward in the forward, which a stage cannot; use torch.autograd.grad",
    "__set__": "sets an attribute of a tensor, such as x.data or x.grad; use x.copy_() instead",
}
"""Functions that no stage can run."""
_EFFECTS = frozenset(
    ("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "add_loss")
)
"""Functions that do something beside what they return."""
_STATISTICS = frozenset(("batch_norm", "instance_norm"))
"""Functions that change buffers, which torch does not show."""
PIPE_SPLIT = frozenset(("pipe_split", "_pipe_split", "_pipe_split.default"))
"""Functions with which stages begin: ours, and the operator of torch."""
_TRANSFORMED = (
    "is inside of torch.vmap or another transform of functions, in which steps cannot be recorded; "
    "use it inside of a submodule"
)


class Generators:
    """The generators of the user's own with which forwards draw, in all records of a call."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """With their states before the first record."""
        self._states: dict[int, torch.Tensor] = {}
        self._all_known = False

    def are_as_before(self, used: torch.Generator | None = None) -> bool:
        """Whether only steps have changed them, and the one that is used is not of this record."""
        if used in (None, torch.default_generator, *torch.cuda.default_generators):
            pass
        elif id(used) not in self._found:
            if self._all_known:
                return False
            self._found[id(used)] = used, used.get_state()
            self._states[id(used)] = used.get_state()
        return all(
            torch.equal(self._states[key], own.get_state()) for key, (own, _) in self._found.items()
        )

    def note(self) -> None:
        """Note the states after a step."""
        self._states = {key: own.get_state() for key, (own, _) in self._found.items()}

    @contextmanager
    def in_record(self, attempt: int) -> Iterator[None]:
        """Let them begin a record with other states than the last one; restore them after it."""
        self._all_known = attempt > 0
        for own, _ in self._found.values():
            own.manual_seed(attempt)
        self.note()
        try:
            yield
        finally:
            for own, state in self._found.values():
                own.set_state(state)


class Recorder(TorchFunctionMode):
    """Records one forward."""

    def __init__(
        self,
        empty: EmptyModel,
        fakes: Fakes,
        devices: tuple[str, ...],
        generators: Generators,
    ) -> None:
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
        self.regions: tuple[int, ...] = ()
        self.inner_outputs: dict[int, tuple[Step, Path]] = {}
        self.inner_calls: Counter[str] = Counter()
        self.last_step: dict[str, Step] = {}
        """The last call of each unit."""
        self.random_state = self._random_state()
        """That of torch, after the last step."""
        self.constants: set[int] = set()
        """The ids of tensors that were made before, or by functions that are no steps."""
        self.generators = generators
        self.shared: set[int] = set()
        """The ids of tensors that units get from each other as skips."""
        named = [
            *empty.model.named_parameters(remove_duplicate=False),
            *empty.model.named_buffers(remove_duplicate=False),
        ]
        self.kept: list[Any] = [tensor for _, tensor in named]
        """Those whose ids are noted, which others must not get."""
        names = defaultdict[int, list[str]](list)
        for name, tensor in named:
            names[id(tensor)].append(name)
        self.states = {
            id(tensor): State(
                tuple(names[id(tensor)]), fakes.memory(tensor), name in empty.parameters
            )
            for name, tensor in named
        }
        self.unit_names = {id(module): name for name, module in reversed(empty.modules.items())}
        self.module_names = {id(module): name for name, module in empty.model.named_modules()}
        self.inner_names: dict[int, str] = {}
        """The names of the modules inside of the unit that runs."""
        self.first_hook = RemovableHandle.next_id
        """The number of the first hook that the forward itself registers."""
        self.attributes = {name: attributes_in(unit) for name, unit in empty.modules.items()}
        """Those of each unit after its last call."""
        self.shared_state = SharedState(empty.modules)
        self.record = Record(
            given=((), {}),
            steps=[],
            result=None,
            modes=Modes.now(devices),
            states=list(self.states.values()),
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

    def region(self) -> AbstractContextManager[None]:
        """Let steps be inside of a checkpoint."""
        return replaced(self, regions=(*self.regions, len(self.record.steps)))

    # What tensors are called

    def value(self, tensor: torch.Tensor, name: str) -> Value:
        """The value of a tensor, which may be new."""
        if id(tensor) not in self.values:
            absent = Absent(tuple(tensor.shape), tensor.dtype)
            made = Value(len(self.values), name, self.fakes.memory(tensor), absent)
            self.values[id(tensor)] = made
            self.record.values.append(made)
            self.kept.append(tensor)
        return self.values[id(tensor)]

    def known(self, tensor: torch.Tensor) -> Value | State | None:
        """What a tensor is called, if it has a name."""
        return self.values.get(id(tensor)) or self.states.get(id(tensor))

    def reference(self, tensor: torch.Tensor) -> Any:
        """What stands for a tensor in a step: a value, a state, or a constant tensor."""
        if found := self.known(tensor):
            return found
        if is_fake(tensor):
            return self._left_by_unit(tensor)
        self.kept.append(tensor)
        self.constants.add(id(tensor))
        return tensor

    def _left_by_unit(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor that a unit has left elsewhere than in its output."""
        step, path = self.inner_outputs.get(id(tensor)) or self._attribute(tensor)
        value = self.value(tensor, f"{step.target} (inside of it)")
        step.places[value] = path
        self.unknown.add(value)
        return value

    def _attribute(self, tensor: torch.Tensor) -> tuple[Step, Path]:
        """The last call of the unit with a tensor in its attributes, and where it is."""
        for name, step in self.last_step.items():
            for module, part in self.empty.modules[name].named_modules():
                own = {key: v for key, v in vars(part).items() if key not in OWN_OF_MODULES}
                for path, found in walk(own, ((False, "attributes"), (False, module))):
                    if found is tensor:
                        return step, path
        raise PartitionError(
            f"{line_of_user()} uses a tensor that was made inside of a submodule or in an earlier "
            "call, and that is neither in the output of a module, nor in an attribute; return it "
            "from the submodule, or keep it in an attribute of it"
        )

    def _add_step(self, kind: Any, target: Any, given: Call) -> Step:
        (args, kwargs), modes = mapped(given, self.reference), Modes.now(self.devices)
        step = Step(kind, target, args, kwargs, modes, line_of_user(), self.regions)
        self.record.steps.append(step)
        return step

    def _note_outputs(self, step: Step, output: Any, name: str) -> None:
        """Note where the tensors and constants are that a step returns."""
        mapped(output, lambda tensor: tensor)  # raises if it is of a kind that cannot be sent
        for path, part in walk(output, ((False, "output"),)):
            if isinstance(part, torch.Tensor):
                value = self.known(part) or self.value(part, name)
                if isinstance(value, Value):
                    step.places.setdefault(value, path)
            elif part is None or isinstance(part, (bool, int, float, str)):
                step.constants.append((path, part))

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
        if name in _REFUSED:
            self.refuse(_REFUSED[name])
        own, had_data = kwargs.get("generator"), self.fakes.have_data(given)
        self._require_generators(own)
        try:
            if name == "data_ptr":
                raise NeedsData(func)
            output, writes = self.fakes.run(func, (args, kwargs), given, self._number)
            self.generators.note()
        except (NeedsData, NeedsSizes) as error:
            raise PartitionError(
                f"{line_of_user()}: {name} needs the data of a value that submodules have "
                "computed, which decides what the forward does next or how large its values are; "
                "move it into a submodule that one stage runs as a whole, or use torch.where"
            ) from error
        tensors = all_tensors(output)
        has_effect = bool(writes) or name in _EFFECTS
        is_read = had_data and bool(given) and output is not None and not has_effect
        needs_data = is_read and self.fakes.depends_on_data(func, (args, kwargs), output)
        if not tensors and not has_effect:
            if needs_data:
                self._note_read(func, (args, kwargs), output)
            return output
        step = self._add_step("call", func, (args, kwargs))
        draws = had_data and self.random_state != self._random_state()
        step.draws = draws or name in _EFFECTS or own is not None
        if name in _STATISTICS:
            writes |= {state.memory for state in step.states if not state.is_parameter}
        self._note_writes(step, given, writes)
        self._note_outputs(step, output, f"{name} ({step.line})")
        is_free = not step.draws and self.unknown.isdisjoint(step.reads)
        if not is_free:
            self.unknown.update(step.places)
        for tensor in tensors if needs_data else ():
            self._note_read(torch.Tensor.size, ((tensor,), {}), tensor.shape)
        return output

    def _number(
        self, tensor: torch.Tensor, read: Callable[[torch.Tensor], Any] = torch.Tensor.item
    ) -> Any:
        """A number that a function reads from a tensor with data, such as a size."""
        number = read(tensor)
        self._note_read(read, ((tensor,), {}), number)
        return number

    def _note_read(self, func: Any, given: Call, found: Any) -> None:
        """Record what was read, to compare it with what later calls read."""
        step = self._add_step("read", func, given)
        step.found = found
        step.is_guard = self.unknown.isdisjoint(step.reads)

    def _note_writes(self, step: Step, given: list[torch.Tensor], writes: set[int]) -> None:
        """Note the memory that a step changes; raise if that is of no value."""
        named = (*self.record.values, *self.record.states)
        step.writes = frozenset(writes.intersection(each.memory for each in named))
        for tensor in given if writes else ():
            if id(tensor) in self.constants and self.fakes.memory(tensor) in writes:
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

    def _require_generators(self, used: torch.Generator | None = None) -> None:
        """Raise if the forward has made or seeded a generator of its own."""
        if not self.generators.are_as_before(used):
            self.refuse(
                "comes after the forward has made or seeded a generator, which stages would not "
                "do; make and seed it before, or do both in a submodule that one stage runs"
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
        unit = self.unit_names.get(id(module)) if self.is_recording else None
        if unit is not None:
            with self._inside((args, kwargs), unit):
                output = self._unit(module, unit, partial(call, module), (args, kwargs))
        else:
            output = call(module, *args, **kwargs)
        # Each call once, also if its class has a __call__ of its own.
        name = self.module_names.get(id(module))
        if name is None or threading.get_ident() != self.thread:
            return output
        if not self.is_inside and (unit is not None or call is _CALL):
            self.record.spans.append((name, begin, len(self.record.steps)))
        if call is _CALL:
            self.record.runs[name] += 1
            if self.is_inside and (path := self.inner_names.get(id(module))):
                self._note_inner(path, output)
        return output

    def _unit(self, module: nn.Module, name: str, call: Callable[..., Any], given: Call) -> Any:
        record = self.record
        require_no_modules(given)
        self._require_generators()
        for (path, key), value in attributes_in(module).items():
            if self.attributes[name].get((path, key)) != value:
                self._refuse_change(name, f"of which the forward has changed {joined(path, key)!r}")
        if changed := self.shared_state.changed_for(name):
            self._refuse_change(name, f"which uses {changed!r}, that the forward has changed")
        step, known = self._add_step("unit", name, given), len(self.values)
        before = self.last_step.pop(name, None)
        step.call = before.call + 1 if before is not None else 0
        self.last_step[name] = step
        self._watch_hooks(module)
        self.inner_calls.clear()
        self.inner_names = {id(part): path for path, part in module.named_modules()}
        tensors = all_tensors(given)
        own = {self.known(tensor) for tensor in tensors}
        own.update(v for s in record.steps if s.target == name for v in (*s.reads, *s.places))
        uses = partial(self._require_own, name, own)
        output, step.is_made_up, writes, counter = self.fakes.run_unit(module, call, given, uses)
        self.generators.note()
        torch.rand(())  # as if it had drawn: a state that is set back is seen
        self.attributes[name] = attributes_in(module)
        self.shared_state.note(name)
        record.costs[Cut(name, step.call)] = getattr(counter, "training", 0)
        step.needs_backward = getattr(counter, "backward_input", 1) > 0
        self._note_writes(step, tensors, writes)
        self._note_outputs(step, output, f"{name} (its output)")
        for path, tensor in walk(given, ((False, "arguments"),)):  # such as in lists and dicts
            if isinstance(tensor, torch.Tensor) and self.known(tensor) is None:
                step.places[self.value(tensor, f"{name} (in its arguments)")] = path
        self.unknown.update(value for value in step.places if value.number >= known)
        return output

    def _refuse_change(self, name: str, what: str) -> NoReturn:
        self.refuse(
            f"calls {name!r}, {what} before, but the stage of that submodule does not see it; pass "
            "it on as an argument"
        )

    def _require_own(self, name: str, own: set[Any], tensor: torch.Tensor) -> None:
        """Raise if a unit uses a tensor that it was not given."""
        found = self.known(tensor)
        if found is None or found in own or id(tensor) in self.shared:
            return
        if isinstance(found, State) and (
            not found.is_parameter  # each stage has the buffers
            or any(each.startswith(f"{name}.") for each in found.names)
        ):
            return
        self.refuse(
            f"computes in {name!r} with a tensor that the forward has made, or that is of another "
            f"module ({found.name}), but which is not among the arguments of that submodule; pass "
            "it on as an argument"
        )

    def _watch_hooks(self, unit: nn.Module) -> None:
        """Let hooks of a unit that the forward itself has registered only note outputs."""
        for part in unit.modules():
            for table in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
                for number in (key for key in table if key >= self.first_hook):
                    table[number] = partial(self._note_by, table[number])

    def _note_by(self, hook: Callable[..., Any], *args: Any) -> None:
        if hook(*args) is not None:
            self.refuse(
                "is a hook that changes what a submodule does, and that the forward registers, "
                "but no stage has it; register it before the model is cut"
            )

    def _note_inner(self, path: str, output: Any) -> None:
        """Note the output of a module inside of the unit that runs."""
        step, call = next(reversed(self.last_step.values())), self.inner_calls[path]
        self.inner_calls[path] += 1
        for at, tensor in walk(output, ((False, "inner outputs"), (False, (path, call)))):
            if isinstance(tensor, torch.Tensor):
                self.inner_outputs.setdefault(id(tensor), (step, at))
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


def name_of(func: Any) -> str:
    """What a function, a method or an attribute of torch is called."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name
