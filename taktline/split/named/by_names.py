"""Cuts a model at submodules by name, without a trace: each stage runs the model's forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn

from taktline import pytree
from taktline.checks import known_keywords, refuse, require_instance, require_iterable
from taktline.errors import PartitionError
from taktline.split.arguments import Call, arguments_of, tensors_in
from taktline.split.named.dry_run import dry_run
from taktline.split.named.forward_summary import Cut, ForwardSummary
from taktline.split.named.hugging_face import install_hooks, without_padding
from taktline.split.named.known_calls import cache_key
from taktline.split.named.layout import Layout
from taktline.split.named.recurrent import open_recurrent
from taktline.split.named.sequential import slice_sequential
from taktline.split.named.shape_probe import require_not_nested
from taktline.split.named.stage_forward import StageForward
from taktline.split.named.units import derived_class, is_own_unit
from taktline.split.stages import Pieces
from taktline.stage.names import unwrapped
from taktline.text import did_you_mean

_log = logging.getLogger("taktline")
_CUTS = "a list of names of submodules"


@known_keywords
def by_names(model: nn.Module, cuts: Sequence[str], *, example: Any = None) -> Pieces:
    """Cut a model at submodules that its forward calls; every stage runs that same forward.

    An ``nn.Sequential`` is sliced: a stage has its own modules alone. Of other models, each stage
    computes again what the forward itself computes (masks, positions, rotary embeddings); outputs
    of submodules go from stage to stage.

    Args:
        model: any module; it stays unchanged, and the stages have its own parameters. It may be
            on the meta device.
        cuts: the names of the submodules with which a new stage begins, in the order of their
            calls. Of one that is called several times, ``"block@3"`` is the call after three
            others; it then lies in several stages, as a tied weight.
        example: a micro-batch, to see what the forward calls when: a tuple of arguments, or
            ``(args, kwargs)``. Only shapes matter. Hugging Face models have one themselves;
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
    require_instance("model", model, nn.Module, "an nn.Module", PartitionError)
    model = without_compiler(model)
    given = require_iterable("cuts", cuts, _CUTS, PartitionError)
    if not all(isinstance(cut, str) for cut in given):
        refuse("cuts", _CUTS, cuts, PartitionError)
    model = open_recurrent(model, given)
    starts = _checked(model, given)
    call = None if example is None else as_call(model, example)
    slices = slice_sequential(model, starts)
    if slices is not None:
        return Pieces(slices, cuts=given, model=model)
    layout, summary = _dry_run(model, starts, call)
    if summary is not None and summary.hooked:
        install_hooks(map(model.get_submodule, sorted(summary.hooked)))
        layout, summary = _dry_run(model, starts, call)
    if summary is None:
        _place_by_definition(layout)
    else:
        layout.summary = summary
        _place_by_use(layout, summary)
    modules = [_stage_module(layout, model, stage) for stage in range(layout.stages)]
    return Pieces(modules, cuts=given, model=model)


class _Stage:
    """Mixed into the class of a model that is cut."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage."""
        stage_forward: StageForward = vars(self)["_stage_forward"]
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        return stage_forward.run(self, forward, args, kwargs)  # pyright: ignore[reportArgumentType]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the units of this stage, but not the forward, which runs with placeholders."""
        stage_forward: StageForward = vars(self)["_stage_forward"]
        for name in stage_forward.layout.probes:
            unit: nn.Module = self.get_submodule(name)  # pyright: ignore[reportAttributeAccessIssue]
            if is_own_unit(unit):
                unit._compiled_call_impl = torch.compile(_call_of(unit), *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # pyright: ignore[reportAttributeAccessIssue]
        vars(self)["_stage_forward"].layout.retype(self, fn)
        return self


def _call_of(unit: nn.Module) -> Callable[..., Any]:
    """The call of a module as a function of ours: torch does not compile its own functions."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return unit._call_impl(*args, **kwargs)

    return call


def _stage_module(layout: Layout, model: nn.Module, stage: int) -> nn.Module:
    made = layout.stage_modules(model, stage)
    made.__class__ = derived_class(type(model), _Stage)
    vars(made)["_stage_forward"] = StageForward(layout, stage)
    return made


def _dry_run(
    model: nn.Module, cuts: Sequence[Cut], call: Call | None
) -> tuple[Layout, ForwardSummary | None]:
    """A layout, and what the forward does with the example, or else with the model's own."""
    layout = Layout.of(model, cuts)
    if call is None:
        return layout, _run_dummy_inputs(layout, model)
    layout.example_key = cache_key(call)
    return layout, dry_run(layout, *call, thorough=True)


def _run_dummy_inputs(layout: Layout, model: nn.Module) -> ForwardSummary | None:
    """What the forward does with the example of a Hugging Face model; None if there is none."""
    dummies = getattr(model, "dummy_inputs", None)
    if not isinstance(dummies, dict):
        return None
    kwargs = {name: without_padding(model, dummy) for name, dummy in dummies.items()}
    try:
        return dry_run(layout, *as_call(model, ((), kwargs)))
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


def _checked(model: nn.Module, cuts: Sequence[str]) -> tuple[Cut, ...]:
    """The cuts; raises if one is not a submodule, is there twice, or lies inside of another."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
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
        if type(unwrapped(model.get_submodule(unit))).forward is nn.Module.forward:
            raise PartitionError(
                f"{unit!r} is a {type(model.get_submodule(unit)).__name__}, which is never called "
                f"itself; cut inside it, such as at '{unit}.0'"
            )
    return tuple(read)


def as_call(model: nn.Module, example: Any) -> Call:
    """An example as the arguments of a call, on the device of the model."""
    call = arguments_of(example)
    for tensor in tensors_in(call):
        require_not_nested(tensor, "the example has")
    tensors = (*model.parameters(), *model.buffers())
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    if device is None:
        return call

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:  # only its shape matters
            return torch.zeros_like(tensor, device=device)
        return tensor.to(device)

    return pytree.tree_map_only(torch.Tensor, moved, call)


def _place_by_use(layout: Layout, summary: ForwardSummary) -> None:
    """Put each unit and parameter into the stages that use it."""
    stage = 0
    for name, probe in layout.probes.items():
        called = set(summary.calls.get(name, ()))
        if len(called) > 1 and probe.changes_buffers:
            *first, last = map(str, sorted(called))
            raise PartitionError(
                f"the forward calls {name!r} in stages {', '.join(first)} and {last}, and each "
                "would change its own copy of the buffers; cut the model so that all calls are in "
                "one stage"
            )
        used = called | summary.uses.get(name, set())
        # A unit that is never called has a state, too: it goes with the one before it.
        stage = min(used, default=stage)
        layout.homes[name] = frozenset(used or {stage})
    for name in layout.direct:
        layout.homes[name] = frozenset(summary.uses.get(name, {0}))


def _place_by_definition(layout: Layout) -> None:
    """Put units into stages in the order in which the model defines them."""
    for cut in layout.cuts:
        if cut.call:
            raise PartitionError(
                f"the cut {cut!r} is one of several calls of {cut.unit!r}; pass example=, the "
                "arguments of the model, to see what is between them"
            )
    stage = 0
    for name in layout.probes:
        if Cut(name) in layout.cuts:
            if Cut(name) != layout.start(stage + 1):
                raise PartitionError(
                    f"{name!r} is defined before {layout.start(stage + 1)!r}; list the cuts in the "
                    "order of their calls, and pass example=, the arguments of the model, if that "
                    "is not the order of their definition"
                )
            stage += 1
        layout.homes[name] = frozenset({stage})
    for name in layout.direct:
        layout.homes[name] = frozenset({0})
