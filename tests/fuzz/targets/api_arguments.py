"""Public functions, classes and methods, with some of their arguments replaced by anything."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo  # which takes seconds, that are no input's
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


class Call(NamedTuple):
    """What to call, arguments that it takes, and the names of all that may be given."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    """Those that it needs; functions of no argument make those that change."""
    names: list[str]


def call(function: Callable[..., Any], *options: str, **needed: Any) -> Call:
    """A call of what always stays the same; ``options`` are those that its signature hides."""
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    names = [p.name for p in signature(function).parameters.values() if p.kind in named]
    return Call(
        function.__qualname__, function, needed, [*(n for n in names if n not in _APART), *options]
    )


def method(make: Callable[[], Any], name: str, *batch: Any, **needed: Any) -> Call:
    """A call of a method of an object that is made for it, with a batch or without."""
    options = _OF_STEPS if batch else ()
    made = call(getattr(make(), name), *options, **needed)
    return made._replace(
        function=lambda **arguments: getattr(make(), name)(*batch, **arguments),
        names=list(dict.fromkeys(made.names)),
    )


def spans(rank: Any) -> list[Any]:
    return list(TIMELINE.spans(rank))


def to_html(other: Any) -> str:
    return TIMELINE.to_html(other)


def stall_after(seconds: Any) -> None:
    schedule().stall_after = seconds


_APART = ("compile", "on_preempt")
"""Options that take seconds, or that last."""
_OF_STEPS = ("losses", "aux_losses", "loss_weights", "loss_kwargs", "arg_mbs", "scaler")
_OF_SCHEDULES = ("seed", "dynamic_shapes")

_ALL = [
    call(tl.Action, stage=1, kind=tp.Kind.F),
    call(tp.Overlap, forward=tp.parse("0F0"), backward=tp.parse("1B0")),
    call(tp.parse, text="0F0"),
    call(tl.Costs),
    call(COSTS.of, name="forward", stages=2),
    call(COSTS.durations, plan=PLAN),
    call(tl.Costs.from_dict, values={"forward": 1.0, "link": {"latency": 1.0}}),
    call(tl.Costs.from_timeline, timeline=TIMELINE),
    call(tl.Link),
    call(tl.Placement, rank_of=(0, 1), ranks=2),
    *(call(make, ranks=2) for make in (tl.Placement.linear, tl.Placement.loop, tl.Placement.v)),
    call(tl.Placement.custom, rank_of=[0, 1]),
    call(PLACEMENT.stages_of, rank=1),
    call(tl.Plan, rows_by_rank=ROWS, placement=PLAN.placement, microbatches=2),
    call(tl.Plan.from_actions, actions=[["0F0", "0B0"], ["1F0", "1B0"]]),
    *(call(read, rank=0) for read in (PLAN.__getitem__, PLAN.rows_of)),
    call(PLAN.with_rows, rows_by_rank=ROWS),
    call(tl.Timeline, plan=PLAN, start=TIMELINE.start, end=TIMELINE.end),
    call(spans, rank=1),
    *(call(show) for show in (TIMELINE.cost, TIMELINE.bubble, TIMELINE.to_svg, TIMELINE.to_text)),
    call(to_html, other=TIMELINE),
    call(tl.balance, costs=[1, 2, 3], stages=2),
    call(tl.build, name="1f1b", ranks=2, microbatches=2),
    *(
        call(use, plan=PLAN)
        for use in (tl.lower, tp.add_comm, tp.add_shard, tp.add_reduce, tp.merge_backward)
    ),
    *(call(judge, plan=PLAN) for judge in (tl.simulate, tl.validate, tp.peak_memory)),
    call(tp.find, name="zbv"),
    call(tl.get_schedule_class, schedule_name="gpipe"),
    call(tl.PipelineStage, submodule=MODULE, stage_index=0, num_stages=1, device=CPU),
    *(
        call(one, *_OF_SCHEDULES, stage=stage, n_microbatches=2)
        for one in (tl.ScheduleGPipe, tl.Schedule1F1B)
    ),
    call(tl.ScheduleInterleaved1F1B, *_OF_SCHEDULES, stages=lambda: [stage()], n_microbatches=2),
    call(tl.ScheduleFromPlan, *_OF_SCHEDULES, stages=lambda: [stage()], plan=ALONE),
    call(
        tl.Pipeline,
        model=lambda: [nn.Linear(2, 2)],
        schedule="gpipe",
        microbatches=2,
        loss_fn=LOSS,
        ranks=1,
        device="cpu",
    ),
    call(tl.TensorChunkSpec, split_dim=0),
    call(tl.merge_chunks, chunks=[X, X], chunk_spec=SPEC),
    call(tl.split_args_kwargs_into_chunks, args=(X,), kwargs={"mask": X}, chunks=2),
    call(tl.Tie, uses={0: "a", 1: "b"}),
    call(tl.Tie({0: "a", 1: "b"}).name_in, stage=0),
    call(tl.add_loss, loss=X.sum()),
    call(tl.skip.put, name="a", value=X),
    call(tl.skip.get, name="a"),
    call(tl.local.run, fn=abs, ranks=2),
    call(tl.split.by_hand, modules=[MODULE]),
    call(
        tl.split.by_names,
        model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
        cuts=["1"],
        example=(X,),
    ),
    call(
        tl.split.auto,
        model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        n=2,
        example=(X,),
    ),
    call(tl.split.materialise, piece=lambda: nn.Linear(2, 2), device="cpu"),
    call(PIECES.get_stage_module, stage_idx=0),
    call(PIECES.build_stage, stage_index=0, device=CPU),
    call(tl.build_stage, stage_module=MODULE, stage_index=0, pipe_info=None, device=CPU),
    call(tl.pipeline, module=3, mb_args=(X,)),
    call(stall_after, seconds=3.0),
    method(pipe, "step", X, target=X),
    method(pipe, "eval", X, target=X),
    method(pipe, "train"),
    method(pipe, "grad_norm"),
    method(pipe, "clip_grad_norm_", max_norm=1.0),
    method(pipe, "state_dict"),
    method(pipe, "load_state_dict", state_dict={}, strict=False),
    method(schedule, "step", X, target=X),
]
CALLS = {each.name: each for each in _ALL}
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
    names = CALLS[name].names
    chosen = random.sample(names, min(len(names), random.choice([1, 1, 1, 2, 3])))
    return name, {argument: _anything(random) for argument in chosen}


def try_(input: tuple[str, dict[str, Any]]) -> None:
    """Call it."""
    name, changes = input
    made = {
        key: value() if callable(value) and getattr(value, "__name__", "") in _MAKERS else value
        for key, value in CALLS[name].arguments.items()
        if key not in changes
    }
    state = torch.get_rng_state()
    try:
        CALLS[name].function(**made, **changes)
    finally:
        torch.set_rng_state(state)


_MAKERS = ("<lambda>", "stage")


def _anything(random: Random) -> Any:
    draws = [lambda: random.choice(NUMBERS), lambda: random.choice(ODD), lambda: a_value(random)]
    return random.choice(draws)()
