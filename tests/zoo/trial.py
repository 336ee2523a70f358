"""One architecture on a pipeline for a step, against the plain model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import taktline as tl
from tests.zoo import find
from tests.zoo.architecture import Architecture, loss_of

ROWS, PARTS = 8, 4


class Place(NamedTuple):
    """A schedule on so many ranks, and what it cuts a model into."""

    schedule: str
    ranks: int
    stages: int


PLACES = [Place("1f1b", 2, 2), Place("1f1b", 4, 4), Place("zbv", 2, 4), Place("zbv", 4, 8)]


@dataclass(frozen=True)
class Found:
    """What a step has shown: its loss, gradients and buffers, by their names in the model."""

    loss: float
    parameters: int
    gradients: dict[str, Tensor]
    """By every name that a parameter has, where they are those of the plain model."""
    buffers: dict[str, Tensor]


def plain(architecture: Architecture, autocast: torch.dtype | None = None) -> Found:
    """The model by itself, micro-batch after micro-batch."""
    model = architecture.make()
    call, total = architecture.call(ROWS), 0.0
    for part in range(PARTS):
        args, kwargs = pytree.tree_map_only(Tensor, lambda whole, at=part: _cut(whole, at), call)
        mixed = torch.autocast("cpu", autocast, enabled=autocast is not None)
        with mixed, tl.collect_losses() as added:
            loss = loss_of(model(*args, **kwargs), _target()[: ROWS // PARTS])
        (sum(added, start=loss) / PARTS).backward()
        total += loss.item() / PARTS
    named = model.named_parameters(remove_duplicate=False)
    count = len(list(model.parameters()))
    return Found(total, count, _gradients(named), dict(model.named_buffers()))


def _cut(whole: Tensor, part: int) -> Tensor:
    size = ROWS // PARTS
    return whole[part * size : (part + 1) * size] if len(whole) == ROWS else whole


def _target() -> Tensor:
    return torch.ones(ROWS)


def train(architecture: Architecture, place: Place, mesh: DeviceMesh | None = None) -> Found:
    """A step on a pipeline; over processes, what this one has."""
    args, kwargs = architecture.call(ROWS)
    with tl.Pipeline(
        architecture.make(),
        example=architecture.call(ROWS // PARTS),
        schedule=place.schedule,
        microbatches=PARTS,
        loss_fn=loss_of,
        ranks=place.ranks,
        mesh=mesh,
    ) as pipe:
        loss = pipe.step(*args, target=_target(), **kwargs)
        buffers = [m.named_buffers() for m in pipe.stages.values()]
        return Found(
            loss.item(),
            len(list(pipe.parameters())),
            _gradients(pipe.named_parameters()),
            {name: buffer for named in buffers for name, buffer in named},
        )


def _gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in parameters}


def compare(found: Found, expected: Found, *, whole: bool = True) -> None:
    """Raise unless a pipeline has shown the same; ``whole`` is whether it has all parameters."""
    if abs(found.loss - expected.loss) > 1e-4 * max(1.0, abs(expected.loss)):
        raise AssertionError(f"the loss is {found.loss}, not {expected.loss}")
    if whole and found.parameters != expected.parameters:
        missing = sorted(expected.gradients.keys() - found.gradients.keys())
        raise AssertionError(f"these have no gradients, or have them under another name: {missing}")
    for what in ("gradients", "buffers"):
        right = getattr(expected, what)
        for name, value in getattr(found, what).items():
            wide, exact = value.to(torch.complex128), right[name].to(torch.complex128)
            off, most = _most(wide - exact), _most(exact)
            # Numbers are added in another order if several stages use a weight or a value, or if
            # what crosses between processes is transposed.
            if not off <= _rounding(value) * most + 1e-9:
                raise AssertionError(f"{what}: {name} is off by {off:.3g} of {most:.3g}")


def _rounding(values: Tensor) -> float:
    return min(1e-3, 64 * torch.finfo(values.dtype).eps) if values.is_floating_point() else 0.0


def _most(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def over_processes(
    rank: int,
    group: dist.ProcessGroup,
    name: str,
    place: Place,
    expected: Found | None = None,
) -> None:
    """The same in each of some processes, for the fixture ``workers``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers
        architecture = find(name)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
        found = train(architecture, place, mesh)
        compare(found, expected or plain(architecture), whole=False)
