"""The examples run, in a small size, and come to the same in one process and in several."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

from tests import warm
from tests.documents import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES = ROOT / "examples"
CASES = {
    "fsdp": (["--steps", "2"], 4, "step 2: loss"),
    "gpt": (["--steps", "10", "--microbatches", "2"], 4, "step 10: loss"),
    "hugging_face": (["--steps", "4", "--layers", "2"], 2, "among them transformer.wte.weight"),
    "trainer": (["--steps", "3"], 2, "step 3: loss"),
    "lora": (["--steps", "3"], 2, "step 3: loss"),
    "qlora": (["--steps", "3"], 2, "step 3: loss"),
    "lightning_module": (["--steps", "3"], 2, "step 3: loss"),
    "from_config": (["--training.steps=2"], 4, "step 2: loss"),
    "custom_schedule": (["--steps", "2"], 2, "step 2: loss"),
    "inference": (["--tokens", "2"], 2, "\nhij\n"),
    "resumable": (["--steps", "10"], 2, "step 10: loss"),
    "checkpointing": (["--steps", "2", "--checkpoint", "attention"], 2, "step 2: loss"),
    "mixed_precision": (["--steps", "2", "--dtype", "float16"], 2, "step 2: loss"),
    "log_metrics": ([], 2, "step 6: loss"),
    "profiling": ([], 2, "such as 'taktline 0F0'"),
    "experts": ([], 4, "step 4: loss"),
    "elastic": (["--epochs", "1"], 2, "step 4: loss"),
}
NEEDS = {"lora": "peft", "qlora": "peft", "lightning_module": "pytorch_lightning"}


def run(command: list[str], folder: Path, ranks: int = 1) -> list[str]:
    """What a command prints in a folder; on several ranks, as torchrun would start them."""
    folder.mkdir()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if ranks > 1:
        with socket.create_server(("localhost", 0)) as free:
            told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        told |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        for rank in range(ranks):
            mine = dict.fromkeys(("RANK", "LOCAL_RANK") if ranks > 1 else (), str(rank))
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folder,
                env=os.environ | told | mine,
            )
            processes.append(process)
            stack.callback(process.kill)
        said = [process.communicate(timeout=240) for process in processes]
    failed = [
        text for (_, text), process in zip(said, processes, strict=True) if process.returncode
    ]
    assert not failed, "\n".join(failed)
    return [text for text, _ in said]


def missing(name: str) -> bool:
    """Whether an example needs a package that is not installed, which on CI none may."""
    needed = NEEDS.get(name)
    here = needed is None or importlib.util.find_spec(needed) is not None
    return not here and os.environ.get("CI", "").lower() != "true"


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    with warm.commands("transformers.trainer", "peft") as folder:
        yield str(folder / "python")


Printed: TypeAlias = Callable[[str, int], tuple[Path, list[str]]]


@pytest.fixture(scope="module")
def printed(python: str, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Runs an example on so many ranks, once: its folder, and what each of them has printed."""
    top = tmp_path_factory.mktemp("examples")

    @cache
    def printed(name: str, ranks: int) -> tuple[Path, list[str]]:
        command = [python, str(EXAMPLES / f"{name}.py"), *CASES[name][0]]
        return (folder := top / f"{name}-{ranks}"), run(command, folder, ranks)

    return printed


def losses(shown: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\S+?)(?:,|$)", shown, re.M)]


def test_every_example_is_tested() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*CASES}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in CASES if name != "resumable"])
def test_the_same_in_one_process_and_in_several(name: str, printed: Printed) -> None:
    if missing(name):
        pytest.skip(f"{NEEDS[name]} is not installed: pip install 'taktline[clients]'")
    _, ranks, text = CASES[name]
    (alone,), shown = printed(name, 1)[1], "".join(printed(name, ranks)[1])
    assert text in alone
    assert shown.count(text) == 1, "one rank speaks for all"
    # As printed, with three places or more; the last one may be rounded otherwise.
    assert losses(shown) == pytest.approx(losses(alone), rel=1e-3)
    assert bool(losses(alone)) == (name != "inference")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_adapters_are_all_that_is_saved(printed: Printed) -> None:
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
    for folder in (printed("lora", ranks)[0] / "adapters" for ranks in (1, 2)):
        assert (folder / "adapter_model.safetensors").stat().st_size < 50_000
        loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM(config), folder)
        trained = [value for name, value in loaded.named_parameters() if "lora_B" in name]
        assert trained
        assert all(value.abs().max() > 0 for value in trained)  # where LoRA begins, they are 0


def test_accelerate_starts_them_too(printed: Printed, python: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    command = [python, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(EXAMPLES / "custom_schedule.py"), "--steps", "2"]
    (shown,), (alone,) = run(command, tmp_path / "both"), printed("custom_schedule", 1)[1]
    assert losses(shown) == pytest.approx(losses(alone), rel=1e-3)
    assert len(losses(shown)) == 2


@pytest.mark.parametrize(("to", "file"), [("tensorboard", "runs/*"), ("wandb", "wandb/offline-*")])
def test_metrics_in_a_logger(
    to: str, file: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(to)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run([python, str(EXAMPLES / "log_metrics.py"), "--to", to], tmp_path / to)
    assert list((tmp_path / to).glob(file))


def test_the_batch_script_of_slurm(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host, by commands that stand in for those of Slurm: the doctor, then the program."""
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("scontrol", "echo localhost"),
        ("srun", 'exec "$@"'),
        ("torchrun", f'exec {python} -m torch.distributed.run "$@"'),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with socket.create_server(("localhost", 0)) as free:
        monkeypatch.setenv("PORT", str(free.getsockname()[1]))
    for name, value in {"NNODES": "1", "JOB_ID": "7", "JOB_NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PER_NODE", "2")
    command = ["bash", str(EXAMPLES / "slurm.sbatch"), str(EXAMPLES / "inference.py")]
    (shown,) = run([*command, "--tokens", "2"], tmp_path / "job")
    assert shown.index("pipeline") < shown.index("\nhij\n")


def test_a_training_that_goes_on_by_itself(printed: Printed, python: str, tmp_path: Path) -> None:
    """A rank is killed in step 7; torchrun starts anew, and all goes on from the latest save."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / "resumable.py"), *CASES["resumable"][0]]
    (calm,), (shown,) = (
        printed("resumable", 1)[1],
        run([*command, "--die-in", "7"], tmp_path / "killed"),
    )
    steps = [dict(re.findall(r"step (\d+): (loss \S+)", text)) for text in (calm, shown)]
    assert steps[0] == steps[1], "to the last place"
    assert shown.count("step 7: ") + shown.count("step 8: ") > 2, "some were made twice"
