"""Files: what is written is read back, torch's files are read, and mistakes are located."""

from __future__ import annotations

import json
import os
import stat
from functools import partial
from pathlib import Path
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
    build,
    lower,
    read,
    read_costs,
    read_timeline,
    validate,
    write,
)
from taktline.plan.io import from_csv, from_json, to_csv, to_json
from tests.plan.peer import compute_order, lowered_order, make
from tests.plan.strategies import any_plan, costs, shapes


@given(any_plan())
def test_json_keeps_everything(plan: Plan) -> None:
    again = from_json(to_json(plan))
    assert again == plan
    assert again.name == plan.name


@given(shapes())
def test_csv_keeps_the_actions(plan: Plan) -> None:
    assert from_csv(to_csv(plan)) == plan
    lowered = lower(plan)
    again = from_csv(to_csv(lowered))
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
        plan = from_csv(text + "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1REDUCE_GRAD\r\n")
        assert [str(action) for action in plan[0]] == [*text.split(",")[:4], "0REDUCE_GRAD"]
        assert validate(plan) == ()
        with pytest.raises(PlanFileError, match="row 1, column 2: not an action"):
            from_csv("0F0,0WAIT_SEND_G0")

    def test_idle_cells_mean_nothing(self) -> None:
        plan = from_csv("0F0,,0B0\r\n,1F0, 1B0 \r\n\r\n")
        assert [str(action) for action in plan[1]] == ["1F0", "1B0"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "row", "column", "message"),
        [
            ("0F0,0B0\n1F0,1X0", 2, 2, "expected one of F, B, I, W"),
            ("0F0,0BANANA3", 1, 2, "expected a micro-batch number at character 3"),
            ("", None, None, "is empty"),
            (",,\n,", None, None, "is empty"),
            ('0F0,"0B0', 1, None, "not CSV"),
            ("1F0", None, None, "no rank computes stage 0"),
        ],
    )
    def test_in_csv(
        self, tmp_path: Path, text: str, row: int | None, column: int | None, message: str
    ) -> None:
        file = tmp_path / "bad.csv"
        file.write_text(text)
        with pytest.raises(PlanFileError, match=r"bad\.csv") as caught:
            read(file)
        assert (caught.value.row, caught.value.column) == (row, column)
        assert message in str(caught.value)
        if row:
            assert f"row {row}" in str(caught.value)

    GOOD = json.loads(to_json(build("1f1b", ranks=2, microbatches=1)))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": "other"}, 'expected "format": "taktline-plan"'),
            ({"version": 2}, "has version 2 of the format, but this program reads version 1"),
            ({"version": True}, "has version True"),
            ({"version": [[]] * 1000}, "has version [[], [], "),
            ({"ranks": [[]] * 100_000}, "a plan has at most 65,536 ranks, not 100,000"),
            (
                {"placement": [0] * 2_000_000},
                "the number of stages must be a whole number from 1 to 1,048,576",
            ),
            ({"microbatches": 10**600}, "microbatches has more than 64 bits"),
            ({"microbatches": 10**10}, "from 1 to 2,147,483,647"),
            (
                {"ranks": [["0F99999999999"], ["1F0"]]},
                "row 1, column 1: microbatch must be a whole number from 0",
            ),
            ({"origin": "\ud800"}, "is not a text in UTF-8"),
            ({"ranks": None}, "ranks is null, not a list"),
            ({"ranks": [["0F0"], [7]]}, "ranks[1][0] is a whole number, not a text"),
            ({"ranks": [["0F0"], ["1F0", "oops"]]}, "row 2, column 2"),
            ({"placement": [0, "1"]}, "placement[1] is a text, not a whole number"),
            ({"placement": [0, 2]}, "stage 1 is placed on rank 2 of 2"),
            ({"microbatches": 0}, "microbatches must be a whole number from 1 "),
            ({"microbatches": True}, "microbatches is true or false, not a whole number"),
            ({"level": "deep"}, "level is one of compute, sharded, lowered, not 'deep'"),
            ({"level": "compute", "ranks": [["0SEND_F0"], ["1F0"]]}, "may not contain SEND_F"),
            ({"origin": 3}, "origin is a whole number, not a text"),
        ],
    )
    def test_in_json(self, change: dict[str, object], message: str) -> None:
        with pytest.raises(PlanFileError) as caught:
            from_json(json.dumps(self.GOOD | change), "plan.json")
        assert message in str(caught.value)

    def test_in_json_text(self, tmp_path: Path) -> None:
        file = tmp_path / "bad.json"
        file.write_text('{\n  "format" 3}')
        with pytest.raises(PlanFileError, match=r"bad\.json, row 2, column 12: not JSON"):
            read(file)
        with pytest.raises(PlanFileError, match="the value is a list, not an object"):
            from_json("[]")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "not JSON"),
            ("[" * 100_000, "is nested deeper than 64 levels"),
            (
                '{"microbatches": ' + "9" * 5000 + "}",
                "holds a number that is not finite, or has too",
            ),
            ("\0", "not JSON"),
        ],
    )
    def test_in_json_beyond_what_python_reads(self, text: str, message: str) -> None:
        with pytest.raises(PlanFileError, match=rf"^plan\.json.*{message}"):
            from_json(text, "plan.json")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("\n" * 2_000_000, "a plan has at most 65,536 ranks"),
            ("0F0," * 10 + "0F" + "9" * 5000, "row 1, column 11: .*at most 18 digits"),
            ("0F0\0", "row 1, column 1: .*expected the end"),
            ("0F0," + "x" * 200_000, "not CSV: field larger than field limit"),
            ("0F0,0B2147483648", "row 1, column 2: microbatch must be a whole number from 0"),
        ],
    )
    def test_in_csv_beyond_measure(self, text: str, message: str) -> None:
        with pytest.raises(PlanFileError, match=rf"^plan\.csv.*{message}"):
            from_csv(text, "plan.csv")

    @pytest.mark.parametrize("path", [None, 7, b"plan.csv", "a\0.csv", "\ud800.json"])
    def test_in_what_is_no_path(self, path: Any) -> None:
        for function in (read, read_costs, read_timeline, partial(write, self.PLAN)):
            with pytest.raises(ArgumentError, match="path must be the path of a file, not"):
                function(path)

    PLAN = build("1f1b", ranks=1, microbatches=1)

    def test_in_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(self.GOOD | {"costs": {"forward": -1}}))
        with pytest.raises(PlanFileError, match="costs: forward must be a number from 0 up"):
            read_costs(file)
        (tmp_path / "plan.csv").write_bytes(b"0F0\xff")
        with pytest.raises(PlanFileError, match=r"not a text in UTF-8 \(byte 3\)"):
            read(tmp_path / "plan.csv")
        with pytest.raises(PlanFileError, match=r"ends in \.csv or \.json"):
            read(tmp_path / "plan.txt")

    def test_in_the_path(self, tmp_path: Path) -> None:
        plan = build("1f1b", ranks=1, microbatches=1)
        with pytest.raises(PlanFileError, match="cannot be read: No such file"):
            read(tmp_path / "none.csv")
        with pytest.raises(PlanFileError, match="cannot be written: No such file"):
            write(plan, tmp_path / "no-folder" / "plan.csv")
        (tmp_path / "folder.csv").mkdir()
        with pytest.raises(PlanFileError, match="cannot be read: Is a directory"):
            read(tmp_path / "folder.csv")
        with pytest.raises(PlanFileError, match="cannot be written: Is a directory"):
            write(plan, tmp_path / "folder.csv")
        assert os.listdir(tmp_path) == ["folder.csv"]


def test_a_plan_is_named_after_any_file() -> None:
    plan = from_csv("0F0,0B0", os.fsdecode(b"plan \xff.csv"))
    assert plan.name == "plan �"
    assert from_json(to_json(plan)).name == plan.name


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
