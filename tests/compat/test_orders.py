"""Orders of named schedules, as torch makes and finds them."""

from __future__ import annotations

import pytest

from tests.compat.peer import SINCE_2_13, module, outcome, require_same

_schedules = module(".schedules")


@pytest.mark.parametrize(
    "name",
    ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
)
@pytest.mark.parametrize("defer", [False, pytest.param(True, marks=SINCE_2_13)])
def test_whole_schedules(name: str, defer: bool) -> None:
    peer, ours = module("._schedule_visualizer").get_schedule_ops
    for ranks, microbatches, per_rank in ((2, 4, 2), (4, 8, 2), (2, 6, 3)):
        if per_rank == 3 and name in ("ZBVZeroBubble", "DualPipeV"):
            continue
        options = {"with_comms": True} | ({"defer_pp_recv": True} if defer else {})
        sizes = (ranks, microbatches, per_rank)
        require_same(peer(name, *sizes, **options), ours(name, *sizes, **options))


@pytest.mark.parametrize("name", ["1f1b", "GPIPE", "zbvZeroBubble", "PipelineScheduleMulti", "no"])
def test_names_of_schedules(name: str) -> None:
    peer, ours = (outcome(get, name) for get in _schedules.get_schedule_class)
    if name == "no":
        require_same(peer, ours)
    else:
        assert ours.__name__ == peer.__name__
        assert ours is getattr(_schedules.ours, ours.__name__)
