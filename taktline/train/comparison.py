"""Compares a step of a pipeline with a step of the plain model, tensor by tensor."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline import pytree
from taktline.runtime.schedule import LossFn
from taktline.side_values import collect_losses
from taktline.stage.names import named_modules
from taktline.train.steps import of_model

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE = 3e-2
"""For types with fewer digits."""
_ENDLESS = sys.float_info.max
"""Reported for an error that is not finite."""
_FORWARD, _LOSS, _BACKWARD, _GRADIENT = range(4)
_WORDS = ("forward", "loss", "backward", "gradient")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tensor that differs between a pipeline and the plain model."""

    phase: int
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

    @property
    def within(self) -> str:
        """The phase: "forward", "loss", "backward" or "gradient"."""
        return _WORDS[self.phase]

    def order(self) -> tuple[int, int, int]:
        """A key that sorts differences in the order in which the plain model computes."""
        return self.phase, self.place, self.microbatch

    def __str__(self) -> str:
        where = [f"stage {self.stage}"]
        where += [f"micro-batch {self.microbatch}"] * (self.microbatch >= 0)
        what = {
            _FORWARD: f"the output of {self.name or 'the model'}",
            _LOSS: "the loss",
            _BACKWARD: f"the gradient of the output of {self.name or 'the model'}",
            _GRADIENT: f"the gradient of the parameter {self.name}",
        }[self.phase]
        advice = f"; {self.advice}" if self.advice else ""
        much = "is not finite" if self.error == _ENDLESS else f"differs by {self.error:.1e}"
        return f"{', '.join(where)}, {self.within}: {what} {much}{advice}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What :meth:`taktline.Pipeline.verify` has found; true if nothing differs."""

    compared: int
    """The number of tensors that were compared, on all ranks."""
    difference: Difference | None

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"equal to the plain model: {self.compared:,} tensors"
        return str(self.difference)

    def __repr__(self) -> str:
        return f"Verification({self})"


class ModuleOutput(NamedTuple):
    """The name of an output tensor: its module, the call within a forward, and the tensor."""

    module: str
    call: int
    tensor: int


@dataclass(slots=True)
class Recorded:
    """A tensor, and the gradient that has reached it."""

    value: torch.Tensor
    gradient: torch.Tensor | None = None

    def keep_gradient(self, gradient: torch.Tensor) -> None:
        """Keep the first gradient: both halves of a split backward may call this."""
        if self.gradient is None:
            self.gradient = gradient.detach().clone()


@dataclass
class Recorder:
    """The records, forward by forward, in the order in which modules return."""

    forwards: list[dict[ModuleOutput, Recorded]] = field(default_factory=list)

    @contextmanager
    def recording(self, root: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Inside, record outputs of modules in each call of ``root``; not in recomputation."""
        inside, counts = [False], Counter[str]()

        def begin(*_: Any) -> None:
            inside[0] = True
            counts.clear()
            self.forwards.append({})

        def end(*_: Any) -> None:
            inside[0] = False

        def hook(name: str) -> Callable[..., None]:
            def note(module: nn.Module, args: Any, output: Any) -> None:
                if inside[0]:
                    self._note(name, counts[name], output)
                    counts[name] += 1

            return note

        handles = [root.register_forward_pre_hook(begin)]
        handles += [part.register_forward_hook(hook(name)) for name, part in modules.items()]
        handles.append(root.register_forward_hook(end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, call: int, output: Any) -> None:
        # Other classes of tensors are placeholders for values that a stage does not have.
        tensors = [leaf for leaf in pytree.tree_leaves(output) if type(leaf) is torch.Tensor]
        for place, tensor in enumerate(tensors):
            # A copy, as the next module may change it in place.
            entry = Recorded(tensor.detach().clone())
            self.forwards[-1][ModuleOutput(name, call, place)] = entry
            if tensor.requires_grad:
                tensor.register_hook(entry.keep_gradient)


class Expected:
    """A step of the plain model on the whole batch."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, batch: Any) -> None:
        modules = named_modules(model)
        first, again = Recorder(), Recorder()
        with first.recording(model, modules):
            self.loss = _loss(model, loss_fn, batch)
        self.loss.backward()
        with again.recording(model, modules), torch.no_grad():
            _loss(model, loss_fn, batch)
        (self.entries,), (other,) = first.forwards, again.forwards
        self.random = {
            call
            for call, entry in self.entries.items()
            if call not in other or not torch.equal(entry.value, other[call].value)
        }
        named = list(model.named_parameters(remove_duplicate=False))
        self.parameters = {name: (place, p.grad) for place, (name, p) in enumerate(named)}
        gradients = [p.grad for _, p in named if p.grad is not None]
        self.largest = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)


