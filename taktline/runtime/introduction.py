"""What ranks compare before their first call: models, options, and who has which stages.

Each rank shares a digest of its blueprint, when a pipeline is built and before a first step. Where
digests differ, two ranks send their blueprints, and all ranks raise the first difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from taktline.errors import MismatchError
from taktline.plan import Plan
from taktline.runtime.agreement import digest_of, located
from taktline.runtime.ties import untied, uses_of
from taktline.stage import PipelineStage
from taktline.stage.names import OPTION, PLACE, TOPICS, Blueprint, attached, blueprint
from taktline.transport import Transport
from taktline.transport.exchange import share_error, share_values

T = TypeVar("T")

BUILDING = "Pipeline(…)"

INTRODUCTION = {
    "options": int,  # the digest of what the schedule was given
    "model": int,  # that of the model that the stages were cut from; 0 if it is not known
    "stages": [int],
    "shards": bool,  # whether a stage is gathered before it computes
    "reduces": bool,  # whether a stage averages its gradients over replicas
    "in_company": bool,  # whether processes of other pipelines share the work of its stages
    "ties": [([(int, str)], int, str, str)],  # the TieUse of each tied weight in its stages
    "number": int,  # what the rank proposes as the schedule's number; that of rank 0 counts
}
"""What a rank says of its part of a schedule, once before the first step."""


def introduce(
    transport: Transport,
    mine: Mapping[str, Any],
    options: Blueprint,
    model: Blueprint,
    rank_of: Sequence[int],
) -> list[dict[str, Any]]:
    """Share what this rank says of its schedule; raises unless all ranks fit together.

    ``rank_of`` has the rank of each stage, by the plan.
    """
    said = {"options": digest(options), "model": digest(model), **mine}
    what = "what a rank says of itself, that"
    ranks = share_values(transport, said, INTRODUCTION, "the first step", what=what)
    for name, whole in (("options", options), ("model", model)):
        if reason := first_difference(transport, whole, [rank[name] for rank in ranks]):
            raise MismatchError(reason)
    if reason := misfit(ranks, rank_of):
        raise MismatchError(reason)
    return ranks


def misfit(ranks: Sequence[Mapping[str, Any]], rank_of: Sequence[int]) -> str | None:
    """Why ranks with these introductions cannot run a schedule together; None if they can."""
    misplaced: list[str] = []
    for rank, said in enumerate(ranks):
        needs = [stage for stage, there in enumerate(rank_of) if there == rank]
        if sorted(said["stages"]) != needs:
            misplaced.append(f"rank {rank} has stages {said['stages']} and needs {needs}")
    if misplaced:
        return f"the stages are not where the schedule runs them: {'; '.join(misplaced)}"
    return untied([use for said in ranks for use in uses_of(said["ties"])])


def options_of(name: str, plan: Plan, **others: object) -> Blueprint:
    """The entries of a blueprint for what was passed; the plan last, as others say more."""
    given = {
        "schedule": name,
        "microbatches": plan.microbatches,
        "number of stages": plan.stages,
        **others,
        "plan": plan.digest()[:8],
    }
    return tuple((OPTION, name, str(value)) for name, value in given.items())


def digest(mine: Blueprint) -> int:
    """A number for a blueprint; 0 for an empty one, which fits all others."""
    return digest_of(text for entry in mine for text in entry) | 1 if mine else 0


def whole_model(stages: Sequence[PipelineStage]) -> Blueprint:
    """The blueprint of the model that stages were cut from; empty if it is not known."""
    found = {stage.stage_index: whole for stage in stages if (whole := attached(stage.submod))}
    first = next(iter(found.values()), ())
    for stage, whole in found.items():
        if whole != first:
            raise MismatchError(
                f"stages {next(iter(found))} and {stage} of this rank were cut from different "
                "models, or at different places; take all stages from one split"
            )
    return first


def first_difference(
    transport: Transport, mine: Blueprint, digests: Sequence[int], noun: str = "rank"
) -> str | None:
    """The first difference between the blueprints of two ranks; None if all are the same.

    All ranks take part, and return the same.
    """
    counts = Counter(number for number in digests if number)
    if len(counts) < 2:
        return None
    ((most, _),) = counts.most_common(1)  # the first of several
    other = next(number for number in digests if number not in (0, most))
    # Only one rank for each sends its own: those of a thousand ranks would take too long.
    ranks = [digests.index(number) for number in (most, other)]
    sent = list(mine) if transport.rank in ranks else []
    shared = share_values(transport, sent, [(str, str, str)], "the models of ranks", what="these")
    one, two = ({(topic, name): text for topic, name, text in shared[rank]} for rank in ranks)
    found = _worded(f"{noun} {ranks[0]}", f"{noun} {ranks[1]}", one, two)
    return (
        f"the {noun}s do not build the same pipeline: {found}; build the same "
        f"model with the same options and cuts on every {noun}"
    )


def _worded(first: str, second: str, one: Mapping[Any, str], two: Mapping[Any, str]) -> str:
    """The first difference between the texts of two ranks, by topic and name."""
    for topic, name in sorted({**one, **two}, key=lambda key: TOPICS.index(key[0])):
        text, text2 = one.get((topic, name)), two.get((topic, name))
        if text == text2:
            continue
        if topic == PLACE:
            places = text or "no stage", text2 or "no stage"
            return f"{name} is in {places[0]} on {first}, but in {places[1]} on {second}"
        if text is None or text2 is None:
            lacks, has = (first, second) if text is None else (second, first)
            return f"{lacks} has no {topic} {name}, which is {text or text2} on {has}"
        return f"{topic} {name} is {text} on {first}, but {text2} on {second}"
    return f"tensors or modules are in another order on {second} than on {first}"


def compared(
    plan: Plan, modules: Mapping[int, nn.Module], *, seed: int | None, **options: object
) -> dict[str, Blueprint]:
    """What a process says of its pipeline when it is built, to ranks and to replicas of it.

    ``modules`` are all stages, or those of one rank. To others, "", which may hold other parts of
    its stages, it says less. The seed may differ between replicas.
    """
    passed = options_of(plan.name, plan, **options)
    model = attached(modules[min(modules)]) if plan.stages > 1 else ()
    whole = model if len(modules) == plan.stages else ()
    return {
        "rank": (*passed, (OPTION, "seed", str(seed)), *model),
        "replica": (*passed, *(whole or blueprint(modules))),
        "": passed,
    }


def together(
    ranks: Any, make: Callable[[], T], said: Callable[[T], Mapping[str, Blueprint]] = lambda _: {}
) -> T:
    """What a function returns, if it works on all ranks of all replicas, and they say the same.

    Otherwise all of them raise; a rank with an error of its own raises that one. ``ranks`` are
    those of ``taktline.train.ranks``, over all dimensions of the mesh.
    """
    made, mine, error, known = None, {}, None, None
    try:
        made = make()
        mine = said(made)
    except Exception as raised:  # of the user's code, too
        error = raised
        known = located(error, ranks.transport, MismatchError)

    def of(noun: str) -> Blueprint:
        return mine.get(noun, mine.get("", ()))

    for noun, transport in ranks.dims():
        rows = transport.exchange([int(known is not None), digest(of(noun))], BUILDING)
        if any(failed for failed, _ in rows):
            known = share_error(transport, known)
        elif text := first_difference(transport, of(noun), [number for _, number in rows], noun):
            known = MismatchError(text)
    if known is not None:
        raise error or known
    return cast("T", made)
