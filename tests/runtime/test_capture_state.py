"""Steps whose forwards keep state in attributes of modules: refused by name, and right."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.runtime.capture import buffers
from taktline.runtime.capture.state import State
from tests.runtime.recorded import Recorded
from tests.runtime.test_capture import WIDTH, Pair, Stage, Weighted, count


class Remembering(Stage):
    """Adds what it has computed for the micro-batch before."""

    before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if self.before is not None:
            found = found + 0.1 * self.before.mean(0)
        self.before = found.detach()
        return found


class Averaging(Stage):
    """Keeps a running mean in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"mean": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x - self.kept["mean"])
        self.kept["mean"] = 0.9 * self.kept["mean"] + 0.1 * x.detach().mean(0)
        return found


class Aside(Averaging):
    """Keeps it in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = SimpleNamespace(inner=SimpleNamespace(mean=torch.zeros(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.aside.inner
        found = Stage.forward(self, x - inner.mean)
        inner.mean = 0.9 * inner.mean + 0.1 * x.detach().mean(0)
        return found


class Window(Stage):
    """Keeps the latest outputs in a queue that is full."""

    def __init__(self) -> None:
        super().__init__()
        self.latest = deque([torch.zeros(WIDTH)] * 100, maxlen=100)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x - self.latest[0])
        self.latest.append(found.detach().mean(0))
        return found


class Counting(Stage):
    """Counts micro-batches, by a number."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Replacing(Stage):
    """Replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x) / self.seen


class Elsewhere(Stage):
    """Changes a tensor of another device in place."""

    calls = torch.zeros((), device="meta")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


KEEPING = {
    Remembering: "before",
    Averaging: "kept",
    Aside: "aside",
    Window: "latest",
    Counting: "calls",
    Replacing: "seen",
    Elsewhere: "calls",
}


@pytest.fixture(autouse=True)
def only_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded operations hold the memory of gradients, which a graph does not."""
    buffers._usual()  # with torch's own counts
    monkeypatch.setattr("taktline.runtime.capture.buffers.count_users", lambda _: 0)


def train(pair: Pair, steps: int) -> None:
    for seed in range(steps):
        pair.step(seed=seed)
        pair.each(lambda pipe: torch.optim.SGD(pipe.parameters(), 0.1).step())
        pair.each(tl.Pipeline.zero_grad)


@pytest.mark.parametrize("stage", KEEPING)
def test_what_a_forward_keeps_is_refused_by_name(stage: type[Stage]) -> None:
    pair = Pair(lambda: [Stage(), nn.Sequential(Stage(), stage()), Stage(), Stage()])
    with pytest.warns(
        UserWarning,
        match=f"eagerly: stage 1: '1.{KEEPING[stage]}' is changed by a forward, but not by a "
        "replay; keep such state in a buffer on cpu",
    ) as warned:
        train(pair, 6)
    assert len(warned) == 1
    assert pair.graphs.log == []
    assert f"eagerly, stage 1: '1.{KEEPING[stage]}' is changed" in str(pair.pipe)


def test_what_a_loss_keeps_is_refused_by_name() -> None:
    class Keeping(Weighted):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.latest = super().forward(output, target)
            return self.latest

    pair = Pair(loss_fn=Keeping())
    with pytest.warns(UserWarning, match="eagerly: loss_fn: 'latest' is changed by a forward"):
        train(pair, 5)
    assert pair.graphs.log == []


class Caching(Stage):
    """Makes a table once for each number of rows, as some positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.linspace(0, 1, len(x)).unsqueeze(1)
        return super().forward(x) + self.tables[len(x)]


def test_what_is_kept_once_is_no_state() -> None:
    pair = Pair(lambda: [Caching() for _ in range(4)])
    pair.graphs.make = Recorded
    pair.settle()
    for _ in range(5):
        pair.step(rows=12)
    for _ in range(3):
        pair.step(rows=8)  # captured again: there is another table
    assert count(pair, "capture") == 3
    assert pair.graphs.log[-1] == "replay"


class Moving(Stage):
    """Changes a buffer and a tensor in place: a graph does the same."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.total = torch.zeros(WIDTH, device=device)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x - self.get_buffer("mean") - self.total)
        self.get_buffer("mean").lerp_(x.detach().mean(0), 0.1)
        self.total += 0.01 * x.detach().mean(0)
        return found


def test_what_is_changed_in_place_is_part_of_the_graph() -> None:
    pair = Pair(lambda: [Moving() for _ in range(4)], schedule="looped_bfs")
    pair.graphs.make = Recorded
    train(pair, 7)
    assert pair.graphs.log == ["capture", *["replay"] * 4]
    for ours, theirs in zip(*(pipe.stages.values() for pipe in pair.both), strict=True):
        assert isinstance(ours, Moving)
        assert isinstance(theirs, Moving)
        assert torch.equal(ours.get_buffer("mean"), theirs.get_buffer("mean"))
        assert torch.equal(ours.total, theirs.total)


class Sudden(Stage):
    """Changes an attribute only when it is captured."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            self.latest = x
        return super().forward(x)


def test_a_change_in_the_capture_itself_is_an_error() -> None:
    pair = Pair(lambda: [Sudden() for _ in range(4)])
    pair.graphs.make = Recorded
    for seed in range(3):
        pair.step(seed=seed)
    with pytest.raises(tl.TaktlineError, match="stage 0: 'latest' was changed by a forward that"):
        pair.step(seed=3)


class Choosing(Stage):
    """Uses one of two layers, by a switch that nobody sees."""

    first = True

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if Choosing.first else self.other(found)


@pytest.mark.parametrize("before", [True, False])
def test_other_parameters_get_gradients(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choosing, "first", before)
    pair = Pair(lambda: [Choosing() for _ in range(4)])
    pair.graphs.make = Recorded
    for seed in range(3):
        pair.step(seed=seed)
    monkeypatch.setattr(Choosing, "first", not before)
    with pytest.warns(UserWarning, match="other parameters get gradients than in the step before"):
        pair.step(seed=3)
    pair.step(seed=4)
    assert "replay" not in pair.graphs.log


def test_a_tensor_on_another_device_whose_values_are_in_the_graph() -> None:
    stage = tl.PipelineStage(Elsewhere(), 0, 1, torch.device("cpu"))
    stage.submod.calls = torch.zeros((), device="meta")
    before = State([stage])
    assert before.difference(State([stage])) is None
    stage.submod.calls.fill_(3)  # pyright: ignore
    assert before.difference(State([stage])) == "stage 0: 'calls'"


def test_a_stage_with_a_backward_of_its_own() -> None:
    stage = tl.PipelineStage(Stage(), 0, 1, torch.device("cpu"), dw_builder=lambda: lambda: None)
    assert State([stage]).refusal == "stage 0: it has a backward of its own, or a dw_builder"