def _loss(model: nn.Module, loss_fn: LossFn, batch: Any) -> torch.Tensor:
    args, target, options = cloned(batch)
    with collect_losses() as added:
        output = model(*args, **of_model(options))
        loss = loss_fn(output, target, **options.get("loss_kwargs") or {})
    return loss + sum(added)


class Comparison:
    """The first difference on this process."""

    def __init__(self, expected: Expected, tolerance: float | None) -> None:
        self._expected = expected
        self._tolerance = tolerance
        self.first: Difference | None = None
        self.compared = 0

    def forwards(
        self, stage: int, forwards: Sequence[Mapping[ModuleOutput, Recorded]], order: Sequence[int]
    ) -> None:
        """Compare the outputs of a stage's modules, and the gradients that reach these outputs."""
        by_microbatch = dict(sorted(zip(order, forwards, strict=True)))
        for place, (call, whole) in enumerate(self._expected.entries.items()):
            found = {m: forward[call] for m, forward in by_microbatch.items() if call in forward}
            rows = _rows(whole, [entry.value for entry in found.values()])
            advice = _RANDOM if call in self._expected.random else ""
            for (microbatch, entry), wanted in zip(found.items(), rows, strict=False):
                where = (microbatch, stage, call.module)
                self._compare(_FORWARD, (place, *where), entry.value, wanted.value, advice)
                if wanted.gradient is not None:
                    none = torch.zeros_like(wanted.gradient)
                    gradient = none if entry.gradient is None else entry.gradient
                    backwards = len(self._expected.entries) - place
                    self._compare(_BACKWARD, (backwards, *where), gradient, wanted.gradient, "")

    def loss(self, stage: int, loss: torch.Tensor | None) -> None:
        """Compare the loss of the step."""
        if loss is not None:
            where = (0, -1, stage, "")
            self._compare(_LOSS, where, loss.detach(), self._expected.loss.detach(), _MEAN)

    def parameter(self, stage: int, name: str, parameter: nn.Parameter) -> None:
        """Compare the sum of a parameter's gradients over the micro-batches."""
        if name not in self._expected.parameters or not parameter.requires_grad:
            return
        place, expected = self._expected.parameters[name]
        zeros = torch.zeros_like(parameter)
        where = (-place, -1, stage, name)
        found = zeros if parameter.grad is None else parameter.grad
        wanted = zeros if expected is None else expected
        self._compare(_GRADIENT, where, found, wanted, "", 1e-3 * self._expected.largest)

    def _compare(
        self,
        phase: int,
        where: tuple[int, int, int, str],
        found: torch.Tensor,
        expected: torch.Tensor,
        advice: str,
        floor: float = 0.0,
    ) -> None:
        self.compared += 1
        if found.dtype == expected.dtype and torch.equal(found, expected):
            return
        usual = _TOLERANCE.get(expected.dtype, _COARSE)
        limit = usual if self._tolerance is None else self._tolerance
        found, expected = found.double(), expected.double()
        scale = max(float(expected.abs().max()) if expected.numel() else 0.0, floor, 1e-12)
        error = float((found - expected).abs().max()) / scale if expected.numel() else 0.0
        if error <= limit:
            return
        size = min(error, _ENDLESS) if error == error else _ENDLESS
        difference = Difference(phase, *where, size, advice)
        if self.first is None or difference.order() < self.first.order():
            self.first = difference


_RANDOM = (
    "the plain model itself returns another value each time: it is random, or it remembers calls"
)
_MEAN = (
    "the mean of loss_fn over micro-batches is not its value for the batch: make it a mean over "
    "rows, or pass loss_weights"
)


def _rows(whole: Recorded, parts: Sequence[torch.Tensor]) -> list[Recorded]:
    """The rows of each micro-batch in a tensor of the plain model; none if they do not match."""
    shape = whole.value.shape
    if all(part.shape == shape for part in parts):
        # Not cut: its gradient is the sum of those in all micro-batches.
        return [Recorded(whole.value)] * len(parts)
    if any(part.dim() != len(shape) for part in parts):
        return []
    cut = {dim for part in parts for dim in range(len(shape)) if part.shape[dim] != shape[dim]}
    dim = min(cut)
    sizes = [part.shape[dim] for part in parts]
    if len(cut) > 1 or sum(sizes) != shape[dim]:
        return []
    values, gradient = whole.value.split(sizes, dim), whole.gradient
    gradients = [None] * len(parts) if gradient is None else gradient.split(sizes, dim)
    return list(map(Recorded, values, gradients))


def cloned(batch: Any) -> Any:
    """A copy of a batch, which may be changed in place."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, batch)
