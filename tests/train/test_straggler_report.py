"""Every n-th step is traced, and the log names the rank that is slow in it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import taktline as tl
from taktline.errors import ArgumentError
from taktline.plan import Kind
from tests.workers import Workers

X = torch.ones(8, 16)


class Layer(nn.Linear):
    """May take its time."""

    naps = 0.0

    def forward(self, input: Tensor) -> Tensor:
        time.sleep(self.naps)
        return torch.tanh(super().forward(input))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(16, 16) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def pipeline(**options: Any) -> tl.Pipeline:
    usual: dict[str, Any] = {"microbatches": 4, "loss_fn": nn.functional.mse_loss, "ranks": 2}
    return tl.Pipeline(Model(), cuts=["layers.2"], **(usual | options))


def slow_down(pipe: tl.Pipeline, stage: int = 1) -> None:
    for module in pipe.stages[stage].modules() if stage in pipe.stages else ():
        if isinstance(module, Layer):
            module.naps = 0.02


class Lines(logging.Handler):
    """What is logged inside."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("taktline").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("taktline").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def reported(rank: int, group: Any, counted: bool) -> list[str]:
    """The log of four steps, of which the last two are slow on the second rank."""
    here = {}
    if group is not None:
        here["mesh"] = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    pipe = pipeline(report_stragglers=2, example=(X[:2],) if counted else None, **here)
    with Lines() as lines:
        for number in range(4):
            if number == 2:
                slow_down(pipe)
            pipe.step(X, target=X)
    return lines


@pytest.mark.parametrize(
    ("counted", "words"), [(True, "its work accounts for"), (False, "it took before")]
)
@pytest.mark.parametrize("ranks", ["local", pytest.param("gloo", marks=pytest.mark.processes)])
def test_the_log_names_the_slow_rank(
    request: pytest.FixtureRequest, ranks: str, counted: bool, words: str
) -> None:
    if ranks == "local":
        found, others = reported(0, None, counted), []
    else:
        workers: Workers = request.getfixturevalue("workers")
        found, others = workers.run(reported, counted, ranks=2)
    # Not of the first one, in which so small a model may seem slow anywhere.
    start = "step 3: rank 1 is slow: the forward of stage 1 takes"
    (slow,) = [line for line in found if line.startswith(start)]
    assert f"times what {words}; slowest in micro-batches" in slow
    assert others == []


def test_a_trace_knows_them_too() -> None:
    pipe = pipeline(report_stragglers=1, example=(X[:2],))
    pipe.step(X, target=X)
    slow_down(pipe)
    with Lines() as lines, pipe.trace() as trace:
        pipe.step(X, target=X)
    assert lines == []  # one trace at a time
    worst = trace.stragglers()[0]
    assert (worst.rank, worst.stage, worst.kind, len(trace.timelines)) == (1, 1, Kind.F, 1)


def test_only_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    trace = tl.ScheduleFromPlan.trace

    def counted(schedule: Any) -> Any:
        traced.append(schedule.steps)
        return trace(schedule)

    monkeypatch.setattr("taktline.runtime.schedule.Schedule.trace", counted)
    pipe = pipeline(report_stragglers=3)
    for _ in range(7):
        pipe.step(X, target=X)
        pipe.eval(X)
    assert sorted(set(traced)) == [2, 5]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "often"])
def test_a_number_of_steps(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="report_stragglers must be a whole number from 1 up"):
        pipeline(report_stragglers=wrong)
