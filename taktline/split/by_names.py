"""Cuts a model at submodules by name: its forward is recorded, and each stage runs its steps."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from taktline.checks import check, check_list, known_keywords, refuse
from taktline.errors import PartitionError
from taktline.split.arguments import (
    Call,
    arguments_of,
    arguments_of_forward,
    device_of,
    filled,
    key_of,
    mapped,
    without_cache,
    without_padding,
)
from taktline.split.cut import Cut, Record
from taktline.split.record import record_twice
from taktline.split.recorded_stage import CutModel, StageProgram, key_of_kind, make_stage
from taktline.split.stages import Pieces
from taktline.split.without_data import EmptyModel
from taktline.stage.names import unwrapped
from taktline.text import did_you_mean

_log = logging.getLogger("taktline")
_CUTS = "a list of names of submodules"


@known_keywords
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
