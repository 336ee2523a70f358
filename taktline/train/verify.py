"""Compares one step with the plain model, and reports the first tensor that differs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from taktline import pytree
from taktline.checks import Either, check
from taktline.device import keep_generators
from taktline.errors import UseError
from taktline.plan import Kind
from taktline.side_values import collect_losses
from taktline.stage.names import named_modules, unchanged
from taktline.train.build import Built
from taktline.train.parameters import gathered_state
from taktline.train.steps import in_mode, of_model, run
from taktline.transport.exchange import share_values

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_FORWARD, _LOSS, _GRADIENT = range(3)
_MEAN = (
    "the mean of loss_fn over micro-batches is not its value for the batch: make it a mean over "
    "rows, or pass loss_weights"
)
_DROPOUTS = tuple(getattr(nn, name) for name in nn.modules.dropout.__all__)

_Forward: TypeAlias = dict[str, list[torch.Tensor]]
"""Outputs by module, of all its calls within the forward; in that order."""
_Pair: TypeAlias = tuple[tuple[int, int, int], str, torch.Tensor, torch.Tensor]
"""A tensor of the pipeline and that of the plain model: when it is computed there, and where.

The first is the phase, the second the place in it, and the third the micro-batch.
"""


@dataclass(frozen=True, slots=True)
class Verification:
    """What :meth:`taktline.Pipeline.verify` has found; true if nothing differs."""

    compared: int
    """The number of tensors that were compared, on all ranks."""
    difference: str
    """The first difference in the order in which the plain model computes; or nothing."""

    def __bool__(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        return self.difference or f"equal to the plain model: {self.compared:,} tensors"


def verify(
    built: Built,
    model: nn.Module,
    batch: tuple[tuple[Any, ...], Any, dict[str, Any]],
    tolerance: float | None,
) -> Verification:
    """See :meth:`taktline.Pipeline.verify`; all ranks take part."""
    if tolerance is not None:
        check("tolerance", tolerance, float, least=0)
    if built.ranks.mesh is not None and built.ranks.mesh.ndim > 1:
        raise UseError(
            "verify() needs a pipeline without replicas and tensor parallelism; make one with the "
            "same stages"
        )
    with built.everywhere("verify()"):
        plain = _copy_of(model, built)
    stages, runner = built.model.modules, built.schedule._runner
    steps, stepped_at = built.schedule.steps, runner.stepped_at
    parts = [part for module in (plain, *stages.values()) for part in module.modules()]
    dropouts = [part for part in parts if isinstance(part, _DROPOUTS)]
    with (
        keep_generators([built.ranks.device]),
        unchanged(stages.values()),
        in_mode(*dropouts, training=False),
        ExitStack() as stack,
    ):
        whole = _record(plain, named_modules(plain), stack)
        wanted = _plain_loss(plain, built.options["loss_fn"], batch)
        forwards = {
            stage: _record(module, _same_modules(built, stage, plain), stack)
            for stage, module in stages.items()
        }
        _, loss = run(built, "step", _cloned(batch), False)
        built.schedule.steps, runner.stepped_at = steps, stepped_at  # this is no training step
        pairs = [pair for stage in forwards for pair in _outputs(built, stage, forwards, *whole)]
        if loss is not None:
            where = f"stage {built.plan.stages - 1}, loss: the loss"
            pairs.append(((_LOSS, 0, 0), where, loss.detach(), wanted))
        pairs += _gradients(built, plain)
        largest = max((_largest(p.grad) for p in plain.parameters()), default=0.0)
    found: list[tuple[int, int, int, str]] = []
    for order, where, here, there in pairs:
        error = _error(here, there, tolerance, largest if order[0] == _GRADIENT else 0.0)
        if error:
            much = f"differs by {error:.1e}" if error < math.inf else "is not finite"
            found.append((*order, f"{where} {much}" + (f"; {_MEAN}" * (order[0] == _LOSS))))
    mine, shape = (len(pairs), min(found, default=None)), (int, Either(None, (int, int, int, str)))
    call, what = "verify()", "the differences"
    shared = share_values(built.ranks.transport, mine, shape, call, what=what)
    *_, first = min((each for _, each in shared if each is not None), default=[""])
    return Verification(sum(count for count, _ in shared), first)


def _copy_of(model: nn.Module, built: Built) -> nn.Module:
    """The plain model with the pipeline's values, on every rank."""
    check("model", model, nn.Module)
    values = gathered_state(built.model, built.ranks, everywhere=True)
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    plain, device = copy.deepcopy(model), built.ranks.device
    plain = plain.to_empty(device=device) if is_meta else plain.to(device)
    try:
        plain.load_state_dict(values)
    except RuntimeError as error:
        raise UseError(
            "verify() needs the plain model, with the names and shapes of pipe.state_dict(); of a "
            f"list of stages it is nn.Sequential(*stages): {error}"
        ) from None
    plain.train(all(module.training for module in built.model.modules.values()))
    plain.zero_grad()
    return plain


