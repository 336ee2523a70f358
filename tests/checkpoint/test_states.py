"""Models, optimizers and schedulers of every kind: what was saved is what is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr

import taktline as tl
from taktline.errors import CheckpointError
from tests.checkpoint.training import mesh_of
from tests.workers import Workers


class Odd(nn.Module):
    """A layer with all that a state may have beside plain weights."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.frozen = nn.Parameter(torch.randn(4, dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, dtype=dtype))
        self.empty = nn.Parameter(torch.empty(0, 4, dtype=dtype))
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64).conj())
        self.register_buffer("count", torch.randint(100, (), dtype=torch.int64))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("nothing", torch.empty(0, dtype=torch.uint8))
        self.register_buffer("across", torch.randn(3, 2).t())
        self.register_buffer("passing", torch.randn(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * (1 + self.frozen))


def odd(cuts: list[str], dtype: torch.dtype = torch.float32) -> tl.Pipeline:
    model: Any = nn.Sequential(*(Odd(dtype) for _ in range(4)))
    model[3].linear.weight = model[0].linear.weight
    return tl.Pipeline(
        model, cuts=cuts, microbatches=2, loss_fn=nn.functional.mse_loss, ranks=len(cuts) + 1
    )


def steps(pipe: Any, optimizer: torch.optim.Optimizer, count: int, dtype: Any) -> list[float]:
    x, losses = torch.linspace(0, 1, 32).reshape(8, 4).to(dtype), []
    for _ in range(count):
        losses.append(pipe.step(x, target=x).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in ("AdamW", "SGD", "Adagrad", "RMSprop", "Adafactor")),
        *((kind, torch.bfloat16) for kind in ("AdamW", "Adafactor")),
    ],
)
def test_odd_models(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    def made(cuts: list[str]) -> tuple[tl.Pipeline, torch.optim.Optimizer]:
        pipe = odd(cuts, dtype)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        return pipe, getattr(torch.optim, kind)(pipe.parameters(), lr=0.01, **options)

    first, optimizer = made(["1", "2", "3"])
    steps(first, optimizer, 2, dtype)
    first.save(tmp_path, optimizer)
    passing: Any = dict(first.named_buffers()).get("0.passing")
    assert passing is None, "what does not last is in no state"
    state = {name: value.clone() for name, value in first.state_dict().items()}
    expected = steps(first, optimizer, 2, dtype)
    for cuts in (["2"], [], ["1", "2", "3"]):
        again, other = made(cuts)
        steps(again, other, 1, dtype)
        again.load(tmp_path, other)
        torch.testing.assert_close(again.state_dict(), state, rtol=0, atol=0)
        torch.testing.assert_close(steps(again, other, 2, dtype), expected)


def test_state_that_needs_more_room_than_its_parameter(tmp_path: Path) -> None:
    class Precise(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["sum"] = torch.full(parameter.shape, 1 / 3)

    pipe = odd(["2"], torch.bfloat16)
    optimizer = Precise(pipe.parameters())
    optimizer.step()
    pipe.save(tmp_path, optimizer)
    again = odd([], torch.bfloat16)
    other = Precise(again.parameters())
    again.load(tmp_path, other)
    assert {state["sum"].dtype for state in other.state.values()} == {torch.float32}
    assert all((state["sum"] == 1 / 3).all() for state in other.state.values())


def test_before_the_first_step(tmp_path: Path) -> None:
    """A save without state takes away what there is."""
    pipe = odd(["2"])
    # The first step adds up the gradients of a tied weight in another order than later ones.
    steps(pipe, torch.optim.SGD(pipe.parameters(), lr=0.0), 1, torch.float32)
    saved = pipe.save(tmp_path, torch.optim.AdamW(pipe.parameters()))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.5)
    expected = steps(pipe, optimizer, 2, torch.float32)
    pipe.load(saved, optimizer)
    assert (len(optimizer.state), optimizer.param_groups[0]["lr"]) == (0, 1e-3)
    optimizer.param_groups[0]["lr"] = 0.5
    assert steps(pipe, optimizer, 2, torch.float32) == expected


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 20),
    "cycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=20),
    "sequence": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)], [3]),
    "chain": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)], o),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
}


