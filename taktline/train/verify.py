"""Compares one step with the plain model, and reports the first tensor that differs."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from taktline import pytree
from taktline.checks import Either, check
from taktline.device import keep_generators
from taktline.errors import UseError
from taktline.plan import Kind, Plan
from taktline.side_values import collect_losses
from taktline.stage.names import named_modules, unchanged
from taktline.train.build import Built
from taktline.train.parameters import gathered_state
from taktline.train.steps import in_mode, of_model, run
from taktline.transport.exchange import share_values

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE = 3e-2
"""For types with fewer digits."""
_ENDLESS = sys.float_info.max
"""Reported for an error that is not finite."""
_PHASES = {
    "forward": "the output of {}",
    "loss": "the loss",
    "gradient": "the gradient of the parameter {}",
}
_MEAN = (
    "the mean of loss_fn over micro-batches is not its value for the batch: make it a mean over "
    "rows, or pass loss_weights"
)
_DROPOUTS = tuple(getattr(nn, name) for name in nn.modules.dropout.__all__)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tensor that differs between a pipeline and the plain model."""

    within: str
    """The phase: "forward", "loss" or "gradient"."""
    place: int
    """In the order in which the plain model computes."""
    microbatch: int
    """-1: all of them together."""
    stage: int
    name: str
    """Of a module, or of a parameter."""
    error: float
    """The largest difference, relative to the largest value."""
    advice: str = ""

    def order(self) -> tuple[int, int, int]:
        """A key that sorts differences in the order in which the plain model computes."""
        return list(_PHASES).index(self.within), self.place, self.microbatch

    def __str__(self) -> str:
        where = f"stage {self.stage}"
        where += f", micro-batch {self.microbatch}" if self.microbatch >= 0 else ""
        what = _PHASES[self.within].format(self.name or "the model")
        advice = f"; {self.advice}" if self.advice else ""
        much = "is not finite" if self.error == _ENDLESS else f"differs by {self.error:.1e}"
        return f"{where}, {self.within}: {what} {much}{advice}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What :meth:`taktline.Pipeline.verify` has found; true if nothing differs."""

    compared: int
    """The number of tensors that were compared, on all ranks."""
    difference: Difference | None

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        equal = f"equal to the plain model: {self.compared:,} tensors"
        return equal if self.difference is None else str(self.difference)


def verify(
    built: Built,
    model: nn.Module,
    batch: tuple[tuple[Any, ...], Any, dict[str, Any]],
    tolerance: float | None,
) -> Verification:
    """See :meth:`taktline.Pipeline.verify`; all ranks take part."""
    if tolerance is not None:
        check("tolerance", tolerance, float, least=0)
    mesh = built.ranks.mesh
    if mesh is not None and mesh.ndim > 1:
        raise UseError(
            "verify() needs a pipeline without replicas and tensor parallelism; make one with the "
            "same stages"
        )
    with built.everywhere("verify()"):
        plain = _copy_of(model, built)
    stages = built.model.modules
    parts = [part for module in (plain, *stages.values()) for part in module.modules()]
    dropouts = [part for part in parts if isinstance(part, _DROPOUTS)]
    with (
        keep_generators([built.ranks.device]),
        unchanged(stages.values()),
        in_mode(*dropouts, training=False),
        ExitStack() as stack,
    ):
        found = _Comparison(plain, built.options["loss_fn"], batch, tolerance)
        forwards = {
            stage: stack.enter_context(_recording(module, _same_modules(built, stage, plain)))
            for stage, module in stages.items()
        }
        runner, before = built.schedule._runner, built.schedule.steps
        stepped_at = runner.stepped_at
        _, loss = run(built, "step", _cloned(batch), (None, None), False)
        built.schedule.steps, runner.stepped_at = before, stepped_at  # this is no training step
        for stage, recorded in forwards.items():
            order = [part for part in _order(built.plan, stage) if part < len(recorded)]
            found.outputs(stage, dict(sorted(zip(order, recorded, strict=True))))
        if loss is not None:
            where = (0, -1, built.plan.stages - 1, "")
            found.compare("loss", where, loss.detach(), found.loss.detach(), _MEAN)
        for stage, name, parameter in built.parameters():
            found.parameter(stage, name, parameter)
    first = None if found.first is None else astuple(found.first)
    shape = (int, Either(None, (str, int, int, int, str, float, str)))
    mine, call = (found.compared, first), "verify()"
    shared = share_values(built.ranks.transport, mine, shape, call, what="the differences")
    differences = [Difference(*each) for _, each in shared if each is not None]
    compared = sum(count for count, _ in shared)
    return Verification(compared, min(differences, key=Difference.order, default=None))


def _order(plan: Plan, stage: int) -> list[int]:
    """The micro-batches in the order in which a stage runs them forward."""
    rows = plan.rows_of(plan.placement.rank_of[stage])
    return rows.microbatch[(rows.kind == Kind.F) & (rows.stage == stage)].tolist()


def _copy_of(model: nn.Module, built: Built) -> nn.Module:
    """The plain model with the pipeline's values, on every rank."""
    check("model", model, nn.Module)
    device, plain = built.ranks.device, copy.deepcopy(model)
    values = gathered_state(built.model, built.ranks, everywhere=True)
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
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


