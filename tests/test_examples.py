"""The examples run, in a small size, and come to the same in one process and in several."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.documents import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES = ROOT / "examples"
CASES = {
    "fsdp": (["--steps", "2"], 4, "step 2: loss"),  # makes the group that others then use
    "gpt": (["--steps", "10", "--microbatches", "2"], 4, "step 10: loss"),
    "hugging_face": (["--steps", "4", "--layers", "2"], 2, "among them transformer.wte.weight"),
    "trainer": (["--steps", "3"], 2, "step 3: loss"),
    "lora": (["--steps", "3"], 2, "saved 16 of 55 tensors"),
    "lightning_module": (["--steps", "3"], 2, "step 3: loss"),
    "from_config": (["--training.steps=2"], 4, "step 2: loss"),
    "custom_schedule": (["--steps", "2"], 2, "step 2: loss"),
    "inference": (["--tokens", "2"], 2, "\nhij\n"),
}
RESUMABLE = ("--steps", "10")
NEEDS = {"lora": "peft", "lightning_module": "pytorch_lightning"}


def run(command: list[str], folder: Path) -> str:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    folder.mkdir()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def missing(name: str) -> bool:
    """Whether an example needs a package that is not installed, which on CI none may."""
    needed = NEEDS.get(name)
    here = needed is None or importlib.util.find_spec(needed) is not None
    return not here and os.environ.get("CI", "").lower() != "true"


@pytest.fixture(scope="module")
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples have printed that are tested now, alone and on each rank."""
    top = tmp_path_factory.mktemp("examples")
    items: list[Any] = [item for item in request.session.items if item.parent is request.node]
    tested = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    tested |= {"lora", "custom_schedule"}
    launches: dict[int, list[list[str]]] = {
        ranks: [
            [name, *words]
            for name, (words, several, _) in CASES.items()
            if name in tested and not missing(name) and ranks in (1, several)
        ]
        for ranks in (1, 2, 4)
    }
    launches[1].append(["resumable", *RESUMABLE])
    run([sys.executable, "-m", "tests.examples", str(top), json.dumps(launches)], top / "in")
    return top


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    with warm.commands() as folder:
        yield str(folder / "python")


def losses(shown: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\S+?)(?:,|$)", shown, re.M)]


def test_every_example_is_tested() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*CASES, "resumable"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_the_same_in_one_process_and_in_several(name: str, printed: Path) -> None:
    if missing(name):
        pytest.skip(f"{NEEDS[name]} is not installed: pip install 'taktline[clients]'")
    _, ranks, text = CASES[name]
    alone = (printed / "ranks-1" / f"{name}.0").read_text()
    each = [(printed / f"ranks-{ranks}" / f"{name}.{rank}").read_text() for rank in range(ranks)]
    assert text in alone
    shown = "".join(each)
    assert shown.count(text) == 1, "one rank speaks for all"
    # As printed, with three places or more; the last one may be rounded otherwise.
    assert losses(shown) == pytest.approx(losses(alone), rel=1e-3)
    assert bool(losses(alone)) == (name != "inference")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_adapters_are_all_that_is_saved(printed: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=128,
        use_cache=False,
    )
    files = [printed / f"ranks-{ranks}" / "in-lora" / "adapters" for ranks in (1, 2)]
    for folder in files:
        assert (folder / "adapter_model.safetensors").stat().st_size < 50_000
        loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM(config), folder)
        trained = [value for name, value in loaded.named_parameters() if "lora_B" in name]
        assert trained
        assert all(value.abs().max() > 0 for value in trained)  # where LoRA begins, they are 0


def test_accelerate_starts_them_too(printed: Path, python: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    command = [python, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(EXAMPLES / "custom_schedule.py"), "--steps", "2"]
    shown, alone = run(command, tmp_path / "both"), printed / "ranks-1" / "custom_schedule.0"
    assert losses(shown) == pytest.approx(losses(alone.read_text()), rel=1e-3)
    assert len(losses(shown)) == 2


def test_a_training_that_goes_on_by_itself(printed: Path, python: str, tmp_path: Path) -> None:
    """A rank is killed in step 7; torchrun starts anew, and all goes on from the latest save."""
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        "3",
        "--nproc-per-node",
        "2",
    ]
    command += [str(EXAMPLES / "resumable.py"), *RESUMABLE, "--die-in", "7"]
    calm, shown = (
        (printed / "ranks-1" / "resumable.0").read_text(),
        run(command, tmp_path / "killed"),
    )
    steps = [dict(re.findall(r"step (\d+): (loss \S+)", text)) for text in (calm, shown)]
    assert steps[0] == steps[1], "to the last place"
    assert shown.count("step 7: ") + shown.count("step 8: ") > 2, "some were made twice"
