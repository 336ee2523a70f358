"""Orders of actions: checked, lowered, played and shown as torch does."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline.errors import InvalidOrderError, PlanError
from tests.compat.peer import Failure, Pair, actions, module, orders, outcome, require_same

_schedules = module(".schedules")
_Action: Pair = _schedules._Action
_KINDS = ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
_WHOLE = ["UNSHARD", "RESHARD", "REDUCE_GRAD"]


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
    if isinstance(theirs, Failure) and theirs.kind is IndexError:
        # Torch cannot show an order in which a rank does nothing.
        assert not isinstance(ours, Failure) or issubclass(ours.kind, PlanError)
        return
    require_same(theirs, ours)
    assert repr(given[0]) == repr(given[1])  # what is left of the arguments


def test_kinds_and_texts() -> None:
    assert [(k.name, k.value, str(k)) for k in _schedules.ours._ComputationType] == [
        (k.name, k.value, str(k)) for k in _schedules.peer._ComputationType
    ]
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
        _require_same("_defer_recv_ops", texts, place.__getitem__)


@given(st.dictionaries(st.integers(0, 2), st.lists(_texts(), min_size=1, max_size=5), min_size=1))
def test_orders_that_cannot_run(rows: dict[int, list[str]]) -> None:
    _require_same("_validate_schedule", rows, 3, 4, 2)
    _require_same("_format_pipeline_order", rows, 2)
    if len(rows) == 3 and "-" not in [text for row in rows.values() for text in row]:
        _require_same("_defer_recv_ops", rows, lambda stage: stage % 3)


def test_an_order_that_does_not_go_on_says_where() -> None:
    order = orders(_Action.ours, {0: ["0F0", "0B0"], 1: ["1F0", "1B0"]})
    with pytest.raises(PlanError, match="rank 0 waits at 0B0\nrank 1 waits at 1F0"):
        _schedules.ours._simulate_comms_compute(order, lambda stage: stage, 2)
    with pytest.raises(AssertionError, match=r"no rank can go on with 1F1 \(rank 1\)"):
        _schedules.ours._add_send_recv(orders(_Action.ours, {1: ["1F1"]}), lambda stage: stage, 2)
    with pytest.raises(InvalidOrderError, match="Rank 0, step 0: there is no stage 7 among 2"):
        _schedules.ours._validate_schedule(orders(_Action.ours, {0: ["7F0"]}), 1, 2, 1)


@pytest.mark.parametrize(
    "name",
    ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
)
@pytest.mark.parametrize("defer", [False, True])
def test_whole_schedules(name: str, defer: bool) -> None:
    peer, ours = module("._schedule_visualizer").get_schedule_ops
    for ranks, microbatches, per_rank in ((2, 4, 2), (4, 8, 2), (2, 6, 3)):
        if per_rank == 3 and name in ("ZBVZeroBubble", "DualPipeV"):
            continue
        require_same(
            peer(name, ranks, microbatches, per_rank, with_comms=True, defer_pp_recv=defer),
            ours(name, ranks, microbatches, per_rank, with_comms=True, defer_pp_recv=defer),
        )


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


def test_overlapped_pairs_are_played_as_well() -> None:
    texts = ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]
    order = orders(_Action.ours, {0: texts})
    played = _schedules.ours._simulate_comms_compute(order, lambda stage: 0, 1)
    assert [str(action) for action in played[0]] == texts


@pytest.mark.parametrize("name", ["1f1b", "GPIPE", "zbvZeroBubble", "PipelineScheduleMulti", "no"])
def test_names_of_schedules(name: str) -> None:
    peer, ours = (outcome(get, name) for get in _schedules.get_schedule_class)
    if name == "no":
        require_same(peer, ours)
    else:
        assert ours.__name__ == peer.__name__
        assert ours is getattr(_schedules.ours, ours.__name__)


def test_messages_go_out_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[int]] = []

    def start(ops: list[Any]) -> list[Any]:
        sent.append([op.peer for op in ops])
        return [op.work for op in ops]

    class Message:
        def __init__(self, peer: int) -> None:
            self.peer, self.work, self.waited = peer, self, False

        def wait(self) -> None:
            self.waited = True

    schedules = _schedules.ours
    monkeypatch.setattr(schedules.dist, "batch_isend_irecv", start)
    messages = [Message(3), Message(1), Message(3)]
    assert schedules._batch_p2p(messages) == messages
    by_peer = schedules._sorted_batch_p2p(messages)
    assert by_peer == {1: [messages[1]], 3: [messages[0], messages[2]]}
    assert sent == [[3, 1, 3], [1], [3, 3]]
    schedules._wait_batch_p2p(by_peer[3])
    assert [message.waited for message in messages] == [True, False, True]
    assert (schedules._batch_p2p([]), schedules._sorted_batch_p2p([]), len(sent)) == ([], {}, 3)
