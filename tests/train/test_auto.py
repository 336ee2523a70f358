"""``schedule="auto"``: the chosen plan trains as the model does, and is the same on all ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import ScheduleError, UseError
from taktline.plan import Kind, peak_memory, read
from taktline.plan.candidates import Candidate, candidates
from taktline.plan.io import read_cuts
from taktline.plan.units import Units
from taktline.train import auto
from taktline.train.rank_limits import held_by
from taktline.train.ranks import Ranks
from tests.train.models import LM, PARTS, TARGET, TOKENS, loss_fn, plain, train
from tests.workers import Workers

PART: dict[str, Any] = {"example": (TOKENS[:2],), "example_target": TARGET[:2]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short search."""
    monkeypatch.setattr(auto, "_SECONDS", 0.3)


def pipeline(model: Any = None, **options: Any) -> tl.Pipeline:
    usual: dict[str, Any] = {"schedule": "auto", "microbatches": PARTS, "loss_fn": loss_fn}
    usual |= {"ranks": 2, **PART, **options}
    return tl.Pipeline(LM() if model is None else model, **usual)


def gradients(order: list[int]) -> dict[str, Tensor]:
    """Those of plain accumulation over the micro-batches."""
    model = LM(tied=False)
    for number in order:
        part, target = (x.chunk(PARTS)[number] for x in (TOKENS, TARGET))
        (loss_fn(model(part), target) / PARTS).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def require_exact(pipe: tl.Pipeline) -> None:
    """Gradients are those of plain accumulation in the plan's order, to the last bit."""
    for stage, name, parameter in pipe._built.parameters():
        rows = pipe.plan.rows
        ends = rows.microbatch[
            (rows.stage == stage) & ((rows.kind == Kind.B) | (rows.kind == Kind.W))
        ]
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients(ends.tolist())[name])


def test_gradients_are_those_of_the_plain_model() -> None:
    model = LM(tied=False)
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    pipe = pipeline(model)
    random = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(random, torch.rand(3))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    pipe.step(TOKENS, target=TARGET)
    require_exact(pipe)
    text = str(pipe)
    assert f"chosen: {pipe.plan.name}, predicted to be the quickest of" in text
    assert "costs measured on these ranks" in text


def test_the_file_runs_without_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    pipe = pipeline(stages_per_rank=2)
    pipe.write_plan(path)
    monkeypatch.setattr(auto, "candidates", None)
    again = pipeline(schedule=path, microbatches=None)
    assert again.plan == pipe.plan == read(path)
    assert [*again.stages] == [*pipe.stages]
    for stage, module in pipe.stages.items():
        names = [name for name, _ in module.named_parameters()]
        assert names == [name for name, _ in again.stages[stage].named_parameters()]
    assert train(again).state.keys() == plain(LM()).state.keys()
    cuts = read_cuts(path)
    assert cuts is not None
    assert len(cuts) == 3
    with pytest.raises(tl.TaktlineError, match="a CSV file cannot hold cuts"):
        pipe.write_plan(tmp_path / "plan.csv")


def test_the_number_of_microbatches() -> None:
    """The example is a batch then, and the loss is that of the same batch."""
    pipe = pipeline(example=(TOKENS,), example_target=TARGET, microbatches=None)
    assert pipe.plan.microbatches in (2, 4, 8)
    loss = pipe.step(TOKENS, target=TARGET)
    torch.testing.assert_close(loss, loss_fn(LM()(TOKENS), TARGET).detach())


def test_on_the_meta_device_costs_are_counted() -> None:
    with tl.split.deferred():
        model = LM()
    pipe = pipeline(model, state_dict=LM().state_dict())
    assert "from counted operations" in str(pipe)
    assert train(pipe).losses == pytest.approx(plain(LM()).losses)


def test_a_model_with_its_own_loss() -> None:
    class Own(LM):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore
            return loss_fn(super().forward(tokens), labels)

    example = ((TOKENS[:2],), {"labels": TARGET[:2]})
    pipe = pipeline(Own(), loss_fn=None, example=example, example_target=None)
    torch.testing.assert_close(
        pipe.step(TOKENS, labels=TARGET), loss_fn(LM()(TOKENS), TARGET).detach()
    )


def test_those_near_the_quickest_take_turns() -> None:
    """One that had a slow while is still found, and one far behind costs one turn only."""
    units = Units(np.ones((4, 8)))
    found = candidates(units, 2, 4, per_rank=[1], seconds=1)[:3]
    slow, steady, far = (each.plan.name for each in found)
    times = {slow: [105.0, 95.0, 95.0], steady: [100.0] * 3, far: [200.0] * 3}
    turns: list[str] = []

    def time(each: Candidate) -> list[float]:
        turns.append(each.plan.name)
        return [times[each.plan.name][turns.count(each.plan.name) - 1]] * 2

    best = auto.tried(found, time, Ranks(2, device=torch.device("cpu")), "")
    assert [each.plan.name for each in best] == [slow, steady, far]
    assert [each.measured for each in best] == [95.0, 100.0, 200.0]
    assert turns == [slow, steady, far, steady, slow, slow, steady]


