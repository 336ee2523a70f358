"""Compares one step with the plain model, and reports the first tensor that differs."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from torch import nn

from taktline.checks import Either, require_instance
from taktline.device import keep_generators
from taktline.errors import UseError
from taktline.stage.names import named_buffers, named_modules, named_parameters, unchanged
from taktline.train.broadcast import broadcast
from taktline.train.build import Built
from taktline.train.comparison import (
    Comparison,
    Difference,
    Expected,
    Recorder,
    Verification,
    cloned,
)
from taktline.train.state_dict import gathered_state
from taktline.train.steps import forward_order, in_mode, run
from taktline.transport.exchange import share_values

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def verify(
    built: Built,
    model: nn.Module,
    batch: tuple[tuple[Any, ...], Any, dict[str, Any]],
    tolerance: float | None,
) -> Verification:
    """See :meth:`taktline.Pipeline.verify`; all ranks take part."""
    mesh = built.ranks.mesh
    if mesh is not None and mesh.ndim > 1:
        raise UseError(
            "verify() needs a pipeline without replicas and tensor parallelism; make one with the "
            "same stages"
        )
    with built.everywhere("verify()"):
        plain = _copy_of(model, built)
    parts = [m for module in (plain, *built.model.modules.values()) for m in module.modules()]
    dropouts = [part for part in parts if isinstance(part, _DROPOUTS)]
    with (
        keep_generators([built.ranks.device]),
        unchanged(built.model.modules.values()),
        in_mode(*dropouts, training=False),
        ExitStack() as stack,
    ):
        expected = Expected(plain, built.options["loss_fn"], batch)
        recorders = {stage: Recorder() for stage in built.model.modules}
        for stage, module in built.model.modules.items():
            same = _same_modules(built, stage, plain)
            stack.enter_context(recorders[stage].recording(module, same))
        runner, before = built.schedule._runner, built.schedule.steps
        stepped_at = runner.stepped_at
        _, loss = run(built, "step", cloned(batch), (None, None), False)
        built.schedule.steps, runner.stepped_at = before, stepped_at  # this is no training step
        found = Comparison(expected, tolerance)
        for stage, recorder in recorders.items():
            count = len(recorder.forwards)
            order = [part for part in forward_order(built.plan, stage) if part < count]
            found.forwards(stage, recorder.forwards, order)
        found.loss(built.plan.stages - 1, loss)
        for stage, name, parameter in built.parameters():
            found.parameter(stage, name, parameter)
    return _merged(built, found)


def _copy_of(model: nn.Module, built: Built) -> nn.Module:
    """The plain model with the pipeline's values, on every rank."""
    require_instance("model", model, nn.Module)
    ranks = built.ranks
    values = gathered_state(built.model, ranks)
    if ranks.group is not None:
        values = broadcast(values, ranks.group, ranks.device, 0, "verify()")
    plain = copy.deepcopy(model)
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    plain = plain.to_empty(device=ranks.device) if is_meta else plain.to(ranks.device)
    try:
        missing, unknown = plain.load_state_dict(values, strict=False)
    except RuntimeError as error:
        raise UseError(f"verify() needs the plain model, with the same shapes: {error}") from None
    if missing or unknown:
        differ = f"without {missing[:3]}" if missing else f"with {unknown[:3]}"
        raise UseError(
            f"verify() needs the plain model, with the names of pipe.state_dict(), which is "
            f"{differ}; of a list of stages it is nn.Sequential(*stages)"
        )
    modes = [module.training for module in built.model.modules.values()]
    plain.train(all(modes))
    for parameter in plain.parameters():
        parameter.grad = None
    return plain


def _same_modules(built: Built, stage: int, plain: nn.Module) -> dict[str, nn.Module]:
    """The modules of a stage that are whole: with the same contents as in the model."""
    theirs, found = named_modules(plain), dict[str, nn.Module]()
    for name, module in named_modules(built.model.modules[stage]).items():
        in_model = built.model.name(stage, name).removesuffix(".")
        if in_model in theirs and _contents(module) == _contents(theirs[in_model]):
            found[in_model] = module
    return found


def _contents(module: nn.Module) -> list[list[str]]:
    """The names in a module; classes may differ, as those of a cut model do."""
    parts = named_modules(module), named_parameters(module), named_buffers(module)
    return [list(names) for names in parts]


def _merged(built: Built, found: Comparison) -> Verification:
    """The result of all ranks, on each of them."""
    first = None if found.first is None else asdict(found.first)
    fields = {"phase": int, "place": int, "microbatch": int, "stage": int}
    shape = (int, Either(None, fields | {"name": str, "error": float, "advice": str}))
    results = share_values(
        built.ranks.transport, (found.compared, first), shape, "verify()", what="the differences"
    )
    differences = [Difference(**each) for _, each in results if each is not None]
    compared = sum(count for count, _ in results)
    return Verification(compared, min(differences, key=Difference.order, default=None))
