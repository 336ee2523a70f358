"""One case: a model, a plan, calls and faults, all of which follow from its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any

from torch import nn

from taktline.plan import Kind, Plan, build, validate
from tests import models
from tests.runtime.features import DYNAMIC, FEATURES, INEXACT, plain_batch, some_batch
from tests.runtime.scenarios import SCHEDULES, Batch, Scenario
from tests.torture.plans import draw_plan, has_one_order

TRANSPORTS = ("local", "gloo")
MOST_MICROBATCHES = 6
WORDS = ("", ": größer", ":\n  several\n  lines", " " + 1000 * "long ")


@dataclass(frozen=True)
class Fault:
    """Something that fails once: ``where`` is forward, backward, loss or weight."""

    where: str
    stage: int
    microbatch: int
    words: str = ""
    """What else its error says."""

    def __str__(self) -> str:
        return f"{self.where} of stage {self.stage}, micro-batch {self.microbatch}"


@dataclass(frozen=True)
class Call:
    """A step or eval with a batch of a size, or zero_grad()."""

    what: str
    size: int = 0
    weights: tuple[float, ...] | None = None
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        size = f"({self.size})" if self.size else "()"
        weights = " weighted" if self.weights else ""
        faults = f" with a fault in {' and '.join(map(str, self.faults))}" if self.faults else ""
        return f"{self.what}{size}{weights}{faults}"


@dataclass(frozen=True)
class Case:
    """What is run, and how."""

    name: str
    plan: Plan
    schedule: str | None
    """One of the classes; None: ScheduleFromPlan."""
    values: str
    calls: tuple[Call, ...]
    options: dict[str, Any] = field(default_factory=dict)
    """Of the schedule."""
    strict: bool = False
    shares: bool = True
    outputs: bool = True

    @property
    def transport(self) -> str:
        return self.name.split("-")[0]

    @property
    def scenario(self) -> Scenario:
        """The model and its batches."""
        return KINDS[self.values].scenario

    @cached_property
    def exact(self) -> bool:
        """Whether every sum has the plain model's order, so that not a bit may differ."""
        return KINDS[self.values].exact and has_one_order(self.plan)

    def __str__(self) -> str:
        on = [name for name, value in self.options.items() if value]
        on += ["strict"] * self.strict
        return (
            f"{self.name}: {self.schedule or f'plan {self.plan.name!r}'}, {self.plan.placement}, "
            f"{self.plan.level.name.lower()}, {self.plan.microbatches} micro-batches, "
            f"values: {self.values}{', ' + ', '.join(on) if on else ''}\n"
            f"  calls: {'; '.join(map(str, self.calls))}"
        )


@dataclass(frozen=True)
class Values:
    """A kind of model, and whether its gradients are sums of one order."""

    scenario: Scenario
    exact: bool = True
    dynamic: bool | None = None
    """Whether it needs dynamic_shapes; None: both go."""
    seeded: bool = False


def _layers(make: Callable[[], nn.Module]) -> Callable[[int], list[nn.Module]]:
    return lambda count: [make() for _ in range(count)]


def _gpt(count: int) -> list[nn.Module]:
    return list(models.cut(models.make_layers("gpt", max(2, count)), count))


def _tokens(number: int, size: int) -> Batch:
    x, target = models.make_batch("gpt", size, seed=number)
    return (x,), {}, target


def _some_batch(number: int, size: int) -> Batch:
    return some_batch(number % 5, size)


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())


def _kinds() -> dict[str, Values]:
    kinds = {
        "single": Values(Scenario(_layers(lambda: nn.Linear(6, 6)), plain_batch)),
        "gpt": Values(Scenario(_gpt, _tokens, models.cross_entropy)),
        "dropout": Values(Scenario(_layers(_dropout), plain_batch), seeded=True),
    }
    for name, scenario in FEATURES.items():
        # Running statistics depend on the order of the forwards, and a failed step changes them.
        # Weights and rows are drawn here.
        left_out = name in ("buffers", "no gradient in any", "few rows")
        if not left_out and "loss_weights" not in scenario.options:
            batch = _some_batch if name == "no gradient in some" else scenario.batch
            exact = name not in INEXACT and scenario.options == {}
            dynamic = True if name in DYNAMIC else None
            kinds[name] = Values(replace(scenario, batch=batch), exact, dynamic)
    return kinds


