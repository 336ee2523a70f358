"""Random plans for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from taktline.plan import (
    Costs,
    Link,
    Links,
    NamedSchedule,
    Plan,
    add_reduce,
    add_shard,
    build,
    find,
    lower,
    names,
)

LEVELS = ("compute", "sharded", "lowered", "lowered and sharded")


@st.composite
def shapes(draw: st.DrawFn, most_ranks: int = 5, most_microbatches: int = 9) -> Plan:
    """A compute plan of any schedule, with any numbers."""
    schedule: NamedSchedule = find(draw(st.sampled_from(names())))
    return build(
        schedule.name,
        ranks=draw(st.integers(1, most_ranks)),
        microbatches=draw(st.integers(1, most_microbatches)),
        stages_per_rank=schedule.stages_per_rank or draw(st.integers(1, 3)),
    )


def at_level(plan: Plan, level: str, keep_ready: int = 2) -> Plan:
    """The plan with as much spelled out as the level says."""
    if level == "compute":
        return plan
    if level == "sharded":
        return add_reduce(add_shard(plan, keep_ready))
    sharded = "sharded" in level
    return lower(plan, keep_ready=keep_ready if sharded else None, reduce=sharded)


@st.composite
def any_plan(draw: st.DrawFn, most_ranks: int = 4, most_microbatches: int = 5) -> Plan:
    """A plan of any schedule at any level."""
    plan = draw(shapes(most_ranks, most_microbatches))
    return at_level(plan, draw(st.sampled_from(LEVELS)), draw(st.integers(1, 3)))


def link() -> st.SearchStrategy[Link]:
    """A link whose times are sums of quarters."""
    latency = st.integers(0, 12).map(lambda n: n / 4)
    bandwidth = st.sampled_from([1.0, 2.0, float("inf")])
    return st.builds(Link, latency=latency, bandwidth=bandwidth)


def links() -> st.SearchStrategy[Links]:
    """Hosts of a few ranks, and single links."""
    pairs = st.dictionaries(st.sampled_from([(0, 1), (2, 1), (0, 3)]), link(), max_size=2)
    hosts, rail = st.integers(1, 3), st.none() | link()
    return st.builds(
        Links, ranks_per_host=hosts, within=link(), across=link(), rail=rail, pairs=pairs
    )


@st.composite
def costs(draw: st.DrawFn, stages: int) -> Costs:
    """Costs that differ from stage to stage, in quarters so that sums are exact."""
    quarters = st.integers(0, 12).map(lambda n: n / 4)

    def per_stage() -> tuple[float, ...]:
        return tuple(draw(st.lists(quarters, min_size=stages, max_size=stages)))

    return Costs(
        forward=per_stage(),
        backward_input=per_stage(),
        backward_weight=per_stage(),
        backward=draw(st.none() | st.just(per_stage())),
        overlap=draw(st.none() | st.just(per_stage())),
        link=draw(st.one_of(link(), links())),
        message_bytes=per_stage(),
        comm_blocks=draw(st.booleans()),
    )