def rates(scheduler: Any, count: int) -> list[list[float]]:
    found: list[list[float]] = []
    optimizer = getattr(scheduler, "optimizer", None) or scheduler._schedulers[0].optimizer
    for _ in range(count):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[tl.Pipeline, Any, Any]:
        pipe = odd(["2"])
        parameters = list(pipe.parameters())
        groups = [{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return pipe, optimizer, SCHEDULERS[kind](optimizer)

    pipe, optimizer, scheduler = made()
    rates(scheduler, 3)
    pipe.save(tmp_path, optimizer, scheduler=scheduler)
    expected = rates(scheduler, 4)
    pipe, optimizer, scheduler = made()
    rates(scheduler, 1)
    pipe.load(tmp_path, optimizer, scheduler=scheduler)
    assert rates(scheduler, 4) == expected


def test_a_scaler(tmp_path: Path) -> None:
    pipe, scaler = odd([]), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    pipe.save(tmp_path, scaler=scaler)
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    pipe.load(tmp_path, scaler=other)
    assert other.state_dict() == scaler.state_dict()


def test_several_optimizers(tmp_path: Path) -> None:
    def made() -> tuple[tl.Pipeline, list[Any]]:
        pipe = odd(["2"])
        weights = [each for each in pipe.parameters() if each.dim() == 2]
        others = [each for each in pipe.parameters() if each.dim() < 2]
        return pipe, [torch.optim.AdamW(weights), torch.optim.SGD(others, momentum=0.9)]

    def run(pipe: tl.Pipeline, optimizers: list[Any]) -> list[float]:
        losses: list[float] = []
        for _ in range(2):
            losses += steps(pipe, optimizers[0], 1, torch.float32)
            optimizers[1].step()
            optimizers[1].zero_grad()
        return losses

    pipe, optimizers = made()
    run(pipe, optimizers)
    pipe.save(tmp_path, optimizers)
    expected = run(pipe, optimizers)
    pipe, optimizers = made()
    with pytest.raises(CheckpointError, match=r"and optimizer 0 is torch\.SGD"):
        pipe.load(tmp_path, optimizers[::-1])
    pipe.load(tmp_path, optimizers)
    assert run(pipe, optimizers) == expected


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipe = odd([])
    saved = pipe.save("runs", async_save=True)
    (tmp_path / "elsewhere").mkdir()
    os.chdir("elsewhere")
    assert pipe.load("../runs").path.name == saved.name
    os.chdir("..")
    assert pipe.load("runs").path == saved


def uneven(rank: int, group: Any, folder: str, stages: list[nn.Module]) -> list[Any]:
    """Steps from the latest save on; ranks have other numbers of groups, or no parameters."""
    torch.manual_seed(0)
    where: Any = {"ranks": 2} if group is None else {"mesh": mesh_of(group, None)}
    pipe: Any = tl.Pipeline(stages, microbatches=2, loss_fn=nn.functional.mse_loss, **where)
    groups: list[Any] = [
        {"params": some, "lr": rate}
        for dim, rate in ((2, 0.1), (1, 0.2))
        if (some := [each for each in pipe.parameters() if each.dim() == dim])
    ]
    optimizer = torch.optim.AdamW(groups) if groups else None
    scheduler = lr.CosineAnnealingLR(optimizer, 10) if optimizer else None
    x, found = torch.linspace(0, 1, 32).reshape(8, 4).requires_grad_(), []
    if tl.checkpoint.latest(folder) is not None:
        assert pipe.load(folder, optimizer, scheduler=scheduler).step == 2
    for step in range(4):
        if step == 2 and tl.checkpoint.latest(folder) is None:
            pipe.save(folder, optimizer, scheduler=scheduler)
            found.clear()
        elif step == 2:
            break
        found.append(pipe.step(x, target=x.detach()).item())
        if optimizer is not None and scheduler is not None:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.extend(each["lr"] for each in optimizer.param_groups)
            assert scheduler.get_last_lr() == [each["lr"] for each in optimizer.param_groups]
    return found


@pytest.mark.processes
def test_ranks_with_other_groups(workers: Workers, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.LayerNorm(4)]
    for place, stages in enumerate(([nn.Tanh(), layers[0]], [layers[0], nn.Tanh()], layers)):
        folder = str(tmp_path / str(place))
        expected = workers.run(uneven, folder, stages)
        assert workers.run(uneven, folder, stages) == expected
    # A scheduler has a rate for each group, and the last rank has no group of matrices here.
    one = uneven(0, None, str(tmp_path / "one"), layers)
    first, last = workers.run(uneven, str(tmp_path / "one"), layers)
    assert first == pytest.approx(one)
    assert last == pytest.approx([one[0], one[2], one[3], one[5]])
