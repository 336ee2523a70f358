"""A loader that one rank of each replica reads: the same batches, end and errors everywhere."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import taktline as tl
from taktline.errors import DataError, SignatureError
from tests.workers import Workers

DATA = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.arange(12.0).reshape(12, 1))


def pipeline(mesh: DeviceMesh | None = None, **options: Any) -> tl.Pipeline:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Tanh()), nn.Linear(8, 1)]
    return tl.Pipeline(
        stages,
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        mesh=mesh,
        ranks=2,
        seed=0,
        **options,
    )


def on(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))


def failing(error: Exception) -> Iterator[torch.Tensor]:
    yield torch.ones(2)
    raise error


class TestInOneProcess:
    def test_passes_on_what_it_reads(self) -> None:
        batches = [(torch.ones(2), {"a": [1, "x", None]}), torch.zeros(())]
        loader = pipeline().loader(batches)
        assert len(loader) == 2
        for _ in range(2):
            first, second = loader
            assert first[0] is batches[0][0]
            assert first[1] == {"a": [1, "x", None]}
            assert second is batches[1]
        batches.append(torch.ones(1))
        assert len(loader) == len(list(loader)) == 3

    def test_an_error_names_rank_and_batch(self) -> None:
        loader = iter(pipeline().loader(failing(KeyError("gone"))))
        next(loader)
        with pytest.raises(DataError, match="rank 0, batch 1: KeyError: 'gone'") as caught:
            next(loader)
        assert isinstance(caught.value.__cause__, KeyError)

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (DATA, r"TensorDataset has samples, not batches; pass a DataLoader\(dataset"),
            (3, "int has no batches"),
        ],
    )
    def test_what_has_no_batches(self, given: Any, text: str) -> None:
        with pytest.raises(DataError, match=f"rank 0, the loader: {text}"):
            pipeline().loader(given)

    def test_such_a_mapping_inside_of_a_batch(self) -> None:
        inner = UserDict(x=torch.ones(2), y=[UserDict(z=1)])
        (batch,) = pipeline().loader([(inner, {"labels": UserDict(a=None)})])
        assert [type(part) for part in batch] == [dict, dict]
        assert batch[0]["x"] is inner["x"]
        assert batch[0]["y"] == [{"z": 1}]
        assert batch[1] == {"labels": {"a": None}}

    def test_set_epoch_reaches_the_sampler(self) -> None:
        sampler = DistributedSampler(DATA, num_replicas=1, rank=0)
        loader = pipeline().loader(DataLoader(DATA, 4, sampler=sampler))
        first, again = list(loader), list(loader)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
        loader.set_epoch(3)
        assert sampler.epoch == 3
        assert not all(torch.equal(a[0], b[0]) for a, b in zip(first, loader, strict=True))
        pipeline().loader([]).set_epoch(1)  # nobody to tell


BATCH = {
    "x": torch.arange(6.0).reshape(2, 3).t(),
    "y": (torch.tensor(True), [torch.zeros(0, 2), torch.ones(2, dtype=torch.bfloat16)]),
    "z": [1, 2.5, "größer", None, True],
}


class Box:
    """A container that only the reading rank has registered."""

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside


def told(run: Callable[[], Any]) -> str:
    try:
        run()
    except DataError as error:
        return str(error)
    return ""


def handed_on(rank: int, group: Any) -> tuple[Any, list[str]]:
    pipe = pipeline(on(group))
    if rank == 0 and Box not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            Box, lambda box: ([box.inside], None), lambda inside, _: Box(*inside)
        )
    cases = {
        "values": lambda: [BATCH, torch.ones(1), UserDict(a=1)],
        "error": lambda: failing(ValueError("no image")),
        "object": lambda: [object()],
        "dataset": lambda: DATA,
        "container": lambda: [Box(torch.ones(2))],
    }
    read = {name: case() if rank == 0 else None for name, case in cases.items()}
    batches = list(pipe.loader(read.pop("values")))
    errors = [told(lambda batches=batches: list(pipe.loader(batches))) for batches in read.values()]
    assert float(pipe.step(torch.ones(4, 2), target=torch.ones(4, 1))) > 0  # still in step
    return batches, errors


@pytest.mark.processes
def test_values_and_errors_reach_every_rank(workers: Workers) -> None:
    (first, errors), (second, others) = workers.run(handed_on, ranks=2)
    assert errors == others
    assert errors[0] == "rank 0, batch 1: ValueError: no image"
    assert errors[1].startswith("rank 0, batch 0: object cannot be sent to another rank")
    assert errors[2].startswith("rank 0, the loader: TensorDataset has samples")
    assert errors[3].startswith("rank 0, batch 0: ")
    assert "Box" in errors[3]
    for batches in (first, second):
        assert len(batches) == 3
        assert batches[0].pop("z") == [1, 2.5, "größer", None, True]
        tensors = {name: BATCH[name] for name in ("x", "y")}
        torch.testing.assert_close(batches[0], tensors, rtol=0, atol=0)
        assert batches[2] == {"a": 1}


def sparse_output(rank: int, group: Any) -> None:
    class Sparse(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).to_sparse()

    pipe = tl.Pipeline([nn.Linear(2, 2), Sparse(2, 2)], microbatches=1, mesh=on(group), ranks=2)
    pipe.eval(torch.ones(2, 2), return_outputs=True)


@pytest.mark.processes
def test_an_output_that_cannot_be_sent_raises_on_every_rank(workers: Workers) -> None:
    for error in workers.outcomes(sparse_output, ranks=2):
        assert isinstance(error, SignatureError)
        assert "sparse tensor cannot be sent" in str(error)
        assert str(error).endswith("or pass return_outputs='last'")


def replicated(rank: int, group: Any) -> tuple[int, list[float], str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = pipeline(mesh, data_parallel="ddp")
    sampler = DistributedSampler(DATA, pipe.replicas, pipe.replica, shuffle=False)
    loader = pipe.loader(DataLoader(DATA, 2, sampler=sampler))
    losses: list[float] = []
    seen: list[float] = []
    for x, y in loader:
        losses.append(float(pipe.step(x, target=y)))
        seen += y.flatten().tolist()
    broken = failing(ValueError("no image")) if pipe.replica == 1 else [torch.ones(1)] * 2
    return pipe.replica, seen, told(lambda: list(pipe.loader(broken)))


@pytest.mark.processes
def test_replicas_read_their_own_part(workers: Workers) -> None:
    found = workers.run(replicated, ranks=4)
    for replica, seen, error in found:
        assert seen == [float(i) for i in range(replica, 12, 2)]
        assert error == ("rank 0 of replica 1, batch 1: ValueError: no image" if replica else "")
    assert [replica for replica, *_ in found] == [0, 1, 0, 1]


def beside_tensor_parallelism(rank: int, group: Any) -> tuple[list[int], str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe = pipeline(mesh)
    values = [int(x) for x in pipe.loader([torch.tensor(10 * rank), torch.tensor(1)])]
    return values, told(lambda: list(pipe.loader([object()] if rank == 0 else None)))


@pytest.mark.processes
def test_tensor_parallel_ranks_have_the_same_batch(workers: Workers) -> None:
    for values, error in workers.run(beside_tensor_parallelism, ranks=4):
        assert values == [0, 1]
        assert error.startswith("rank 0, batch 0: object cannot be sent")
