"""Files: what is written is read back, torch's files are read, and mistakes are located."""

from __future__ import annotations

import json
import os
import stat
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from taktline.errors import ArgumentError, PlanFileError
from taktline.plan import (
    Costs,
    Level,
    Link,
    Plan,
    Timeline,
    build,
    lower,
    read,
    read_costs,
    read_timeline,
    simulate,
    validate,
    write,
    write_timeline,
)
from taktline.plan.io import is_timeline, to_csv, to_json
from tests.plan.peer import compute_order, lowered_order, make
from tests.plan.strategies import any_plan, costs, shapes


def from_text(text: str, name: str) -> Plan:
    """The plan in a file with this text."""
    with TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_text(text, newline="")
        return read(file)


@given(any_plan())
def test_json_keeps_everything(plan: Plan) -> None:
    again = from_text(to_json(plan), "plan.json")
    assert again == plan
    assert again.name == plan.name


@given(shapes())
def test_csv_keeps_the_actions(plan: Plan) -> None:
    assert from_text(to_csv(plan), "plan.csv") == plan
    lowered = lower(plan)
    again = from_text(to_csv(lowered), "plan.csv")
    assert [again[rank] for rank in range(plan.ranks)] == [
        lowered[rank] for rank in range(plan.ranks)
    ]


@given(st.data(), shapes(3, 3))
def test_json_keeps_costs(data: st.DataObject, plan: Plan) -> None:
    known = data.draw(costs(plan.stages))
    values = json.loads(to_json(plan, known))["costs"]
    assert Costs.from_dict(values) == known


class TestTorchDialect:
    """A file that torch writes is read, and the reverse; compute-only and with communication."""

    @pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
    @pytest.mark.parametrize("lowered", [False, True])
    def test_torch_writes(self, tmp_path: Path, name: str, lowered: bool) -> None:
        file = tmp_path / "torch.csv"
        level = "compute_comms" if lowered else "compute_only"
        make(name, 0, 4, 8, 2)._dump_csv(str(file), level)
        plan = read(file)
        order = (lowered_order if lowered else compute_order)(name, 4, 8, 2)
        assert [[str(action) for action in plan[rank]] for rank in range(4)] == order
        assert plan.level is (Level.LOWERED if lowered else Level.COMPUTE)
        assert validate(plan) == ()

    @pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv", "dualpipev"])
    @pytest.mark.parametrize("lowered", [False, True])
    def test_torch_reads(self, tmp_path: Path, name: str, lowered: bool) -> None:
        if lowered and hasattr(torch_schedules, "WAIT_SEND_F"):
            pytest.skip("this torch reads messages only with its own waits, which are not written")
        plan = build(name, ranks=4, microbatches=8)
        plan = lower(plan, keep_ready=2, reduce=True) if lowered else plan
        file = tmp_path / "ours.csv"
        write(plan, file)
        schedule = make("Interleaved1F1B", 0, 4, 8, 2)
        schedule._load_csv(str(file), "compute_comms" if lowered else "compute_only")
        read_back = schedule.pipeline_order_with_comms if lowered else schedule.pipeline_order
        for rank in range(4):
            assert [str(action) for action in read_back[rank]] == [str(a) for a in plan[rank]]

    def test_waits_mean_nothing(self) -> None:
        text = "0F0,0SEND_F0,0RECV_B0,0B0, 0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\r\n"
        plan = from_text(
            text + "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1REDUCE_GRAD\r\n", "plan.csv"
        )
        assert [str(action) for action in plan[0]] == [*text.split(",")[:4], "0REDUCE_GRAD"]
        assert validate(plan) == ()

    def test_idle_cells_mean_nothing(self) -> None:
        plan = from_text("0F0,,0B0\r\n,1F0, 1B0 \r\n\r\n", "plan.csv")
        assert [str(action) for action in plan[1]] == ["1F0", "1B0"]


GOOD = json.loads(to_json(build("1f1b", ranks=2, microbatches=1)))


