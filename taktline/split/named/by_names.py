"""A model cut at submodules by their names, without a trace: each stage runs its own forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.checks import refuse, require_instance, require_iterable
from taktline.errors import PartitionError
from taktline.split.example import Call, arguments_of
from taktline.split.named.chain import sliced
from taktline.split.named.course import Course, Cut
from taktline.split.named.layout import Layout
from taktline.split.named.looks import look
from taktline.split.named.of_transformers import hook, without_padding
from taktline.split.named.piece import piece
from taktline.split.named.recurrent import open_recurrent
from taktline.split.named.shape_probe import require_plain
from taktline.split.named.walk import walk
from taktline.split.pieces import Pieces
from taktline.stage.names import unwrapped
from taktline.text import did_you_mean

__all__ = ["as_call", "by_names", "without_compiler"]

_log = logging.getLogger("taktline")
_CUTS = "a list of names of submodules"


def by_names(model: nn.Module, cuts: Sequence[str], *, example: Any = None) -> Pieces:
    """Cut a model at submodules that its forward calls; every stage runs that same forward.

    An ``nn.Sequential`` is sliced: a stage has its own modules alone. Of other models, what the
    forward computes by itself (masks, positions, rotary embeddings) each stage computes,
    too; what the submodules of other stages return is handed on from stage to stage.

    Args:
        model: any module; it is left as it is, and the pieces have its own parameters. It may be
            on the meta device.
        cuts: the names of the submodules with which a new stage begins, in the order of their
            calls. Of one that is called several times, ``"block@3"`` is the call after three
            others; it then lies in several stages, as a tied weight.
        example: a micro-batch, to see what the forward calls when: a tuple of arguments, or
            ``(args, kwargs)``. Only shapes matter. Models of transformers have one themselves;
            without one, submodules are taken to be called in the order of their definition.

    >>> import taktline as tl
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> pieces = tl.split.by_names(model, ["2"])
    >>> [name for name, _ in pieces[1].named_parameters()]
    ['2.weight', '2.bias']
    >>> x = torch.ones(2, 4)
    >>> torch.equal(pieces(x), model(x))
    True
    """
    model = without_compiler(model)
    if isinstance(model, nn.Module) and not isinstance(cuts, str):
        cuts = require_iterable("cuts", cuts, _CUTS, PartitionError)
        model = open_recurrent(model, cuts)
    begun = _checked(model, cuts)
    call = None if example is None else as_call(model, example)
    pieces = sliced(model, begun)
    if pieces is not None:
        return Pieces(pieces)
    layout, course = _walked(model, begun, call)
    if course is not None and course.hooked:
        hook(map(model.get_submodule, sorted(course.hooked)))
        layout, course = _walked(model, begun, call)
    if course is None:
        _by_definition(layout)
    else:
        layout.course = course
        _by_course(layout, course)
    return Pieces([piece(layout, model, stage) for stage in range(layout.stages)])


def _walked(
    model: nn.Module, cuts: Sequence[Cut], call: Call | None
) -> tuple[Layout, Course | None]:
    """A layout, and what the forward does with an example, or with one of the model's own."""
    layout = Layout.of(model, cuts)
    if call is None:
        return layout, _dummy_course(layout, model)
    layout.example = look(call)
    return layout, walk(layout, *call, thorough=True)


def without_compiler(model: nn.Module) -> nn.Module:
    """The model that ``torch.compile(model)`` compiles: as a whole it does not run here."""
    inside = model._modules.get("_orig_mod") if isinstance(model, nn.Module) else None
    if inside is None and getattr(model, "_compiled_call_impl", None) is None:
        return model
    _log.warning(
        "the model was compiled as a whole, and its stages run as they are; compile its blocks "
        "(block.compile()), or say compile=True"
    )
    return model if inside is None else inside


