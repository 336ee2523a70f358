"""An optimizer that keeps its state on the host, and steps there: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.runtime.host_optimizer import device_of_state

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


class Run:
    """A pipeline in training, with clipped gradients and a schedule of learning rates."""

    def __init__(self, name: str = "AdamW", *, host: bool = True, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.model[0].requires_grad_(False)
        options: Any = {"loss_fn": nn.functional.mse_loss, "device": device}
        self.pipe = tl.Pipeline(self.model, cuts=["2"], microbatches=2, ranks=2, **options)
        groups = [{"params": [*self.model[:3].parameters()]}, {"params": [self.model[3].bias]}]
        self.optimizer = OPTIMIZERS[name]([*groups, {"params": [self.model[3].weight], "lr": 0.2}])
        if host:
            assert tl.offload_optimizer(self.optimizer) is self.optimizer
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.steps = 0

    def train(self, steps: int) -> list[Tensor]:
        for _ in range(steps):
            torch.manual_seed(self.steps)
            x, self.steps = torch.randn(8, 8, device=self.pipe.device), self.steps + 1
            self.pipe.step(x, target=x)
            self.pipe.clip_grad_norm_(0.1)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return [each.detach().cpu() for each in self.model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_like_the_optimizer_that_it_was(name: str) -> None:
    run, plain = Run(name), Run(name, host=False)
    first = run.optimizer.param_groups[0]
    assert all(map(torch.equal, run.train(3), plain.train(3)))
    first["lr"] = 0.05  # a group that the user has kept
    plain.optimizer.param_groups[0]["lr"] = 0.05
    assert all(map(torch.equal, run.train(2), plain.train(2)))
    parameters = {p for p in run.model.parameters() if p.requires_grad}
    assert set(run.optimizer.state) == parameters
    for parameter in parameters:
        assert all(each.device.type == "cpu" for each in run.optimizer.state[parameter].values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True), (True, True)])
def test_saves_load_with_and_without(saves: bool, loads: bool, device: str, tmp_path: Path) -> None:
    wanted = Run(host=False, device=device).train(5)
    run, other = Run(host=saves, device=device), Run(host=loads, device=device)
    run.train(3)
    run.pipe.save(tmp_path, run.optimizer, scheduler=run.scheduler)
    other.train(1)  # its state is replaced
    other.pipe.load(tmp_path, other.optimizer, scheduler=other.scheduler)
    other.steps = 3
    exact: Any = {"rtol": 0.0, "atol": 0.0} if device == "cpu" else {}
    torch.testing.assert_close(other.train(2), wanted, **exact)
    kinds = {s["exp_avg"].device.type for s in other.optimizer.state.values()}
    assert kinds == {"cpu" if loads else device}


def test_a_state_that_it_has_already_moves() -> None:
    run, plain = Run(host=False), Run(host=False)
    run.train(2)
    tl.offload_optimizer(run.optimizer)
    tl.offload_optimizer(run.optimizer)  # once is enough
    run.train(2)
    assert all(map(torch.equal, run.train(1), plain.train(5)))
    assert device_of_state(run.optimizer, run.model[3].bias).type == "cpu"


class Unlucky(torch.optim.SGD):
    """Fails in its second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("no luck")
        return super().step(closure)


def test_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        OPTIMIZERS, "Unlucky", lambda found: Unlucky(found, 0.1, momentum=0.9, fused=True)
    )
    run, plain = Run("Unlucky"), Run("Unlucky", host=False)
    for each in (run, plain):
        each.train(1)
        with pytest.raises(RuntimeError, match="no luck"):
            each.train(1)
        each.optimizer.zero_grad()
    assert all(map(torch.equal, run.train(2), plain.train(2)))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        run.optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert all(map(torch.equal, run.train(1), plain.train(1)))


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.train(1)
    with pytest.raises(tl.TaktlineError, match="without a closure: call"):
        run.optimizer.step(lambda: 1.0)
    monkeypatch.setattr("taktline.runtime.host_optimizer.is_sharded", lambda _: True)
    with pytest.raises(tl.TaktlineError, match=r"CPUOffloadPolicy\(\) to fully_shard"):
        tl.offload_optimizer(Run(host=False).optimizer)
    with pytest.raises(tl.TaktlineError, match="optimizer must be an optimizer of torch"):
        tl.offload_optimizer(run.model)  # pyright: ignore[reportArgumentType]
