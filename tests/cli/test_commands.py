"""The commands as a user runs them: what they print, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import taktline
from taktline.cli import main
from taktline.cli.app import app
from taktline.plan import (
    Costs,
    Link,
    Timeline,
    build,
    names,
    peak_memory,
    read,
    read_costs,
    simulate,
    write,
    write_timeline,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def ok(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    asked = {"COMP_WORDS": " ".join(("taktline", *words)), "COMP_CWORD": str(len(words))}
    environment = asked | {"_TAKTLINE_COMPLETE": "complete_bash"}
    return CliRunner().invoke(app, [], prog_name="taktline", env=environment).output.split()


BAD_INPUT = [
    ("plan 2f2b", "no schedule is called '2f2b'"),
    ("plan zbv -r 2 -m 2 -s 3", "zbv runs 2 stages per rank, not 3"),
    ("plan 1f1b -r 0 -m 2", "ranks must be a whole number from 1 to 4,096"),
    ("plan 1f1b -o x.txt", "ends in .csv or .json"),
    ("check", "Missing argument"),
    ("check none.csv", "none.csv: cannot be read: No such file or directory"),
    ("simulate 2f2b", "a file's name ends in .csv or .json"),
    ("simulate 1f1b --ranks x", "Invalid value for '--ranks'"),
    ("simulate 1f1b --forward -1", "forward must be"),
    ("simulate plan.csv -r 2", "plan.csv is a file and has its own numbers"),
    ("show plan.csv -r 2", "plan.csv is a file and has its own numbers"),
    ("show 1f1b -o x.png", "ends in .html, .svg, .json or .perfetto.json"),
    ("show 1f1b zbv -o x.json", "draw several as .html, .svg or .perfetto.json"),
    ("check x.perfetto.json", "a trace for Perfetto; plans and timelines end in .json"),
    ("compare plan.csv -r 2", "plan.csv is a file and has its own numbers"),
    ("compare 1f1b 2f2b", "no schedule is called '2f2b'"),
    ("compare 1f1b -s 2", "1f1b runs 1 stage per rank, not 2"),
    ("compare --nonsense", "No such option"),
    ("optimise --seconds 0", "seconds must be more than 0"),
    ("optimise --memory 0.5", "no plan fits into memory 0.5 on rank 0"),
    ("optimise --placement w", "Invalid value for '--placement'"),
    ("simulate 1f1b --memory 2", "do not say what saves it: pass offload, the time of a copy"),
    ("simulate 1f1b --memory 0.2 --offload 1", "rank 0 needs at least 2, not 0.2"),
    ("simulate 1f1b --memory 2 --offload fast", "--offload takes a time or, for a file"),
    (
        "simulate 1f1b --memory 2 --offload 5GB/s",
        "for a file with costs in bytes, and in s or ms, byte",
    ),
    ("balance 1,x --stages 1", "expected numbers with commas between them"),
    ("balance 1,1 --stages 3", "from 1 to 2, not 3"),
    ("doctor --backend x", "--backend must be gloo or nccl"),
    ("demo -m 3000000", "1024"),
    ("demo --schedule 1f2b", "no schedule is called '1f2b'; did you mean 1f1b?"),
    ("explore 2f2b", "no schedule is called '2f2b'"),
    ("explore forward_only", "forward_only has no backward, and no bubble to compare"),
    ("explore --ranks 64", "--ranks must be from 1 to 32, not 64"),
    ("explore -o page.svg", "the page is an .html file, not '.svg'"),
    *(
        (f"{command} zbv {size}", f"must be a whole number from 1 to {most}, not ")
        for command in ("plan", "show", "simulate", "compare")
        for size, most in (
            ("-m 3000000", "500,000"),
            (f"-m {10**30}", "500,000"),
            ("-r 3000000", "4,096"),
        )
    ),
]


@pytest.mark.parametrize(("words", "message"), BAD_INPUT)
def test_bad_input_exits_with_2_and_a_line(folder: Path, words: str, message: str) -> None:
    write(build("gpipe", ranks=2, microbatches=4), "plan.csv")
    result = run(*words.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert re.fullmatch(r"error: \S.*\n", result.stderr)
    assert [file.name for file in folder.iterdir()] == ["plan.csv"]


def test_the_command_of_the_shell_exits_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["taktline", "plan", "2f2b"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: no schedule is called")


class TestPlan:
    @pytest.mark.parametrize("file", ["plan.csv", "plan.json"])
    def test_writes_a_file(self, folder: Path, file: str) -> None:
        out = ok("plan", "Interleaved1F1B", "-r", "4", "-s", "2", "-m", "8", "-o", file)
        assert out == f"{file}: 128 actions of 4 ranks\n"
        assert read(file) == build("interleaved_1f1b", ranks=4, stages_per_rank=2, microbatches=8)

    def test_lowered_as_json(self, folder: Path) -> None:
        data = json.loads(ok("plan", "zbv", "-r", "2", "-m", "3", "--lower", "--json"))
        assert data["level"] == "lowered"
        assert "0SEND_F0" in data["ranks"][0]


class TestSimulate:
    def test_a_file_with_times(self, folder: Path) -> None:
        write(build("1f1b", ranks=4, microbatches=8), "plan.csv")
        times = ("--forward", "2", "--backward", "3", "--weight", "1", "--comm", "0.5")
        data = json.loads(ok("simulate", "plan.csv", *times, "--json"))
        costs = Costs(forward=2.0, backward_input=3.0, backward_weight=1.0, link=Link(latency=0.5))
        timeline = simulate(read("plan.csv"), costs)
        assert data["makespan"] == timeline.makespan > 11 * 6
        assert data["bubble"] == timeline.bubble()
        assert data["peak_memory"] == [4, 3, 2, 1]
        assert data["critical_path"][0] == "0F0"

    def test_costs_in_the_file_are_used_unless_replaced(self, folder: Path) -> None:
        plan = build("gpipe", ranks=1, microbatches=1)
        write(plan, "plan.json", costs=Costs(forward=5.0, backward=7.0))
        assert json.loads(ok("simulate", "plan.json", "--json"))["makespan"] == 12
        write(plan, "plan.json", costs=Costs(forward=5.0, backward=7.0, unit="ms"))
        assert "makespan 12 ms;" in ok("simulate", "plan.json")
        replaced = ok("simulate", "plan.json", "--weight", "2", "--json")
        assert json.loads(replaced)["makespan"] == 5 + 1 + 2


class TestOptimise:
    SIZE = ("-r", "3", "-m", "6", "--memory", "4", "--comm", "0.25", "--seconds", "5")

    def test_the_plan_is_written_and_compared(self, folder: Path) -> None:
        out = ok("optimise", *self.SIZE, "--weight", "0.5", "-o", "plan.json")
        assert re.search(r"│\s*zb_h1 ", out)
        assert "no plan in this memory is below" in out
        plan, costs = read("plan.json"), read_costs("plan.json")
        assert costs == Costs(backward_weight=0.5, link=Link(latency=0.25))
        timeline = simulate(plan, costs)
        assert f"optimised: bubble {timeline.bubble('span'):.2%} of" in out
        assert timeline.peak_memory.max() <= 4

    def test_json_from_a_timeline(self, folder: Path) -> None:
        costs = Costs(forward=2.0, backward_input=1.5)
        write_timeline(simulate(build("zb_h1", ranks=3, microbatches=6), costs), "a.json")
        data = json.loads(ok("optimise", *self.SIZE, "--costs", "a.json", "--makespan", "--json"))
        *named, found = data["plans"]
        assert found["makespan"] <= min(each["makespan"] for each in named)
        assert data["bound"]["makespan"] <= found["makespan"] + 1e-9


class TestShow:
    NUMBERS = ("-r", "4", "-m", "8")

    @pytest.mark.parametrize("command", ["show", "compare", "simulate"])
    def test_colours_on_request(
        self, folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "\x1b[" not in ok(command, "zbv", *self.NUMBERS)
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert "\x1b[" in ok(command, "zbv", *self.NUMBERS)

    @pytest.mark.parametrize(
        ("file", "beginning"),
        [("a.svg", "<svg"), ("a.html", "<!doctype html>"), ("a.perfetto.json", '{"traceEvents"')],
    )
    def test_into_a_file(self, folder: Path, file: str, beginning: str) -> None:
        out = ok("show", "1f1b", "zbv", *self.NUMBERS, "-o", file)
        assert out.startswith(f"{file}: ")
        text = Path(file).read_text()
        assert text.startswith(beginning)
        assert "zbv" in text

    def test_files_beside_names(self, folder: Path) -> None:
        plan = build("gpipe", ranks=2, microbatches=2)
        write(plan, "plan.json", costs=Costs(forward=5.0))
        out = ok("show", "plan.json", "interleaved_1f1b", "zbv", "-r", "2", "-m", "2", "-s", "3")
        assert "gpipe: makespan 21" in out
        assert "interleaved_1f1b: " in out


class TestTheSameEverywhere:
    def test_defaults(self, folder: Path) -> None:
        for command in ("plan", "show", "simulate", "compare"):
            numbers = ("--ranks", "4", "--microbatches", "8")
            assert ok(command, "zbv") == ok(command, "zbv", *numbers)

    @pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved_1f1b"])
    def test_one_makespan_for_one_plan(self, folder: Path, name: str) -> None:
        (row,) = json.loads(ok("compare", name, "--json"))
        assert json.loads(ok("simulate", name, "--json"))["makespan"] == row["makespan"]
        assert f"makespan {row['makespan']:g}," in ok("show", name)
        ok("plan", name, "-o", "plan.csv")
        (row_of_file,) = json.loads(ok("compare", "plan.csv", "--json"))
        assert row_of_file["makespan"] == row["makespan"]
        assert f"makespan {row['makespan']:g}," in ok("show", "plan.csv", name)

    def test_shells_complete_schedules_and_files(self, folder: Path) -> None:
        (folder / "zigzag.csv").touch()
        (folder / "zebra.txt").touch()
        for command in ("show", "compare", "simulate"):
            assert completed(command, "z") == ["zb_h1", "zb_h2", "zbv", "zigzag.csv"]
        for command in ("plan", "explore"):
            assert completed(command, "z") == ["zb_h1", "zb_h2", "zbv"]

    def test_shells_complete_the_commands(self) -> None:
        assert "--install-completion" in ok("--help")
        assert completed("s") == ["show", "simulate"]


class TestCompare:
    def test_fits_eighty_columns(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        out = ok("compare")
        assert "interleaved_zero_bubble" in out
        assert "…" not in out

    def test_all_schedules_for_one_model(self, folder: Path) -> None:
        data = json.loads(ok("compare", "-r", "4", "-m", "8", "--json"))
        known = [name for name in names() if name != "forward_only"]
        assert [row["schedule"] for row in data] == [*known, "optimised"]
        figures = {row["schedule"]: row for row in data}
        assert figures["1f1b"]["makespan"] == 33
        assert figures["interleaved_1f1b"]["makespan"] == 24 + 9 / 2
        assert figures["zbv"]["peak_memory"] == figures["1f1b"]["peak_memory"] == 4
        assert figures["v_half"]["peak_memory"] == 3
        assert figures["v_min"]["peak_memory"] == 2

    def test_the_best_plan_in_the_memory_of_the_quickest(self, folder: Path) -> None:
        times = ("--forward", "2", "--weight", "0.5", "--comm", "0.2")
        data = json.loads(ok("compare", "v_half", "v_min", "1f1b", *times, "--json"))
        *named, found = data
        quickest = min(named, key=lambda row: row["makespan"])
        assert found["schedule"] == "optimised"
        assert found["makespan"] < quickest["makespan"]
        assert found["peak_memory"] <= quickest["peak_memory"]
        assert found["stages_per_rank"] == quickest["stages_per_rank"]


class TestMemory:
    def test_plans_within_a_limit(self, folder: Path) -> None:
        limit = ("-m", "6", "--memory", "2", "--offload", "1")
        result = run("compare", "1f1b", "zb_h1", "interleaved_1f1b", *limit, "--json")
        assert "left out, as they do not fit: zb_h1" in result.stderr
        rows = json.loads(result.stdout)
        assert [row["schedule"] for row in rows] == ["1f1b", "interleaved_1f1b", "optimised"]
        assert max(row["peak_memory"] for row in rows) <= 2
        one = json.loads(ok("simulate", "1f1b", *limit, "--json"))
        assert one["peak_memory"] == [2, 2, 2, 1]
        ok("optimise", *limit, "--seconds", "1", "-o", "best.json")
        assert max(peak_memory(read("best.json"), read_costs("best.json"))) <= 2

    def test_a_speed_of_copies(self, folder: Path) -> None:
        """3 MB in 2 ms, as long as a forward of a stage."""
        costs = Costs(forward=2.0, activation=3e6, unit="ms")
        write(build("gpipe", ranks=2, microbatches=4), "plan.json", costs=costs)
        words = ("simulate", "plan.json", "--memory", "7e6", "--json")
        times = [json.loads(ok(*words, "--offload", x))["makespan"] for x in ("2", "1.5GB/s")]
        assert times[0] == times[1]


class TestTimelines:
    """A measured timeline in a file; here one that was simulated plays its part."""

    @pytest.fixture
    def measured(self, folder: Path) -> Timeline:
        costs = Costs(forward=2.0, link=Link(latency=0.5), unit="ms")
        timeline = simulate(build("1f1b", ranks=2, microbatches=3), costs)
        measured = replace(timeline, end=timeline.end * 1.5, start=timeline.start * 1.5)
        measured = replace(measured, measured=True)
        write_timeline(measured, "measured.json")
        return measured

    def test_show(self, measured: Timeline) -> None:
        out = ok("show", "measured.json")
        assert out.startswith("1f1b, measured: makespan 27 ms")
        assert out.count("makespan") == 1

    @pytest.mark.parametrize("file", ["a.svg", "a.html", "a.perfetto.json"])
    def test_predicted_and_measured_on_one_axis(self, measured: Timeline, file: str) -> None:
        assert ok("show", "measured.json", "--predict", "-o", file) == f"{file}: 2 timelines\n"
        assert "1f1b, measured" in Path(file).read_text()
        lines = ok("show", "measured.json", "--predict").splitlines()
        assert [line.split(",")[0] for line in lines if "makespan" in line] == [
            "1f1b: makespan 18 ms",
            "1f1b",
        ]

    def test_compare(self, measured: Timeline) -> None:
        rows = json.loads(ok("compare", "measured.json", "--predict", "--json"))
        assert [(row["schedule"], row["makespan"]) for row in rows] == [
            ("1f1b", 18.0),
            ("1f1b, measured", 27.0),
        ]
        assert "makespan/ms" in ok("compare", "measured.json")

    def test_times_without_a_common_unit(self, measured: Timeline) -> None:
        for command in ("show", "compare"):
            result = run(command, "measured.json", "1f1b", "-r", "2", "-m", "3")
            assert result.exit_code == 2
            assert "do not share an axis" in result.stderr

    def test_simulate_and_check_its_plan(self, measured: Timeline) -> None:
        assert json.loads(ok("simulate", "measured.json", "--json"))["makespan"] == 18
        assert "valid: every action once" in ok("check", "measured.json")


def test_version(folder: Path) -> None:
    assert ok("--version") == f"taktline {taktline.__version__}\n"


@pytest.mark.parametrize("command", ["plan", "check", "show", "simulate", "compare"])
def test_help_has_examples(folder: Path, command: str) -> None:
    assert f"taktline {command}" in ok(command, "--help")


@pytest.mark.processes
class TestAsAProcess:
    def taktline(self, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
        )

    def test_planning_never_imports_torch(self, folder: Path) -> None:
        code = (
            "import sys; sys.argv = ['taktline', 'plan', 'zbv', '-r', '2', '-m', '4']\n"
            "from taktline.cli import main\n"
            "try: main()\n"
            "except SystemExit as stop: assert not stop.code, stop\n"
            "assert 'torch' not in sys.modules, 'torch was imported'"
        )
        result = self.taktline(code, folder)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("zbv: 2 ranks × 2 stages")

    def test_without_the_extra_says_what_to_install(self, folder: Path) -> None:
        code = "import sys; sys.modules['typer'] = None\nfrom taktline.cli import main\nmain()"
        result = self.taktline(code, folder)
        assert result.returncode == 1
        assert result.stderr == "taktline: the commands need typer: pip install 'taktline[cli]'\n"
