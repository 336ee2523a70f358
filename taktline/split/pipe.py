"""``pipeline()``: a model cut at split points, under the names of torch.

Its forward is recorded as for :func:`by_names`. A split point lies before a step: where the forward
calls :func:`pipe_split`, where a call of a submodule begins or ends, or where a policy puts it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import repeat
from types import MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from taktline.checks import check, check_callable
from taktline.errors import PartitionError
from taktline.meta import as_arguments
from taktline.split.by_names import as_call, require_stage, stages_of, without_compiler
from taktline.split.cut import record_twice, recording
from taktline.split.on_meta import materialise
from taktline.split.recorded_stage import CutModel
from taktline.split.recorder import PIPE_SPLIT, name_of
from taktline.split.steps import Args, Call, Cut, Kwargs, Record, Step, Value, parts_in
from taktline.split.without_data import EmptyModel
from taktline.stage import PipelineStage, Tie
from taktline.stage.names import declared
from taktline.text import counted, did_you_mean

Policy = Callable[[fx.GraphModule], fx.GraphModule]
_METHODS = (MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)


class SplitPoint(Enum):
    """Whether a model is cut before or after a submodule.

    >>> SplitPoint.BEGINNING
    <SplitPoint.BEGINNING: 1>
    """

    BEGINNING = 1
    END = 2


@fx.has_side_effect
def pipe_split():
    """Begin a new stage here, inside a forward; does nothing unless :func:`pipeline` records it.

    >>> class Model(nn.Linear):
    ...     def forward(self, x):
    ...         x = super().forward(x)
    ...         pipe_split()
    ...         return torch.tanh(x)
    >>> pipeline(Model(4, 4), (torch.zeros(2, 4),)).num_stages
    2
    """
    if not torch.compiler.is_compiling() and (recorder := recording.recorder) is not None:
        recorder.mark()


@dataclass
class PipeInfo:
    """The information about the whole pipeline for :func:`build_stage`."""

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool


class Pipe(nn.Module):
    """The stages of a model. Calling it runs them one after the other.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> pipe = pipeline(model, (torch.zeros(2, 4),), split_spec={"2": SplitPoint.BEGINNING})
    >>> pipe
    Pipe(2 stages: 20 parameters, 20 parameters)
    >>> [name for name, _ in pipe.get_stage_module(1).named_parameters()]
    ['2.weight', '2.bias']
    """

    def __init__(
        self, split_gm: fx.GraphModule, num_stages: int, has_loss_and_backward: bool, loss_spec
    ):
        super().__init__()
        self.split_gm = split_gm
        self.num_stages = num_stages
        self.has_loss_and_backward = has_loss_and_backward
        self.loss_spec = loss_spec
        self.training = split_gm.training

    def forward(self, *args, **kwargs):
        """What the model returns."""
        value = self.get_stage_module(0)(*args, **kwargs)
        for stage in range(1, self.num_stages):
            value = self.get_stage_module(stage)(*as_arguments(value))
        return value

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of one stage; its parameters and buffers are those of the model."""
        stage = require_stage(stage_idx, self.num_stages)
        return self.split_gm.get_submodule(f"submod_pp_{stage}")

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The parameters that several stages use; schedules keep them equal."""
        return declared(self.get_stage_module(0))

    @property
    def replicated_params(self) -> list[dict[str, str]]:
        """The ties, in the format of torch."""
        return [{f"submod_pp_{stage}": name for stage, name in tie.uses} for tie in self.ties]

    def info(self) -> PipeInfo:
        """The information for :func:`build_stage`."""
        return PipeInfo(self.split_gm.graph, self.num_stages, self.has_loss_and_backward)

    def build_stage(
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> PipelineStage:
        """A stage to run in a schedule; its module is moved to a device, or materialised there."""
        module = materialise(self.get_stage_module(stage_index), device)
        return build_stage(module, stage_index, self.info(), device, group)

    def print_readable(self):
        """Print which stage calls which, and the steps of each stage."""
        self.split_gm.print_readable()
        for stage in range(self.num_stages):
            programs = vars(self.get_stage_module(stage))["_cut"].first
            print(f"submod_pp_{stage}:")
            for step in programs[stage].plan.steps:
                print(f"    {_called(step)}  # {step.line}")

    def __str__(self):
        return self.split_gm.__str__()

    def __repr__(self):
        stages = map(self.get_stage_module, range(self.num_stages))
        counts = [f"{sum(p.numel() for p in s.parameters()):,} parameters" for s in stages]
        return f"Pipe({counted(self.num_stages, 'stage')}: {', '.join(counts)})"


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> PipelineStage:
    """A stage to run in a schedule, from a module on its device.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> pipe = pipeline(model, (torch.zeros(2, 4),), split_spec={"2": SplitPoint.BEGINNING})
    >>> build_stage(pipe.get_stage_module(1), 1, pipe.info(), torch.device("cpu"))
    PipelineStage(1 of 2, RecordedStage, 20 parameters, cpu)
    """
    check("pipe_info", pipe_info, PipeInfo, "what pipe.info() returns")
    return PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)


def pipeline(
    module: nn.Module,
    mb_args: Args,
    mb_kwargs: Kwargs | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Record the forward of a module, and cut it into stages.

    Args:
        module: the model; it stays unchanged, and the stages have its own parameters.
        mb_args: the arguments of one micro-batch, as an example.
        mb_kwargs: its keyword arguments; they go to the first stage.
        split_spec: names of submodules, and whether to cut before or after each call of them.
            Calls of :func:`pipe_split` in a forward cut, too.
        split_policy: instead of ``split_spec``, a function that puts calls of :func:`pipe_split`
            into a graph of the steps of the forward, and returns the graph module.

    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    >>> pipe = pipeline(model, (x,), split_spec={"0": SplitPoint.END})
    >>> pipe.num_stages, torch.equal(pipe(x), model(x))
    (2, True)
    """
    check("module", module, nn.Module, "an nn.Module", error=PartitionError)
    check("mb_args", mb_args, tuple, "a tuple of arguments", error=PartitionError)
    for name, value in (("mb_kwargs", mb_kwargs), ("split_spec", split_spec)):
        if value is not None:
            check(name, value, dict, error=PartitionError)
    if split_policy is not None:
        check_callable("split_policy", split_policy, error=PartitionError)
    if split_spec is not None and split_policy is not None:
        raise PartitionError(
            "split_spec and split_policy both say where to cut; pass only one of them"
        )
    model = without_compiler(module)
    points, call = _checked(model, split_spec or {}), as_call(model, (mb_args, mb_kwargs or {}))
    opened = set[str]() if split_policy is None else _blocks(model)
    while True:
        empty = EmptyModel(model, [Cut(name) for name in points], opened)
        record = record_twice(empty, call)
        if not record.marked_units:
            break
        opened |= record.marked_units
    starts = partial(_starts, empty, points, split_policy)
    stages = list(stages_of(model, CutModel(empty, (), starts), call, record))
    if len(stages) == 1 and split_spec is None:
        raise PartitionError(
            "no split point: pass split_spec, let split_policy put pipe_split() between the steps "
            "of its graph, or call pipe_split() in the forward; split_spec={} makes a pipeline of "
            "one stage"
        )
    return Pipe(joined(stages, (mb_args, mb_kwargs or {})), len(stages), False, None)


