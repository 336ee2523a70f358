"""Tracebacks show the user's lines, and ours only where somebody asks for them."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import taktline
from taktline import Pipeline, TaktlineError
from taktline.errors import PartitionError, StageError
from taktline.plan.walk import unit_run
from taktline.train.tracebacks import short_traceback

X = torch.ones(8, 4)
PACKAGE = str(Path(taktline.__file__).parent)


class Wrong(nn.Module):
    """Fails on batches of so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ torch.ones(5, 4) if len(x) == self.rows else x


def files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def of_building() -> None:
    Pipeline(Wrong(2), example=(X[:2],), microbatches=4, ranks=2)


def of_a_step() -> None:
    pipe = Pipeline(
        Wrong(1), example=(X[:2],), microbatches=8, ranks=2, loss_fn=nn.functional.mse_loss
    )
    pipe.step(X, target=X)


@pytest.mark.parametrize(
    ("fails", "error"), [(of_building, PartitionError), (of_a_step, StageError)]
)
def test_only_the_users_lines(
    fails: object, error: type[TaktlineError], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(fails)
    monkeypatch.delenv("TAKTLINE_DEBUG", raising=False)
    with pytest.raises(error, match=r"mat1 and mat2|same reduction dim") as told:
        fails()
    ours = [file for file in files(told.value) if file.startswith(PACKAGE)]
    assert [Path(file).stem for file in ours] == ["tracebacks"]
    cause = told.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert __file__ in files(cause), "the line in the user's model"
    shown = "".join(traceback.format_exception(told.value)).splitlines()
    inside = [line for line in shown if f'"{PACKAGE}' in line]
    assert len(inside) == 1, "and nothing of how it came about"

    monkeypatch.setenv("TAKTLINE_DEBUG", "1")
    with pytest.raises(error) as told:
        fails()
    assert len([file for file in files(told.value) if file.startswith(PACKAGE)]) > 2


def test_an_error_holds_no_pipeline() -> None:
    pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], microbatches=2, ranks=2)
    gone = weakref.ref(pipe)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(TaktlineError):
            pipe.step(X)
        del pipe
        gc.collect(0)
        assert gone() is None
    finally:
        gc.enable()


def test_no_lines_of_a_cause_that_is_all_ours() -> None:
    @short_traceback
    def fails() -> None:
        try:
            unit_run(None)  # type: ignore[arg-type]
        except AttributeError as error:
            # Without the frame of this test: as if we had called it ourselves.
            inside = error.__traceback__ and error.__traceback__.tb_next
            raise PartitionError("as it is told") from error.with_traceback(inside)

    with pytest.raises(PartitionError) as told:
        fails()
    assert isinstance(told.value.__cause__, AttributeError)
    assert files(told.value.__cause__) == []


def test_a_backward_after_a_step_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = Pipeline(layers, microbatches=2, ranks=2, loss_fn=nn.functional.mse_loss)
    loss = pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    for tensor, explained in ((loss, True), (torch.ones(()), False)):
        try:
            tensor.backward()
        except RuntimeError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        assert ("pipe.step() has run the backward" in capsys.readouterr().err) == explained
    assert type(loss) is torch.Tensor
    assert not loss.__dict__
