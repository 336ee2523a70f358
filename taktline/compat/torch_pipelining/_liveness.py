"""How long a schedule keeps the activations of each stage and micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

from taktline.compat.torch_pipelining import schedules as torchs
from taktline.compat.torch_pipelining._calls import leaves
from taktline.errors import ScheduleError

_Key = tuple[int, int]
"""A stage and a micro-batch."""


@dataclass(frozen=True)
class PipelineActivationLiveness:
    """The slot, a place to be used again, of each stage's activations of a micro-batch."""

    pp_rank: int
    granularity: Literal["microbatch", "stage_microbatch"]
    stage_indices: tuple[int, ...]
    num_microbatches: int
    slot_by_stage_and_microbatch: Mapping[_Key, int]
    num_slots: int
    _activation_lifetime_by_stage_and_microbatch: Mapping[_Key, _Key] = field(repr=False)
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def slot_for(self, stage_index: int, microbatch_index: int) -> int:
        """The slot of a stage and micro-batch."""
        key = self._require(stage_index, microbatch_index)
        return self.slot_by_stage_and_microbatch[key]

    def get_activation_lifetime(self, stage_index: int, microbatch_index: int) -> _Key:
        """The places in the order of the rank, from the forward to what releases it, inclusive."""
        key = self._require(stage_index, microbatch_index)
        return self._activation_lifetime_by_stage_and_microbatch[key]

    def _require(self, *key: int) -> Any:
        if key not in self.slot_by_stage_and_microbatch:
            raise ScheduleError(
                f"stage {key[0]}, micro-batch {key[1]} is not in this analysis; it has stages "
                f"{[*self.stage_indices]} and {self.num_microbatches} micro-batches"
            )
        return key


def analyze_pipeline_activation_liveness(
    schedule: Any,
    *,
    pp_rank: int,
    stage_indices: Sequence[int],
    granularity: Literal["microbatch", "stage_microbatch"],
) -> PipelineActivationLiveness:
    """When a rank keeps the activations of its stages, and which of them can share a place.

    They are kept from F to B or W, both inclusive. For "microbatch", all stages of a micro-batch
    share one place from the first of their forwards to the last of their backwards.
    """
    stages, count = tuple(stage_indices), schedule._n_microbatches
    if granularity not in ("microbatch", "stage_microbatch"):
        raise ScheduleError(
            f"granularity must be 'microbatch' or 'stage_microbatch', not {granularity!r}"
        )
    if not stages or len(set(stages)) < len(stages):
        raise ScheduleError(f"stage_indices must name some stages, each once, not {stages}")
    runtime = isinstance(schedule, torchs._PipelineScheduleRuntime)
    order = schedule.pipeline_order_with_comms if runtime else schedule.pipeline_order
    if pp_rank not in order:
        raise ScheduleError(f"rank {pp_rank} is not in the schedule; it has {[*order]}")
    spans = _spans(order[pp_rank], stages, count, f"rank {pp_rank}")
    if granularity == "microbatch":
        for m in range(count):
            own = [spans[stage, m] for stage in stages]
            whole = min(begin for begin, _ in own), max(end for _, end in own)
            spans |= {(stage, m): whole for stage in stages}
        by_unit = _slots({m: spans[stages[0], m] for m in range(count)})
        slots = {key: by_unit[key[1]] for key in spans}
    else:
        slots = by_unit = _slots(spans)
    tables = MappingProxyType(slots), len({*by_unit.values()}), MappingProxyType(spans)
    return PipelineActivationLiveness(pp_rank, granularity, stages, count, *tables)


def _spans(row: Sequence[Any], stages: Collection[int], count: int, who: str) -> dict[_Key, _Key]:
    """The places of F, and of B or W, in the order of a rank."""
    begins, halves, ends = {}, {}, {}
    tables = {torchs.FORWARD: begins, torchs.BACKWARD_INPUT: halves}
    split: set[_Key] = set()
    for place, action in enumerate(row):
        for part in leaves([action]):
            if not part.is_compute_op or part.stage_index not in stages:
                continue
            key = part.stage_index, part.microbatch_index
            table = tables.get(part.computation_type, ends)
            if key in table or key[1] is None or not 0 <= key[1] < count:
                why = "is there twice" if key in table else f"is not one of {count} micro-batches"
                raise ScheduleError(f"{who}: {part} {why}")
            table[key] = place
            if part.computation_type == torchs.BACKWARD_WEIGHT:
                split.add(key)
    keys = [*product(sorted(stages), range(count))]
    for name, table in (("F", begins), ("B or W", ends)):
        if missing := [key for key in keys if key not in table]:
            raise ScheduleError(f"{who} has no {name} of these (stage, micro-batch): {missing}")
    for key in keys:
        if (key in split and key not in halves) or ends[key] < begins[key]:
            raise ScheduleError(
                f"{who}: stage {key[0]}, micro-batch {key[1]} has a W without an I, or a backward "
                "before its forward"
            )
    return {key: (begins[key], ends[key]) for key in keys}


def _slots(spans: Mapping[Any, _Key]) -> dict[Any, int]:
    """The first free slot for each, in the order of their beginnings.

    >>> _slots({"a": (0, 3), "b": (1, 2), "c": (3, 4)})
    {'a': 0, 'b': 1, 'c': 1}
    """
    until: list[int] = []
    slots: dict[Any, int] = {}
    for unit, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        slot = next((slot for slot, last in enumerate(until) if last < begin), len(until))
        until[slot : slot + 1] = [end]
        slots[unit] = slot
    return {unit: slots[unit] for unit in spans}