def _blocks(model: nn.Module) -> set[str]:
    """The modules that a policy sees inside: all that have others in them, but those of torch."""
    rows = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return {
        name
        for name, part in model.named_modules()
        if part._modules
        and (isinstance(part, rows) or not type(part).__module__.startswith("torch."))
    }


def _checked(model: nn.Module, spec: dict[str, SplitPoint]) -> dict[str, str]:
    """The first name that the model has for each submodule, and whether to cut before or after."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first = {id(module): name for name, module in reversed(modules.items())}
    for name, point in spec.items():
        if not name or name not in modules:
            raise PartitionError(
                f"split_spec names {name!r}, but {type(model).__name__} has no such "
                f"submodule; {did_you_mean(name, list(filter(None, modules)))}"
            )
        if getattr(point, "name", "") not in SplitPoint.__members__:  # torch's own will do
            raise PartitionError(
                f"split_spec[{name!r}] must be SplitPoint.BEGINNING or SplitPoint.END, "
                f"not {point!r}"
            )
    return {first[id(modules[name])]: point.name for name, point in spec.items()}


def joined(
    stages: Sequence[nn.Module], example: Call, counts: Iterable[int] = repeat(3)
) -> fx.GraphModule:
    """One module of all stages; ``counts`` are the numbers of values that these return."""
    root, graph = nn.Module(), fx.Graph()
    root.training = stages[0].training
    values = [graph.placeholder(f"arg{place}") for place in range(len(example[0]))]
    named: dict[str, Any] = {name: graph.placeholder(name) for name in example[1]}
    for stage, (module, count) in enumerate(zip(stages, counts, strict=False)):
        root.add_module(f"submod_pp_{stage}", module)
        output = graph.call_module(f"submod_pp_{stage}", tuple(values), named)
        values, named = [output], {}
        if count > 1 and module is not stages[-1]:
            values = [graph.call_function(operator.getitem, (output, at)) for at in range(count)]
    graph.output(values[0])
    return fx.GraphModule(root, graph)


def _starts(
    empty: EmptyModel, points: dict[str, str], policy: Policy | None, record: Record
) -> list[int]:
    """The steps with which stages begin: those at split points, of which none is at an end.

    Split points with nothing between them count once.
    """
    called = {name for name, *_ in record.spans}
    if missing := [name for name in points if name not in called]:
        raise PartitionError(
            f"the forward does not call {', '.join(map(repr, missing))}, so there is nothing to "
            "split at; name submodules in split_spec that the forward calls, or call pipe_split() "
            "in the forward"
        )
    ends = {"BEGINNING": 0, "END": 1}
    spans = [(ends[points[name]], span) for name, *span in record.spans if name in points]
    marks = [*record.marks, *(span[end] for end, span in spans)]
    if policy is not None:
        marks = _marks_of_policy(policy, record, empty.model)
    found, steps = [0], [step.kind != "read" for step in record.steps]
    for mark in sorted(marks):
        if any(steps[found[-1] : mark]) and any(steps[mark:]):
            found.append(mark)
    return found[1:]


def _marks_of_policy(policy: Policy, record: Record, model: nn.Module) -> list[int]:
    """Where a policy puts split points into the graph of a record."""
    graph, values, places = fx.Graph(), dict[Any, fx.Node](), dict[str, int]()
    for number, value in enumerate(dict.fromkeys(parts_in(record.given, Value))):
        values[value] = graph.placeholder(f"arg{number}")
    for place, step in enumerate(record.steps):
        for _ in range(record.marks.count(place)):
            graph.call_function(pipe_split)
        for state in {*step.states} - values.keys():
            values[state] = graph.create_node("get_attr", state.name)
        op, target = "call_function", step.target
        if step.kind == "unit":
            op = "call_module"
        elif isinstance(target, _METHODS):
            op, target = "call_method", _called(step)
        if step.kind != "read":
            given = tuple(values[part] for part in (*step.reads, *step.states))
            node = graph.create_node(op, target, given, {}, _called(step))
            places[node.name] = place + 1
            values |= dict.fromkeys(step.places, node)
    graph.output([values[value] for value in parts_in(record.result, Value)])
    split = policy(fx.GraphModule(model, graph))
    if not isinstance(split, fx.GraphModule):
        raise PartitionError(
            f"split_policy must return the GraphModule with its marks, not {split!r}"
        )
    found, place = list[int](), 0
    for node in split.graph.nodes:
        if getattr(node.target, "__name__", "") in PIPE_SPLIT:
            found.append(place)
        place = places.get(node.name, place)
    return found


def _called(step: Step) -> str:
    return step.target if step.kind == "unit" else name_of(step.target)