@pytest.mark.parametrize(
    ("text", "row", "column", "message"),
    [
        ("0F0,0B0\n1F0,1X0", 2, 2, "expected one of F, RECOMPUTE, B, I, W"),
        ("", None, None, "a plan without actions"),
        (",,\n,", None, None, "a plan without actions"),
        ("\n" * 200_000, None, None, "a plan without actions"),
        ('0F0,"0B0', 1, None, "not CSV"),
        ("1F0", None, None, "no rank computes stage 0"),
        ("0F0," * 10 + "0F" + "9" * 5000, 1, 11, "must be a whole number from 0 to 2,147,483,647"),
        ("0F0\0", 1, 1, "expected the end"),
        ("0F0,0WAIT_SEND_G0", 1, 2, "not an action"),
        ("0F0," + "x" * 200_000, 1, None, "not CSV: field larger than field limit"),
    ],
)
def test_mistakes_in_csv(
    tmp_path: Path, text: str, row: int | None, column: int | None, message: str
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(PlanFileError, match=r"bad\.csv") as caught:
        read(file)
    assert (caught.value.row, caught.value.column) == (row, column)
    assert message in str(caught.value)
    assert row is None or f"row {row}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, 'expected "format": "taktline-plan"'),
        ({"version": 2}, "has version 2 of the format, but this program reads version 1"),
        ({"version": [[]] * 1000}, "has version [[], [], "),
        ({"ranks": [[]] * 100_000}, "ranks must be a whole number from 1 to 65,536, not 100000"),
        ({"microbatches": 10**600}, "microbatches has more than 64 bits"),
        ({"microbatches": 10**10}, "from 1 to 2,147,483,647"),
        ({"microbatches": 0}, "microbatches must be a whole number from 1 "),
        ({"ranks": [["0F99999999999"], ["1F0"]]}, "row 1, column 1: microbatch must be a whole"),
        ({"ranks": [["0F0"], ["1F0", "oops"]]}, "row 2, column 2"),
        ({"ranks": [["0F0"], [7]]}, "ranks[1][0] is a whole number, not a text"),
        ({"origin": "\ud800"}, "not JSON: 'utf-8' codec"),
        ({"placement": [0, 2]}, "stage 1 is placed on rank 2 of 2"),
        ({"level": "deep"}, "level is one of compute, sharded, lowered, not 'deep'"),
        ({"level": "compute", "ranks": [["0SEND_F0"], ["1F0"]]}, "may not contain SEND_F"),
    ],
)
def test_mistakes_in_json(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        from_text(json.dumps(GOOD | change), "plan.json")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{\n  "format" 3}', "row 2, column 12: not JSON"),
        ("[]", "the value is a list, not an object"),
        ("[" * 100_000, "not JSON: nested deeper than 64 levels"),
        ('{"microbatches": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
    ],
)
def test_mistakes_in_the_text_of_json(text: str, message: str) -> None:
    with pytest.raises(PlanFileError, match=rf"plan\.json.*{message}"):
        from_text(text, "plan.json")