def _checked(model: nn.Module, cuts: Sequence[str]) -> tuple[Cut, ...]:
    """The cuts, if they are names of submodules that do not get into each other's way."""
    require_instance("model", model, nn.Module, "an nn.Module", PartitionError)
    given = require_iterable("cuts", cuts, _CUTS, PartitionError)
    if not all(isinstance(cut, str) for cut in given):
        refuse("cuts", _CUTS, cuts, PartitionError)
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    read = [Cut.read(text, names) for text in given]
    for place, (cut, begun) in enumerate(zip([cut.unit for cut in read], read, strict=True)):
        if cut not in names:
            raise PartitionError(
                f"cuts name {cut!r}, but {type(model).__name__} has no such submodule; "
                f"{did_you_mean(cut, names)}"
            )
        if begun in read[:place]:
            raise PartitionError(f"cuts name {begun!r} twice; a stage can begin there once")
        inside = next((other.unit for other in read if cut.startswith(f"{other.unit}.")), None)
        if inside is not None:
            raise PartitionError(
                f"the cut {cut!r} lies inside of {inside!r}, which begins a stage as a whole; cut "
                f"at the first submodule of {inside!r} instead"
            )
        if type(unwrapped(model.get_submodule(cut))).forward is nn.Module.forward:
            raise PartitionError(
                f"{cut!r} is a {type(model.get_submodule(cut)).__name__}, which is never called "
                f"itself; cut at what it holds, such as '{cut}.0'"
            )
    return tuple(read)


def _dummy_course(layout: Layout, model: nn.Module) -> Course | None:
    """What the forward does with an example of the model's own; None if there is none."""
    dummies = getattr(model, "dummy_inputs", None)
    if not isinstance(dummies, dict):
        return None
    call = {name: without_padding(model, dummy) for name, dummy in dummies.items()}
    try:
        return walk(layout, *as_call(model, ((), call)))
    except PartitionError:
        raise
    except Exception as error:
        # Models of images have words as an example, too: whatever they raise over them, the order
        # of their definition serves instead.
        _log.info("dummy_inputs do not fit the model: %s: %s", type(error).__name__, error)
        return None


def as_call(model: nn.Module, example: Any) -> Call:
    """The arguments of a call, where the model's tensors are."""
    call = arguments_of(example)
    for leaf in pytree.tree_leaves(call):
        if isinstance(leaf, torch.Tensor):
            require_plain(leaf, "the example has")
    tensors = (*model.parameters(), *model.buffers())
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    if device is None:
        return call

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:  # its shape is all that matters
            return torch.zeros_like(tensor, device=device)
        return tensor.to(device)

    return pytree.tree_map_only(torch.Tensor, moved, call)


def _by_course(layout: Layout, course: Course) -> None:
    """Let each unit lie in the stages that use it, as a walk has seen."""
    stage = 0
    for name, probe in layout.probes.items():
        called = set(course.calls.get(name, ()))
        if len(called) > 1 and probe.changes_buffers:
            raise PartitionError(
                f"the forward calls {name!r} in the stages {_listed(called)}, and it changes its "
                "buffers, which each stage would do by itself; cut the model where all its calls "
                "are in one stage"
            )
        used = called | course.units.get(name, set())
        # What is never called is kept beside what is defined before it, for the state's sake.
        stage = min(used, default=stage)
        layout.homes[name] = frozenset(used or {stage})
    for name in layout.direct:
        layout.users[name] = frozenset(course.uses.get(name, {0}))


def _by_definition(layout: Layout) -> None:
    """Let stages follow each other in the order in which the model has its units."""
    for cut in layout.cuts:
        if cut.call:
            raise PartitionError(
                f"the cut {cut!r} is one of several calls of {cut.unit!r}; pass an example= of "
                "what the model is called with, to see what lies between them"
            )
    stage = 0
    for name in layout.probes:
        if Cut(name) in layout.cuts:
            if Cut(name) != layout.start(stage + 1):
                raise PartitionError(
                    f"{name!r} is defined before {layout.start(stage + 1)!r}; list the cuts in "
                    "the order of their calls, and pass an example= of what the model is called "
                    "with if that is not the order of their definition"
                )
            stage += 1
        layout.homes[name] = frozenset({stage})
    for name in layout.direct:
        layout.users[name] = frozenset({0})


def _listed(stages: set[int]) -> str:
    *first, last = map(str, sorted(stages))
    return f"{', '.join(first)} and {last}"
