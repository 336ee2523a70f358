"""Compiled pipelines in one process, eager and captured, against the plain loop.

    python benchmarks/compiled.py                          on a GPU; takes about three minutes
    python benchmarks/compiled.py --only launch memory     some of its parts
    python benchmarks/compiled.py --tiny                   on the CPU; its times say nothing

A GPT is cut by names, once with blocks so small that launching operations takes the time (launch),
once so large that computing does (compute). All take turns; medians of a step, as ratios to the
plain accumulation loop, and in brackets to that under torch.compile. Then the time of the first
step with 32 and with 2 equal blocks, each in a new process without caches, and the peak of memory.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import taktline as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zbv": 2}
WORDS = 512


@dataclass(frozen=True)
class Size:
    """A model, its batch, and how often a step is measured."""

    width: int
    length: int
    rows: int
    blocks: int = 8
    microbatches: int = 8
    rounds: int = 7


SIZES = {"launch": Size(256, 64, 2), "compute": Size(2048, 512, 4)}
PARTS = ("launch", "compute", "first", "memory")
TINY = Size(16, 8, 1, blocks=4, microbatches=4, rounds=2)


class Block(nn.Module):
    """Attention and an MLP around residuals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = parts.unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """Words in, the next words' scores out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.blocks))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy."""
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), target.flatten())


def model_of(size: Size) -> GPT:
    """The model on the device, in bfloat16 on a GPU."""
    torch.manual_seed(0)
    return GPT(size).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)


def batch_of(size: Size) -> tuple[Tensor, Tensor]:
    """Words, and the words after them."""
    shape = 2, size.microbatches * size.rows, size.length
    words, target = torch.randint(WORDS, shape, device=DEVICE).unbind()
    return words, target


def wait() -> None:
    """Until the device has done all."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def plain_loop(size: Size, model: Callable[[Tensor], Tensor], parameters: list[Any]) -> Any:
    """Gradient accumulation with the whole model."""
    parts = list(zip(*(each.chunk(size.microbatches) for each in batch_of(size)), strict=True))

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        for words, target in parts:
            (loss_fn(model(words), target) / size.microbatches).backward()

    return step


def pipelined(size: Size, model: GPT, schedule: str, ranks: int, **options: Any) -> Any:
    """A step of a pipeline, from no gradients."""
    stages = ranks * SCHEDULES[schedule]
    pipe = tl.Pipeline(
        copy.deepcopy(model),
        cuts=[f"blocks.{size.blocks * stage // stages}" for stage in range(1, stages)] or None,
        schedule=schedule if stages > 1 else "1f1b",
        microbatches=size.microbatches,
        ranks=ranks,
        loss_fn=loss_fn,
        **options,
    )
    words, target = batch_of(size)

    def step() -> None:
        pipe.zero_grad()
        pipe.step(words, target=target)

    return step


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each; they take turns, after steps that compile and warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(6):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            wait()
            began = time.perf_counter()
            call()
            wait()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(found) for name, found in times.items()}


def peak(call: Callable[[], object]) -> float:
    """What the allocator holds at most during a step, in MiB: what is in graphs counts, too."""
    for _ in range(6):
        call()
    wait()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    wait()
    return torch.cuda.max_memory_reserved() / 2**20


def compare(name: str, size: Size, ranks: tuple[int, ...]) -> None:
    """A table of steps: schedules and ranks, eager, compiled and captured."""
    model = model_of(size)
    whole: Any = torch.compile(copy.deepcopy(model))
    plain = {
        "plain": plain_loop(size, model, list(model.parameters())),
        "torch": plain_loop(size, whole, list(whole.parameters())),
    }
    ways: dict[str, dict[str, bool]] = {"eager": {}, "compile": {"compile": True}}
    if DEVICE == "cuda":
        ways["graphs"] = {"cuda_graphs": True}
        ways["compile + graphs"] = {"compile": True, "cuda_graphs": True}
    found = measure(plain, size.rounds)
    print(f"\n{name}: plain {found['plain']:.1f} ms, under torch.compile {found['torch']:.1f} ms")
    print(f"{'':24}" + "".join(f"{way:>20}" for way in ways))
    for schedule in SCHEDULES:
        for count in ranks:
            if count == 1 and schedule != "1f1b" and size is TINY:
                continue
            calls = {
                way: pipelined(size, model, schedule, count, **options)
                for way, options in ways.items()
            }
            found = measure({**plain, **calls}, size.rounds)
            row = (
                f"{found[way] / found['plain']:.3f} ({found[way] / found['torch']:.3f})"
                for way in ways
            )
            label = f"{schedule} {count} rank{'s' if count > 1 else ''}"
            print(f"{label:24}" + "".join(f"{each:>20}" for each in row), flush=True)
            del calls
            gc.collect()


def memory(size: Size) -> None:
    """The peak of memory, of 1F1B on two ranks."""
    ways: dict[str, dict[str, bool]] = {
        "eager": {},
        "compile": {"compile": True},
        "compile + graphs": {"compile": True, "cuda_graphs": True},
    }
    peaks: dict[str, float] = {}
    model = model_of(size)
    for way, options in ways.items():
        call = pipelined(size, model, "1f1b", 2, **options)
        peaks[way] = peak(call)
        del call
    print("\npeak memory: eager {:.0f} MiB".format(peaks["eager"]), end="")
    for way in ("compile", "compile + graphs"):
        print(f", {way} {peaks[way] / peaks['eager']:.3f} of it", end="")
    print(flush=True)


def first_step(size: Size) -> None:
    """Print the seconds of a first step."""
    call = pipelined(size, model_of(size), "1f1b", 2, compile=True)
    wait()
    began = time.perf_counter()
    call()
    wait()
    print(time.perf_counter() - began)


def first_steps(options: list[str], depths: tuple[int, int]) -> None:
    """First steps with few and with many blocks, each without what another has compiled."""
    took: list[float] = []
    for depth in depths:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, *options, "--first-step", str(depth)]
            env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
            said = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        took.append(float(said.stdout.split()[-1]))
    print(
        f"\nfirst step, compiled: {depths[0]} blocks {took[0]:.1f} s, "
        f"{depths[1]} blocks {took[1]:.1f} s ({took[1] / took[0]:.2f})",
        flush=True,
    )


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--first-step", type=int, metavar="BLOCKS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.tiny:
        sys.exit("this benchmark needs a CUDA GPU, or --tiny")
    size = TINY if options.tiny else SIZES["launch"]
    if options.first_step is not None:
        first_step(Size(size.width, size.length, size.rows, options.first_step))
        return
    print(DEVICE if DEVICE == "cpu" else torch.cuda.get_device_name(), "with torch", end=" ")
    print(torch.__version__)
    for name, each in {"tiny": TINY}.items() if options.tiny else SIZES.items():
        if options.tiny or name in options.only:
            compare(name, each, (1, 2) if options.tiny else (1, 2, 4))
    if "first" in options.only:
        first_steps(["--tiny"] if options.tiny else [], (2, 8) if options.tiny else (2, 32))
    if DEVICE == "cuda" and "memory" in options.only:
        memory(TINY if options.tiny else SIZES["compute"])


if __name__ == "__main__":
    main()
