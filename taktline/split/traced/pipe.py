"""Traces a module, and cuts it into stages."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from taktline.checks import known_keywords, require_callable, require_instance
from taktline.errors import PartitionError
from taktline.meta import as_arguments
from taktline.split.arguments import Args, Call, Kwargs
from taktline.split.on_meta import materialise
from taktline.split.stages import Pieces, require_stage
from taktline.split.traced.cut import cut
from taktline.split.traced.markers import SplitPoint, is_marker
from taktline.split.traced.stage_module import StageModule, attributes_of
from taktline.split.traced.state import State
from taktline.split.traced.trace import in_mode, trace
from taktline.stage import PipelineStage, Tie
from taktline.stage.ties import declared
from taktline.text import counted


@dataclass
class PipeInfo:
    """The information about the whole pipeline for :func:`build_stage`.

    >>> PipeInfo(fx.Graph(), 2, False).num_stages
    2
    """

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool


class Pipe(nn.Module):
    """The stages of a traced model. Calling it runs them one after the other.

    >>> import taktline as tl
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> pipe = tl.pipeline(model, (torch.zeros(2, 4),), split_spec={"2": tl.SplitPoint.BEGINNING})
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
        return PipeInfo(
            graph=self.split_gm.graph,
            num_stages=self.num_stages,
            has_loss_and_backward=self.has_loss_and_backward,
        )

    def build_stage(
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> PipelineStage:
        """A stage to run in a schedule; its module is moved to a device, or materialised there."""
        module = materialise(self.get_stage_module(stage_index), device)
        return build_stage(module, stage_index, self.info(), device, group)

    def print_readable(self):
        """Print the code of all stages."""
        self.split_gm.print_readable()

    def __str__(self):
        return self.split_gm.__str__()

    def __repr__(self):
        counts = (
            sum(p.numel() for p in self.get_stage_module(stage).parameters())
            for stage in range(self.num_stages)
        )
        listed = ", ".join(f"{count:,} parameters" for count in counts)
        return f"Pipe({counted(self.num_stages, 'stage')}: {listed})"


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> PipelineStage:
    """A stage to run in a schedule, from a module on its device.

    >>> import taktline as tl
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> pipe = tl.pipeline(model, (torch.zeros(2, 4),), split_spec={"2": tl.SplitPoint.BEGINNING})
    >>> tl.build_stage(pipe.get_stage_module(1), 1, pipe.info(), torch.device("cpu"))
    PipelineStage(1 of 2, StageModule, 20 parameters, cpu)
    """
    require_instance("pipe_info", pipe_info, PipeInfo, "what pipe.info() returns")
    return PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)


@known_keywords
def pipeline(
    module: nn.Module,
    mb_args: Args,
    mb_kwargs: Kwargs | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a module with torch.export, and cut it into stages.

    Args:
        module: the model; it stays unchanged, and the stages have its own parameters.
        mb_args: the arguments of one micro-batch, as an example of their shapes.
        mb_kwargs: its keyword arguments; they go to the first stage.
        split_spec: names of submodules, and whether to cut before or after each. Calls of
            :func:`pipe_split` in a forward cut, too.
        split_policy: instead of ``split_spec``, a function that puts calls of :func:`pipe_split`
            into the graph of the traced module, and returns the graph module.

    >>> import taktline as tl
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> x = torch.ones(2, 4)
    >>> pipe = tl.pipeline(model, (x,), split_spec={"1": tl.SplitPoint.END})
    >>> pipe.num_stages, torch.equal(pipe(x), model(x))
    (2, True)
    """
    require_instance("module", module, nn.Module, "an nn.Module", PartitionError)
    for name, value in (("mb_kwargs", mb_kwargs), ("split_spec", split_spec)):
        if value is not None:
            require_instance(name, value, dict, error=PartitionError)
    if split_policy is not None:
        require_callable("split_policy", split_policy, PartitionError)
    if split_spec is not None and split_policy is not None:
        raise PartitionError(
            "split_spec and split_policy both say where to cut; pass only one of them"
        )
    state, training = State(module), module.training
    traced = trace(module, mb_args, mb_kwargs, split_spec or {}, split_policy)
    if split_spec is None and split_policy is None and not any(map(is_marker, traced.graph.nodes)):
        raise PartitionError(
            "no split point: pass split_spec or split_policy, or call pipe_split() in the forward; "
            "split_spec={} makes a pipeline of one stage"
        )
    stages = {training: cut(traced, state)}
    try:
        with in_mode(module, training=not training):
            traced_too = trace(module, mb_args, mb_kwargs, split_spec or {}, split_policy)
        other = cut(traced_too, state)
        why_not = _difference(stages[training], other, state)
        if not why_not:
            stages[not training] = other
    except PartitionError as error:
        why_not = str(error)
    return assembled(stages, traced, state, training, why_not)


def assembled(
    stages: dict[bool, list[fx.Graph]],
    traced: fx.GraphModule,
    state: State,
    training: bool,
    why_not: str,
) -> Pipe:
    """A pipe of the stages of each mode; ``why_not`` says why one mode is missing."""
    modules = [
        StageModule({mode: stages[mode][stage] for mode in stages}, training, state, why_not)
        for stage in range(len(stages[training]))
    ]
    hook = partial(_without_keywords, frozenset(_argument_names(traced)))
    for module in modules[1:]:
        module.register_forward_pre_hook(hook, with_kwargs=True)
    Pieces(modules)  # declares the ties
    return Pipe(_joined(modules, traced, training), len(modules), False, None)


def _without_keywords(names: frozenset[str], module: nn.Module, args: Args, kwargs: Kwargs) -> Call:
    """The arguments of a later stage: keywords of the model reach all stages of a rank."""
    return args, {name: value for name, value in kwargs.items() if name not in names}


def _difference(stages: list[fx.Graph], other: list[fx.Graph], state: State) -> str:
    """Why the stages of two modes do not fit together."""
    if len(stages) != len(other):
        return f"it has {len(other)} stages there, and {len(stages)} here"
    for stage, (one, two) in enumerate(zip(stages, other, strict=True)):
        names = sorted(state.parameters(attributes_of(one) ^ attributes_of(two)))
        if names:
            return f"stage {stage} uses {', '.join(names)} in one mode only"
    return ""


def _joined(modules: list[StageModule], traced: fx.GraphModule, training: bool) -> fx.GraphModule:
    """A module of all stages, whose graph calls one after the other."""
    root = nn.Module()
    graph = fx.Graph()
    values: tuple[fx.Node, ...] = tuple(graph.placeholder(name) for name in _argument_names(traced))
    output: Any = None
    for stage, module in enumerate(modules):
        name = f"submod_pp_{stage}"
        root.add_module(name, module)
        output = graph.call_module(name, values)
        given = module.graph.output_node().args[0]
        if stage < len(modules) - 1 and isinstance(given, tuple):
            values = tuple(
                graph.call_function(operator.getitem, (output, place))
                for place in range(len(given))
            )
        else:
            values = (output,)
    graph.output(output)
    root.training = training
    return fx.GraphModule(root, graph)


def _argument_names(traced: fx.GraphModule) -> list[str]:
    info = getattr(traced.graph._codegen, "pytree_info", None)
    if info is not None:
        return list(info.orig_args)
    return [str(node.target) for node in traced.graph.nodes if node.op == "placeholder"]
