"""When wrapped stages communicate: where the plan says, once a step or once a block; and errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import taktline as tl
from taktline.errors import ScheduleError
from taktline.plan import Plan
from taktline.plan.passes import add_reduce, add_shard
from taktline.runtime.runnable_plan import Runnable
from tests.runtime.parallel import (
    WRAPPERS,
    Case,
    Log,
    Rank,
    Texts,
    Wrap,
    assert_gradients,
    collectives_of,
    in_ddp,
    in_fsdp,
    in_nested_fsdp,
    mesh_of,
    run_case,
    run_logged,
    run_plain,
    texts,
)
from tests.runtime.scenarios import SCHEDULES
from tests.runtime.test_agreement import OF_ONE_BATCH
from tests.workers import Workers

FSDP = {"UNSHARD": "all_gather", "REDUCE_GRAD": "reduce_scatter"}


def moved() -> dict[str, Texts]:
    """Plans for ranks with two stages each: with one stage gathered at a time, and by hand."""
    plan = tl.build("interleaved_1f1b", ranks=2, microbatches=2)
    tight = texts(add_reduce(add_shard(plan, keep_ready=1)))
    # All reductions last, and long after everything was released.
    late = [
        [action for action in rank if "REDUCE" not in action]
        + [action for action in rank if "REDUCE" in action][::-1]
        for rank in tight
    ]
    # Both stages gathered at once, ahead of all, and never released.
    early = [
        [f"{rank + 2}UNSHARD", f"{rank}UNSHARD"]
        + [action for action in actions if "SHARD" not in action]
        for rank, actions in enumerate(late)
    ]
    return {"tight": tight, "late": late, "early": early}


def planned() -> list[Any]:
    """Cases with the plan that their stages run; None: the schedule's own, with one step."""
    found: dict[str, Any] = {name: (Case(name, in_fsdp), None) for name in SCHEDULES}
    for name, plan in moved().items():
        case = Case("ScheduleInterleaved1F1B", in_fsdp, microbatches=2)
        found[name] = case, plan
    # What is gathered anew for a backward is still on its way when the backward looks for it.
    for turn, name in enumerate(("interleaved_zero_bubble", "zbv", "dualpipev")):
        wrap = (in_fsdp, in_nested_fsdp)[turn % 2]
        case = Case(name, wrap, ("step", "step"))
        plan = texts(add_reduce(add_shard(case.plan, keep_ready=1)))
        found[f"one at a time-{name}"] = case, plan
    return [pytest.param(*both, id=name) for name, both in found.items()]


@pytest.mark.processes
@pytest.mark.parametrize(("case", "plan"), planned())
def test_collectives_happen_where_the_plan_says(
    workers: Workers, case: Case, plan: Texts | None
) -> None:
    lowered = tl.lower(case.plan, keep_ready=3, reduce=True)
    lowered = lowered if plan is None else Plan.from_actions(plan)
    results = workers.run(run_logged, case, plan, ranks=4)
    for rank, (events, _) in enumerate(results):
        if len(case.calls) == 1:
            assert events == collectives_of(lowered, rank // 2, **FSDP)
        computed = [event for event in events if event[0].isdigit()]
        assert computed == collectives_of(lowered, rank // 2) * len(case.calls)
    assert_gradients([found for _, found in results], run_plain(case)[0], case)


def test_moved_actions_are_at_other_places() -> None:
    orders = [collectives_of(Plan.from_actions(plan), 0, **FSDP) for plan in moved().values()]
    assert len(set(map(tuple, orders))) == 3


def run_gathered(rank: int, group: dist.ProcessGroup, case: Case, plan: Texts) -> list[int]:
    """How many stages were gathered at each forward and backward."""
    mine, counts = Rank(group, case, plan), []

    def look(*_: object) -> None:
        whole = [type(next(m.parameters()).data) is Tensor for m in mine.modules.values()]
        counts.append(sum(whole))

    for module in mine.modules.values():
        module[-1].register_forward_hook(look)
    mine.call("step")
    look()
    return counts


@pytest.mark.processes
def test_stages_are_gathered_as_long_as_the_plan_says(workers: Workers) -> None:
    case = Case("ScheduleInterleaved1F1B", in_fsdp, microbatches=2)
    # At the end nothing is, whatever the plan leaves: what comes next may change the parameters.
    for counts in workers.run(run_gathered, case, moved()["tight"], ranks=4):
        assert counts == [1, 1, 1, 1, 0]
    for counts in workers.run(run_gathered, case, moved()["early"], ranks=4):
        assert counts == [1, 1, 2, 2, 0]


STEP: dict[str, dict[str, int]] = {
    "ddp": {"all_reduce": 1},
    "fsdp": {"all_gather": 1, "reduce_scatter": 1},
    "nested_fsdp": {"all_gather": 2, "reduce_scatter": 2},
    "replicate": {"all_reduce": 1},
}
"""The collectives of a step for each stage; nested, two layers hold all parameters."""


def run_counted(rank: int, group: dist.ProcessGroup, case: Case, nested: bool) -> Any:
    """The collectives of an eval, a step, two steps in a block, and its end; and all gradients."""
    mine, logs = Rank(group, case), [Log() for _ in range(4)]
    with logs[0]:
        mine.call("eval")
    with logs[1]:
        mine.call("step", 0)
    with logs[3], mine.schedule.accumulate():
        with logs[2]:
            mine.call("step", 1)
            mine.call("eval")
            with mine.schedule.accumulate() if nested else nullcontext():
                mine.call("step", 2)
        logs[3].events.clear()
    return [log.counts() for log in logs], mine.gradients()


@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrapper", STEP)
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "ScheduleInterleavedZeroBubble"])
def test_gradients_are_reduced_once_a_step_or_once_a_block(
    workers: Workers, schedule: str, wrapper: str
) -> None:
    case = Case(schedule, WRAPPERS[wrapper], ("step", "step", "step"))
    gathered = {name: n for name, n in STEP[wrapper].items() if name == "all_gather"}
    reduced = {name: n for name, n in STEP[wrapper].items() if name != "all_gather"}
    here = case.stages // 2

    def times(factor: int, counts: dict[str, int]) -> dict[str, int]:
        return {name: factor * n for name, n in counts.items()}

    results = workers.run(run_counted, case, wrapper == "fsdp", ranks=4)
    for (evaluated, step, inside, end), _ in results:
        assert evaluated == times(here, gathered)
        assert step == times(here, STEP[wrapper])
        assert inside == times(3 * here, gathered)
        assert end == times(here, reduced)
    assert_gradients([found for _, found in results], run_plain(case)[0], case)