def _plain_loss(plain: nn.Module, loss_fn: Any, batch: Any) -> torch.Tensor:
    """Run the whole batch forward and backward; returns the loss."""
    args, target, options = _cloned(batch)
    with collect_losses() as added:
        output = plain(*args, **of_model(options))
    loss = sum(added, start=loss_fn(output, target, **options.get("loss_kwargs") or {}))
    loss.backward()
    return loss.detach()


def _same_modules(built: Built, stage: int, plain: nn.Module) -> dict[str, nn.Module]:
    """The modules of a stage that are whole: with the same modules inside as in the model."""
    theirs, found = named_modules(plain), dict[str, nn.Module]()
    for name, module in named_modules(built.model.modules[stage]).items():
        in_model = built.model.name(stage, name).removesuffix(".")
        if in_model in theirs and list(named_modules(module)) == [*named_modules(theirs[in_model])]:
            found[in_model] = module
    return found


def _record(root: nn.Module, modules: Mapping[str, nn.Module], stack: ExitStack) -> list[_Forward]:
    """A list that gets the outputs of modules in each call of ``root``, until the stack is left."""
    forwards: list[_Forward] = []
    running = False  # what a backward computes again is not recorded

    def begin(*_: Any) -> None:
        nonlocal running
        running = True
        forwards.append({})

    def end(*_: Any) -> None:
        nonlocal running
        running = False

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if running:
            tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
            # Copies, as the next module may change them in place.
            forwards[-1].setdefault(name, []).extend(x.detach().clone() for x in tensors)

    handles = [root.register_forward_pre_hook(begin)]
    handles += [part.register_forward_hook(partial(note, name)) for name, part in modules.items()]
    for handle in (*handles, root.register_forward_hook(end, always_call=True)):
        stack.callback(handle.remove)
    return forwards


def _outputs(
    built: Built, stage: int, forwards: Mapping[int, Sequence[_Forward]], whole: _Forward
) -> Iterator[_Pair]:
    """The outputs of modules for each micro-batch, and the same rows of the plain model's."""
    rows = built.plan.rows_of(built.plan.placement.rank_of[stage])
    order = rows.microbatch[(rows.kind == Kind.F) & (rows.stage == stage)].tolist()
    # Of a small batch, there are fewer micro-batches.
    order = [part for part in order if part < len(forwards[stage])]
    recorded = dict(sorted(zip(order, forwards[stage], strict=True)))
    for place, (name, outputs) in enumerate(whole.items()):
        # Of a module that several stages call, each has a part of the calls.
        called = [m for m in recorded if len(recorded[m].get(name, ())) == len(outputs)]
        for number, output in enumerate(outputs):
            parts = [recorded[microbatch][name][number] for microbatch in called]
            for microbatch, part, there in zip(called, parts, _rows(output, parts), strict=False):
                where = f"stage {stage}, micro-batch {microbatch}, forward: the output of "
                yield (_FORWARD, place, microbatch), where + (name or "the model"), part, there


def _rows(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The rows of each micro-batch in a tensor of the plain model; none if they do not match."""
    if all(part.shape == whole.shape for part in parts):
        return [whole] * len(parts)  # not cut
    if any(part.dim() != whole.dim() for part in parts):
        return []
    cut = {d for part in parts for d in range(whole.dim()) if part.shape[d] != whole.shape[d]}
    sizes = [part.shape[min(cut)] for part in parts]
    matches = len(cut) == 1 and sum(sizes) == whole.shape[min(cut)]
    return whole.split(sizes, min(cut)) if matches else []


def _gradients(built: Built, plain: nn.Module) -> Iterator[_Pair]:
    """The gradients of parameters, summed over the micro-batches."""
    named = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    for stage, name, parameter in built.parameters():
        if name in named and parameter.requires_grad:
            zeros, there = torch.zeros_like(parameter), plain.get_parameter(name).grad
            where = f"stage {stage}, gradient: the gradient of the parameter {name}"
            here = zeros if parameter.grad is None else parameter.grad
            # The backward reaches the last one first.
            order = _GRADIENT, -named.index(name), 0
            yield order, where, here, zeros if there is None else there


def _largest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())


def _error(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float | None, largest: float
) -> float:
    """The difference of two tensors, relative to the largest value; 0 if it is rounding.

    ``largest`` is that of all gradients: beside it, small ones are rounded coarsely.
    """
    if found.dtype == expected.dtype and torch.equal(found, expected):
        return 0.0
    usual = _TOLERANCE.get(expected.dtype, 3e-2)  # of types with fewer digits
    found, expected = found.double(), expected.double()
    error = _largest(found - expected) / max(_largest(expected), 1e-3 * largest, 1e-12)
    if math.isnan(error):
        return math.inf
    return 0.0 if error <= (usual if tolerance is None else tolerance) else error


def _cloned(batch: Any) -> Any:
    """A copy of a batch, which may be changed in place."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, batch)
