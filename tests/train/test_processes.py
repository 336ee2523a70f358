"""A pipeline over processes trains as the model does, with copies of it, too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import taktline as tl
from taktline.meta import local
from tests.train import models
from tests.train.models import CUTS, LM, TARGET, TOKENS, Record, batches, loss_fn, plain, train
from tests.workers import Workers

pytestmark = pytest.mark.processes


def pipeline(group: Any, model: Any = None, **options: Any) -> tl.Pipeline:
    """The usual one, on the ranks of a group."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    return models.pipeline(model, **({"mesh": mesh} | options))


def trained(rank: int, group: Any, schedule: str, stages: int, cast: bool) -> Record:
    return train(pipeline(group, schedule=schedule, cuts=CUTS[stages]), cast=cast)


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zbv", 4)])
def test_equals_plain_training(workers: Workers, schedule: str, stages: int, cast: bool) -> None:
    expected = plain(LM(), cast=cast)
    first, second = workers.run(trained, schedule, stages, cast)
    limits = {"rtol": 1e-4, "atol": 1e-5} if cast else {}
    first.require_close(expected, **limits)
    if not cast:
        assert first.norms == expected.norms  # to the last bit, though each rank has a part of them
    assert (second.losses, second.norms, second.state) == (first.losses, first.norms, {})


def everything(rank: int, group: Any) -> dict[str, Any]:
    """What a pipeline gives beside its training."""
    pipe = pipeline(group)
    loss, output = pipe.step(TOKENS, target=TARGET, return_outputs=True)
    kept = pipe.step(TOKENS, target=TARGET, return_outputs="last")[1]
    state = pipe.state_dict()
    with pipe.trace() as trace:
        pipe.step(TOKENS, target=TARGET)
    other = pipeline(group, schedule="zbv", cuts=CUTS[4])
    before = other.eval(TOKENS, target=TARGET)
    changed = {name: value + 0.1 for name, value in LM().state_dict().items()}
    other.load_state_dict(changed)
    return {
        "loss": loss,
        "output": output,
        "last": kept is not None,
        "names": list(state),
        "ranks": trace.timeline.plan.ranks,
        "before": before,
        "after": other.eval(TOKENS, target=TARGET),
        "text": str(pipe),
    }


def test_everything_else(workers: Workers) -> None:
    model = LM()
    expected = model(TOKENS).detach()
    first, second = workers.run(everything)
    for found in (first, second):
        torch.testing.assert_close(found["output"], expected)
        torch.testing.assert_close(found["loss"], loss_fn(expected, TARGET))
        torch.testing.assert_close(found["before"], found["loss"])
        assert found["ranks"] == 2
        assert "2 ranks (a process each)" in found["text"]
    assert (first["last"], second["last"]) == (False, True)
    assert first["names"][:2] == ["scale", "embed.weight"]
    assert "head.weight" in second["names"]
    assert "embed.weight" not in second["names"]
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})
    torch.testing.assert_close(first["after"], loss_fn(model(TOKENS), TARGET).detach())
    assert first["text"] == second["text"]


def reconnected(rank: int, group: Any, ended: int) -> list[Any]:
    """A step before and after new connections; rank 1 may have ended one more."""
    pipe = pipeline(group)
    losses = [pipe.step(TOKENS, target=TARGET).item()]
    pipe.schedules[rank].steps += ended * rank
    try:
        pipe.reconnect()
    except tl.MismatchError as error:
        return [str(error), error.recoverable]
    return [*losses, pipe.step(TOKENS, target=TARGET).item()]


def test_new_connections(workers: Workers) -> None:
    for before, after in workers.run(reconnected, 0):
        assert before == after


def test_a_step_that_has_ended_on_some_ranks_only(workers: Workers) -> None:
    for text, recoverable in workers.run(reconnected, 1):
        assert text == (
            "the latest step has ended on some ranks only (training steps: 1 on rank 0; 2 on rank "
            "1), so their weights may differ; load a checkpoint on every rank, and set steps of "
            "the schedules"
        )
        assert recoverable == "restart"


