"""Plans drawn at random: any order that the dependencies allow, on any placement."""

from __future__ import annotations

from random import Random

from taktline.plan import (
    Action,
    Kind,
    Level,
    Overlap,
    Placement,
    Plan,
    find,
    names,
    validate,
)
from tests.plan.strategies import LEVELS, at_level

Step = Action | Overlap

SHUFFLES = 15
JOINS = 4


def draw_plan(rng: Random, ranks: int, microbatches: int) -> Plan:
    """A valid plan: a known schedule or an order of its own, lowered or not, perhaps shuffled."""
    if rng.random() < 0.4:
        schedule = find(rng.choice([name for name in names() if name != "forward_only"]))
        per_rank = schedule.stages_per_rank or rng.randint(1, 3)
        plan = schedule.build(ranks, microbatches, per_rank)
    else:
        plan = _any_order(rng, _draw_placement(rng, ranks), microbatches)
        if rng.random() < 0.5:
            plan = _joined(rng, plan)
    plan = at_level(plan, rng.choice(LEVELS), rng.randint(1, 3))
    if plan.level == Level.LOWERED and rng.random() < 0.3:
        plan = _with_late_receives(plan)
    return _shuffled(rng, plan) if rng.random() < 0.5 else plan


def _draw_placement(rng: Random, ranks: int) -> Placement:
    """A shape with a name, or each stage anywhere; every rank holds one at least."""
    per_rank = rng.randint(1, 3)
    shape = rng.choice(("loop", "v", "any"))
    if shape == "loop":
        return Placement.loop(ranks, per_rank)
    if shape == "v":
        return Placement.v(ranks, per_rank)
    owners = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, ranks)))]
    rng.shuffle(owners)
    return Placement.custom(owners, ranks)


def _any_order(rng: Random, placement: Placement, microbatches: int) -> Plan:
    """One after the other, whatever can run next; some backwards in two halves."""
    splits = rng.choice((0.0, 0.5, 1.0))
    patience = rng.random()
    ready = [(Kind.F, 0, m) for m in range(microbatches)]
    actions: list[list[Action]] = [[] for _ in range(placement.ranks)]
    while ready:
        # Forwards first or backwards first, more or less: memory and order vary between the two.
        kinds = sorted({kind for kind, _, _ in ready}, key=lambda kind: kind == Kind.F)
        kind = kinds[0] if rng.random() < patience else rng.choice(kinds)
        chosen = rng.choice([item for item in ready if item[0] == kind])
        ready.remove(chosen)
        kind, stage, m = chosen
        actions[placement.rank_of[stage]].append(Action(stage, kind, m))
        backward = Kind.I if rng.random() < splits else Kind.B
        if kind == Kind.F and stage + 1 < placement.stages:
            ready.append((Kind.F, stage + 1, m))
        elif kind == Kind.F:
            ready.append((backward, stage, m))
        if kind in (Kind.B, Kind.I) and stage > 0:
            ready.append((backward, stage - 1, m))
        if kind == Kind.I:
            ready.append((Kind.W, stage, m))
    return Plan.from_actions(actions, placement, microbatches, name="any order")


def _joined(rng: Random, plan: Plan) -> Plan:
    """With a few neighbours, a forward and a backward, as overlapped pairs."""
    for _ in range(JOINS):
        rank = rng.randrange(plan.ranks)
        actions: list[list[Step]] = [list(plan[r]) for r in range(plan.ranks)]
        pairs = [
            at
            for at, (one, two) in enumerate(zip(actions[rank], actions[rank][1:], strict=False))
            if isinstance(one, Action) and isinstance(two, Action)
            if one.kind is Kind.F and two.kind in (Kind.B, Kind.I)
        ]
        if pairs:
            at = rng.choice(pairs)
            one, two = actions[rank][at : at + 2]
            assert isinstance(one, Action)
            assert isinstance(two, Action)
            actions[rank][at : at + 2] = [Overlap(one, two)]
            plan = _if_valid(actions, plan)
    return plan


def _shuffled(rng: Random, plan: Plan) -> Plan:
    """With neighbours swapped wherever that breaks no rule."""
    for _ in range(SHUFFLES):
        actions: list[list[Step]] = [list(plan[r]) for r in range(plan.ranks)]
        rank = rng.randrange(plan.ranks)
        if len(actions[rank]) > 1:
            at = rng.randrange(len(actions[rank]) - 1)
            mine = actions[rank]
            mine[at], mine[at + 1] = mine[at + 1], mine[at]
            plan = _if_valid(actions, plan)
    return plan


def _with_late_receives(plan: Plan) -> Plan:
    """With every receive just before what needs it: sends that block may then close a circle."""
    receives = {(Kind.F, Kind.RECV_F), (Kind.B, Kind.RECV_B), (Kind.I, Kind.RECV_B)}
    actions: list[list[Step]] = []
    for rank in range(plan.ranks):
        steps = plan[rank]
        posts = {
            step for step in steps if isinstance(step, Action) and step.kind.name[:4] == "RECV"
        }
        late: list[Step] = []
        for step in steps:
            if step in posts:
                continue
            parts = (step.forward, step.backward) if isinstance(step, Overlap) else (step,)
            needed = [
                Action(part.stage, post, part.microbatch)
                for part in parts
                for kind, post in receives
                if kind is part.kind
            ]
            late += [*(post for post in needed if post in posts), step]
        actions.append(late)
    return _if_valid(actions, plan)


def _if_valid(actions: list[list[Step]], plan: Plan) -> Plan:
    """A plan of these actions, or the old one."""
    new = Plan.from_actions(
        actions, plan.placement, plan.microbatches, level=plan.level, name=plan.name
    )
    # A plan with messages may also be one that deadlocks where sends block: that has to run, too.
    return plan if validate(new, sends="asynchronous") else new


def has_one_order(plan: Plan) -> bool:
    """Whether each stage does its W in the order of its I, so that every sum has one order."""
    for rank in range(plan.ranks):
        rows = plan.rows_of(rank)
        for stage in plan.placement.stages_of(rank):
            here = rows.stage == stage
            orders = [
                rows.microbatch[here & ((rows.kind == Kind.B) | (rows.kind == half))].tolist()
                for half in (Kind.I, Kind.W)
            ]
            if orders[0] != orders[1]:
                return False
    return True


def order_of_forwards(plan: Plan, stage: int) -> list[int]:
    """The micro-batches in the order in which a stage runs them forward."""
    rows = plan.rows_of(plan.placement.rank_of[stage])
    return rows.microbatch[(rows.kind == Kind.F) & (rows.stage == stage)].tolist()
