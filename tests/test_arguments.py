"""Arguments of public functions: what is wrong with them is named, with what they take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import taktline as tl
from taktline.errors import ArgumentError, TaktlineError
from taktline.plan import Kind

CPU = torch.device("cpu")
PLAN = tl.build("1f1b", ranks=2, microbatches=2)


def stage() -> tl.PipelineStage:
    return tl.PipelineStage(nn.Linear(2, 2), 0, 1, CPU)


def pipe(**options: Any) -> tl.Pipeline:
    return tl.Pipeline([nn.Linear(2, 2)], schedule="gpipe", **{"microbatches": 2, **options})


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: tl.ScheduleGPipe([stage()], 2), r"stage must be a PipelineStage, not \["),  # type: ignore
    (lambda: tl.ScheduleInterleaved1F1B(stage(), 2), "stages must be a list, each a PipelineSt"),  # type: ignore
    (lambda: tl.ScheduleFromPlan([None], PLAN), r"stages\[0\] must be a PipelineStage"),  # type: ignore
    (lambda: tl.ScheduleFromPlan([stage()], 3), "plan must be a Plan, or the path of a file"),  # type: ignore
    (lambda: tl.ScheduleGPipe(stage(), True), "n_microbatches must be a whole number from 1 up"),
    (lambda: tl.ScheduleGPipe(stage(), 2, "mse"), "loss_fn must be a function, not 'mse'"),  # type: ignore
    (lambda: tl.PipelineStage(3, 0, 1, CPU), "submodule must be an nn.Module, not 3"),  # type: ignore
    (lambda: tl.PipelineStage(nn.ReLU(), "0", 1, CPU), "stage_index must be a whole number"),  # type: ignore
    (lambda: tl.PipelineStage(nn.ReLU(), 0, 1, "gpu!"), 'device must be a device such as "cpu"'),  # type: ignore
    (lambda: tl.validate(None), "plan must be a Plan, not None"),  # type: ignore
    (lambda: tl.simulate(PLAN, {"forward": 1}), "costs must be a Costs, not"),  # type: ignore
    (lambda: tl.lower(PLAN, merge=1), "merge must be True or False, not 1"),  # type: ignore
    (lambda: tl.build(None, ranks=1, microbatches=1), "the name of a schedule must be a text"),  # type: ignore
    (
        lambda: tl.build("1f1b", ranks=10**9, microbatches=1),
        "1f1b: ranks must be a whole number from 1 to 4,096",
    ),
    (
        lambda: tl.build("1f1b", ranks=2, microbatches=10**9),
        "stages × microbatches must be a whole number from 1 to",
    ),
    (lambda: tl.Placement.v(10**9), "ranks must be a whole number from 1 to 65,536"),
    (lambda: tl.Link(latency=math.nan), "latency must be a number from 0 up, not nan"),
    (lambda: PLAN["0"], "rank must be a whole number, not '0'"),  # type: ignore
    (lambda: tl.Tie([1, 2]), "uses must be a dict of stages and names"),  # type: ignore
    (lambda: tl.local.run(None, 2), "fn must be a function, not None"),  # type: ignore
    (lambda: tl.local.run(abs, 10**9), "ranks must be a whole number from 1 to 1,024"),
    (lambda: tl.merge_chunks(None, None), "chunks must be a list, not None"),  # type: ignore
    (lambda: tl.split_args_kwargs_into_chunks(3, None, 2), "args must be a tuple, not 3"),  # type: ignore
    (lambda: tl.split.by_hand(3), "modules must be a list, not 3"),  # type: ignore
    (lambda: tl.pipeline(None, ()), "module must be an nn.Module, not None"),  # type: ignore
    (lambda: pipe(seed="x"), "seed must be a whole number, not 'x'"),
    (lambda: pipe(device=1.5), "device must be a device"),
    (lambda: pipe().train("yes"), "mode must be True or False, not 'yes'"),  # type: ignore
    (lambda: pipe().grad_norm(0), "norm_type must be more than 0, not 0"),
    (lambda: pipe().grad_norm(torch.ones(2)), "norm_type must be a number from 0 up, not tensor"),  # type: ignore
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_mistakes(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TaktlineError, match=message):
        call()


def test_a_wrong_type_is_a_type_error_as_well() -> None:
    with pytest.raises(TypeError):
        tl.validate(3)  # type: ignore[arg-type]
    assert issubclass(ArgumentError, tl.TaktlineError)


def test_numbers_of_numpy_are_numbers() -> None:
    two = np.int64(2)
    assert tl.build("1f1b", ranks=two, microbatches=two) == PLAN  # type: ignore[arg-type]
    assert tl.Action(two, Kind.F, two) == tl.Action(2, Kind.F, 2)  # type: ignore
    assert PLAN[np.int64(1)] == PLAN[1]  # type: ignore[index]


def test_what_cannot_be_shown_is_named_by_its_type() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(ArgumentError, match="plan must be a Plan, not <Silent instance"):
        tl.validate(Silent())  # type: ignore[arg-type]
