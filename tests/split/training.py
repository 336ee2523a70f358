"""Training in stages beside that of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same parameters each time."""
    torch.manual_seed(0)
    return make()


def gradients(*modules: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters that have one, by each of their names."""
    named = (pair for m in modules for pair in m.named_parameters(remove_duplicate=False))
    return {name: p.grad for name, p in named if p.grad is not None}


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise unless both have the same gradients, to the last bit."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def require_plain_training(
    make: Callable[[], nn.Module],
    args: tuple[Tensor, ...],
    target: Tensor,
    *,
    microbatches: int,
    **options: Any,
) -> None:
    """Raise unless two steps of a pipeline have the losses, gradients and buffers of the model."""
    model, plain = made(make), made(make)
    parts = list(zip(*(part.chunk(microbatches) for part in (*args, target)), strict=True))
    options = {"microbatches": microbatches, "loss_fn": F.mse_loss, **options}
    with tl.Pipeline(model, example=parts[0][:-1], **options) as pipe:
        for _ in range(2):  # calls of which nothing is known, and calls like them
            found = pipe.step(*args, target=target)
            losses = [F.mse_loss(plain(*given), wanted) for *given, wanted in parts]
            loss = torch.stack(losses).mean()
            loss.backward()
            torch.testing.assert_close(found, loss.detach())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=name)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name), msg=name)
