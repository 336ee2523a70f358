"""The doctor: what it finds on a healthy machine, and that it names what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from taktline.cli.app import app
from taktline.cli.doctor import Report, check_devices, check_links, check_pipeline, describe
from taktline.cli.ranks import launch
from taktline.errors import TransportError
from taktline.train import Pipeline
from taktline.train.verify import Verification

COMMAND = ("-m", "taktline", "doctor")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return subprocess.run(
        command,
        env=kept | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["on its own", "torchrun"])
def test_a_healthy_machine(commands: Path, launcher: tuple[str, ...]) -> None:
    result = run([str(commands / "python"), *launcher, *COMMAND, "--json"])
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)  # only one rank prints
    assert found["well"], found["findings"]
    assert [facts["rank"] for facts in found["ranks"]] == [0, 1]
    assert [link["ranks"] for link in found["links"]] == [[0, 1]]
    assert found["links"][0]["bandwidth"] > 0
    assert found["findings"][-1]["check"] == "pipeline"


@pytest.mark.processes
@pytest.mark.parametrize(("rank", "port"), [("0", "0"), ("1", "1")])
def test_a_rank_that_finds_nobody(rank: str, port: str) -> None:
    # One that has not imported torch yet: it must keep torch from printing errors of its own.
    words = [sys.executable, *COMMAND, "--timeout", "1"]
    here = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    result = run(words, RANK=rank, **here)
    assert (result.returncode, result.stdout) == (1, "")
    where = f"error: rank {rank} does not find the others at 127.0.0.1:{port} within 1 s; "
    assert result.stderr.startswith(where)
    assert result.stderr.count("\n") == 1


DYING = """
import os
from taktline.cli import doctor, main
if os.environ["RANK"] == "1":
    doctor.measure = lambda *_: os._exit(3)
main()
"""


@pytest.mark.processes
def test_a_rank_that_dies(
    tmp_path: Path,
    commands: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    monkeypatch.setattr("taktline.cli.ranks.COMMAND", (str(script),))
    assert launch(2, ["doctor", "--timeout", "20", "--json"], patience=60.0) == 1
    *_, finding = json.loads(capfd.readouterr().out)["findings"]
    assert finding["check"] == "connection"
    assert finding["text"].startswith("broke on rank 0 while measuring links: ")


@pytest.mark.processes
def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    # What is left of the command is the script: one rank fails, the others would sleep on.
    monkeypatch.setattr("taktline.cli.ranks.COMMAND", ("-c",))
    assert launch(3, ['[ "$RANK" != 1 ] && sleep 100; exit 3'], patience=0.1) == 1
    assert launch(3, ["exit 0"], patience=0.1) == 0


def test_a_launcher_and_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.setenv(name, "1")
    result = CliRunner().invoke(app, ["doctor", "--ranks", "2"])
    assert result.exit_code == 2
    assert "a launcher has started the ranks" in result.output


FACTS = describe(0, "gloo", torch.device("cpu"))
GPU = {"backend": "nccl", "gpu": "H200", "device": "cuda:0 H200"}


def judged(*ranks: dict[str, Any]) -> list[dict[str, str]]:
    """What is not well with ranks that differ from healthy ones in this."""
    all_facts: list[dict[str, Any]] = [
        FACTS | {"rank": rank} | facts for rank, facts in enumerate(ranks)
    ]
    report = Report(all_facts[0]["backend"], all_facts)
    check_devices(report)
    return [finding for finding in report.findings if finding["verdict"] != "ok"]


def test_nothing_to_complain_about() -> None:
    assert judged({}, {}) == []
    assert judged({**GPU, "gpu_id": "a"}, {**GPU, "gpu_id": "b"}) == []


@pytest.mark.parametrize(
    ("ranks", "verdict", "text"),
    [
        (({}, {"torch": "2.11"}), "failed", "2.11 on rank 1"),
        (({}, {"taktline": "0.0"}), "failed", "0.0 on rank 1"),
        (({}, {"Python": "3.10.1"}), "warning", "3.10.1 on rank 1"),
        (({}, {"NumPy": "1.26.0"}, {"NumPy": "1.26.0"}), "warning", "1.26.0 on rank 1, 2"),
        (({}, {**GPU, "gpu_id": "a"}), "failed", "gloo on rank 0; nccl on rank 1"),
        (({**GPU, "gpu_id": "a"},) * 2, "failed", "each rank, but there is"),
        (({**GPU, "gpu": None, "gpu_id": None},) * 2, "failed", "cuda:0 H200 on rank 0, 1"),
        (
            ({**GPU, "gpu_id": "a"}, {**GPU, "gpu_id": "b", "gpu": "A100"}),
            "warning",
            "H200 on rank 0; A100 on rank 1",
        ),
    ],
)
def test_machines_that_do_not_fit(
    ranks: tuple[dict[str, Any], ...], verdict: str, text: str
) -> None:
    (finding,) = judged(*ranks)
    assert finding["verdict"] == verdict
    assert text in finding["text"]
    assert finding["advice"]


def linked(*measured: list[dict[str, Any]]) -> tuple[str, str]:
    report = Report("gloo", [])
    check_links(report, measured)
    return report.findings[0]["verdict"], report.findings[0]["text"]


def test_a_link_that_is_slow() -> None:
    good = {"latency": 1e-5, "bandwidth": 1e9}
    links = [{"ranks": [a, b], **good} for a in range(3) for b in range(a + 1, 3)]
    assert linked(links) == ("ok", "3 links, both ways")
    slow = [*links[:-1], {**links[-1], "bandwidth": 1e8}]
    assert linked(slow) == ("warning", "less than a quarter of the usual rate: 1 ↔ 2")


def test_a_pipeline_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("gloo", [FACTS, FACTS])
    found = "the gradient of 1.0.weight (stage 1) differs by 0.5"
    monkeypatch.setattr(Pipeline, "verify", lambda *_, **__: Verification(9, found))
    check_pipeline(report, torch.device("cpu"))
    monkeypatch.setattr(Pipeline, "verify", Mock(side_effect=TransportError("rank 1 is gone")))
    check_pipeline(report, torch.device("cpu"))
    assert [finding["text"] for finding in report.findings] == [
        f"zbv differs from the plain model: {found}",
        "zbv: rank 1 is gone",
    ]
    assert report.count("failed") == 2


def test_all_that_is_wrong_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    link = {"ranks": [7, 8], "latency": 2e-5, "bandwidth": 3e8}
    report = Report("gloo", [FACTS | {"rank": rank} for rank in range(9)], [link])
    report.add("x [y]", "failed", "no [luck]", "have [some]")
    report.show()
    text = capsys.readouterr().out
    for part in ("✗ x [y]: no [luck]", "→ have [some]", "7 ↔ 8: 20.0 µs, 0.30 GB/s", "rank 8: "):
        assert part in text, part
    assert text.endswith("1 check failed.\n")