def _same_modules(built: Built, stage: int, plain: nn.Module) -> dict[str, nn.Module]:
    """The modules of a stage that are whole: with the same modules inside as in the model."""
    theirs, found = named_modules(plain), dict[str, nn.Module]()
    for name, module in named_modules(built.model.modules[stage]).items():
        in_model = built.model.name(stage, name).removesuffix(".")
        if in_model in theirs and list(named_modules(module)) == [*named_modules(theirs[in_model])]:
            found[in_model] = module
    return found


_Forward: TypeAlias = dict[tuple[str, int, int], torch.Tensor]
"""Outputs by module, its call within the forward, and the place in its output; in that order."""


@contextmanager
def _recording(root: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[list[_Forward]]:
    """Yields a list that gets the outputs of modules in each call of ``root``."""
    forwards: list[_Forward] = []
    inside, counts = [False], Counter[str]()  # what a backward computes again is not recorded

    def begin(*_: Any) -> None:
        inside[0] = True
        counts.clear()
        forwards.append({})

    def end(*_: Any) -> None:
        inside[0] = False

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            if inside[0]:
                tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
                for place, tensor in enumerate(tensors):
                    # A copy, as the next module may change it in place.
                    forwards[-1][name, counts[name], place] = tensor.detach().clone()
                counts[name] += 1

        return record

    with ExitStack() as stack:
        for handle in (
            root.register_forward_pre_hook(begin),
            *(part.register_forward_hook(hook(name)) for name, part in modules.items()),
            root.register_forward_hook(end, always_call=True),
        ):
            stack.callback(handle.remove)
        yield forwards


class _Comparison:
    """A step of the plain model on the whole batch, and the first difference on this process."""

    def __init__(self, model: nn.Module, loss_fn: Any, batch: Any, tolerance: float | None) -> None:
        self._tolerance = tolerance
        self.first: Difference | None = None
        self.compared = 0
        args, target, options = _cloned(batch)
        with _recording(model, named_modules(model)) as forwards, collect_losses() as added:
            output = model(*args, **of_model(options))
        loss = loss_fn(output, target, **options.get("loss_kwargs") or {})
        self.loss = sum(added, start=loss)
        self.loss.backward()
        self._expected = forwards[0]
        named = list(model.named_parameters(remove_duplicate=False))
        self._gradients = {name: (place, p.grad) for place, (name, p) in enumerate(named)}
        gradients = [p.grad for _, p in named if p.grad is not None]
        self._largest = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)

    def outputs(self, stage: int, by_microbatch: Mapping[int, _Forward]) -> None:
        """Compare the outputs of a stage's modules."""
        for place, (call, whole) in enumerate(self._expected.items()):
            found = {m: forward[call] for m, forward in by_microbatch.items() if call in forward}
            rows = _rows(whole, list(found.values()))
            for (microbatch, output), expected in zip(found.items(), rows, strict=False):
                self.compare("forward", (place, microbatch, stage, call[0]), output, expected)

    def parameter(self, stage: int, name: str, parameter: nn.Parameter) -> None:
        """Compare the sum of a parameter's gradients over the micro-batches."""
        if name not in self._gradients or not parameter.requires_grad:
            return
        place, expected = self._gradients[name]
        zeros = torch.zeros_like(parameter)
        found = zeros if parameter.grad is None else parameter.grad
        wanted = zeros if expected is None else expected
        where = (-place, -1, stage, name)  # the backward reaches the last one first
        self.compare("gradient", where, found, wanted, least=1e-3 * self._largest)

    def compare(
        self,
        within: str,
        where: tuple[int, int, int, str],
        found: torch.Tensor,
        expected: torch.Tensor,
        advice: str = "",
        least: float = 1e-12,
    ) -> None:
        """Compare two tensors, relative to the largest value, or to ``least`` if that is more."""
        self.compared += 1
        if found.dtype == expected.dtype and torch.equal(found, expected):
            return
        usual = _TOLERANCE.get(expected.dtype, _COARSE)
        limit = usual if self._tolerance is None else self._tolerance
        found, expected = found.double(), expected.double()
        scale = max(float(expected.abs().max()) if expected.numel() else 0.0, least, 1e-12)
        error = float((found - expected).abs().max()) / scale if expected.numel() else 0.0
        if error <= limit:
            return
        size = min(error, _ENDLESS) if error == error else _ENDLESS
        difference = Difference(within, *where, size, advice)
        if self.first is None or difference.order() < self.first.order():
            self.first = difference


def _rows(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The rows of each micro-batch in a tensor of the plain model; none if they do not match."""
    if all(part.shape == whole.shape for part in parts):
        return [whole] * len(parts)  # not cut
    if any(part.dim() != whole.dim() for part in parts):
        return []
    cut = {d for part in parts for d in range(whole.dim()) if part.shape[d] != whole.shape[d]}
    dim = min(cut)
    sizes = [part.shape[dim] for part in parts]
    return whole.split(sizes, dim) if len(cut) == 1 and sum(sizes) == whole.shape[dim] else []


def _cloned(batch: Any) -> Any:
    """A copy of a batch, which may be changed in place."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, batch)