KINDS = _kinds()


def draw(name: str, most_ranks: int = 4) -> Case:
    """The case of a name such as ``local-17``."""
    transport, _, number = name.partition("-")
    if transport not in TRANSPORTS or not number.isdigit():
        raise ValueError(f"a case is called local-17 or gloo-17, not {name!r}")
    rng = Random(name)
    values = rng.choice(list(KINDS))
    ranks, microbatches = rng.randint(1, most_ranks), rng.randint(1, MOST_MICROBATCHES)
    schedule = rng.choice([*SCHEDULES, *[None] * len(SCHEDULES)])
    if schedule is None:
        plan = draw_plan(rng, ranks, microbatches)
    else:
        per_rank = rng.choice(SCHEDULES[schedule])
        plan = build(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
    dynamic = KINDS[values].dynamic
    options = {
        "dynamic_shapes": rng.random() < 0.3 if dynamic is None else dynamic,
        "scale_grads": rng.random() < 0.8,
        "seed": rng.randrange(100) if KINDS[values].seeded else None,
    }
    return Case(
        name,
        plan,
        schedule,
        values,
        _draw_calls(rng, plan, values),
        options,
        # Some plans need asynchronous sends; where sends block they may deadlock, and do.
        strict=transport == "local" and rng.random() < 0.5 and not validate(plan),
        shares=rng.random() < 0.5,
        outputs=rng.random() < 0.7,
    )


def _draw_calls(rng: Random, plan: Plan, values: str) -> tuple[Call, ...]:
    sizes = [plan.microbatches + rng.randint(0, 6) for _ in range(2)]
    plain = [
        Call(rng.choice(("step", "step", "eval", "zero")), rng.choice(sizes))
        for _ in range(rng.randint(1, 4))
    ]
    calls = [replace(call, size=0) if call.what == "zero" else call for call in plain]
    calls = [_weighted(rng, call, plan) for call in calls]
    if rng.random() < 0.6:
        faults = [_draw_fault(rng, plan, values) for _ in range(rng.choice((1, 1, 1, 2)))]
        trains = any(fault.where in ("backward", "weight") for fault in faults)
        what = "step" if trains else rng.choice(("step", "step", "eval"))
        at = rng.randint(0, len(calls))
        failed = Call(what, rng.choice(sizes), None, tuple(faults))
        # A failed evaluation leaves gradients alone, so they go on adding up.
        calls[at:at] = [failed, Call("zero")] if what == "step" else [failed]
    return (*calls, Call("step", rng.choice(sizes)), Call("eval", rng.choice(sizes)))


def _weighted(rng: Random, call: Call, plan: Plan) -> Call:
    """With a weight for each micro-batch, at times; some of them 0."""
    if call.what != "step" or rng.random() < 0.8:
        return call
    weights = [float(rng.randint(0, 3)) for _ in range(plan.microbatches)]
    weights[rng.randrange(len(weights))] = 2.0
    return replace(call, weights=tuple(weights))


def _draw_fault(rng: Random, plan: Plan, values: str) -> Fault:
    halves = plan.rows.kind == Kind.W
    where = rng.choice(["forward", "backward", "loss", *["weight"] * bool(halves.any())])
    stage, microbatch = rng.randrange(plan.stages), rng.randrange(plan.microbatches)
    if where == "loss":
        stage = plan.stages - 1
    elif where == "backward" and values == "frozen":
        # The stages before have no backward.
        stage = rng.randrange(plan.stages // 2, plan.stages)
    elif where == "weight":
        row = rng.choice(halves.nonzero()[0].tolist())
        stage, microbatch = int(plan.rows.stage[row]), int(plan.rows.microbatch[row])
    return Fault(where, stage, microbatch, rng.choice(WORDS))
