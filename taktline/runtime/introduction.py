"""What ranks compare beside their calls: models and options at first, then data at times.

Each rank shares a digest of its blueprint, when a pipeline is built and before a first step. Where
digests differ, two ranks send their blueprints, and all ranks raise the first difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from taktline import pytree
from taktline.errors import MismatchError
from taktline.meta import local
from taktline.plan import Plan
from taktline.runtime.agreement import digest_of, located, words_of
from taktline.runtime.ties import TieUse, untied
from taktline.stage import PipelineStage
from taktline.stage.names import OPTION, PLACE, TOPICS, Blueprint, attached, blueprint
from taktline.transport import Transport
from taktline.transport.exchange import share_error, share_values

T = TypeVar("T")

BUILDING = "Pipeline(…)"

_TIE = {"tie": {"uses": [(int, str)]}, "stage": int, "kind": str, "identity": str}
INTRODUCTION = {
    "options": int,  # the digest of what the schedule was given
    "model": int,  # that of the model that the stages were cut from; 0 if it is not known
    "stages": [int],
    "shards": bool,  # whether a stage is gathered before it computes
    "reduces": bool,  # whether a stage averages its gradients over replicas
    "in_company": bool,  # whether processes of other pipelines share the work of its stages
    "ties": [_TIE],  # the tied weights in the rank's stages
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
    return untied([TieUse.from_plain(use) for said in ranks for use in said["ties"]])


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


# The data of batches.

_SAMPLED = 4096
"""The most elements of a tensor that are read."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""


class Fingerprint:
    """A number from 1 to 2**63 - 1 for the values of a batch.

    Bit-equal values have the same number in every process, whatever their strides and devices. It
    depends on order, types and shapes, on up to 4,096 elements spread over each tensor, on numbers
    and strings, and on the types of other objects.

    A GPU copies its elements to the host without waiting; only :meth:`read` waits for them.
    """

    def __init__(self, values: Any) -> None:
        self._words: list[str] = []
        self._samples: list[torch.Tensor] = []
        self._copied: list[torch.Event] = []
        with torch.no_grad():
            for leaf in pytree.tree_leaves(values):
                self._words += words_of(leaf)[:2]
                if isinstance(leaf, torch.Tensor) and (data := _sampled(leaf)) is not None:
                    self._samples.append(data.to("cpu", non_blocking=True, copy=True))
                    if data.device.type != "cpu":
                        self._copied.append(torch.Event(data.device))
                        self._copied[-1].record(torch.accelerator.current_stream(data.device))

    def read(self) -> int:
        """The number; waits until all elements are there."""
        for event in self._copied:
            event.synchronize()
        data = [sample.numpy().tobytes().hex() for sample in self._samples]
        return digest_of([*self._words, *data]) or 1


class DataCheck:
    """Computes the fingerprints of some calls' data: of the first five, then of every 16th."""

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type != "cpu"
        self._pending: list[Fingerprint | None] = []

    def fingerprints(self, call: int, *data: Any) -> list[int]:
        """A number for each part of the data, 0 where there is none to compare.

        With a GPU they are those of the call before: by now it has computed these, and is at work
        on the rest of that call while the host reads them.
        """
        found, self._pending = self._pending, []
        if call <= 5 or call % 16 == 1:
            self._pending = [None if each is None else Fingerprint(each) for each in data]
        if not self._waits:
            found, self._pending = self._pending, []
        return [0 if each is None else each.read() for each in found or [None] * len(data)]


def _sampled(tensor: torch.Tensor) -> torch.Tensor | None:
    """Some elements of a tensor, as whole numbers; None if it has no plain data."""
    tensor = local(tensor.detach())
    opaque = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    if opaque or tensor.is_meta or hasattr(tensor, "__tensor_flatten__"):
        return None
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype.itemsize > 8:  # complex128
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_INTEGERS[tensor.dtype.itemsize])
    step = -(-bits.numel() // _SAMPLED)
    if step <= 1:
        return bits
    while math.gcd(step, bits.numel() // len(bits)) > 1:  # it would hit the same columns again
        step += 1
    return bits.take(torch.arange(0, bits.numel(), step, device=bits.device))
