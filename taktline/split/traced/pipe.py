"""Traces a module, and cuts it into stages."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from taktline.checks import known_keywords, require_callable, require_instance
from taktline.errors import PartitionError
from taktline.meta import as_arguments
from taktline.split.arguments import Args, Kwargs
from taktline.split.on_meta import materialise
from taktline.split.stages import Pieces, require_stage
from taktline.split.traced.cut import Piece, cut
from taktline.split.traced.stage_module import StageModule
from taktline.split.traced.trace import SplitPoint, in_mode, trace
from taktline.stage import PipelineStage, Tie
from taktline.stage.names import declared
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
    spec, training, why_not = split_spec or {}, module.training, ""
    pieces = {training: cut(module, trace(module, mb_args, mb_kwargs, spec), split_policy)}
    try:
        with in_mode(module, training=not training):
            program = trace(module, mb_args, mb_kwargs, spec)
            pieces[not training] = cut(module, program, split_policy)
    except PartitionError as error:
        why_not = str(error)
    pipe = joined(pieces, (mb_args, mb_kwargs or {}), why_not)
    if pipe.num_stages == 1 and split_spec is None and split_policy is None:
        raise PartitionError(
            "no split point: pass split_spec or split_policy, or call pipe_split() in the forward; "
            "split_spec={} makes a pipeline of one stage"
        )
    return pipe


def joined(pieces: dict[bool, list[Piece]], example: Any, why_not: str) -> Pipe:
    """A pipe of pieces by mode, the present one first; ``why_not`` says why there is one only."""
    mode, *others = pieces
    for other in others:
        if (found := len(pieces[other])) != len(pieces[mode]):
            why_not = f"it has {found} stages there, and {len(pieces[mode])} here"
            del pieces[other]
    root, graph = nn.Module(), fx.Graph()
    root.training = mode
    values = [graph.placeholder(f"arg{place}") for place in range(len(example[0]))]
    named: dict[str, Any] = {name: graph.placeholder(name) for name in example[1]}
    for stage, several in enumerate(zip(*pieces.values(), strict=True)):
        graphs = {mode: made for mode, (made, _) in zip(pieces, several, strict=True)}
        parts = {name: part for _, each in several for name, part in each.items()}
        name = f"submod_pp_{stage}"
        root.add_module(name, StageModule(graphs, parts, mode, why_not))
        values, named = [graph.call_module(name, tuple(values), named)], {}
        if isinstance(given := graphs[mode].output_node().args[0], tuple):
            places = range(len(given))
            values = [graph.call_function(operator.getitem, (*values, place)) for place in places]
    graph.output(values[0])  # the last stage gives one value, with all containers
    Pieces(root.children())  # declares the ties
    return Pipe(fx.GraphModule(root, graph), len(pieces[mode]), False, None)