def run_interrupted(rank: int, group: dist.ProcessGroup, case: Case) -> Any:
    mine = Rank(group, case)
    mine.call("eval")
    log = Log()

    def block() -> None:
        with log, mine.schedule.accumulate():
            mine.call("step", 1)
            raise KeyError

    with pytest.raises(KeyError):
        block()
    for module in mine.modules.values():
        module.zero_grad()
    mine.call("step", 0)
    return log.counts(), mine.gradients()


@pytest.mark.processes
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_block_that_fails_reduces_nothing(workers: Workers, wrapper: str) -> None:
    case = Case("Schedule1F1B", WRAPPERS[wrapper])
    results = workers.run(run_interrupted, case, ranks=4)
    for counts, _ in results:
        assert counts.keys() <= {"all_gather"}
    # Nor does anything of it reach the next step.
    assert_gradients([found for _, found in results], run_plain(case)[0], case)


def run_without_sync(rank: int, group: dist.ProcessGroup, case: Case) -> Any:
    """One step that the wrapper is told not to reduce, then one that it is."""
    mine = Rank(group, case)
    (module,) = mine.modules.values()
    with Log() as log:
        if case.wrap is in_ddp:
            with module.no_sync():
                mine.call("step", 0)
        else:
            module.set_requires_gradient_sync(False)
            mine.call("step", 0)
            module.set_requires_gradient_sync(True)
    mine.call("step", 1)
    return log.counts(), mine.gradients()


@pytest.mark.processes
@pytest.mark.parametrize("wrap", [in_ddp, in_fsdp])
def test_what_the_wrapper_is_told_holds(workers: Workers, wrap: Wrap) -> None:
    case = Case("Schedule1F1B", wrap, ("step", "step"))
    results = workers.run(run_without_sync, case, ranks=4)
    for counts, _ in results:
        assert counts.keys() <= {"all_gather"}
    assert_gradients([found for _, found in results], run_plain(case)[0], case)


def half_wrapped(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    """Only the stages of the pipeline's second rank are wrapped."""
    return in_fsdp(module, mesh) if dist.get_rank() > 1 else module


@pytest.mark.processes
def test_ranks_agree_on_a_plan_where_only_some_hold_wrapped_stages(workers: Workers) -> None:
    case = Case("ScheduleInterleaved1F1B", half_wrapped)
    gradients, _ = run_plain(case)
    results = workers.run(run_case, case, ranks=4)
    for found, _ in results[2:]:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-12)
    # A plain stage has the gradients of its own half of the batch.
    for name, gradient in results[0][0].items():
        mean = (gradient + results[1][0][name]) / 2
        torch.testing.assert_close(mean, gradients[name], rtol=1e-9, atol=1e-12)
        assert not torch.equal(gradient, results[1][0][name])


