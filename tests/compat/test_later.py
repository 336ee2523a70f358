"""What torch has added in 2.14 and 2.15, beside torch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from taktline.compat.torch_pipelining import schedules as ours
from taktline.compat.torch_pipelining.stage import PipelineStage
from taktline.errors import MismatchError
from tests.compat.peer import SINCE_2_12, SINCE_2_15, module, outcome, require_same
from tests.compat.programs import (
    CPU,
    OURS,
    TORCHS,
    Program,
    loss_fn,
    make_batch,
    make_layers,
    schedules,
    wrapped,
)
from tests.plan.peer import StandIn
from tests.runtime.parallel import mesh_of, whole
from tests.workers import Workers

MULTI = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def _infos(program: Program, schedule: Any) -> list[tuple[int, int]]:
    """The forwards of a step, as the contexts around them were told."""
    told: list[tuple[int, int]] = []

    @contextmanager
    def context(info: Any) -> Iterator[None]:
        yield
        if not info.is_metadata_inference:
            told.append((info.stage_index, info.microbatch_index))

    handles = [stage.register_forward_context(context) for stage in program.stages]
    for stage in program.stages:
        with pytest.raises(RuntimeError, match="already registered"):
            stage.register_forward_context(context)
    program.step(schedule)
    for handle in handles:
        handle.remove()
    program.step(schedule)
    return told


def _contexts(rank: int, group: dist.ProcessGroup, peer: bool) -> None:
    found = []
    for source, calls in ((OURS, False), (OURS, True), *([(TORCHS, False)] if peer else [])):
        program = Program(group, 4, [rank, rank + 2], source, calls=calls)
        schedule = schedules(source).ScheduleInterleaved1F1B(program.stages, 4, loss_fn=loss_fn)
        found.append(_infos(program, schedule))
    assert len(found[0]) == 8
    assert all(told == found[0] for told in found)


@SINCE_2_15
@pytest.mark.processes
def test_contexts_around_forwards(workers: Workers) -> None:
    workers.run(_contexts, SINCE_2_15.args[0] is False)


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("odd")


@SINCE_2_15
@pytest.mark.parametrize("calls", [False, True])
def test_a_context_that_suppresses_errors(fake_group: None, calls: bool) -> None:
    stage = PipelineStage(Odd(), 0, 1, CPU)
    if calls:
        wrapped(stage)
    stage.register_forward_context(lambda info: suppress(Exception))
    schedule = ours.ScheduleGPipe(stage, 2)
    with pytest.raises(RuntimeError, match="must not suppress exceptions"):
        schedule.step(torch.ones(2, 2))


def _finalized(rank: int, group: dist.ProcessGroup, peer: bool) -> None:
    mesh = mesh_of(group)
    here = mesh["pp"].get_local_rank()
    for name in ("ScheduleGPipe", "ScheduleInterleavedZeroBubble"):
        mine = [here] if name == "ScheduleGPipe" else [here, here + 2]
        found = []
        for source, calls in ((OURS, False), (OURS, True), *([(TORCHS, False)] if peer else [])):
            layers = make_layers(2 * len(mine)).double()
            for index in mine:
                fully_shard(layers[index], mesh=mesh["dp"])
            make = module(".stage")[0 if source == TORCHS else 1].PipelineStage
            pipeline = mesh["pp"].get_group()
            stages = [make(layers[i], i, len(layers), CPU, group=pipeline) for i in mine]
            if calls:
                for stage in stages:
                    wrapped(stage)
            cls = getattr(schedules(source), name)
            schedule = cls(stages[0] if len(mine) == 1 else stages, 4, loss_fn=loss_fn)
            for step in range(3):  # torch scales earlier gradients again
                x, target = (part.double() for part in make_batch(2 * step + rank % 2))
                options = {"target": target} if mine[-1] == len(layers) - 1 else {}
                last = step == 2
                schedule.step(*([x] if here == 0 else []), **options, finalize_gradients=last)
                if not last and source == OURS:
                    assert all(p.grad is None for p in stages[0].submod.parameters())
            found.append([whole(p.grad) for i in mine for p in layers[i].parameters()])
        plain = make_layers(2 * len(mine)).double()
        for step in range(3):
            for replica in range(2):
                x, target = (part.double() for part in make_batch(2 * step + replica))
                for layer in plain:
                    x = layer(x)
                (loss_fn(x, target) / 2).backward()
        found.append([p.grad for i in mine for p in plain[i].parameters()])
        for gradients in found[1:]:
            torch.testing.assert_close(gradients, found[0])


@pytest.mark.processes
def test_gradients_that_a_later_step_finalizes(workers: Workers) -> None:
    workers.run(_finalized, SINCE_2_15.args[0] is False, ranks=4)


def _unlike(rank: int, group: dist.ProcessGroup) -> None:
    program = Program(group, 2, [rank])
    schedule = ours.Schedule1F1B(program.stages[0], 4, loss_fn=loss_fn)
    program.step(schedule, finalize_gradients=False)  # plain stages do as ever
    program.modules[rank].zero_grad()
    program.train(schedule, 1)
    with pytest.raises(MismatchError, match="finalize_gradients=False"):
        program.step(schedule, finalize_gradients=rank == 0)


@pytest.mark.processes
def test_ranks_that_finalize_unlike(workers: Workers) -> None:
    workers.run(_unlike)


def _make(source: str, name: str, **options: Any) -> Any:
    stages = [StandIn(rank, 4, 0, 2) for rank in (0, 2)]
    return getattr(schedules(source), f"Schedule{name}")(stages, 4, **options)


OPTIONS = (
    {"max_active_stages": 1},
    {"max_active_stages": 0},
    {"max_active_stages": True},
    {"unshard_lookahead": "auto"},
    {"unshard_lookahead": (1, 2)},
    {"unshard_lookahead": (1,)},
    {"unshard_lookahead": (1, 4)},
    {"unshard_lookahead": [1, 2]},
    {"max_active_stages": 2, "unshard_lookahead": (2, 1), "defer_reduce_grad_wait": True},
    {"defer_reduce_grad_wait": True},
    {"max_outstanding_sends": -1},
    {"max_outstanding_sends": 1.5},
    {"max_outstanding_sends": 0},
    {"max_outstanding_sends": 1},
    {"max_outstanding_sends": 4},
)


@SINCE_2_15
@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_limits_of_schedules_are_those_of_torch(name: str, options: dict[str, Any]) -> None:
    def lowered(source: str) -> Any:
        made = _make(source, name, **options)
        return {r: [*map(str, row)] for r, row in made.pipeline_order_with_comms.items()}

    require_same(outcome(lowered, TORCHS), outcome(lowered, OURS), texts=False)


def _limited(rank: int, group: dist.ProcessGroup) -> None:
    for name in MULTI:
        mine = [rank, 3 - rank if name in ("ZBVZeroBubble", "DualPipeV") else rank + 2]
        for calls in (False, True):
            program = Program(group, 4, mine, calls=calls)
            cls = getattr(ours, f"Schedule{name}")
            schedule = cls(program.stages, 4, loss_fn=loss_fn, max_outstanding_sends=2)
            program.train(schedule, 3)
            program.step(schedule, "eval")
            assert schedule._on_ours is not calls


@SINCE_2_15
@pytest.mark.processes
def test_steps_with_few_messages_under_way(workers: Workers) -> None:
    workers.run(_limited)


@SINCE_2_15
@pytest.mark.parametrize("granularity", ["microbatch", "stage_microbatch", "other"])
@pytest.mark.parametrize("name", MULTI)
def test_liveness_is_that_of_torch(name: str, granularity: str) -> None:
    def analyzed(source: str, rank: int, stages: tuple[int, ...]) -> Any:
        analyze = schedules(source).analyze_pipeline_activation_liveness
        options = {"pp_rank": rank, "stage_indices": stages, "granularity": granularity}
        found = analyze(_make(source, name), **options)
        spans = [found.get_activation_lifetime(*key) for key in found.slot_by_stage_and_microbatch]
        return found, spans, [found.slot_for(stages[0], m) for m in range(4)]

    for rank, stages in ((0, (0, 2)), (1, (1,)), (0, (0, 3)), (0, (0,)), (0, ()), (2, (0,))):
        for given in (stages, stages[::-1], stages * 2):
            found = [outcome(analyzed, source, rank, given) for source in (TORCHS, OURS)]
            require_same(*found, texts=False)


def _released(rank: int, group: dist.ProcessGroup) -> None:
    program = Program(group, 2, [rank])
    stage = program.stages[0]
    schedule = ours.Schedule1F1B(stage, 4, loss_fn=loss_fn)
    wrapped(stage)
    sent: list[Any] = []
    send, backward = stage.get_fwd_send_ops, stage.backward_one_chunk

    def sending(chunk: int) -> Any:
        ops = send(chunk)
        if ops:
            sent.append((ops, weakref.ref(stage.fwd_cache[chunk][0][0])))
        return ops

    def going_back(chunk: int, **options: Any) -> Any:
        if rank == 0:
            # The gradient has arrived, so the output has.
            stage.release_fwd_send_outputs(chunk)
            stage.release_fwd_send_outputs(chunk)
            assert not isinstance(stage.fwd_cache[chunk][0][0], Tensor)
            assert sent[chunk][1]() is None
        stage.release_fwd_send_outputs(99)
        return backward(chunk, **options)

    stage.get_fwd_send_ops, stage.backward_one_chunk = sending, going_back
    program.train(schedule, 1)


@SINCE_2_15
@pytest.mark.processes
def test_outputs_that_were_sent_are_dropped(workers: Workers) -> None:
    workers.run(_released)


def _reduced_apart(rank: int, group: dist.ProcessGroup) -> None:
    layer, mesh = make_layers(1)[0], mesh_of(group)
    module = fully_shard(layer, mesh=mesh["dp"])
    stage = PipelineStage(module, 0, 2, CPU, group=mesh["pp"].get_group())
    with pytest.raises(RuntimeError, match="No gradient reduction is pending"):
        stage.wait_for_gradient_reduction(1)
    stage.has_backward, stage.chunks = True, 1
    plain = make_layers(1)[0]
    _ = stage.grad_sync
    stage.forward_one_chunk(0, (make_batch(rank % 2)[0],)).sum().backward()
    stage.start_gradient_reduction()
    with pytest.raises(RuntimeError, match="already pending"):
        stage.start_gradient_reduction()
    stage.wait_for_gradient_reduction(2)
    for replica in range(2):
        (plain(make_batch(replica)[0]).sum() / 4).backward()
    for mine, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), expected.grad)


@SINCE_2_12  # before, a stage is checked without being prepared
@pytest.mark.processes
def test_a_reduction_in_two_calls(workers: Workers) -> None:
    workers.run(_reduced_apart, ranks=4)


def test_only_sharded_stages_are_reduced_in_two_calls(fake_group: None) -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, CPU)
    for call in (stage.start_gradient_reduction, lambda: stage.wait_for_gradient_reduction(1)):
        with pytest.raises(RuntimeError, match="requires FSDP"):
            call()


def _with_own_channels(rank: int, group: dist.ProcessGroup, name: str) -> None:
    with torch.distributed.config.patch(**{name: True}):  # pyright: ignore
        for calls in (False, True):
            program = Program(group, 4, [rank, rank + 2], calls=calls)
            schedule = ours.ScheduleInterleaved1F1B(program.stages, 4, loss_fn=loss_fn)
            program.train(schedule)


@pytest.mark.processes
def test_channels_for_each_edge(workers: Workers) -> None:
    """Torch 2.14 has them for each direction instead, over nccl alone."""
    config = __import__("torch.distributed.config").distributed.config
    if not hasattr(config, "pipeline_per_edge_p2p"):
        pytest.skip("not in this version of torch")
    workers.run(_with_own_channels, "pipeline_per_edge_p2p")
