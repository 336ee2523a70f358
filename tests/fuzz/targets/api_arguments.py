"""Public functions, classes and methods, with some of their arguments replaced by anything."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

import taktline as tl
from taktline import plan as tp
from tests.fuzz.mutate import NUMBERS, a_value

CPU = torch.device("cpu")
PLAN = tl.build("1f1b", ranks=2, microbatches=2)
ALONE = tl.build("gpipe", ranks=1, microbatches=2)
TIMELINE = tl.simulate(PLAN)
COSTS = tl.Costs()
PLACEMENT = tl.Placement.v(2)
ROWS = [PLAN.rows_of(0), PLAN.rows_of(1)]
MODULE = nn.Linear(2, 2)
LOSS = nn.functional.mse_loss
X = torch.ones(4, 2)
PIECES = tl.split.by_hand([nn.Linear(2, 2), nn.Linear(2, 2)])
SPEC = tl.TensorChunkSpec(0)


def stage() -> tl.PipelineStage:
    return tl.PipelineStage(MODULE, 0, 1, CPU)


def schedule() -> Any:
    return tl.ScheduleGPipe(stage(), 2, LOSS)


def pipe() -> tl.Pipeline:
    return tl.Pipeline([nn.Linear(2, 2)], schedule="gpipe", microbatches=2, loss_fn=LOSS)


RUNNING: dict[str, Any] = {
    "args_chunk_spec": (SPEC,),
    "kwargs_chunk_spec": {},
    "output_merge_spec": None,
    "scale_grads": True,
    "seed": None,
    "dynamic_shapes": False,
}
# What to call, and arguments that it takes; functions of no argument make those that change.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Action": (tl.Action, {"stage": 1, "kind": tp.Kind.F, "microbatch": 1}),
    "Overlap": (tp.Overlap, {"forward": tp.parse("0F0"), "backward": tp.parse("1B0")}),
    "parse": (tp.parse, {"text": "0F0"}),
    "Costs": (
        tl.Costs,
        {
            "forward": [1.0, 2.0],
            "backward": None,
            "overlap": None,
            "link": tl.Link(),
            "message_bytes": 1,
            "comm_blocks": False,
            "activation": 1.0,
            "kept_for_weight": 0.5,
            "unit": "ms",
        },
    ),
    "Costs.of": (COSTS.of, {"name": "forward", "stages": 2}),
    "Costs.durations": (COSTS.durations, {"plan": PLAN}),
    "Costs.from_dict": (tl.Costs.from_dict, {"values": {"forward": 1.0, "link": {"latency": 1.0}}}),
    "Costs.from_timeline": (tl.Costs.from_timeline, {"timeline": TIMELINE}),
    "Link": (tl.Link, {"latency": 0.5, "bandwidth": 2.0}),
    "Placement": (tl.Placement, {"rank_of": (0, 1), "ranks": 2}),
    "Placement.linear": (tl.Placement.linear, {"ranks": 2}),
    "Placement.loop": (tl.Placement.loop, {"ranks": 2, "stages_per_rank": 2}),
    "Placement.v": (tl.Placement.v, {"ranks": 2, "stages_per_rank": 2}),
    "Placement.custom": (tl.Placement.custom, {"rank_of": [0, 1], "ranks": 2}),
    "Placement.stages_of": (PLACEMENT.stages_of, {"rank": 1}),
    "Plan": (
        tl.Plan,
        {
            "rows_by_rank": ROWS,
            "placement": PLAN.placement,
            "microbatches": 2,
            "level": None,
            "name": "a",
        },
    ),
    "Plan.from_actions": (
        tl.Plan.from_actions,
        {
            "actions": [["0F0", "0B0"], ["1F0", "1B0"]],
            "placement": None,
            "microbatches": 1,
            "level": None,
            "name": "a",
        },
    ),
    "Plan.__getitem__": (lambda rank: PLAN[rank], {"rank": 0}),
    "Plan.rows_of": (PLAN.rows_of, {"rank": 0}),
    "Plan.with_rows": (PLAN.with_rows, {"rows_by_rank": ROWS, "level": None}),
    "Timeline": (
        tl.Timeline,
        {
            "plan": PLAN,
            "start": TIMELINE.start,
            "end": TIMELINE.end,
            "costs": COSTS,
            "arrival": None,
            "measured": False,
        },
    ),
    "Timeline.spans": (lambda rank: list(TIMELINE.spans(rank)), {"rank": 1}),
    "Timeline.cost": (TIMELINE.cost, {"by": "span"}),
    "Timeline.bubble": (TIMELINE.bubble, {"by": "makespan"}),
    "Timeline.to_svg": (TIMELINE.to_svg, {"width": 500.0}),
    "Timeline.to_text": (TIMELINE.to_text, {"width": 80, "colour": False}),
    "Timeline.to_html": (lambda other: TIMELINE.to_html(other), {"other": TIMELINE}),
    "balance": (
        tl.balance,
        {"costs": [1, 2, 3], "stages": 2, "memory": [1, 1, 1], "limits": [5, 5]},
    ),
    "build": (
        tl.build,
        {"name": "1f1b", "ranks": 2, "microbatches": 2, "stages_per_rank": None},
    ),
    "lower": (tl.lower, {"plan": PLAN, "merge": False, "keep_ready": 1, "reduce": True}),
    "add_comm": (tp.add_comm, {"plan": PLAN}),
    "add_shard": (tp.add_shard, {"plan": PLAN, "keep_ready": 1}),
    "add_reduce": (tp.add_reduce, {"plan": PLAN}),
    "merge_backward": (tp.merge_backward, {"plan": PLAN}),
    "simulate": (tl.simulate, {"plan": PLAN, "costs": COSTS}),
    "validate": (tl.validate, {"plan": PLAN, "sends": "blocking"}),
    "peak_memory": (tp.peak_memory, {"plan": PLAN, "costs": COSTS}),
    "find": (tp.find, {"name": "zbv"}),
    "get_schedule_class": (tl.get_schedule_class, {"schedule_name": "gpipe"}),
    "PipelineStage": (
        tl.PipelineStage,
        {
            "submodule": MODULE,
            "stage_index": 0,
            "num_stages": 1,
            "device": CPU,
            "input_args": X,
            "output_args": X,
            "group": None,
            "dw_builder": None,
            "get_mesh": None,
            "ties": (),
        },
    ),
    **{
        f"Schedule{name}": (
            getattr(tl, f"Schedule{name}"),
            {"stage": stage, "n_microbatches": 2, "loss_fn": LOSS, **RUNNING},
        )
        for name in ("GPipe", "1F1B")
    },
    "ScheduleInterleaved1F1B": (
        tl.ScheduleInterleaved1F1B,
        {"stages": lambda: [stage()], "n_microbatches": 2, "loss_fn": LOSS, **RUNNING},
    ),
    "ScheduleFromPlan": (
        tl.ScheduleFromPlan,
        {"stages": lambda: [stage()], "plan": ALONE, "loss_fn": LOSS, **RUNNING},
    ),
    "Pipeline": (
        tl.Pipeline,
        {
            "model": lambda: [nn.Linear(2, 2)],
            "example": None,
            "schedule": "gpipe",
            "microbatches": 2,
            "loss_fn": LOSS,
            "ranks": 1,
            "stages_per_rank": None,
            "cuts": None,
            "mesh": None,
            "data_parallel": None,
            "prepare": None,
            "device": "cpu",
            "state_dict": None,
            "seed": 1,
            "dynamic_shapes": False,
            "args_chunk_spec": None,
            "kwargs_chunk_spec": None,
            "output_merge_spec": None,
        },
    ),
    "TensorChunkSpec": (tl.TensorChunkSpec, {"split_dim": 0}),
    "merge_chunks": (tl.merge_chunks, {"chunks": [X, X], "chunk_spec": SPEC}),
    "split_args_kwargs_into_chunks": (
        tl.split_args_kwargs_into_chunks,
        {
            "args": (X,),
            "kwargs": {"mask": X},
            "chunks": 2,
            "args_chunk_spec": None,
            "kwargs_chunk_spec": None,
        },
    ),
    "Tie": (tl.Tie, {"uses": {0: "a", 1: "b"}}),
    "Tie.name_in": (tl.Tie({0: "a", 1: "b"}).name_in, {"stage": 0}),
    "add_loss": (tl.add_loss, {"loss": X.sum()}),
    "skip.put": (tl.skip.put, {"name": "a", "value": X}),
    "skip.get": (tl.skip.get, {"name": "a"}),
    "local.run": (tl.local.run, {"fn": abs, "ranks": 2, "strict": False}),
    "split.by_hand": (tl.split.by_hand, {"modules": [MODULE]}),
    "split.by_names": (
        tl.split.by_names,
        {
            "model": lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
            "cuts": ["1"],
            "example": (X,),
        },
    ),
    "split.auto": (
        tl.split.auto,
        {
            "model": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            "n": 2,
            "example": (X,),
        },
    ),
    "split.materialise": (
        tl.split.materialise,
        {"piece": lambda: nn.Linear(2, 2), "device": "cpu", "state_dict": None},
    ),
    "Pieces.get_stage_module": (PIECES.get_stage_module, {"stage_idx": 0}),
    "Pieces.build_stage": (PIECES.build_stage, {"stage_index": 0, "device": CPU, "group": None}),
    "build_stage": (
        tl.build_stage,
        {"stage_module": MODULE, "stage_index": 0, "pipe_info": None, "device": CPU},
    ),
    "pipeline": (
        tl.pipeline,
        {"module": 3, "mb_args": (X,), "mb_kwargs": None, "split_spec": None, "split_policy": None},
    ),
    "Schedule.stall_after": (
        lambda seconds: setattr(schedule(), "stall_after", seconds),
        {"seconds": 3.0},
    ),
    "Pipeline.step": (
        lambda **given: pipe().step(X, **given),
        {
            "target": X,
            "return_outputs": False,
            "scaler": None,
            "losses": None,
            "aux_losses": None,
            "loss_weights": None,
            "loss_kwargs": None,
            "arg_mbs": None,
        },
    ),
    "Pipeline.eval": (lambda **given: pipe().eval(X, **given), {"target": X, "losses": None}),
    "Pipeline.train": (lambda mode: pipe().train(mode), {"mode": True}),
    "Pipeline.grad_norm": (lambda norm_type: pipe().grad_norm(norm_type), {"norm_type": 2.0}),
    "Pipeline.clip_grad_norm_": (
        lambda **given: pipe().clip_grad_norm_(**given),
        {"max_norm": 1.0, "norm_type": 2.0, "error_if_nonfinite": False},
    ),
    "Pipeline.state_dict": (lambda gathered: pipe().state_dict(gathered=gathered), {"gathered": 0}),
    "Pipeline.load_state_dict": (
        lambda **given: pipe().load_state_dict(**given),
        {"state_dict": {}, "strict": False},
    ),
    "Schedule.step": (
        lambda **given: schedule().step(X, **given),
        {
            "target": X,
            "losses": None,
            "return_outputs": True,
            "loss_kwargs": None,
            "loss_weights": None,
            "aux_losses": None,
            "share_losses": False,
            "grad_scale": 1.0,
            "arg_mbs": None,
            "kwarg_mbs": None,
            "target_mbs": None,
        },
    ),
}
ODD: list[Any] = [
    *(object(), object, [None], [[]], {1: 2}, {"a": None}, {1, 2}, (), b"0F0", range(3), iter([])),
    *(np.int64(2), np.float32(1.5), np.zeros(2), np.array("x"), np.zeros((2, 2)), 1j),
    *(
        X,
        torch.tensor(1),
        torch.zeros(0),
        CPU,
        MODULE,
        LOSS,
        PLAN,
        COSTS,
        TIMELINE,
        ["0F0"],
        "1f1b",
    ),
    *(torch.float32, "cpu", "nonsense", "xpu:9", [MODULE], [[MODULE]], [X, "a"], SPEC, [SPEC]),
]


def draw(random: Random) -> tuple[str, dict[str, Any]]:
    """A name, and what to replace of its arguments."""
    name = random.choice(sorted(CALLS))
    arguments = list(CALLS[name][1])
    chosen = random.sample(arguments, min(len(arguments), random.choice([1, 1, 1, 2, 3])))
    return name, {argument: _anything(random) for argument in chosen}


def try_(input: tuple[str, dict[str, Any]]) -> None:
    """Call it."""
    name, changes = input
    function, arguments = CALLS[name]
    made = {
        key: value() if callable(value) and getattr(value, "__name__", "") in _MAKERS else value
        for key, value in arguments.items()
        if key not in changes
    }
    state = torch.get_rng_state()
    try:
        function(**made, **changes)
    finally:
        torch.set_rng_state(state)


_MAKERS = ("<lambda>", "stage", "schedule", "pipe")


def _anything(random: Random) -> Any:
    draws = [lambda: random.choice(NUMBERS), lambda: random.choice(ODD), lambda: a_value(random)]
    return random.choice(draws)()
