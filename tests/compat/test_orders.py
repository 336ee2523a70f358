"""Orders of actions: checked, lowered, played and shown as torch does."""

from __future__ import annotations

import json
import pickle
import string
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compat.peer import (
    DEFERS,
    SINCE_2_13,
    Pair,
    actions,
    module,
    orders,
    outcome,
    require_same,
)

_schedules = module(".schedules")
_Action: Pair = _schedules._Action
_KINDS = ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
_WHOLE = ["UNSHARD", "RESHARD", "REDUCE_GRAD"]
_LATER = ["WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"]


@st.composite
def _texts(draw: st.DrawFn, stages: int = 4, microbatches: int = 3) -> str:
    stage, number = st.integers(0, stages - 1), st.integers(0, microbatches - 1)
    shape = draw(st.sampled_from(["compute"] * 6 + ["any", "whole", "overlap", "none"]))
    if shape == "none":
        return "-"
    if shape == "whole":
        return f"{draw(stage)}{draw(st.sampled_from(_WHOLE))}"
    if shape == "overlap":
        kind = draw(st.sampled_from("BI"))
        forward = f"{draw(stage)}F{draw(number)}"
        return f"({forward};{draw(stage)}{kind}{draw(number)})OVERLAP_F_B"
    kind = draw(st.sampled_from(_KINDS[:4] if shape == "compute" else _KINDS))
    return f"{draw(stage)}{kind}{draw(number)}"


@st.composite
def _runs(draw: st.DrawFn) -> tuple[dict[int, list[str]], list[int], int]:
    """Orders in which everything is done in a possible sequence, and perhaps a mistake."""
    ranks, stages = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    microbatches, split = draw(st.integers(1, 3)), draw(st.booleans())
    place = [draw(st.integers(0, ranks - 1)) for _ in range(stages)]
    rows: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    forward = dict.fromkeys(range(microbatches), 0)
    backward = dict.fromkeys(range(microbatches), stages - 1)
    while backward:
        number = draw(st.sampled_from(sorted(backward)))
        if forward[number] < stages:
            stage = forward[number]
            forward[number] += 1
            texts = [f"{stage}F{number}"]
        else:
            stage = backward[number]
            backward[number] -= 1
            if backward[number] < 0:
                del backward[number]
            texts = [f"{stage}I{number}", f"{stage}W{number}"] if split else [f"{stage}B{number}"]
        rows[place[stage]] += texts + ["-"] * draw(st.booleans())
    if draw(st.integers(0, 3)) == 0:
        row = rows[draw(st.sampled_from(sorted(rows)))]
        if len(row) > 1:
            at = draw(st.integers(0, len(row) - 2))
            row[at], row[at + 1] = row[at + 1], row[at]
    return rows, place, microbatches


def _require_same(name: str, rows: dict[int, list[str]], *args: Any) -> None:
    pair = getattr(_schedules, name)
    given = [orders(cls, rows) for cls in _Action]
    theirs, ours = (outcome(f, order, *args) for f, order in zip(pair, given, strict=True))
    require_same(theirs, ours)
    assert repr(given[0]) == repr(given[1])  # what is left of the arguments


def test_kinds_and_texts() -> None:
    ours = [(k.name, k.value, str(k)) for k in _schedules.ours._ComputationType]
    theirs = [(k.name, k.value, str(k)) for k in _schedules.peer._ComputationType]
    assert ours[: len(theirs)] == theirs
    assert {name for name, _, _ in ours[len(theirs) :]} <= set(_LATER)
    for name in ("F", "B", "I", "W", "FORWARD", "FULL_BACKWARD", "OVERLAP_F_B", "REDUCE_GRAD"):
        peer, ours = getattr(_schedules, name)
        assert ours.value == peer.value
        assert hash(ours) == hash(peer)


@given(st.one_of(_texts(), st.text(string.digits + "FBIWSEND_;() x", max_size=12)))
def test_parsing(text: str) -> None:
    peer, ours = (outcome(cls.from_str, text) for cls in _Action)
    require_same(peer, ours)
    if isinstance(ours, _Action.ours):
        assert ours.is_compute_op == peer.is_compute_op
        assert ours[0] == peer[0]
        assert ours[2:] == peer[2:]


@given(st.lists(_texts(stages=10), max_size=12), st.integers(1, 4), st.integers(1, 3))
def test_the_order_of_one_rank(texts: list[str], active: int, microbatches: int) -> None:
    for name, args in (
        ("_merge_bw", ()),
        ("_add_unshard_reshard", (active,)),
        ("_add_reduce_grad", (microbatches,)),
    ):
        given = [actions(cls, texts) for cls in _Action]
        pair = getattr(_schedules, name)
        require_same(*(outcome(f, row, *args) for f, row in zip(pair, given, strict=True)))
        assert repr(given[0]) == repr(given[1])


