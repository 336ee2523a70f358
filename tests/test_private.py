"""Private names of torch that the installed version lacks: a feature is off, and says why."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_map

import taktline as tl
from taktline.errors import TorchVersionError
from taktline.private import for_all, lacking, missing, private
from taktline.runtime import program
from taktline.runtime.capture import state
from taktline.stage import split_backward
from taktline.stage.grad_sync import FSDPSync
from taktline.stage.split_backward import Splitter

compiled: Any = importlib.import_module("taktline.stage.compiled")

_add_all: Any = vars(torch)["_foreach_add_"]

GONE = private("torch._C._gone", "this test")
REASON = f"this test needs torch._C._gone, which torch {torch.__version__} does not have"


def test_what_is_missing_raises_when_it_is_used() -> None:
    class Mode(GONE):
        """A class can be made from it, but no object."""

    for use in (lambda: GONE(1), lambda: GONE.attribute, lambda: Mode()):
        with pytest.raises(TorchVersionError) as caught:
            use()
        assert str(caught.value) == REASON
    assert not isinstance(1, GONE)
    assert missing(len, GONE) == REASON
    assert missing(len) is None


def test_what_is_there_is_torchs() -> None:
    assert private("torch.utils._pytree.tree_map", "trees") is tree_map
    assert private("torch._foreach_add_", "sums", None) is _add_all
    assert private("torch._gone.name", "sums", 3) == 3
    assert for_all("torch._foreach_add_", torch.Tensor.add_) is _add_all
    assert lacking(torch.Tensor, "_version", feature="this test") is None


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def train() -> list[torch.Tensor]:
    """The gradients of a step with a split backward, on local ranks; they are those of the loop."""
    x = torch.arange(32.0).view(8, 4).sin()
    plain = model()
    for part in x.chunk(4):
        (mse_loss(plain(part), part) / 4).backward()
    cut = model()
    cuts = ["1", "2", "3"]
    pipe = tl.Pipeline(cut, ranks=2, schedule="zbv", cuts=cuts, microbatches=4, loss_fn=mse_loss)
    pipe.step(x, target=x)
    gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
    for found, expected in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected.grad)
    return gradients


def test_a_backward_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train()
    monkeypatch.setattr(split_backward, "_engine", None)
    assert all(map(torch.equal, train(), expected))


def test_a_whole_backward_if_the_graph_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(split_backward, "_UNSEEN", REASON)
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    roots, gradients = [layer(x)], [torch.ones(2, 4)]
    assert Splitter("stage 2").run_input(roots, gradients, [x], [*layer.parameters()]) is None
    assert caplog.messages == [f"stage 2: its backward is not split: {REASON}"]
    train()


def test_marks_without_a_shared_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of a version without the private way gets a hook of its own."""
    monkeypatch.setattr(program, "hasattr", lambda *_: False, raising=False)
    backward = program._Backward(7, torch.device("cpu"))
    y = torch.ones(2, requires_grad=True) * 2
    backward._mark(3, [y])
    y.sum().backward()
    assert backward.stage == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_backward_stays_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = SimpleNamespace(compile=lambda graph, _: graph, compile_inner=GONE)
    monkeypatch.setattr(compiled, "_compiler", lambda: found)
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with caplog.at_level(logging.WARNING, "taktline"):
        made = tl.compile_stages(layer, 2)(x)
    torch.testing.assert_close(made, layer(x))
    assert caplog.messages == [
        f"stage 2: its compiled backward stays whole, so W is empty: {REASON}"
    ]


def test_no_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state.State([]).refusal is None
    monkeypatch.setattr(state, "_UNSEEN", REASON)
    assert state.State([]).refusal == REASON


def test_a_wrapper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class State:
        """Of a version that keeps everything elsewhere."""

    sync: Any = FSDPSync(nn.Linear(2, 2))
    assert sync.refusal() is None
    sync._roots = [State()]
    assert "FSDP in a pipeline needs State._lazy_init, which torch" in sync.refusal()
