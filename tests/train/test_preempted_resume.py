"""A run that SIGTERM has ended and that was resumed equals one that went on, to the last bit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import CheckpointError
from taktline.meta import local
from tests.checkpoint import training
from tests.checkpoint.training import mesh_of
from tests.workers import Workers

UPDATES = 8


class Data(training.Data):
    """Batches of numbers."""

    def __next__(self) -> Tensor:
        self.next += 1
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(self.next))


class Run:
    """A loop as users write it, of one of many kinds."""

    def __init__(self, kind: str, folder: str, **where: Any) -> None:
        self.kind, self.folder = kind, folder
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(4)]
        self.pipe = tl.Pipeline(
            nn.Sequential(*layers),
            cuts=["2"],
            microbatches=4,
            loss_fn=nn.functional.mse_loss,
            seed=0,
            on_preempt=self.save,
            **where,
        )
        self.optimizers = self._optimizers()
        self.schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in self.optimizers
        ]
        self.data = Data()
        self.parts = 2 if kind in ("accumulated", "reduced once", "every other") else 1
        self.saves = 0

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        weights = [each for each in self.pipe.parameters() if each.dim() > 1]
        others = [each for each in self.pipe.parameters() if each.dim() < 2]
        if self.kind in ("several", "every other"):
            return [torch.optim.AdamW(weights), torch.optim.SGD(others, 0.1, momentum=0.9)]
        return [torch.optim.AdamW(self.pipe.parameters(), lr=0.1)]

    def saved_with(self) -> dict[str, Any]:
        position: dict[str, Any] = {} if self.kind == "drawn" else {"data": self.data}
        return {"scheduler": self.schedulers, **position}

    def save(self, pipe: tl.Pipeline) -> None:
        self.saves += 1
        later = self.kind == "eval"  # written in the background, until the process ends
        saved = pipe.save(self.folder, self.optimizers, **self.saved_with(), async_save=later)
        (steps,) = {each.steps for each in pipe.schedules.values()}
        assert saved.name.endswith(f"-step-{steps}")

    def batch(self) -> Tensor:
        return torch.randn(8, 4) if self.kind == "drawn" else next(self.data)

    def losses(self, stop: tuple[int, int, str] | None) -> Iterator[float]:
        """Train to the end; ``stop`` is where SIGTERM comes: update, part, and before what."""
        first = 0
        if tl.checkpoint.latest(self.folder):
            first = self.pipe.load(self.folder, self.optimizers, **self.saved_with()).step
            assert first % self.parts == 0
        for update in range(first // self.parts, UPDATES):
            together = self.pipe.accumulate() if self.kind == "reduced once" else nullcontext()
            with together:
                for part in range(self.parts):
                    x = self.batch()
                    self.hear(stop, (update, part, "step"))
                    yield self.pipe.step(x, target=x).item()
                    self.hear(stop, (update, part, "update"))
                    if self.kind == "every other":
                        self.optimizers[0].step()
                        self.optimizers[0].zero_grad()
            for each in self.optimizers[self.kind == "every other" :]:
                each.step()
                each.zero_grad(set_to_none=self.kind != "several")
            for each in self.schedulers:
                each.step()
            if self.kind == "eval":
                self.pipe.eval(torch.ones(8, 4))

    def hear(self, stop: tuple[int, int, str] | None, here: tuple[int, int, str]) -> None:
        if stop == here:
            signal.raise_signal(signal.SIGTERM)


def run(rank: int, group: Any, folder: str, kind: str, shape: Any, stop: Any) -> Any:
    """Train to the end, or until SIGTERM on the last rank; returns losses and weights."""
    where: dict[str, Any] = {"mesh": mesh_of(group, shape)}
    if shape is not None:
        where["data_parallel"] = "fsdp" if kind == "reduced once" else "ddp"
    losses, code = list[float](), 0
    one = Run(kind, folder, **where)
    with one.pipe:
        last = torch.distributed.get_rank(group) == torch.distributed.get_world_size(group) - 1
        try:
            losses += one.losses(stop if last else None)
        except SystemExit as end:
            code = end.code
        # A first save that has not seen the data before asks for one more step.
        calls = 2 if "data" in one.saved_with() else 1
        assert (code, one.saves) == ((0, 0) if stop is None else (tl.Pipeline.PREEMPTED, calls))
        weights = {name: p.detach().clone() for name, p in one.pipe.named_parameters()}
        if shape is not None:
            weights = {name: local(p) for name, p in weights.items()}
    return losses, {name: p.tolist() for name, p in weights.items()}


KINDS = [
    ("plain", None, (2, 0, "step")),
    ("drawn", None, (2, 0, "step")),
    ("accumulated", None, (2, 0, "step")),
    ("every other", None, (2, 0, "step")),
    ("reduced once", None, (2, 0, "step")),
    ("several", None, (2, 0, "step")),
    ("eval", None, (2, 0, "step")),
    ("reduced once", (2, 2), (2, 0, "step")),
]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "shape", "stop"), KINDS)
def test_a_resumed_run_is_one_that_went_on(
    workers: Workers, tmp_path: Path, kind: str, shape: Any, stop: Any
) -> None:
    ranks = 2 if shape is None else 4
    expected = workers.run(run, str(tmp_path / "none"), kind, shape, None, ranks=ranks)
    ended = workers.run(run, str(tmp_path / "runs"), kind, shape, stop, ranks=ranks)
    resumed = workers.run(run, str(tmp_path / "runs"), kind, shape, None, ranks=ranks)
    done = len(ended[0][0])
    assert 0 < done < len(expected[0][0])
    for went_on, before, after in zip(expected, ended, resumed, strict=True):
        assert len(before[0]) == done
        assert before[0] + after[0] == went_on[0]
        assert after[1] == went_on[1]


def test_a_save_before_the_update_is_refused(tmp_path: Path) -> None:
    one = Run("plain", str(tmp_path), ranks=2)
    with one.pipe as pipe:
        x = torch.ones(8, 4)
        pipe.step(x, target=x)
        with pytest.raises(CheckpointError, match=r"gradients of step 1 wait .* save after"):
            pipe.save(tmp_path, one.optimizers)
        one.optimizers[0].step()
        pipe.save(tmp_path, one.optimizers)
        pipe.step(x, target=x)
        pipe.zero_grad()
        pipe.save(tmp_path, one.optimizers)
        with pipe.accumulate():
            pipe.step(x, target=x)
            with pytest.raises(CheckpointError, match="gradients of step 3 wait"):
                pipe.save(tmp_path, one.optimizers)
        pipe.load(tmp_path, one.optimizers)
        pipe.save(tmp_path, one.optimizers)


def test_an_optimizer_of_another_model_is_no_update(tmp_path: Path) -> None:
    one, other = Run("plain", str(tmp_path), ranks=2), nn.Linear(2, 2)
    with one.pipe as pipe:
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
        torch.optim.SGD(other.parameters()).step()
        with pytest.raises(CheckpointError, match="gradients of step 1 wait"):
            pipe.save(tmp_path)