@pytest.mark.parametrize("path", [None, 7, b"plan.csv", "a\0.csv", "\ud800.json"])
def test_what_is_no_path(path: Any) -> None:
    for function in (read, read_costs, read_timeline, partial(write, TestWriting.PLAN)):
        with pytest.raises(ArgumentError, match="path must be the path of a file, not"):
            function(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    contents: dict[str, bytes] = {
        "costs.json": json.dumps(GOOD | {"costs": {"forward": -1}}).encode(),
        "plan.csv": b"0F0\xff",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.csv").mkdir()
    listed = sorted(os.listdir(tmp_path))
    for function, name, message in (
        (read_costs, "costs.json", "forward must be a number from 0 up"),
        (read, "plan.csv", r"not a text in UTF-8 \(byte 3\)"),
        (read, "plan.txt", r"ends in \.csv or \.json"),
        (read, "none.csv", "cannot be read: No such file"),
        (read, "folder.csv", "cannot be read: Is a directory"),
        (partial(write, TestWriting.PLAN), "no-folder/plan.csv", "cannot be written: No such file"),
        (partial(write, TestWriting.PLAN), "folder.csv", "cannot be written: Is a directory"),
    ):
        with pytest.raises(PlanFileError, match=message):
            function(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == listed


def test_a_plan_is_named_after_any_file() -> None:
    plan = from_text("0F0,0B0", os.fsdecode(b"plan \xff.csv"))
    assert plan.name == "plan �"
    assert from_text(to_json(plan), "plan.json").name == plan.name


class TestWriting:
    PLAN = build("1f1b", ranks=2, microbatches=2)

    def test_costs_go_into_json_only(self, tmp_path: Path) -> None:
        known = Costs(forward=(1.0, 2.0), link=Link(latency=0.5), unit="ms")
        write(self.PLAN, tmp_path / "plan.json", costs=known)
        assert read(tmp_path / "plan.json") == self.PLAN
        assert read_costs(tmp_path / "plan.json") == known
        with pytest.raises(PlanFileError, match="cannot hold costs"):
            write(self.PLAN, tmp_path / "plan.csv", costs=known)
        write(self.PLAN, tmp_path / "plan.csv")
        assert read_costs(tmp_path / "plan.csv") is None

    def test_is_all_or_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "plan.csv"
        file.write_text("precious")

        def fail(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(PlanFileError, match="No space left on device"):
            write(self.PLAN, file)
        assert file.read_text() == "precious"
        assert os.listdir(tmp_path) == ["plan.csv"]

    def test_keeps_the_mode_of_a_file_and_follows_links(self, tmp_path: Path) -> None:
        file, link = tmp_path / "plan.csv", tmp_path / "link.csv"
        file.write_text("old")
        file.chmod(0o640)
        link.symlink_to(file)
        write(self.PLAN, link)
        assert link.is_symlink()
        assert read(file) == self.PLAN
        assert stat.S_IMODE(file.stat().st_mode) == 0o640


@given(st.data(), any_plan())
def test_a_timeline_s_file_keeps_everything(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, plan: Plan
) -> None:
    file = tmp_path_factory.mktemp("timelines") / "a.json"
    timeline = simulate(plan, data.draw(costs(plan.stages)))
    write_timeline(timeline, file)
    again = read_timeline(file)
    assert again.plan == timeline.plan
    assert again.name == timeline.name
    assert again.costs == timeline.costs == read_costs(file)
    assert (again.start == timeline.start).all()
    assert (again.end == timeline.end).all()
    assert (again.arrivals == timeline.arrivals).all()
    assert not again.measured
    assert is_timeline(file)
    assert read(file) == timeline.plan


def test_a_measured_timeline_is_named_in_all_drawings(tmp_path: Path) -> None:
    simulated = simulate(build("gpipe", ranks=2, microbatches=1))
    measured = Timeline(simulated.plan, simulated.start, simulated.end, measured=True)
    write_timeline(measured, tmp_path / "a.json")
    assert "    [0.0, 4.0]," in (tmp_path / "a.json").read_text().splitlines()
    again = read_timeline(tmp_path / "a.json")
    assert again.measured
    assert again.arrival is None
    for drawing in (again.to_text(100), again.to_svg(), again.to_html(simulated), again.to_trace()):
        assert "gpipe, measured" in drawing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": None}, "start is null, not a list"),
        ({"start": [[0.0], [1.0]]}, "start must have a number for each action of each rank"),
        ({"end": [["1"] * 4, [1.0] * 4]}, r"end\[0\]\[0\] is a text, not a number"),
        ({"end": [[10**600] * 4, [1.0] * 4]}, "end must be an array of 8 numbers"),
        ({"measured": 1}, "measured is a whole number, not true or false"),
        ({"ranks": [["0F0", "0F0", "0B0", "0B0"], ["1F0", "1B0"] * 2]}, "is not valid: 8 viol"),
        ({"end": [[0.0] * 4, [0.0] * 4]}, "an action ends before it starts"),
        ({"costs": {"speed": 1}}, "unexpected keyword argument 'speed'"),
        ({"format": "taktline-plan"}, "holds a plan and no times"),
    ],
)
def test_timelines_that_cannot_be_read(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "a.json"
    write_timeline(simulate(build("1f1b", ranks=2, microbatches=2)), file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(PlanFileError, match=message):
        read_timeline(file)


def test_only_json_holds_timelines(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", ranks=2, microbatches=2))
    with pytest.raises(PlanFileError, match=r"ends in \.json"):
        write_timeline(timeline, tmp_path / "a.csv")
    write(timeline.plan, tmp_path / "plan.csv")
    assert not is_timeline(tmp_path / "plan.csv")
    with pytest.raises(PlanFileError, match=r"ends in \.json"):
        read_timeline(tmp_path / "plan.csv")
