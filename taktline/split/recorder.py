"""Records the steps of a forward, without the data of its layers.

Arguments of the model have data, and so has what the forward computes from them alone; what its
layers return has none. Each call of a unit is a step, and so is each function of torch between
them, with all that it does inside.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from taktline.errors import PartitionError, TorchVersionError
from taktline.private import missing, private
from taktline.side_values import SideValues, add_loss, side_values
from taktline.split.arguments import (
    Args,
    Call,
    Kwargs,
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
from taktline.split.cut import CheckpointRegion, Cut, Extra, Modes, Record, Step, StepKind
from taktline.split.without_data import (
    EmptyModel,
    Fakes,
    NeedsData,
    is_fake,
    is_transformed,
    joined,
)

_CALL = nn.Module.__call__
_SIZES = frozenset(("shape", "size", "numel", "nelement", "__len__", "stride", "nbytes"))
"""Functions that read sizes, which may depend on data."""
_METADATA = frozenset(
    [
        *("shape", "size", "dtype", "device", "ndim", "dim", "numel", "nelement", "stride"),
        *("is_floating_point", "is_complex", "layout", "is_contiguous", "requires_grad", "is_cuda"),
        *("element_size", "storage_offset", "names", "__len__", "is_nested", "is_sparse"),
        *("itemsize", "nbytes", "type", "is_leaf", "grad_fn", "is_meta", "_version", "get_device"),
        *("is_shared", "is_cpu", "is_quantized", "is_mkldnn", "__hash__", "__repr__", "__format__"),
        *("__str__", "is_inference", "is_signed", "result_type", "is_same_size", "dim_order"),
        *("output_nr", "is_conj", "is_neg", "is_mps", "is_xpu", "_backward_hooks", "is_pinned"),
        *("untyped_storage", "is_tensor", "is_storage", "name", "is_sparse_csr", "ndimension"),
        *("promote_types", "can_cast", "__dir__", "is_xla", "has_names", "__reduce_ex__"),
    ]
)
"""Functions that read what a kind of call has in common: no data."""
_REFUSED = {
    "backward": "runs a backward in the forward, which a stage cannot; use torch.autograd.grad",
    "__set__": "sets an attribute of a tensor, such as x.data or x.grad; use x.copy_() instead",
}
"""Functions that no stage can run."""
_EFFECTS = frozenset(
    ("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "call_side_values")
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
_OWN_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that each module has."""


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
        self.inside_units = {id(m) for unit in empty.modules.values() for m in unit.modules()}
        self.attributes: dict[str, dict[tuple[str, str], Any]] = {}
        """Those of each unit after its last call."""
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

    def __enter__(self) -> Self:
        self.attributes = {n: _attributes_in(unit) for n, unit in self.empty.modules.items()}
        return super().__enter__()

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
                own = {key: v for key, v in vars(part).items() if key not in _OWN_OF_MODULES}
                for path, found in walk(own):
                    if found is tensor:
                        return step, module, ((True, path[0][1]), *path[1:]), None
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
        if name in _REFUSED:
            self.refuse(_REFUSED[name])
        sized = [tensor for tensor in given if self.known(tensor) in self.record.sized]
        if name == "data_ptr" or (name in _SIZES and sized):
            raise _needs_data(name)
        own, has_data = kwargs.get("generator"), self.fakes.have_data(given)
        if own is not None:
            self.generators.setdefault(id(own), (own, own.get_state()))
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
        needs_data = (
            given
            and not (writes or output is None or isinstance(output, (torch.Size, torch.dtype)))
            and self.fakes.have_data([*given, *tensors])
            # Not asked of numbers: some versions of torch know those of small tensors without data.
            and (
                self.fakes.depends_on_data(func, args, kwargs) if tensors else name not in _METADATA
            )
        )
        if not tensors and not writes and name not in _EFFECTS:
            if needs_data:
                self._note_read(func, (args, kwargs), output)
            return output
        step = self.add_step(StepKind.CALL, func, (args, kwargs))
        draws = has_data and self.random_state != self._random_state()
        step.draws = draws or name in _EFFECTS or own is not None
        if name in _STATISTICS:
            names = {state.name for state in step.states} - self.empty.parameters
            writes += [self.record.state_memory[name] for name in names]
        self._note_writes(step, given, writes)
        step.output = self.outputs(output, f"{name} ({step.line})")
        is_free = not step.draws and self.unknown.isdisjoint(step.reads)
        if not is_free:
            self.unknown.update(step.makes)
        if needs_data and is_free:  # sizes that depend on random numbers cannot be compared
            for tensor in tensors:
                self._note_read(torch.Tensor.size, ((tensor,), {}), tensor.shape)
        elif sized or is_sized or needs_data:
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
                output = self._unit(module, partial(call, module), (args, kwargs))
        else:
            output = call(module, *args, **kwargs)
        # Each call once, also if its class has a __call__ of its own.
        name = self.module_names.get(id(module))
        if name is None or threading.get_ident() != self.thread:
            return output
        if not self.is_inside and (is_unit or call is _CALL):
            self.record.spans.append((name, begin, len(self.record.steps)))
        if call is _CALL and not self.fakes.is_second_run:
            self.record.runs[name] += 1
            if self.is_inside and (path := self.inner_names.get(id(module))):
                self._note_inner(path, output)
        return output

    def _unit(self, module: nn.Module, call: Callable[..., Any], given: Call) -> Any:
        record, name = self.record, self.unit_names[id(module)]
        require_no_modules(given)
        for (path, key), value in _attributes_in(module).items():
            if self.attributes[name].get((path, key)) != value:
                self.refuse(
                    f"calls {name!r}, of which the forward has changed {joined(path, key)!r} "
                    "before, but the stage of that submodule does not see it; pass it on as an "
                    "argument"
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
            output, is_sized, cost = self.fakes.run_unit(call, given, uses)
            torch.rand(())  # as if it had drawn: a state that is set back is seen
        self.attributes[name] = _attributes_in(module)
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

    def hook(self, module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of a module that the forward itself registers: it may only note outputs."""

        def noting(*args: Any, **kwargs: Any) -> None:
            if hook(*args, **kwargs) is not None:
                self.refuse(
                    "is a hook that changes what a submodule does, and that the forward registers, "
                    "but no stage has it; register it before the model is cut"
                )

        return noting if self.is_recording and id(module) in self.inside_units else hook

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


def name_of(func: Any) -> str:
    """What a function, a method or an attribute of torch is called."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _attributes_in(unit: nn.Module) -> dict[tuple[str, str], Any]:
    """The attributes and parameters of the modules in a unit, to compare them."""
    return {
        (path, key): value if isinstance(value, (bool, int, float, str)) else id(value)
        for path, part in unit.named_modules()
        for key, value in (*vars(part).items(), *part._parameters.items())
    }


def _differ(one: Sequence[tuple[Path, Any]], other: Sequence[tuple[Path, Any]]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) != len(other) or any(a is not b or p != q for (p, a), (q, b) in pairs)


def _needs_data(name: str) -> PartitionError:
    return PartitionError(
        f"{line_of_user()}: {name} needs the data of a value that submodules have computed, which "
        "decides what the forward does next or how large its values are; move it into a submodule "
        "that one stage runs as a whole, or use torch.where"
    )


_REGISTER = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
_LOG = "torch._subclasses.fake_tensor"
_GENERATOR = "_checkpoint_without_reentrant_generator"
_generator = private(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator", "a recorded forward"
)


recording = SimpleNamespace(recorder=None)
"""Knows the recorder that is at work."""


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


@contextmanager
def patched(recorder: Any, model: nn.Module) -> Iterator[None]:
    """Let calls of modules, functions of autograd, checkpoints and skips come to a recorder."""
    if reason := missing(_generator):
        raise TorchVersionError(reason)
    function, checkpoints = torch.autograd.Function, vars(torch_checkpoint)
    before_apply = inspect.getattr_static(function, "apply")
    name = next(each for each in (f"{_GENERATOR}_impl", _GENERATOR) if each in checkpoints)
    before_region = checkpoints[name]
    before_saving = saved_tensors_hooks.__enter__

    def calling(before: Any) -> Any:
        return lambda self, *args, **kwargs: recorder.module(self, before, args, kwargs)

    def forward_of(unit: nn.Module) -> Any:
        before = unit.forward  # which the forward of the model may call by unit.forward(x)
        return lambda *args, **kwargs: (unit if recorder.is_recording else before)(*args, **kwargs)

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording and kind is torch_checkpoint.CheckpointFunction:
            run, preserves, *rest = args
            with recorder.region(bool(preserves)):
                return run(*rest)
        return recorder.function(before_apply.__get__(None, kind), args, kwargs)

    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not recorder.is_recording:
            yield from before_region(*args, **kwargs)
            return
        given = inspect.signature(before_region).bind(*args, **kwargs).arguments
        with recorder.region(bool(given.get("preserve_rng_state", True))):
            yield

    def saving(self: Any) -> None:
        if recorder.is_recording:
            recorder.refuse(
                "lets autograd save other tensors (saved_tensors_hooks, save_on_cpu), which its "
                "stages would not do; use it inside of a submodule"
            )
        before_saving(self)

    def registering(name: str) -> Any:
        before = vars(nn.Module)[name]
        return lambda self, hook, **kw: before(self, recorder.hook(self, hook), **kw)

    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    with ExitStack() as stack:
        for kind in (kind for kind in kinds if "__call__" in vars(kind)):
            stack.enter_context(replaced(kind, __call__=calling(vars(kind)["__call__"])))
        for unit in {*recorder.empty.modules.values()}:
            if not (unit._forward_hooks or unit._forward_pre_hooks):  # those would not run
                stack.enter_context(replaced(unit, forward=forward_of(unit)))
        hooks = {name: registering(name) for name in _REGISTER}
        stack.enter_context(replaced(nn.Module, **hooks))
        stack.enter_context(replaced(saved_tensors_hooks, __enter__=saving))
        stack.enter_context(replaced(function, apply=classmethod(apply)))
        stack.enter_context(replaced(torch_checkpoint, **{name: region}))
        # What torch writes of operations that cannot run without data.
        stack.enter_context(replaced(logging.getLogger(_LOG), disabled=True))
        stack.enter_context(_RecordedValues(recorder))
        stack.enter_context(replaced(recording, recorder=recorder))
        yield


class _RecordedValues(SideValues):
    """The side values of a forward that is recorded."""

    def __init__(self, recorder: Any) -> None:
        super().__init__(0, {})
        self._recorder = recorder

    def put(self, name: str, value: torch.Tensor) -> None:
        """Put a value, and record it."""
        self._run("put", name, value)

    def get(self, name: str) -> torch.Tensor:
        """A value that was put before, as the value of a step."""
        return self._run("get", name)

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss, and record it."""
        self._run("add", loss)

    def _run(self, method: str, *args: Any) -> Any:
        if self._recorder.is_recording:
            return self._recorder.function(call_side_values, (method, *args), {})
        found = getattr(super(), method)(*args)
        if method != "get":
            return found
        self._recorder.shared.add(id(found))
        return found.view_as(found)


def call_side_values(method: str, *args: Any) -> Any:
    """Put or get a skip, or add a loss, of the stage that runs."""
    # Not add() itself: collect_losses() may collect it.
    return add_loss(*args) if method == "add" else getattr(side_values(), method)(*args)
