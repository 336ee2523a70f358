"""Pipelines × data or tensor parallelism: each combination trains as the plain model does."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import taktline as tl
from tests import models
from tests.runtime.parallel import (
    WRAPPERS,
    Case,
    Rank,
    assert_like_plain,
    batch_of,
    in_fsdp,
    in_nested_fsdp,
    in_parts,
    mesh_of,
    named,
    run_case,
    stage_modules,
    texts,
    whole,
)
from tests.runtime.scenarios import SCHEDULES
from tests.stage.test_compiled import aot
from tests.workers import Workers

SPLIT = ("Schedule1F1B", "ScheduleZBVZeroBubble")
"""One schedule with whole backwards, and one that splits them."""


# A file, or a plan that torch wrote, may have its messages already, and none of the rest.
@pytest.mark.processes
@pytest.mark.parametrize("wrapper", ["ddp", "nested_fsdp"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_a_plan_with_nothing_but_messages(workers: Workers, schedule: str, wrapper: str) -> None:
    case = Case(schedule, WRAPPERS[wrapper], ("step", "update", "step"))
    results = workers.run(run_case, case, texts(tl.lower(case.plan)), ranks=4)
    assert_like_plain(results, case)


def in_fsdp_and_tensor_parallel(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    return in_nested_fsdp(in_tensor_parallel(module, mesh["tp"]), mesh["dp"])


# A pipeline of one rank, so that four are enough for two dimensions beside it.
@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "ScheduleInterleavedZeroBubble"])
def test_two_more_dimensions(workers: Workers, schedule: str) -> None:
    names = ("replicate", "shard")
    mesh = ((1, 2, 2), ("pp", *names))
    case = Case(schedule, in_nested_fsdp, ("step", "step"), ranks=1, mesh=mesh, data=names)
    assert_like_plain(workers.run(run_case, case, ranks=4), case)
    mesh = ((1, 2, 2), ("pp", "dp", "tp"))
    case = Case(schedule, in_fsdp_and_tensor_parallel, ("step", "step"), ranks=1, mesh=mesh)
    assert_like_plain(workers.run(run_case, case, ranks=4), case)


def in_tensor_parallel(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    for block in module.modules():
        if isinstance(block, models.GPTBlock):
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


def compiled(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    # Dynamo looks at the .grad of every tensor that it meets, and means to hide this warning.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    for index, layer in enumerate(module):
        module[index] = torch.compile(layer, backend="aot_eager")  # pyright: ignore
    return in_nested_fsdp(module, mesh)


def compiled_in_halves(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    """As ``compile=True`` and ``data_parallel="fsdp"`` do, but for what Inductor makes of it."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    return in_fsdp(torch.compile(module, backend=aot()), mesh)  # pyright: ignore


def checkpointed(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    for index, layer in enumerate(module):
        module[index] = checkpoint_wrapper(layer)
    return in_nested_fsdp(module, mesh)


def checkpointed_around(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    """The other way round: what is computed again runs FSDP's hooks again."""
    for index, layer in enumerate(module):
        module[index] = checkpoint_wrapper(in_fsdp(layer, mesh))  # pyright: ignore
    return in_fsdp(module, mesh)


def cases() -> list[Any]:
    """Every kind of wrapped stages, with all schedules or with those of SPLIT.

    Steps add up; after an update all must be gathered anew; there are evaluations in between.
    """
    found: dict[str, tuple[Case, bool]] = {}
    for number, schedule in enumerate(SCHEDULES):
        for turn, (name, wrap) in enumerate(WRAPPERS.items()):
            case = Case(schedule, wrap, ("eval", "step", "update", "eval", "step", "step"))
            # All wrappers with two of the schedules, and in turns with the others.
            taken = schedule in SPLIT or number % len(WRAPPERS) == turn
            found[f"{name}-{schedule}"] = case, taken
        case = Case(schedule, in_tensor_parallel, ("step", "update", "step"), data=())
        found[f"tensor parallel-{schedule}"] = case, number % 3 == 0
    for number, schedule in enumerate(SPLIT):
        # Each layer is a root of its own.
        case = Case(schedule, in_parts, ("step", "update", "step", "eval"), "llama")
        found[f"in parts-{schedule}"] = case, True
        ways = (compiled, compiled_in_halves, checkpointed, checkpointed_around)
        for turn, wrap in enumerate(ways):
            # To compile a GPT takes much longer, and shows the same.
            model = "mlp" if wrap in (compiled, compiled_in_halves) else "gpt"
            case = Case(schedule, wrap, ("step", "step"), model)
            found[f"{wrap.__name__}-{schedule}"] = case, turn == number
    return [
        pytest.param(case, id=name, marks=() if taken else pytest.mark.matrix)
        for name, (case, taken) in found.items()
    ]


@pytest.mark.processes
@pytest.mark.parametrize("case", cases())
def test_gradients_equal_those_of_the_plain_model(workers: Workers, case: Case) -> None:
    assert_like_plain(workers.run(run_case, case, ranks=4), case)


def in_mixed_precision(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for layer in module:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def run_beside_fsdp(
    rank: int, group: dist.ProcessGroup, case: Case
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of a step, and those of the same stages in a loop over micro-batches."""
    mine = Rank(group, case)
    mine.call("step")
    stages = [case.wrap(module, mesh_of(group)["dp"]) for module in stage_modules(case)]
    x, target = (t.chunk(2)[mine.replica] for t in batch_of(case, 0))
    for m in range(case.microbatches):
        value = x.chunk(case.microbatches)[m]
        for stage in stages:
            stage.set_requires_gradient_sync(m == case.microbatches - 1)
            value = stage(value)
        loss = models.loss_fn(case.model)(value, target.chunk(case.microbatches)[m])
        (loss / case.microbatches).backward()
    outside = {name: whole(p.grad) for s in mine.modules for name, p in named(s, stages[s])}
    return mine.gradients(), outside


# Gradients are computed in bfloat16 and added up in float32, those of W too: else bits are lost.
@pytest.mark.processes
@pytest.mark.parametrize("schedule", SPLIT)
def test_mixed_precision_is_that_of_fsdp_to_the_last_bit(workers: Workers, schedule: str) -> None:
    case = Case(schedule, in_mixed_precision, dtype=torch.float32)
    for ours, theirs in workers.run(run_beside_fsdp, case, ranks=4):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(ours[name], gradient), name


def summed(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    wrapped = in_fsdp(module, mesh)
    wrapped.set_gradient_divide_factor(1.0)
    return wrapped


@pytest.mark.processes
def test_gradients_are_scaled_as_the_wrapper_is_told(workers: Workers) -> None:
    case = Case("ScheduleZBVZeroBubble", summed)
    assert_like_plain(workers.run(run_case, case, ranks=4), case, times=2.0)


def run_page(rank: int, group: dist.ProcessGroup, code: str) -> float:
    """The workers have met already, and find their mesh among themselves."""
    names: dict[str, Any] = {}
    exec(code.replace('dist.init_process_group("gloo")', ""), names)
    return whole(next(names["module"].parameters())).sum().item()


@pytest.mark.processes
def test_the_script_on_the_page_of_the_docs(workers: Workers) -> None:
    page = Path(__file__).parents[2] / "docs" / "data-parallel.md"
    (code,) = re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.S | re.M)
    first, second, third, fourth = workers.run(run_page, code, ranks=4)
    assert first == second
    assert third == fourth != first
