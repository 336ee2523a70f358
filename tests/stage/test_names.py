"""The parameters of a stage, by name or in their order, whatever its modules are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from taktline.stage.names import unwrapped
from taktline.stage.stage import parameters_of


def shared() -> nn.Module:
    """A weight in two layers, a layer in two places, and a place without a bias."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Sequential(second), first, nn.LayerNorm(2))
    model.register_module("missing", None)
    return model


@pytest.mark.parametrize(
    "make",
    [
        shared,
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.BatchNorm1d(2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.PReLU())),
        nn.Identity,
    ],
    ids=["shared", "transformer", "checkpointed", "parametrized", "scripted", "none"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_parameters_are_those_of_the_module_in_its_order(make: Callable[[], nn.Module]) -> None:
    module = make()
    found = parameters_of(module)
    expected = list(module.parameters())
    assert len(found) == len(expected)
    assert all(
        one is other or torch.equal(one, other) for one, other in zip(found, expected, strict=True)
    )
    assert all(p.requires_grad for p in found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_are_taken_off() -> None:
    inside = nn.Sequential()  # without layers it counts as false
    compiled = torch.compile(checkpoint_wrapper(inside))
    assert unwrapped(compiled) is inside  # pyright: ignore[reportArgumentType]
    assert unwrapped(inside) is inside
