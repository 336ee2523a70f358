"""A save in the background has the state of the moment of the call, or it is not made."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import taktline as tl
from taktline.checkpoint import background
from taktline.errors import CheckpointError
from tests.checkpoint.training import Training, mesh_of, pipeline
from tests.workers import Workers


@contextmanager
def lateness() -> Iterator[None]:
    """Let copies be late: whoever does not wait for them changes what they are made of."""
    copy_in_time = background.Snapshot.copy

    def copy_late(made: background.Snapshot) -> None:
        time.sleep(0.2)
        copy_in_time(made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "_SMALL", -1)
        patch.setattr(background.Snapshot, "copy", copy_late)
        yield


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    with lateness():
        yield


def pipe_of(*layers: nn.Module) -> Any:
    return tl.Pipeline(list(layers), microbatches=2, loss_fn=nn.functional.mse_loss, ranks=2)


def saved_model(folder: Path, like: Any) -> dict[str, Tensor]:
    like.load(folder)
    return {name: value.clone() for name, value in like.state_dict().items()}


def state_of(pipe: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in pipe.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in (*one, *other))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_the_optimizer_waits(tmp_path: Path, fused: bool) -> None:
    training = Training(pipeline(2, ranks=2))
    training.optimizer.param_groups[0]["fused"] = fused
    training.run(1)
    expected = list(training.state())
    training.save(tmp_path, async_save=True)
    training.run(2)
    again = Training(pipeline(2, ranks=2))
    again.load(tmp_path)
    assert len(expected) > 20
    assert all(map(torch.equal, again.state(), expected))


def test_a_step_of_an_optimizer_that_is_not_saved_waits(tmp_path: Path) -> None:
    pipe = pipe_of(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer, x, expected = torch.optim.SGD(pipe.parameters()), torch.ones(4, 4), state_of(pipe)
    pipe.save(tmp_path, async_save=True)
    pipe.step(x, target=x)
    optimizer.step()
    assert not same(expected, state_of(pipe))
    assert same(expected, saved_model(tmp_path, pipe))


def test_what_a_forward_changes(tmp_path: Path) -> None:
    """Buffers, an embedding that is kept in bounds, and a parameter that is no optimizer's."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Parameter(torch.zeros(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.seen += 1
            return x + 0 * self.seen

    def made() -> Any:
        layers = nn.Embedding(5, 4, max_norm=0.5), nn.BatchNorm1d(4), Counting()
        return pipe_of(nn.Sequential(*layers), nn.Linear(4, 4))

    pipe, x, changed = made(), torch.arange(4), set[str]()
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(2):
        expected = state_of(pipe)
        pipe.save(tmp_path, optimizer, async_save=True)
        pipe.step(x, target=torch.ones(4, 4))
        changed |= {n for n, v in pipe.state_dict().items() if not torch.equal(v, expected[n])}
        assert same(expected, saved_model(tmp_path, made()))
        optimizer.step()
    assert {"0.weight", "1.running_mean", "2.seen"} <= changed


def test_what_users_keep(tmp_path: Path) -> None:
    pipe, mine = pipe_of(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1000)
    pipe.save(tmp_path, extra={"mine": mine}, async_save=True)
    mine.zero_()
    assert pipe.load(tmp_path).extra["mine"].sum() == 1000


def test_loads_wait(tmp_path: Path) -> None:
    pipe = pipe_of(nn.Linear(4, 4), nn.Linear(4, 4))
    before = pipe.save(tmp_path / "before")
    optimizer, x = torch.optim.SGD(pipe.parameters()), torch.ones(4, 4)
    pipe.step(x, target=x)
    optimizer.step()
    expected = state_of(pipe)
    pipe.save(tmp_path / "one", async_save=True)
    pipe.load(before)
    assert same(expected, saved_model(tmp_path / "one", pipe))
    pipe.save(tmp_path / "two", async_save=True)
    pipe.load_state_dict({name: value + 1 for name, value in expected.items()})
    assert same(expected, saved_model(tmp_path / "two", pipe))


def by_torch(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0, 1] += 1


def behind_its_back(weight: nn.Parameter) -> None:
    weight.data.add_(1)


