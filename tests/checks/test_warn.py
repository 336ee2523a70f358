"""Warnings point at the line of whoever has called the package."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import taktline as tl
from taktline.checks import seconds_in_environment, warn

NAME = "TAKTLINE_SOME_SECONDS"


def line_of_this() -> int:
    """The line that calls it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def captured_step() -> int:
    pipe = tl.Pipeline(
        [nn.Linear(2, 2)],
        ranks=1,
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        device="cpu",
        cuda_graphs=True,
    )
    x = torch.ones(2, 2)
    pipe.step(x, target=x)
    return line_of_this() - 1


def uneven_step() -> int:
    stage = tl.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    schedule, x = tl.ScheduleGPipe(stage, 2, nn.functional.mse_loss), torch.ones(3, 2)
    schedule.step(x, target=x)
    return line_of_this() - 1


def environment() -> int:
    seconds_in_environment(NAME, 60.0)
    return line_of_this() - 1


def direct() -> int:
    warn("it is as it is")
    return line_of_this() - 1


@pytest.mark.parametrize("call", [captured_step, uneven_step, environment, direct])
def test_a_warning_points_at_the_caller(
    call: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "soon")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        line = call()
    assert [(each.filename, each.lineno) for each in told] == [(__file__, line)]