def test_replan_keeps_training() -> None:
    """Parameters, gradients, optimizer state, buffers and random numbers stay; so does the loss."""
    pipe, other = (pipeline(schedule="1f1b") for _ in range(2))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    pipe.step(TOKENS, target=TARGET)
    optimizer.step()
    kept = [(p, p.detach().clone(), p.grad) for p in pipe.parameters()]
    random = torch.get_rng_state()
    text = pipe.replan()
    assert text.startswith(f"chosen: {pipe.plan.name}, ")
    assert text in str(pipe)
    assert torch.equal(torch.get_rng_state(), random)
    for (before, value, gradient), after in zip(kept, pipe.parameters(), strict=True):
        assert before is after
        assert torch.equal(value, after)
        assert gradient is after.grad
    assert pipe.schedules[0].steps == 1
    optimizer.zero_grad()
    second = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other.step(TOKENS, target=TARGET)
    second.step()
    second.zero_grad()
    assert pipe.step(TOKENS, target=TARGET) == other.step(TOKENS, target=TARGET)
    for one, two in zip(pipe.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"example": None}, ScheduleError, "pass example=(…), the arguments of a micro-batch"),
        ({"cuts": ["blocks.2"]}, ScheduleError, "cuts it itself: pass the whole model"),
        ({"model": [nn.Linear(2, 2)] * 2}, ScheduleError, "cuts it itself: pass the whole model"),
        ({"memory": -1}, ScheduleError, "memory must be a number of bytes above 0"),
        ({"memory": [1e9]}, ScheduleError, "memory is for 1 rank, but there are 2"),
        ({"memory": 1000}, ScheduleError, "no plan fits into memory=1000 B: the least is "),
        ({"microbatches": None, "ranks": 3}, ScheduleError, "2 rows does not divide evenly into 3"),
        ({"stages_per_rank": 9}, ScheduleError, "too few for stages_per_rank=9 on 2 ranks"),
        ({"ranks": 40}, tl.TaktlineError, "LM cannot be cut into 40 stages"),
    ],
)
def test_mistakes(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        pipeline(**options)
    assert text in str(raised.value)


def test_the_least_memory_is_enough() -> None:
    """Whatever it takes: copies to the host, forwards that run again, and so again after replan."""
    with pytest.raises(ScheduleError, match=r"the least is (\d+\.\d) KiB") as raised:
        pipeline(LM(tied=False), memory=1000)
    least = float(str(raised.value).partition("the least is ")[2].partition(" KiB")[0])
    pipe = pipeline(LM(tied=False), memory=1024 * (least + 0.1))
    for _ in range(2):
        held = sum(held_by(pipe.stages[stage]) for stage in pipe.plan.placement.stages_of(0))
        assert held + peak_memory(pipe.plan, pipe._built.table.work)[0] <= 1024 * (least + 0.1)
        pipe.zero_grad()
        pipe.step(TOKENS, target=TARGET)
        require_exact(pipe)
        pipe.replan()


def test_replan_needs_an_example() -> None:
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    pipe = tl.Pipeline(stages, microbatches=2, ranks=2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(UseError, match=r"replan\(\) measures training steps of the example"):
        pipe.replan()


def chosen(rank: int, group: Any, microbatches: int | None, tied: bool) -> dict[str, Any]:
    """A plan over processes, what it trains, and another plan later."""
    auto._SECONDS = 0.3
    whole = {"example": (TOKENS,), "example_target": TARGET}
    given = PART if microbatches else whole
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    options = {"mesh": mesh, "ranks": None, "microbatches": microbatches, **given}
    pipe = pipeline(LM(tied=tied), **options)
    first = train(pipe)
    if not tied:
        fresh = pipeline(LM(tied=False), **options | {"schedule": pipe.plan, "microbatches": None})
        fresh.step(TOKENS, target=TARGET)
        require_exact(fresh)
    text = pipe.replan()
    return {
        "plan": str(pipe.plan.digest()),
        "text": text,
        "losses": first.losses,
        "norms": first.norms,
        "again": pipe.step(TOKENS, target=TARGET).item(),
        "printed": str(pipe),
    }


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "microbatches", "tied"), [(2, PARTS, False), (4, PARTS, True), (2, None, True)]
)
def test_all_ranks_choose_the_same(
    workers: Workers, ranks: int, microbatches: int | None, tied: bool
) -> None:
    found = workers.run(chosen, microbatches, tied, ranks=ranks)
    assert all(each == found[0] for each in found)
    assert "measured to be among the quickest" in found[0]["text"]
    expected = plain(LM(tied=tied))
    assert found[0]["losses"] == pytest.approx(expected.losses, rel=1e-5)
    assert found[0]["norms"] == pytest.approx(expected.norms, rel=1e-4)


def refused(rank: int, group: Any, what: str) -> str:
    """The error of a choice that fails."""
    auto._SECONDS = 0.3
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    options: dict[str, Any] = {"memory": 1000} if what == "memory" else {}
    if what == "schedule" and rank == 1:
        options = {"schedule": "1f1b"}
    try:
        pipeline(mesh=mesh, ranks=None, **(PART | options))
    except tl.TaktlineError as error:
        return str(error)
    return "nothing"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("memory", "no plan fits into memory=1000 B"),
        ("schedule", "schedule is auto on rank 0, but 1f1b on rank 1"),
    ],
)
def test_all_ranks_raise_the_same(workers: Workers, what: str, text: str) -> None:
    first, second = workers.run(refused, what)
    assert text in first
    assert first == second
