"""What the caller's thread has set: for local ranks, and for the stages of a pipeline."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import taktline as tl

X, Y = torch.ones(8, 4), torch.zeros(8, 4)
VARIABLE: ContextVar[str] = ContextVar("variable", default="unset")


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)]


def pipeline(*stages: nn.Module, schedule: str = "1f1b") -> tl.Pipeline:
    return tl.Pipeline(
        list(stages),
        schedule=schedule,
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        ranks=2,
    )


@pytest.mark.parametrize("block", [torch.no_grad, lambda: torch.autocast("cpu")])
def test_blocks_of_the_caller_are_not_those_of_the_ranks(block: Any) -> None:
    def look(rank: int) -> tuple[bool, bool, int]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with block():
            assert tl.local.run(look, 2) == [(True, False, 3)] * 2
    finally:
        torch.set_num_threads(threads)


def test_context_variables_are_copied_to_each_rank() -> None:
    def change(rank: int) -> tuple[str, str]:
        before = VARIABLE.get()
        VARIABLE.set(f"of rank {rank}")
        tl.local.current().exchange([0])  # pyright: ignore[reportOptionalMemberAccess]
        return before, VARIABLE.get()

    token = VARIABLE.set("the caller's")
    assert tl.local.run(change, 2) == [(VARIABLE.get(), f"of rank {rank}") for rank in range(2)]
    assert VARIABLE.get() == "the caller's"
    VARIABLE.reset(token)


def test_hooks_on_saved_tensors_see_every_stage() -> None:
    packed: list[Tensor] = []
    pipe = pipeline(*layers())
    expected = pipe.step(X, target=Y)
    norm = pipe.grad_norm()
    for parameter in pipe.parameters():
        parameter.grad = None

    def pack(tensor: Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    with saved_tensors_hooks(pack, lambda place: packed[place]):
        assert pipe.step(X, target=Y) == expected
    assert pipe.grad_norm() == norm
    shapes = {tuple(tensor.shape) for tensor in packed}
    assert (4, 4) in shapes  # weights and activations, all of them
    assert len(packed) >= 2 * 4


class Places(nn.Linear):
    """Notes where tensors are made by default."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.devices: list[str] = []

    def forward(self, input: Tensor) -> Tensor:
        self.devices.append(torch.arange(2).device.type)
        return super().forward(input)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_block_of_another_device_holds_for_stages_and_for_nothing_of_ours(device: str) -> None:
    stages = [Places(), Places()]
    pipe = pipeline(*stages)
    expected, norm = pipe.step(X, target=Y), pipe.grad_norm()
    fresh = pipeline(*stages)
    for parameter in pipe.parameters():
        parameter.grad = None
    for stage in stages:
        stage.devices.clear()
    with torch.device(device):
        losses: list[Tensor] = []
        assert torch.equal(fresh.step(X, target=Y, losses=losses), expected)
        assert torch.equal(fresh.eval(X, target=Y), expected)
        assert torch.equal(fresh.grad_norm(), norm)
        assert fresh.clip_grad_norm_(1.0) == norm
    assert len(losses) == 2
    for stage in stages:
        assert set(stage.devices) == {device}