def scaled(rank: int, group: Any, sharded: bool) -> list[Any]:
    """An overflow on one rank only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")) if sharded else None
    pipe = pipeline(group, **({"mesh": mesh, "data_parallel": "fsdp"} if sharded else {}))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with pytest.raises(tl.MismatchError, match=r"create it with pipe\.scaler\(…\)"):
        pipe.step(TOKENS, target=TARGET, scaler=torch.amp.GradScaler("cpu"))
    scaler = pipe.scaler(init_scale=8.0)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    found: list[Any] = []
    for overflows in (True, False):
        pipe.step(TOKENS, target=TARGET, scaler=scaler)
        if overflows and rank == 1:
            local(next(pipe.parameters()).grad)[0] = float("inf")  # pyright: ignore
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pairs = zip(before, pipe.parameters(), strict=True)
        same = all(torch.equal(local(one), local(other)) for one, other in pairs)
        found.append((same, scaler.get_scale()))
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp"])
def test_all_ranks_leave_out_a_step(workers: Workers, sharded: bool) -> None:
    ranks = 4 if sharded else 2
    assert workers.run(scaled, sharded, ranks=ranks) == [[(True, 4.0), (False, 4.0)]] * ranks


def copies(rank: int, group: Any, way: str, schedule: str, stages: int) -> Record:
    """Two pipelines, each with its half of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = pipeline(
        group, mesh=mesh, data_parallel=way, schedule=schedule, cuts=CUTS[stages], microbatches=2
    )
    copy, record = mesh["dp"].get_local_rank(), Record()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for tokens, target in batches():
        loss = pipe.step(tokens.chunk(2)[copy], target=target.chunk(2)[copy])
        record.losses.append(loss.item())
        record.norms.append(pipe.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    record.state = pipe.state_dict(gathered=True)
    pipe.load_state_dict({name: value + 0.1 for name, value in LM().state_dict().items()})
    record.losses.append(pipe.eval(TOKENS, target=TARGET).item())
    return record


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zbv", 4)])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_copies(workers: Workers, way: str, schedule: str, stages: int) -> None:
    expected, model = plain(LM()), LM()
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})
    expected.losses.append(loss_fn(model(TOKENS), TARGET).item())
    records = workers.run(copies, way, schedule, stages, ranks=4)
    records[0].require_close(expected)
    for record in records[1:]:
        assert (record.losses, record.norms) == (records[0].losses, records[0].norms)
        assert record.state == {}


def thawed_copies(rank: int, group: Any, way: str) -> list[float]:
    """The first stage is frozen when it is wrapped, and trained later."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = LM(tied=False)
    model.embed.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    pipe = pipeline(group, model, mesh=mesh, data_parallel=way, cuts=CUTS[2], microbatches=2)
    copy, norms = mesh["dp"].get_local_rank(), list[float]()
    for _ in range(2):
        pipe.step(TOKENS.chunk(2)[copy], target=TARGET.chunk(2)[copy])
        norms.append(pipe.grad_norm().item())
        pipe.zero_grad()
        for parameter in pipe.parameters():
            parameter.requires_grad_(True)
    return norms


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_copies_of_a_stage_that_was_frozen_at_first(workers: Workers, way: str) -> None:
    model = LM(tied=False)
    loss_fn(model(TOKENS), TARGET).backward()
    later = [*model.blocks[2:].parameters(), *model.head.parameters()]
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in parameters]).item()  # pyright: ignore
        for parameters in (later, model.parameters())
    ]
    for found in workers.run(thawed_copies, way, ranks=4):
        torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-5)


def largest_gradient(rank: int, group: Any, value: float) -> float:
    """The second of two shards of a bias with one element is empty."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    pipe = pipeline(group, _narrow(), mesh=mesh, data_parallel="fsdp", loss_fn=torch.dist)
    pipe.step(torch.full((4, 3), value), target=torch.zeros(4, 1))
    return pipe.grad_norm(float("inf")).item()