@pytest.mark.parametrize("change", [by_torch, behind_its_back])
def test_a_change_in_between(
    tmp_path: Path, change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    pipe = pipe_of(nn.Linear(40, 40), nn.Linear(40, 40))
    optimizer = torch.optim.SGD(pipe.parameters())
    first = pipe.save(tmp_path)
    pipe.save(tmp_path, optimizer, async_save=True)
    change(dict(pipe.named_parameters())["1.weight"])
    optimizer.step()
    background._running[tmp_path, 0].written.exception()
    text = r"1\.weight was changed before it was copied; change it after the next optimizer\.step"
    with pytest.raises(CheckpointError, match=f"{text}.*unchanged: {first}"):
        pipe.save(tmp_path, optimizer)
    assert "1.weight was changed before" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    # From now on it is copied at once.
    expected = state_of(pipe)
    pipe.save(tmp_path, optimizer, async_save=True)
    change(dict(pipe.named_parameters())["1.weight"])
    assert same(expected, saved_model(tmp_path, pipe))


def test_a_save_that_fails_holds_up_nobody(tmp_path: Path) -> None:
    pipe, x = pipe_of(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)
    optimizer = torch.optim.SGD(pipe.parameters())
    saved = pipe.save(tmp_path, optimizer, async_save=True)
    shutil.rmtree(tmp_path / f".{saved.name}.saving")
    pipe.step(x, target=x)
    optimizer.step()
    with pytest.raises(CheckpointError, match="saving, made by rank 0, is not here"):
        pipe.save(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = [nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)) for _ in range(4)]
    pipe: Any = tl.Pipeline(
        nn.Sequential(*model),
        cuts=["2"],
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        ranks=2,
        device="cuda",
    )
    optimizer, x = torch.optim.AdamW(pipe.parameters()), torch.randn(8, 512, device="cuda")
    for _ in range(3):
        expected = state_of(pipe)
        pipe.save(tmp_path, optimizer, async_save=True)
        for _ in range(3):
            pipe.step(x, target=x)
            optimizer.step()
        background.wait(tmp_path)
        assert not same(expected, state_of(pipe))
        assert same(expected, saved_model(tmp_path, pipe))


def changed_on_the_last(rank: int, group: Any, runs: str) -> str:
    """The last of two ranks writes to a weight while it is copied."""
    training = Training(pipeline(2, mesh=mesh_of(group, None), timeout=20))
    with lateness():
        training.save(runs, async_save=True)
        if rank:
            by_torch(next(p for p in training.pipe.parameters() if p.dim() == 2))
        background._running[Path(runs), rank].written.exception()
        with pytest.raises(CheckpointError) as caught:
            training.save(runs)
        training.save(runs, async_save=True)
        training.step()
        background.wait(Path(runs), rank)
    return str(caught.value)


@pytest.mark.processes
def test_a_change_on_one_rank(workers: Workers, tmp_path: Path) -> None:
    told = workers.run(changed_on_the_last, str(tmp_path))
    assert told[0] == told[1]
    assert told[0].startswith("rank 1: blocks.2.")
    assert "was changed before it was copied" in told[0]


def in_shards(rank: int, group: Any, runs: str) -> bool:
    """Each stage in FSDP2, on two ranks."""
    training = Training(pipeline(2, mesh=mesh_of(group, (2, 2)), data_parallel="fsdp"))
    with lateness():
        training.run(1)
        expected = list(training.state())
        training.save(runs, async_save=True)
        training.run(2)
        training.load(runs)
    return all(map(torch.equal, training.state(), expected))


@pytest.mark.processes
def test_shards(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(in_shards, str(tmp_path), ranks=4) == [True] * 4


def test_a_finished_save_keeps_no_tensor_alive(tmp_path: Path) -> None:
    pipe = pipe_of(nn.Linear(4, 4), nn.Linear(4, 4))
    weights = [StorageWeakRef(weight.untyped_storage()) for weight in pipe.parameters()]
    pipe.save(tmp_path, async_save=True)
    pipe.close()
    del pipe
    until = time.monotonic() + 20
    while not all(weight.expired() for weight in weights) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert all(weight.expired() for weight in weights)
