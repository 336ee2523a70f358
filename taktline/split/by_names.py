"""Cuts a model at submodules by name: its forward is recorded, and each stage runs its steps."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup

from taktline.checks import check, check_list, refuse, shown
from taktline.errors import PartitionError
from taktline.meta import as_arguments
from taktline.split.cut import record_twice
from taktline.split.on_meta import materialise
from taktline.split.recorded_stage import CutModel, RecordedStage, StageProgram, key_of_kind
from taktline.split.steps import (
    Call,
    Cut,
    Record,
    arguments_of,
    arguments_of_forward,
    device_of,
    filled,
    key_of,
    mapped,
    without_cache,
    without_padding,
)
from taktline.split.without_data import EmptyModel, require_python
from taktline.stage import PipelineStage
from taktline.stage.names import Tie, attach, blueprint, declare, find_ties, unwrapped
from taktline.text import counted, did_you_mean

_log = logging.getLogger("taktline")
_CUTS = "a list of names of submodules"


def by_names(model: nn.Module, cuts: Sequence[str], *, example: Any = None) -> Pieces:
    """Cut a model at submodules that its forward calls.

    The forward runs once, without the data of its layers, and is recorded. Each stage runs its own
    steps of it. What depends on the model's arguments alone (masks, positions, rotary embeddings)
    each stage computes by itself; everything else goes from stage to stage.

    Args:
        model: any module; it stays unchanged, and the stages have its own parameters. It may be
            on the meta device.
        cuts: the names of the submodules with which a new stage begins, in the order of their
            calls. Of one that is called several times, ``"block@3"`` is the call after three
            others; it then lies in several stages, as a tied weight.
        example: a micro-batch, to record the forward: a tuple of arguments, or ``(args, kwargs)``.
            Hugging Face models have one themselves; without one, submodules are taken to be called
            in the order of their definition, and the first call records.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> pieces = by_names(model, ["2"])
    >>> [name for name, _ in pieces[1].named_parameters()]
    ['2.weight', '2.bias']
    >>> x = torch.ones(2, 4)
    >>> torch.equal(pieces(x), model(x))
    True
    """
    check("model", model, nn.Module, "an nn.Module", error=PartitionError)
    model = without_compiler(model)
    given = check_list("cuts", cuts, takes=_CUTS, error=PartitionError)
    if not all(isinstance(cut, str) for cut in given):
        refuse("cuts", _CUTS, cuts, PartitionError)
    starts = _checked(model, given)
    call = None if example is None else as_call(model, example)
    cut = CutModel(EmptyModel(model, starts), starts)
    return stages_of(model, cut, call)


def stages_of(
    model: nn.Module, cut: CutModel, call: Call | None, record: Record | None = None
) -> Pieces:
    """The stages of a model, as it is cut."""
    known = _dummy_inputs(cut, model) if call is None else _learned(cut, model, call, record)
    cut.is_example = call is not None
    cut.homes = _homes_by_definition(cut) if known is None else _homes_by_use(cut, known)
    modules = [make_stage(model, cut, stage) for stage in range(cut.stages)]
    return Pieces(modules, cuts=map(str, cut.cuts), model=model)


def _learned(
    cut: CutModel, model: nn.Module, call: Call, record: Record | None = None
) -> list[StageProgram]:
    """The recorded forward of an example."""
    with torch.enable_grad(), torch.inference_mode(False):
        key = key_of_kind(key_of(call, []), model.training, device_of(call), None)
        return cut.learn(key, model.training, lambda: record or record_twice(cut.empty, call))


def _dummy_inputs(cut: CutModel, model: nn.Module) -> list[StageProgram] | None:
    """The recorded forward of the example of a Hugging Face model; None if there is none."""
    dummies = getattr(model, "dummy_inputs", None)
    if not isinstance(dummies, dict):
        return None
    kwargs = {name: without_padding(model, dummy) for name, dummy in dummies.items()}
    try:
        return _learned(cut, model, as_call(model, kwargs))
    except PartitionError:
        raise
    except Exception as error:
        # Image models have words as an example, too, and may raise anything over them.
        _log.info("dummy_inputs do not fit the model: %s: %s", type(error).__name__, error)
        return None


def without_compiler(model: nn.Module) -> nn.Module:
    """The model inside of ``torch.compile(model)``: stages do not run the compiled whole."""
    inside = model._modules.get("_orig_mod")
    if inside is None and model._compiled_call_impl is None:
        return model
    _log.warning(
        "the model was compiled as a whole, but its stages are not; compile its blocks "
        "(block.compile()), or pass compile=True"
    )
    return model if inside is None else inside


def _checked(model: nn.Module, cuts: Sequence[str]) -> list[Cut]:
    """The cuts; raises if one is not a submodule, is there twice, or lies inside of another."""
    require_python(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [name for name in modules if name]
    read = [Cut.read(text, names) for text in cuts]
    for place, cut in enumerate(read):
        unit = cut.unit
        if unit not in names:
            raise PartitionError(
                f"cuts name {unit!r}, but {type(model).__name__} has no such submodule; "
                f"{did_you_mean(unit, names)}"
            )
        if cut in read[:place]:
            raise PartitionError(f"cuts name {cut!r} twice; name it once")
        inside = next((other.unit for other in read if unit.startswith(f"{other.unit}.")), None)
        if inside is not None:
            raise PartitionError(
                f"the cut {unit!r} is inside {inside!r}, which begins a stage as a whole; cut at "
                f"the first submodule of {inside!r} instead"
            )
        if type(unwrapped(modules[unit])).forward is nn.Module.forward:
            raise PartitionError(
                f"{unit!r} is a {type(modules[unit]).__name__}, which is never called itself; cut "
                f"inside it, such as at '{unit}.0'"
            )
    return read


def as_call(model: nn.Module, example: Any) -> Call:
    """An example as the arguments of a call, on the device of the model, without a cache."""
    args, kwargs = arguments_of(example)
    call = args, without_cache(arguments_of_forward(type(model))[len(args) :], kwargs)
    config = getattr(model, "config", None)
    if call[1] is not kwargs and getattr(config, "is_encoder_decoder", False):
        _log.warning(
            "%s runs with use_cache=False, as its stages have no cache of all layers; a few models "
            "make other masks then: compare with model(…, use_cache=False)",
            type(model).__name__,
        )
    tensors = (*model.parameters(), *model.buffers())
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), None)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:  # only its shape matters
            return torch.zeros_like(tensor, device=device or "cpu")
        return tensor if device is None else tensor.to(device)

    return filled(mapped(call, moved), {})


def _homes_by_use(cut: CutModel, known: list[StageProgram]) -> dict[str, frozenset[int]]:
    """The stages that use each unit and each tensor."""
    record, used = known[0].record, defaultdict[str, set[int]](set)
    for stage, program in enumerate(known):
        for name in program.uses:
            used[name].add(stage)
    stage = 0
    for name in cut.empty.modules:
        # A unit that is never called has a state, too: it goes with the one before it.
        stage = min(used.setdefault(name, {stage}))
    written = {memory for step in record.steps for memory in step.writes}
    in_one = {
        name
        for state in record.states
        if state.is_parameter or state.memory in written
        for name in state.names
    }
    for name in cut.empty.own:
        if name in in_one:
            used.setdefault(name, {0})
        else:
            used[name] = set(range(cut.stages))
    return {name: frozenset(used[name]) for name in (*cut.empty.modules, *cut.empty.own, *used)}


def _homes_by_definition(cut: CutModel) -> dict[str, frozenset[int]]:
    """Units in stages in the order in which the model defines them."""
    for start in cut.cuts:
        if start.call:
            raise PartitionError(
                f"the cut {start!r} is one of several calls of {start.unit!r}; pass example=, the "
                "arguments of the model, to see what is between them"
            )
    homes, waiting = dict[str, frozenset[int]](), [start.unit for start in cut.cuts]
    for name in cut.empty.modules:
        if name in waiting[1:]:
            raise PartitionError(
                f"{name!r} is defined before {waiting[0]!r}; list the cuts in the order of their "
                "calls, and pass example=, the arguments of the model, if that is not the order of "
                "their definition"
            )
        if name in waiting:
            waiting.pop(0)
        homes[name] = frozenset({cut.stages - 1 - len(waiting)})
    for name in cut.empty.own:
        homes[name] = frozenset({0} if name in cut.empty.parameters else range(cut.stages))
    return homes


# The stages of a model, however it was cut


def make_stage(model: nn.Module, cut: CutModel, stage: int) -> RecordedStage:
    """The module of a stage, with the modules and tensors of the model that it has."""
    made = RecordedStage(cut, stage)
    made.training = model.training
    units = cut.empty.modules
    for name in (n for n in dict.fromkeys((*units, *cut.homes)) if stage in cut.homes[n]):
        path, _, key = name.rpartition(".")
        source, holder = model.get_submodule(path), _holder(model, made, path)
        if name in units:
            holder._modules[key] = source._modules[key]
        elif key in source._buffers:
            persistent = key not in source._non_persistent_buffers_set
            holder.register_buffer(key, source._buffers[key], persistent)
        else:
            holder._parameters[key] = source._parameters[key]
    for module in made.modules():
        for key, tensor in module._parameters.items():
            if made._lead is None and tensor is not None and tensor.is_floating_point():
                made._lead = module._parameters, key, tensor.dtype
    return made


def _holder(model: nn.Module, made: nn.Module, path: str) -> nn.Module:
    """The module at a path in a stage: a list or dict, or one that only holds others."""
    holder: Any = made
    source: Any = model
    for key in path.split(".") if path else ():
        source = source._modules[key]
        if key not in holder._modules:
            kinds = (nn.ModuleList, nn.ModuleDict, nn.Module)
            holder._modules[key] = next(kind for kind in kinds if isinstance(source, kind))()
            holder._modules[key].training = source.training
        holder = holder._modules[key]
    return holder


class Pieces(Sequence[nn.Module]):
    """The stages of a model, in order. Calling them runs one after the other.

    A parameter that is one object in several stages becomes a :class:`Tie`, which schedules find in
    the modules.

    >>> embed, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    >>> head.weight = embed.weight
    >>> pieces = by_hand([embed, nn.Linear(4, 4), head])
    >>> pieces
    Pieces(3 stages: 32, 20, 32 parameters; tied: weight of stage 0 = weight of stage 2)
    >>> pieces(torch.tensor([1, 2])).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        cuts: Iterable[str] = (),
        model: nn.Module | None = None,
    ) -> None:
        """``cuts`` are the names at which ``model`` was cut into these, if it was."""
        self._modules = tuple(check_list("modules", modules, error=PartitionError))
        if not self._modules:
            raise PartitionError("a model without stages: pass at least one")
        for stage, module in enumerate(self._modules):
            if not isinstance(module, nn.Module):
                raise PartitionError(f"stage {stage} is {shown(module)}, not an nn.Module")
        self.division: object = None
        """The costs of the stages, if they decided where to cut."""
        self.starts = [*cuts]
        """The submodules with which stages begin, but the first one."""
        self.ties: tuple[Tie, ...] = find_ties(self._modules)
        for module in self._modules:
            declare(module, self.ties)
        attach(self._modules, blueprint(dict(enumerate(self._modules)), self.starts, model))

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._modules)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of one stage."""
        return self._modules[require_stage(stage_idx, self.num_stages)]

    def build_stage(
        self, stage_index: int, device: torch.device, group: ProcessGroup | None = None
    ) -> PipelineStage:
        """A stage to run in a schedule; its module is moved to a device, or materialised there."""
        module = materialise(self.get_stage_module(stage_index), device)
        return PipelineStage(module, stage_index, self.num_stages, device, group=group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; returns the output of the model."""
        value = self._modules[0](*args, **kwargs)
        for module in self._modules[1:]:
            value = module(*as_arguments(value))
        return value

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        return self._modules[index]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    def __repr__(self) -> str:
        counts = (sum(p.numel() for p in module.parameters()) for module in self._modules)
        listed = ", ".join(f"{count:,}" for count in counts)
        ties = [*map(str, self.ties[:3]), *(["…"] if len(self.ties) > 3 else [])]
        tied = f"; tied: {', '.join(ties)}" if ties else ""
        return f"Pieces({counted(self.num_stages, 'stage')}: {listed} parameters{tied})"

    def __str__(self) -> str:
        return repr(self) if self.division is None else f"{self!r}\n{self.division}"


def require_stage(stage: int, count: int) -> int:
    """The number of a stage; raises if there is no such stage."""
    if not 0 <= check("stage_idx", stage, int) < count:
        raise PartitionError(
            f"there is no stage {shown(stage)}: stages are numbered from 0 to {count - 1}"
        )
    return stage


def by_hand(modules: Iterable[nn.Module]) -> Pieces:
    """Take modules as the stages of a model."""
    return Pieces(modules)