def test_a_plan_is_spelled_out_only_where_it_says_nothing() -> None:
    plan = tl.build("1f1b", ranks=1, microbatches=1)

    def spelled(*actions: str, shards: bool = True, reduces: bool = True) -> str:
        runnable = Runnable(Plan.from_actions([actions]))
        runnable.wrap(shards=shards, reduces=reduces)
        return " ".join(texts(runnable.lowered)[0])

    assert texts(plan) == [["0F0", "0B0"]]
    assert spelled("0F0", "0B0") == "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD"
    assert spelled("0F0", "0B0", shards=False) == "0F0 0B0 0REDUCE_GRAD"
    assert spelled("0F0", "0B0", reduces=False) == "0UNSHARD 0F0 0B0 0RESHARD"
    assert spelled("0F0", "0B0", shards=False, reduces=False) == "0F0 0B0"
    own = ["0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD"]
    assert spelled(*own) == " ".join(own)
    for actions, lacking in ((own[1:], "UNSHARD"), (own[:-1], "REDUCE_GRAD")):
        with pytest.raises(ScheduleError, match=f"has no {lacking}, which wrapped stages need"):
            spelled(*actions)


# ---- errors ----------------------------------------------------------------------------------


def run_refused(rank: int, group: dist.ProcessGroup, case: Case) -> str:
    mine = Rank(group, case)
    with pytest.raises(tl.MismatchError) as caught:
        mine.call("step")
    return str(caught.value)