def _narrow() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def test_the_largest_gradient_where_shards_are_empty(workers: Workers) -> None:
    model = _narrow()
    torch.stack([torch.dist(model(torch.ones(1, 3)), torch.zeros(1, 1))] * 4).mean().backward()
    gradients = [p.grad for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients, float("inf")).item()  # pyright: ignore
    assert workers.run(largest_gradient, 1.0) == pytest.approx([norm, norm])
    assert all(map(math.isnan, workers.run(largest_gradient, math.nan)))


class Twice(LM):
    """Calls its first block once more, in the last stage."""

    def forward(self, tokens: torch.Tensor, shift: Any = None) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


def with_a_shared_block(rank: int, group: Any) -> str:
    """Both stages, on one rank, have the block."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    options = {"schedule": "interleaved_1f1b", "cuts": CUTS[2], "microbatches": 2}
    with pytest.raises(tl.MismatchError) as refused:
        pipeline(group, Twice(), mesh=mesh, data_parallel="fsdp", **options)
    return str(refused.value)


def test_a_block_in_two_stages_of_a_rank_in_shards_is_refused(workers: Workers) -> None:
    for text in workers.run(with_a_shared_block):
        assert "stages 0 and 1 of this rank share the module blocks.0" in text


class Nested(LM):
    """Has lists inside of its blocks, a list in a list, and parts in several places."""

    def __init__(self, shared: str = "") -> None:
        super().__init__()
        width, first = self.embed.embedding_dim, self.blocks[0]
        for block in self.blocks:
            block.experts = nn.ModuleList([nn.Linear(width, width)])  # pyright: ignore
        self.pairs = nn.ModuleList([nn.ModuleList([nn.LayerNorm(width)])])
        if shared:
            self.blocks[1].norm = first.norm  # pyright: ignore

    def forward(self, tokens: torch.Tensor, shift: Any = None) -> torch.Tensor:
        x = self.get_submodule("pairs.0.0")(self.embed(tokens))
        for block in self.blocks:
            x = block.experts[0](block(x))  # pyright: ignore
        return self.head(x)


REPLICAS: dict[str, Any] = {
    # Batches that 4 micro-batches do not divide, and with too few rows for them.
    "uneven": (LM, (2, 2), {"schedule": "zbv", "cuts": CUTS[4]}, (5, 3)),
    "lists in lists": (Nested, (1, 2), {"cuts": [], "microbatches": 2}, (4, 4)),
    "shared": (lambda: Nested("module"), (1, 2), {"cuts": [], "microbatches": 2}, (4, 4)),
}
"""Models, their meshes and options, and the rows of both replicas."""


def loss_and_norm(rank: int, group: Any, case: str, way: str) -> list[float]:
    make, shape, options, rows = REPLICAS[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    pipe = pipeline(group, make(), mesh=mesh, data_parallel=way, **options)
    found: list[float] = []
    for _ in range(2):
        here = slice(rows[pipe.replica])
        loss = pipe.step(TOKENS[here], target=TARGET[here])
        found += [loss.item(), pipe.grad_norm().item()]
        pipe.zero_grad()
    return found


@pytest.mark.parametrize(
    ("case", "way"),
    [("uneven", "ddp"), ("uneven", "fsdp"), ("lists in lists", "fsdp"), ("shared", "fsdp")],
)
def test_the_mean_over_replicas(workers: Workers, case: str, way: str) -> None:
    make, shape, _, rows = REPLICAS[case]
    model = make()
    loss = torch.stack([loss_fn(model(TOKENS[:n]), TARGET[:n]) for n in rows]).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in workers.run(loss_and_norm, case, way, ranks=math.prod(shape)):
        torch.testing.assert_close(found, [loss.item(), norm.item()] * 2, rtol=1e-4, atol=1e-5)


def left_alone(rank: int, group: Any, way: str) -> str:
    """One rank leaves accumulate() by an error, before the copies meet."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = pipeline(group, mesh=mesh, data_parallel=way, microbatches=2, timeout=20.0)
    try:
        with pipe.accumulate():
            pipe.step(TOKENS, target=TARGET)
            if rank == 3:
                raise ValueError("no more data")
    except (tl.TaktlineError, ValueError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_rank_that_leaves_accumulate_by_an_error(workers: Workers, way: str) -> None:
    *told, last = workers.run(left_alone, way, ranks=4, timeout=60)
    assert last == "no more data"
    error = "has left accumulate() by an error, so nothing was added up: ValueError: no more data"
    assert set(told) == {f"replica 1: rank 1 {error}"}


def split_layers(module: nn.Module, mesh: Any) -> nn.Module:
    """The two layers of each block, side by side on two ranks."""
    for name, layer in module.named_modules():
        if name.endswith(("wide", "narrow")) and isinstance(layer, nn.Linear):
            style = ColwiseParallel() if name.endswith("wide") else RowwiseParallel()
            parallelize_module(layer, mesh, style)
    return module


def in_parts(rank: int, group: Any, way: str | None) -> Record:
    """Tensor parallelism within each stage, on top of which there may be FSDP2."""
    names, sizes = (("pp", "tp"), (2, 2)) if way is None else (("pp", "dp", "tp"), (1, 2, 2))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return train(
        pipeline(
            group,
            mesh=mesh,
            cuts=CUTS[2] if way is None else None,
            data_parallel=way,
            prepare=lambda module, stage: split_layers(module, mesh["tp"]),
        )
    )


@pytest.mark.parametrize("way", [None, "fsdp"])
def test_tensor_parallelism(workers: Workers, way: str | None) -> None:
    expected = plain(LM())
    records = workers.run(in_parts, way, ranks=4)
    records[0].require_close(expected, rtol=1e-4, atol=1e-5)
    for record in records[1:]:
        assert (record.losses, record.norms) == (records[0].losses, records[0].norms)


def own_stages(rank: int, group: Any) -> list[str]:
    """Each process brings its own stage only."""
    model = LM(tied=False)
    stages = [nn.Sequential(model.embed, model.blocks[0]), nn.Sequential(model.head)]
    pipe = pipeline(group, {rank: stages[rank]}, cuts=None)
    loss = pipe.step(TOKENS, target=TARGET)
    expected = loss_fn(stages[1](stages[0](TOKENS)), TARGET)
    torch.testing.assert_close(loss, expected.detach())
    return list(pipe.state_dict(gathered=True))


def test_own_stages_only(workers: Workers) -> None:
    names, nothing = workers.run(own_stages)
    assert names[0] == "0.0.weight"
    assert names[-1] == "1.0.weight"
    assert nothing == []


def wrong(rank: int, group: Any, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    given = {"mesh": mesh} if options.pop("meshed", False) else {}
    if options.pop("unnamed", False):
        given = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))}
    tl.Pipeline(LM(), microbatches=2, loss_fn=loss_fn, cuts=CUTS[2], **given, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 3}, "ranks is 3, but the launcher has started 4 processes"),
        ({"ranks": 2}, 'room for 2 replicas of the pipeline: pass data_parallel="ddp" or "fsdp"'),
        ({"unnamed": True}, "the mesh has no dimension 'pp' for the pipeline, only ['x']"),
        ({"meshed": True, "ranks": 4}, "ranks is 4, but the mesh has 2 in 'pp'"),
        ({"meshed": True}, "room for 2 replicas of stage"),
    ],
)
def test_what_is_refused(workers: Workers, options: dict[str, Any], text: str) -> None:
    for error in workers.outcomes(wrong, options, ranks=4):
        assert isinstance(error, tl.TaktlineError), error
        assert text in str(error)


def given_apart(rank: int, group: Any) -> str:
    """Each rank shuffles for itself, by a generator that its own dropout has moved on."""
    pipe = pipeline(group)
    torch.manual_seed(rank)
    data: Any = list(zip(*batches(1)[0], strict=True))
    tokens, target = next(iter(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)))
    with pytest.raises(tl.MismatchError) as caught:
        pipe.step(tokens=tokens, target=target)
    return str(caught.value)


def test_ranks_with_different_batches(workers: Workers) -> None:
    for text in workers.run(given_apart):
        assert text.startswith("the ranks were given different arguments: digest ")
