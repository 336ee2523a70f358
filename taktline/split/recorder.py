"""Records the steps of a forward, without the data of its layers.

Arguments of the model have data, and so has what the forward computes from them alone; what its
layers return has none. Each call of a unit is a step, and so is each function of torch between
them, with all that it does inside.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.arguments import Args, Call, Kwargs
from taktline.split.empty_model import EmptyModel
from taktline.split.nested import Path, all_tensors, is_object, mapped, walk
from taktline.split.patches import replaced
from taktline.split.steps import Cut, Extra, Kind, Modes, Record, Region, State, Step, Value
from taktline.split.torch_functions import EFFECTS, METADATA, SIZES
from taktline.split.user_code import line_of_user
from taktline.split.without_data import Fakes, NeedsData, is_fake, is_transformed

_CALL = nn.Module.__call__
OWN_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that each module has."""


class Recorder(TorchFunctionMode):
    """Records one forward."""

    def __init__(self, empty: EmptyModel, fakes: Fakes, devices: tuple[str, ...]) -> None:
        super().__init__()
        self.empty, self.fakes, self.devices = empty, fakes, devices
        self.is_inside = False
        """Whether a unit or a function runs, whose own calls are not steps."""
        self.thread = threading.get_ident()
        self.values: dict[int, Value] = {}
        self.unknown: set[Value] = set()
        """Values that do not depend on arguments alone."""
        self.regions: tuple[Region, ...] = ()
        self.inner_outputs: dict[int, tuple[Step, str, Path, int]] = {}
        self.inner_calls: Counter[str] = Counter()
        self.last_step: dict[str, Step] = {}
        """The last call of each unit."""
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """Those of the user's own, with their states before."""
        self.states: dict[int, State] = {}
        named = [
            *empty.model.named_parameters(remove_duplicate=False),
            *empty.model.named_buffers(remove_duplicate=False),
        ]
        self.kept: list[torch.Tensor] = [tensor for _, tensor in named]
        """Those whose ids are noted, which others must not get."""
        aliases: dict[str, tuple[str, ...]] = {}
        for name, tensor in named:
            first = self.states.setdefault(id(tensor), State(name)).name
            aliases[first] = (*aliases.get(first, ()), name)
        self.unit_names = {id(module): name for name, module in reversed(empty.modules.items())}
        self.module_names = {id(module): name for name, module in empty.model.named_modules()}
        self.inner_names: dict[int, str] = {}
        """The names of the modules inside of the unit that runs."""
        self.record = Record(
            given=((), {}),
            steps=[],
            result=None,
            modes=Modes.now(devices),
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

    def region(self, preserves_rng: bool) -> AbstractContextManager[None]:
        """Let steps be inside of a checkpoint."""
        region = Region(len(self.record.steps), preserves_rng)
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
        if is_transformed(tensor):
            raise PartitionError(
                f"{line_of_user()} is inside of torch.vmap or another transform of functions, in "
                "which steps cannot be recorded; use it inside of a submodule"
            )
        if is_fake(tensor):
            return self._left_by_unit(tensor)
        self.kept.append(tensor)
        return tensor

    def _left_by_unit(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor that a unit has left elsewhere than in its output."""
        where = "inside" if id(tensor) in self.inner_outputs else "attribute"
        step, module, path, call = self.inner_outputs.get(id(tensor)) or self._attribute(tensor)
        value = self.value(tensor, f"{step.target} (inside of it)")
        step.extras.append(Extra(value, where, module, path, call))
        self.unknown.add(value)
        return value

    def _attribute(self, tensor: torch.Tensor) -> tuple[Step, str, Path, int]:
        """The attribute of a unit that holds a tensor: the unit's last call, module and path."""
        for name, step in self.last_step.items():
            for module, part in self.empty.modules[name].named_modules():
                own = {key: v for key, v in vars(part).items() if key not in OWN_OF_MODULES}
                for path, found in walk(own):
                    if found is tensor:
                        return step, module, (("attribute", path[0][1]), *path[1:]), 0
        raise PartitionError(
            f"{line_of_user()} uses a tensor that was made inside of a submodule or in an earlier "
            "call, and that is neither in the output of a module, nor in an attribute; return it "
            "from the submodule, or keep it in an attribute of it"
        )

    def add_step(self, kind: Kind, target: Any, given: Call) -> Step:
        """Add a step in the present modes."""
        (args, kwargs), modes = mapped(given, self.reference), Modes.now(self.devices)
        step = Step(kind, target, args, kwargs, None, modes, line_of_user(), self.regions)
        self.record.steps.append(step)
        return step

    # Functions of torch

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        return self.function(func, args, kwargs or {})

    def function(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Call a function, and record it if the forward itself calls it."""
        if not self.is_recording:
            return func(*args, **kwargs)
        with replaced(self, is_inside=True):
            return self._function(func, args, kwargs)

    def _function(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        given, name = all_tensors((args, kwargs)), _name_of(func)
        if name == "apply":  # a function of autograd, of the user's own
            require_no_modules((args, kwargs))
        sized = [tensor for tensor in given if self.known(tensor) in self.record.sized]
        if name == "data_ptr" or (name in SIZES and sized):
            raise _needs_data(name)
        own = kwargs.get("generator")
        if own is not None:
            self.generators.setdefault(id(own), (own, own.get_state()))
        before = self._random_state() if self.fakes.have_data(given) else None
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
        step = self.add_step(Kind.CALL, func, (args, kwargs))
        draws = before is not None and before != self._random_state()
        step.draws = draws or name in EFFECTS or own is not None
        step.writes = frozenset(writes)
        step.output = self.outputs(output, f"{name} ({step.line})")
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
        numbers = [
            tensor
            for tensor in all_tensors(given)
            if not (tensor.ndim or tensor.is_floating_point()) and self.fakes.have_data([tensor])
        ]
        for tensor in numbers:
            self._note_read(int, ((tensor,), {}), int(tensor))
        known = {id(tensor): int(tensor) for tensor in numbers}
        changed = pytree.tree_map(lambda part: known.get(id(part), part), given)
        return changed if numbers else None

    def _note_read(self, func: Any, given: Call, output: Any) -> None:
        """Record what was read, to compare it with what later calls read."""
        step = self.add_step(Kind.READ, func, given)
        step.output = output
        step.is_known = self.unknown.isdisjoint(step.reads)

    def _random_state(self) -> Any:
        state = torch.default_generator.get_state().numpy().tobytes()
        if "cuda" in self.devices and torch.cuda.is_initialized():
            return state, torch.cuda.get_rng_state().numpy().tobytes()
        return state

    # Modules

    def module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module; if it is a unit, record it."""
        if self.is_recording and id(module) in self.unit_names:
            with replaced(self, is_inside=True):
                counted = self._counted_once(partial(call, module))
                output = self._unit(module, counted, (args, kwargs))
        else:
            output = call(module, *args, **kwargs)
        is_here = threading.get_ident() == self.thread and id(module) in self.module_names
        if is_here and call is _CALL:  # once, also if its class has a __call__ of its own
            self.record.runs[self.module_names[id(module)]] += 1
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
        plain = [part for _, part in walk(given) if is_object(part) and not all_tensors(part)]
        attributes = list(walk(plain))
        opened = mapped(given, self.reference, dict.fromkeys(map(id, plain)))
        step, known = self.add_step(Kind.UNIT, name, given), len(self.values)
        before = self.last_step.pop(name, None)
        step.call = before.call + 1 if before is not None else 0
        self.last_step[name] = step
        self.inner_calls.clear()
        self.inner_names = {id(part): path for path, part in module.named_modules()}
        buffers = [(b, b._version) for b in module.buffers()]
        with self.fakes.noting_writes(all_tensors(given)) as writes:
            output, is_sized, cost = self.fakes.run_unit(module, call, given)
        record.costs[Cut(name, step.call)] = cost
        step.writes = frozenset(writes)
        if _differ(attributes, list(walk(plain))):  # then each call has new objects
            step.args, step.kwargs = opened
        if any(buffer._version != version for buffer, version in buffers):
            record.changes_buffers.add(name)
        step.output = self.outputs(output, f"{name} (its output)")
        for path, tensor in walk(given):  # also what it has put into lists and dicts
            if isinstance(tensor, torch.Tensor) and self.known(tensor) is None:
                value = self.value(tensor, f"{name} (in its arguments)")
                step.extras.append(Extra(value, "arguments", "", path))
        made = [value for value in step.makes if value.number >= known]
        self.unknown.update(made)
        if is_sized or not record.sized.isdisjoint(step.reads):
            record.sized.update(made)
        return output

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


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name
