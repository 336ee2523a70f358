"""Captured steps of modules that keep tensors in attributes, and read them in the next forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import taktline as tl
from taktline import pytree
from tests.runtime.recorded import Recorded
from tests.runtime.test_capture import Pair, Stage, count


class Remembering(Stage):
    """Adds what it has computed for the micro-batch before."""

    before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.latest = found
        if self.before is not None:
            found = found + 0.1 * self.before.mean(0)
        self.before = found.detach()
        return found


class Averaging(Stage):
    """Keeps a running mean and the latest output, in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"mean": 0.0, "latest": [None]}

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x - self.kept["mean"])
        self.kept["mean"] = 0.9 * self.kept["mean"] + 0.1 * x.detach().mean(0)
        self.kept["latest"][0] = found
        return found


def kept(pipe: tl.Pipeline, name: str) -> list[Any]:
    return [getattr(stage, name) for stage in pipe.stages.values()]


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def pair_of(stage: type[Stage], **options: Any) -> Pair:
    pair = Pair(lambda: [stage() for _ in range(4)], schedule="looped_bfs", **options)
    pair.graphs.make = Recorded
    return pair


@pytest.mark.parametrize(("stage", "name"), [(Remembering, "before"), (Averaging, "kept")])
def test_the_next_step_reads_what_the_step_before_has_kept(stage: type[Stage], name: str) -> None:
    pair = pair_of(stage)
    for seed in range(7):
        pair.step(seed=seed)
        pair.each(lambda pipe: torch.optim.SGD(pipe.parameters(), 0.1).step())
        pair.each(tl.Pipeline.zero_grad)
        for ours, theirs in zip(*(tensors(kept(pipe, name)) for pipe in pair.both), strict=True):
            assert torch.equal(ours, theirs)
    assert pair.graphs.log == ["capture", *["replay"] * 4]


def test_two_kinds_of_steps_keep_one_state() -> None:
    pair = pair_of(Remembering)
    for seed in range(16):
        pair.step(seed=seed, rows=8 if seed % 2 else 12)
        pair.each(tl.Pipeline.zero_grad)
    assert count(pair, "capture") == 2
    assert count(pair, "replay") >= 4


def test_a_kept_tensor_is_not_written_over() -> None:
    pair = pair_of(Remembering)
    pair.settle()
    before = kept(pair.pipe, "before")
    values = [each.clone() for each in before]
    pair.step(seed=9)
    assert all(map(torch.equal, before, values))


def test_what_is_kept_may_be_reset() -> None:
    def forget(pipe: tl.Pipeline) -> None:
        for stage in pipe.stages.values():
            vars(stage)["before"] = None

    def zero(pipe: tl.Pipeline) -> None:
        for each in kept(pipe, "before"):
            each.zero_()

    pair = pair_of(Remembering)
    pair.settle()
    for change in (zero, forget, zero, forget, forget, forget):
        pair.each(change)
        for seed in range(3):
            pair.step(seed=seed)
    # One graph for steps that begin with nothing.
    assert count(pair, "capture") == 2


class Growing(Stage):
    """Keeps the outputs of all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.outputs.append(found.detach())
        return found


def test_a_list_that_grows_runs_eagerly() -> None:
    pair = pair_of(Growing)
    for seed in range(10):
        pair.step(seed=seed)
    with pytest.warns(UserWarning, match="more than 8 kinds of steps"):
        pair.step(seed=10)
    assert count(pair, "replay") <= 1
    assert [len(each) for each in kept(pair.pipe, "outputs")] == [44] * 4


class Elsewhere(Stage):
    """Counts micro-batches on another device."""

    calls = torch.zeros((), device="meta")

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


def test_a_tensor_on_another_device_runs_eagerly() -> None:
    pair = pair_of(Elsewhere)
    for seed in range(3):
        pair.step(seed=seed)
    with pytest.warns(UserWarning, match="stage 0: its forward changes 'calls', which is on meta"):
        pair.step(seed=3)
    pair.step(seed=4)
    assert count(pair, "replay") == 0
