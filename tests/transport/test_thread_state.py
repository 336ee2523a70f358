"""Local ranks have what their caller's thread has set, as a plain model would."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

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


@contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def threads(number: int) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


SETTINGS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "grad in inference_mode": (
        lambda: _both(torch.inference_mode(), torch.enable_grad()),
        lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()),
    ),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        lambda: ((X @ X.T).dtype, torch.is_autocast_cache_enabled()),
    ),
    "set_default_dtype": (lambda: default_dtype(torch.float64), torch.get_default_dtype),
    "anomaly mode": (
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
        torch.is_anomaly_enabled,
    ),
    "deterministic": (deterministic, torch.are_deterministic_algorithms_enabled),
    "threads": (lambda: threads(3), torch.get_num_threads),
}


@contextmanager
def _both(*blocks: AbstractContextManager[Any]) -> Any:
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_caller_has_set(name: str) -> None:
    block, look = SETTINGS[name]
    without = look()
    with block():
        expected = look()
        found = tl.local.run(lambda rank: look(), 2)
        assert look() == expected
    assert expected != without
    assert found == [expected, expected]
    assert look() == without
    assert tl.local.run(lambda rank: look(), 2) == [without, without]


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


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_flops_are_those_of_the_plain_model(schedule: str) -> None:
    stages = layers()
    plain, found = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with plain:
        for part, target in zip(X.chunk(2), Y.chunk(2), strict=True):
            nn.functional.mse_loss(nn.Sequential(*stages)(part), target).backward()
    pipe = pipeline(*stages, schedule=schedule)
    pipe.step(X, target=Y)
    with found:
        pipe.step(X, target=Y)
    assert found.get_total_flops() == plain.get_total_flops() > 0
