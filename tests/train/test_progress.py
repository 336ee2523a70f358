"""Numbers of how training goes, and the bar that shows them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from taktline import Pipeline
from taktline.errors import ArgumentError
from tests.train.models import loss_fn
from tests.workers import Workers

TOKENS = torch.arange(32).reshape(8, 4) % 10


def make(**where: Any) -> Pipeline:
    torch.manual_seed(0)
    stages = [nn.Embedding(10, 6), nn.Linear(6, 10)]
    return Pipeline(stages, microbatches=4, loss_fn=loss_fn, seed=0, **(where or {"ranks": 2}))


def train(every: int = 2, steps: int = 5, **where: Any) -> tuple[list[float], dict[str, float]]:
    pipe = make(**where)
    losses = [
        pipe.step(batch, target=batch).item()
        for batch in pipe.progress([TOKENS] * steps, every=every)
    ]
    return losses, pipe.metrics()


def test_a_line_every_few_steps(capsys: pytest.CaptureFixture[str]) -> None:
    losses, metrics = train()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines] == ["step    2", "step    4", "step    5"]
    assert all(f"loss {losses[0]:.3f}" in line for line in lines), "nothing was learned"
    assert all(re.search(r"[\d,]+ tokens/s  peak [\d.]+ [KMG]iB$", line) for line in lines)
    assert metrics["step"] == 5
    assert metrics["loss"] == losses[-1]
    assert metrics["tokens_per_s"] == pytest.approx(4 * metrics["rows_per_s"])
    assert metrics["rows_per_s"] == pytest.approx(8 / metrics["step_ms"] * 1e3)
    assert "bubble" not in metrics, "ranks that share a thread have none of their own"


def test_leaving_the_loop_early(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = make()
    for batch in pipe.progress(iter([TOKENS] * 5), every=1):
        pipe.step(batch, target=batch)
        break
    with pipe.trace() as trace:
        pipe.step(TOKENS, target=TOKENS)
    assert len(trace.timelines) == 1
    with pytest.raises(ArgumentError, match="every"):
        pipe.progress([], every=0)


def _measured(rank: int, group: Any) -> dict[str, float]:
    return train(mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",)))[1]


@pytest.mark.processes
def test_processes_measure_their_bubble(workers: Workers) -> None:
    found = workers.run(_measured, ranks=2)
    assert 0 <= found[0]["bubble"] < 1
    assert found[0]["bubble"] == found[1]["bubble"]
    assert found[0]["loss"] == found[1]["loss"]


def test_in_a_notebook() -> None:
    page = make()._repr_html_()
    assert page.startswith("<pre>Pipeline(1f1b on 2 ranks")
    assert "<svg" in page
    pipe = make()
    pipe.close()
    assert pipe._repr_html_() == "<pre>Pipeline(closed)</pre>"
