"""Reports which parts of a module's backward are split, and whether its gradients are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.checks import require_instance
from taktline.device import keep_generators
from taktline.stage.autograd_engine import accumulate
from taktline.stage.split_backward import Splitter, explain
from taktline.stage.unchanged import unchanged


@dataclass(frozen=True, slots=True)
class SplitReport:
    """Where the split backward computes the gradient of each parameter of a module.

    >>> block = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> print(check_split_backward(block, torch.ones(1, 2)))
    gradients equal those of a plain backward
    in W: 0.weight
    in I: 0.bias, 1.weight, 1.bias (no plain matrix)
    """

    later: tuple[str, ...]
    """Parameters whose gradients W computes."""
    at_once: dict[str, str]
    """Parameters whose gradients I computes, and why."""
    differences: dict[str, float]
    """The largest difference from a plain backward, by parameter or input that differs."""

    @property
    def exact(self) -> bool:
        """Whether all gradients equal those of a plain backward."""
        return not self.differences

    def __str__(self) -> str:
        if self.exact:
            lines = ["gradients equal those of a plain backward"]
        else:
            listed = ", ".join(f"{name} by {value:g}" for name, value in self.differences.items())
            lines = [f"gradients differ from those of a plain backward: {listed}"]
        lines.append(f"in W: {', '.join(self.later) or 'nothing'}")
        for reason in dict.fromkeys(self.at_once.values()):
            names = [name for name, other in self.at_once.items() if other == reason]
            lines.append(f"in I: {', '.join(names)} ({reason})")
        return "\n".join(lines)


def check_split_backward(module: nn.Module, *example: Any, **kwargs: Any) -> SplitReport:
    """Run a module's backward whole and split on an example, and compare.

    Gradients, buffers and random numbers are left as they were. Floating-point tensors among the
    positional arguments count as outputs of the stage before.

    >>> report = check_split_backward(nn.Linear(2, 3), torch.ones(1, 2))
    >>> report.exact, report.later
    (True, ('weight',))
    """
    require_instance("module", module, nn.Module, "an nn.Module")
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with unchanged([module]):
        plain, _ = _gradients(module, parameters, example, kwargs, split=False)
    with unchanged([module]):
        split, reasons = _gradients(module, parameters, example, kwargs, split=True)
    return SplitReport(
        tuple(name for name in parameters if name not in reasons),
        reasons,
        {
            name: difference
            for name, gradient in plain.items()
            if (difference := _difference(gradient, split[name])) != 0
        },
    )


def _gradients(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    example: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    split: bool,
) -> tuple[dict[str, torch.Tensor | None], dict[str, str]]:
    """All gradients of one run, and the reasons of parameters whose gradients I computes."""
    arguments = pytree.tree_map_only(torch.Tensor, _as_input, tuple(example))
    inputs = [x for x in pytree.tree_leaves(arguments) if _requires_grad(x)]
    with keep_generators(p.device for p in parameters.values()):
        torch.manual_seed(0)
        output = module(*arguments, **kwargs)
    roots = [x for x in pytree.tree_leaves(output) if _requires_grad(x)]
    gradients = [torch.linspace(-1, 1, x.numel()).to(x).view(x.shape) for x in roots]
    weights = list(parameters.values())
    reasons: dict[str, str] = {}
    if split:
        why = explain(roots, inputs, weights)
        pending = Splitter().run_input(roots, gradients, inputs, weights)
        later = set() if pending is None else set(pending.weights)
        reasons = {name: why[p] for name, p in parameters.items() if p not in later}
        if pending is not None:
            pending.run()
    else:
        accumulate(roots, gradients)
    found = {name: p.grad for name, p in parameters.items()}
    found |= {f"input {index}": x.grad for index, x in enumerate(inputs)}
    return found, reasons


def _as_input(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _requires_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    # Equal infinities and nan in both are no difference.
    gaps = (one - other)[one.ne(other) & ~(one.isnan() & other.isnan())].abs()
    return gaps.nan_to_num(float("inf")).max().item() if gaps.numel() else 0.0