def hooked(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    ddp = in_ddp(module, mesh)
    ddp.register_comm_hook(mesh.get_group(), allreduce_hook)
    return ddp


def static(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    return DistributedDataParallel(module, process_group=mesh.get_group(), static_graph=True)


def sparse(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            layer.sparse = True
    return in_ddp(module, mesh)


def unmade(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    with torch.device("meta"):
        return in_fsdp(nn.Sequential(nn.Linear(4, 4)), mesh)


def both(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    in_fsdp(module[0], mesh)  # pyright: ignore
    module[1] = DistributedDataParallel(module[1], process_group=mesh.get_group())
    return module


def old(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    return FullyShardedDataParallel(
        module, process_group=mesh.get_group(), device_id=torch.device("cpu")
    )


def with_ddp_inside(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    return replicate(module, process_group=mesh.get_group())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (
            hooked,
            "replica 0: rank 0: stage 0: its DDP has a communication hook, which reduces by "
            "itself, at the wrong time; leave it out",
        ),
        (
            static,
            "replica 0: rank 0: stage 0: its DDP has static_graph=True, which reduces by itself, "
            "at the wrong time; leave it out",
        ),
        (
            sparse,
            "replica 0: rank 0: stage 0: its DDP has sparse gradients; leave out sparse=True",
        ),
        (
            unmade,
            "replica 0: rank 0: stage 0: its FSDP cannot begin: FSDP parameters should be "
            "materialized from meta device before training, but the following were still on meta "
            "device: ['0.weight', '0.bias']",
        ),
        (
            both,
            "rank 0: stage 0: it contains both DDP and fully_shard; wrap a stage with one of them "
            "(a mesh of two dimensions makes fully_shard replicate, too)",
        ),
        (
            old,
            "rank 0: stage 0: FullyShardedDataParallel gathers and reduces by itself, at the wrong "
            "time for a pipeline; use fully_shard instead",
        ),
        (
            with_ddp_inside,
            "rank 0: stage 0: the replicate of torch.distributed._composable.replicate makes its "
            "DDP in the first forward, too late for a pipeline; wrap the stage in "
            "DistributedDataParallel instead",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrappers_that_do_not_fit(workers: Workers, wrap: Callable[..., Any], text: str) -> None:
    told = workers.run(run_refused, Case("Schedule1F1B", wrap), ranks=4)
    assert [one.splitlines()[0] for one in told] == [text] * 4


def run_on_the_wrong_dimension(rank: int, group: dist.ProcessGroup, name: str) -> str:
    """Both stages are alike, so that no wrapper notices anything."""
    mesh = mesh_of(group)
    pipeline = mesh["pp"]
    module: Any = nn.Sequential(nn.Linear(4, 4))
    module = in_ddp(module, pipeline) if name == "ddp" else in_fsdp(module, pipeline)
    index = pipeline.get_local_rank()
    stage = tl.PipelineStage(module, index, 2, torch.device("cpu"), group=pipeline.get_group())
    schedule = tl.ScheduleGPipe(stage, 2, nn.functional.mse_loss)
    with pytest.raises(tl.MismatchError) as caught:
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_wrapper_on_the_dimension_of_the_pipeline(workers: Workers, name: str) -> None:
    for rank, told in enumerate(workers.run(run_on_the_wrong_dimension, name, ranks=4)):
        ranks = [rank % 2, rank % 2 + 2]
        assert told == (
            f"rank 0: stage 0: its {name.upper()} averages gradients over the ranks {ranks}, but "
            f"of these {ranks} are one pipeline and hold other stages; pass the data-parallel "
            "dimension of the mesh to the wrapper, and the pipeline's group= to the stage"
        )


def run_one_bad_batch(rank: int, group: dist.ProcessGroup, case: Case) -> list[str]:
    """One replica gets a batch that cannot be cut, then unequal ones; after each, all go on."""
    mine = Rank(group, case)
    told = []
    for sizes in ((2, 2), (8, 5)):
        size = sizes[rank // 2] if mine.replica == 1 else 8
        x = torch.zeros(size, 12, dtype=torch.int64)
        with pytest.raises(tl.TaktlineError) as caught:
            mine.schedule.step(x, target=x)
        told.append(str(caught.value))
        mine.call("step")
    return told


# Else the replica that is well would wait in its first collective for the other one.
@pytest.mark.processes
@pytest.mark.parametrize("wrap", [in_ddp, in_fsdp, half_wrapped])
def test_an_error_of_one_replica_is_raised_in_all(workers: Workers, wrap: Wrap) -> None:
    case = Case("ScheduleInterleaved1F1B", wrap)
    told = workers.run(run_one_bad_batch, case, ranks=4, timeout=30)
    # A rank that holds no wrapped stage does not know which replica it is.
    plain = "replica 1: " if wrap is half_wrapped else ""
    assert len({tuple(one.removeprefix(plain) for one in both) for both in told}) == 1
    cut, unequal = told[0]
    assert cut == (
        "replica 1: rank 0: argument 0 is int64[2, 12]: 2 along dimension 0 cannot be cut into 4 "
        "micro-batches; pass at least 4, or use at most 2 micro-batches"
    )
    assert unequal == (
        f"replica 1: the batch has 8 rows, but the target on rank 1 has 5; {OF_ONE_BATCH}"
    )


def run_locally(rank: int, module: nn.Module) -> str:
    stage = tl.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = tl.ScheduleGPipe(stage, 2, nn.functional.mse_loss)
    with pytest.raises(tl.MismatchError) as caught:
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return str(caught.value)


def run_wrapped_locally(rank: int, group: dist.ProcessGroup) -> list[str]:
    mesh = mesh_of(group)["dp"]
    module: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
    return tl.local.run(run_locally, 2, module)


@pytest.mark.processes
def test_local_ranks_cannot_be_wrapped(workers: Workers) -> None:
    text = (
        "rank 0: stage 0 is wrapped in FSDP, which needs a process per rank, but local ranks share "
        "one; leave the wrapper out here, or start processes with torchrun"
    )
    for told in workers.run(run_wrapped_locally, ranks=4):
        assert told == [text, text]


def run_failing(
    rank: int, group: dist.ProcessGroup, case: Case, backward: bool, everywhere: bool
) -> tuple[str, dict[str, Tensor]]:
    """A forward or backward that fails, in one replica or in all alike, and a step after it."""
    mine = Rank(group, case)
    mine.call("step")
    mine.call("update")
    seen = []

    def fail(*_: object) -> None:
        seen.append(None)
        if len(seen) == 3:
            raise RuntimeError("out of luck")

    def fail_later(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(fail)

    layers = [m for s, module in mine.modules.items() if s == 1 for m in module.modules()]
    norms = [layer for layer in layers if isinstance(layer, nn.LayerNorm)]
    hook = fail_later if backward else fail
    fails = everywhere or mine.replica == 1
    handles = [norm.register_forward_hook(hook) for norm in norms[-1:] if fails]
    with pytest.raises(tl.StageError) as caught:
        mine.call("step", 1)
    for handle in handles:
        handle.remove()
    for module in mine.modules.values():
        module.zero_grad()
    mine.call("step", 2)
    return str(caught.value), mine.gradients()


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize("everywhere", [False, True], ids=["in one replica", "in all"])
@pytest.mark.parametrize("backward", [False, True], ids=["F", "B"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_a_step_that_fails_leaves_nothing_behind(
    workers: Workers, schedule: str, wrapper: str, backward: bool, everywhere: bool
) -> None:
    case = Case(schedule, WRAPPERS[wrapper], ("step", "update", "step"))
    found = workers.run(run_failing, case, backward, everywhere, ranks=4)
    (text,) = {text for text, _ in found}
    action = ("1I" if schedule == "ScheduleZBVZeroBubble" else "1B") if backward else "1F"
    assert text == (
        f"replica {int(not everywhere)}: rank 1, stage 1, micro-batch 2 ({action}2): RuntimeError: "
        "out of luck"
    )
    assert_gradients([gradients for _, gradients in found], run_plain(case)[0], case)