@given(_runs())
def test_the_orders_of_all_ranks(run: tuple[dict[int, list[str]], list[int], int]) -> None:
    rows, place, microbatches = run
    stages = len(place)
    _require_same("_validate_schedule", rows, len(rows), stages, microbatches)
    if any(rows.values()):
        _require_same("_format_pipeline_order", rows, 1)
    if not all(rows.values()):
        return
    _require_same("_add_send_recv", rows, place.__getitem__, stages)
    lowered = outcome(
        _schedules.ours._add_send_recv, orders(_Action.ours, rows), place.__getitem__, stages
    )
    if isinstance(lowered, dict):
        texts = {rank: [str(action) for action in row] for rank, row in lowered.items()}
        _require_same("_simulate_comms_compute", texts, place.__getitem__, stages)
        if DEFERS:
            _require_same("_defer_recv_ops", texts, place.__getitem__)


@given(st.dictionaries(st.integers(0, 2), st.lists(_texts(), min_size=1, max_size=5), min_size=1))
def test_orders_that_cannot_run(rows: dict[int, list[str]]) -> None:
    _require_same("_validate_schedule", rows, 3, 4, 2)
    _require_same("_format_pipeline_order", rows, 2)
    if DEFERS and len(rows) == 3 and "-" not in [text for row in rows.values() for text in row]:
        _require_same("_defer_recv_ops", rows, lambda stage: stage % 3)


@pytest.mark.parametrize("kind", _LATER)
def test_kinds_of_later_versions(kind: str) -> None:
    schedules = _schedules.ours
    text = f"3{kind}" if kind == "WAIT_REDUCE_GRAD" else f"3{kind}12"
    action = schedules._Action.from_str(text)
    assert action.computation_type is getattr(schedules, kind)
    assert schedules._ComputationType(kind) is schedules._ComputationType[kind]
    assert str(action) == text
    assert not action.is_compute_op
    assert pickle.loads(pickle.dumps(action)) == action


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


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)),
    st.integers(0, 3),
    st.booleans(),
    st.data(),
)
def test_the_order_of_1f1b(
    stages: int, ranks: int, phases: tuple[int, int, int], put_off: int, split: bool, data: Any
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    peer, ours = _schedules._get_1f1b_rank_ops
    args = (
        *(stages, ranks, *phases, rank),
        lambda op: (op // ranks) % stages * ranks + rank,
        lambda op: (stages - 1 - ((op - phases[0]) // ranks) % stages) * ranks + rank,
        *(put_off, split),
    )
    require_same(peer(*args), ours(*args))
    peer, ours = _schedules._get_warmup_ops
    assert ours(rank, stages, put_off, ranks, phases[0]) == peer(
        rank, stages, put_off, ranks, phases[0]
    )


def test_traces(tmp_path: Path) -> None:
    texts = ["0F0", "0I0", "-", "0W0", "0SEND_F0", "0UNSHARD", "(0F1;1B0)OVERLAP_F_B"]
    files = []
    for dump, cls in zip(_schedules._dump_chrometrace, _Action, strict=True):
        files.append(tmp_path / cls.__module__)
        dump({1: actions(cls, texts), 0: actions(cls, ["0F0"])}, str(files[-1]))
    assert json.loads(files[1].read_text()) == json.loads(files[0].read_text())


@pytest.mark.parametrize("name", ["1f1b", "GPIPE", "zbvZeroBubble", "PipelineScheduleMulti", "no"])
def test_names_of_schedules(name: str) -> None:
    peer, ours = (outcome(get, name) for get in _schedules.get_schedule_class)
    if name == "no":
        require_same(peer, ours)
    else:
        assert ours.__name__ == peer.__name__
        assert ours is getattr(_schedules.ours, ours.__name__)


@SINCE_2_13
def test_messages_go_out_one_by_one_unless_they_could_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Coalesced, they would be served in their order, on one stream of CUDA."""
    schedules, started = _schedules.ours, []
    for name in ("isend", "irecv"):

        def start(tensor: Any, name: str = name, **where: Any) -> Any:
            started.append((name, tensor, where))
            return MagicMock(message=tensor)

        monkeypatch.setattr(schedules.dist, name, start)

    def batched(ops: list[Any]) -> list[Any]:
        started.append(("batch", [op.tensor for op in ops]))
        return [MagicMock(message=op.tensor) for op in ops]

    monkeypatch.setattr(schedules.dist, "batch_isend_irecv", batched)

    group = MagicMock(group_name="all")

    def message(number: int, peer: int, kind: str) -> Any:
        op = getattr(schedules.dist, kind)
        return MagicMock(op=op, tensor=number, peer=peer, group_peer=peer, tag=7, group=group)

    sends = [message(number, peer, "isend") for number, peer in enumerate((3, 1, 3))]
    works = schedules._batch_p2p(sends)
    assert [work.message for work in works] == [0, 1, 2]
    assert started[0] == ("isend", 0, {"group": group, "tag": 7, "group_dst": 3})
    assert [name for name, *_ in started] == ["isend"] * 3
    started.clear()
    by_peer = schedules._sorted_batch_p2p(sends)
    assert {p: [w.message for w in works] for p, works in by_peer.items()} == {1: [1], 3: [0, 2]}
    started.clear()
    schedules._batch_p2p([message(0, 1, "irecv")])
    schedules._batch_p2p([message(0, 1, "isend"), message(1, 1, "irecv")])
    assert [name for name, *_ in started] == ["irecv", "batch"]
    schedules._wait_batch_p2p(works)
    assert all(work.wait.called for work in works)
    assert (schedules._batch_p2p([]), schedules._sorted_batch_p2p([])) == ([], {})
