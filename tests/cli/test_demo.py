"""The demo, in a small size: what it shows, and that it ends when it is told to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from taktline.cli.demo import MeasuredSchedule, conclusion, durations
from taktline.cli.ranks import called
from taktline.plan import Costs, Link, Rows, build, lower, names, simulate

pytestmark = [pytest.mark.processes, pytest.mark.slow]


SMALL = ("--ranks", "2", "--microbatches", "2")


def shown(commands: Path, *words: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [commands / "taktline", "demo", *SMALL, "--steps", "3", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "schedules"),
    [
        ((), ["1f1b", "gpipe", "zbv"]),
        (("--local", "--schedule", "zb_h1"), ["zb_h1", "gpipe", "1f1b"]),
    ],
)
def test_what_it_shows(
    commands: Path, tmp_path: Path, words: tuple[str, ...], schedules: list[str]
) -> None:
    page = tmp_path / "page.html"
    text = shown(commands, *words, "--output", str(page))
    assert "The losses are equal, but for rounding." in text
    bubble = "" if "--local" in words else r" +bubble +\d+%"
    assert re.search(rf"step +3 +loss \d\.\d+ +[\d,]+ tokens/s{bubble} +peak \S+ MiB$", text, re.M)
    rows = re.findall(r"^│ (\w+) +│ +\d │ +\d+ │ +\d+ │ +\S+ │ +(\S+)% │ +\d+ │$", text, re.M)
    assert [name for name, _ in rows] == schedules
    assert f"{page}\n" in text
    assert text.count("Pipeline(") == 2, "one rank speaks for all, and shows how to go on"
    drawn = json.loads(re.search(r'"timelines":(\[.*\])\}', page.read_text())[1])  # pyright: ignore
    assert [f"{100 * timeline['bubble'][0]:.1f}" for timeline in drawn] == [b for _, b in rows]
    assert re.search(rf"^So choose ({'|'.join(schedules)}) here: ", text, re.M)


def costs(time: float) -> Costs:
    return Costs(forward=time, backward_input=time, backward_weight=time)


@pytest.mark.parametrize("makespans", [(100, 60), (100, 99)])
def test_the_conclusion_claims_no_more_than_the_rounds_show(makespans: tuple[float, float]) -> None:
    noise = [0.0, 4.0, -3.0, 5.0, -4.0, 2.0, -5.0]
    schedules: list[MeasuredSchedule] = []
    for name, makespan, sign in zip(("1f1b", "gpipe"), makespans, (1, -1), strict=True):
        plan = build(name, ranks=2, microbatches=4)
        time = [(makespan + sign * extra) / simulate(plan).makespan for extra in noise]
        schedules.append(
            MeasuredSchedule(plan, [simulate(plan, costs(t)) for t in time], separate=True)
        )
    said = conclusion(schedules)
    if makespans == (100, 60):
        assert said.endswith("So choose gpipe here: 40% less time than 1f1b.")
    else:
        assert "hides how 1f1b, gpipe differ" in said
        assert said.endswith("So choose 1f1b here: none of them keeps fewer micro-batches.")


@pytest.mark.parametrize("name", [name for name in names() if name != "forward_only"])
def test_what_ranks_that_take_turns_would_need_apart(name: str) -> None:
    for ranks, microbatches in ((1, 2), (2, 2), (3, 5)):
        plan = build(name, ranks=ranks, microbatches=microbatches)
        costs = Costs(forward=tuple(range(1, plan.stages + 1)), backward_input=3.0)
        by_rank = [plan.rows_of(rank) for rank in range(ranks)]
        # As traced: the two halves of an overlapped pair run one after the other.
        apart = plan.with_rows([Rows.of(r.kind, r.stage, r.microbatch) for r in by_rank])
        waited = simulate(lower(apart), replace(costs, link=Link(latency=7.0), comm_blocks=True))
        needed = simulate(plan, durations(waited))
        assert needed.makespan == pytest.approx(simulate(plan, costs).makespan)


def test_the_commands_that_it_names_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / ".venv" / "bin" / "taktline"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(script.parent / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert called() == ".venv/bin/python -m taktline"
    monkeypatch.setenv("PATH", str(script.parent))
    assert called() == "taktline"


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "taktline", "demo", *SMALL, "--steps", "1000"]
    command += ["--output", str(tmp_path / "page.html")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where it is ignored, as in the background of a shell, children would ignore it as well.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("2. It trains"):
                break
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=60) != 0
        assert "Traceback" not in rest, rest
        assert not alive(process.pid)
    finally:
        process.stdout.close()
        if alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def alive(group: int) -> bool:
    """Whether a process of the group is left; one that has just ended may take a moment to go."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True
