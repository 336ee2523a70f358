"""The parameters of a pipeline, and their gradients over every rank, stage and shard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from taktline.checks import refuse, require_flag, require_instance, require_number
from taktline.errors import LossError, MismatchError
from taktline.runtime.watchdog import guarded
from taktline.sharding import is_sharded
from taktline.train.live import Live
from taktline.train.plainly import plainly
from taktline.train.ranks import Ranks
from taktline.train.scaler import Scaler

__all__ = ["Gradients"]


class Gradients(Live):
    """The methods of a pipeline for parameters and gradients."""

    def scaler(self, **options: Any) -> Scaler:
        """A ``torch.amp.GradScaler`` with one verdict for all ranks; takes its options."""
        return Scaler(self._ranks, **options)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self, *, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process, with their names in the model.

        A weight with several names has the one that the model lists first. Where ranks are
        processes, a tied weight is in each that uses it.
        """
        seen: set[int | str] = set()
        first = self._built.parts.first_names()
        for _, name, parameter in self._built.parameters():
            if id(parameter) not in seen:
                known = first.get(name, name)
                # Two stages here may have a copy each, if both are sharded.
                known = name if known in seen else known
                seen |= {id(parameter), known}
                yield known, parameter

    @plainly
    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients of the model, the same on every rank."""
        if not (isinstance(norm_type, float) and norm_type == math.inf):
            norm_type = require_number("norm_type", norm_type, least=0)
        if not norm_type:
            refuse("norm_type", "more than 0", norm_type)
        with guarded(self._ranks.transport, "grad_norm()") as what:
            self._built.schedule._runner.arrive(what)
            return norm_of(self._built.counted(), self._ranks, norm_type, device=self.device)

    @plainly
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients like ``torch.nn.utils.clip_grad_norm_``; returns it."""
        if not (isinstance(max_norm, float) and max_norm == math.inf):
            max_norm = require_number("max_norm", max_norm, least=0)
        require_flag("error_if_nonfinite", error_if_nonfinite)
        norm = self.grad_norm(norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise LossError(
                f"the norm of the gradients is {norm.item()}, so they cannot be clipped; leave out "
                "this step, or pass error_if_nonfinite=False"
            )
        clip(self.parameters(), max_norm, norm)
        return norm

    def accumulate(self) -> AbstractContextManager[None]:
        """Steps inside of ``with pipe.accumulate():`` are reduced together, at its end.

        Without it, several steps add up their gradients just as well; what it saves is to average
        them over the replicas in each.
        """
        return self._built.schedule.accumulate()

    def _scale(self, scaler: torch.amp.GradScaler) -> float:
        require_instance("scaler", scaler, torch.amp.GradScaler)
        if not isinstance(scaler, Scaler) and not self._ranks.in_one_process:
            raise MismatchError(
                "this scaler looks at the gradients of its own process only, so that ranks might "
                "disagree on a step; make it with pipe.scaler(…), which takes the same options"
            )
        return float(scaler.scale(torch.ones((), device=self.device)))


def norm_of(
    parameters: Mapping[int, nn.Parameter], ranks: Ranks, norm_type: float, *, device: torch.device
) -> torch.Tensor:
    """The norm of the gradients of all processes; each has its own parameters, by their places.

    The norms of single gradients are put together in the order of the model, as in the plain one:
    then not even the last bit depends on how it was cut. Optimizers make much of that.
    """
    place_of = {parameter: place for place, parameter in parameters.items()}
    norms: dict[int, torch.Tensor] = {}
    for alike in _alike(parameters.values()):
        places = [place_of[parameter] for parameter in alike]
        gradients = [_gradient(parameter) for parameter in alike]
        if is_sharded(gradients[0]):
            total: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
            norms[places[0]] = total.full_tensor()
        else:
            norms |= zip(places, _single_norms(gradients, norm_type), strict=True)
    numbers = torch.stack([norm.to(device) for norm in norms.values()]).tolist() if norms else []
    shared = ranks.gathered(dict(zip(norms, numbers, strict=True)), "grad_norm()")
    ordered = [shared[place] for place in sorted(shared)]
    in_order = torch.tensor(ordered, dtype=torch.float32, device="cpu")
    return torch.linalg.vector_norm(in_order, norm_type).to(device)


def _single_norms(gradients: list[torch.Tensor], norm_type: float) -> Sequence[torch.Tensor]:
    """The norm of each gradient, by the kernels that torch takes for it."""
    if gradients[0].is_cuda:
        return torch._foreach_norm(gradients, norm_type)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients down to what makes the norm of all of them the largest that is allowed."""
    for alike in _alike(parameters):
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)


def _alike(parameters: Iterable[nn.Parameter]) -> Sequence[list[nn.Parameter]]:
    """Parameters with gradients, those of one mesh and one layout together."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            layout = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
            groups.setdefault(layout, []).append(parameter)
    return list(groups.values())


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None  # see _alike
    return gradient.coalesce().values() if gradient.is_sparse else gradient
