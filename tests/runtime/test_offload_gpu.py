"""OFFLOAD, RELOAD and RECOMPUTE on a GPU, where copies run beside the computation."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.plan import Plan
from tests.runtime.test_offload import MODELS, MODES, assert_equal, pipeline, saving, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def on_gpu(modules: list[nn.Module], plan: Plan, **options: Any) -> tl.Pipeline:
    return pipeline(modules, plan, device="cuda", **options)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("name", MODELS)
def test_as_the_same_plan_without(name: str, schedule: str, mode: str) -> None:
    plan = tl.build(schedule, ranks=2, microbatches=4)
    make, options = MODELS[name]
    torch.manual_seed(0)
    modules = make(plan.stages)
    plain = on_gpu(modules, plan, **options)
    with plain.trace():  # each action by itself
        expected = train(plain, steps=6)
    pipe = on_gpu(modules, saving(plan, MODES[mode]), **options)
    assert_equal(train(pipe, steps=6), expected)  # in the first five, data may be compared
    x = torch.randn(8, 8, device="cuda")
    for _ in range(2):  # the first learns, and the second binds what it has learned
        pipe.step(x, target=x)
    try:
        torch.cuda.set_sync_debug_mode("error")
        pipe.step(x, target=x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["autocast", "tied", "batch norm"])
def test_captured(name: str, mode: str) -> None:
    plan = saving(tl.build("interleaved_1f1b", ranks=2, microbatches=4), MODES[mode])
    torch.manual_seed(0)
    modules = MODELS[name][0](plan.stages)
    pipe = on_gpu(modules, plan, cuda_graphs=True)
    assert_equal(train(pipe, steps=7), train(on_gpu(modules, plan), steps=7))
    assert "captured, 4 replays" in str(pipe), str(pipe)


class Wide(nn.Module):
    """Saves 4 MiB for each of its 32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(32)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("mode", ["offload all", "recompute all"])
def test_memory_is_free(mode: str, captured: bool) -> None:
    """All forwards together save 1 GiB; a graph holds the batch and its target, too."""
    plan = saving(tl.build("gpipe", ranks=1, microbatches=8), MODES[mode])
    pipe = on_gpu([Wide()], plan, cuda_graphs=captured)
    x = torch.randn(8 * 2048, 512, device="cuda")
    for _ in range(5):
        pipe.step(x, target=x)
        pipe.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = 0 if captured else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pipe.step(x, target=x)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved if captured else torch.cuda.max_memory_allocated
    assert peak() - before < 0.6 * 2**30
