"""Steps as CUDA graphs against eager steps and the plain loop, on one GPU.

    python benchmarks/cuda_graphs.py                all of it
    python benchmarks/cuda_graphs.py --only launch

    launch    blocks so small that launching operations takes the time: every schedule on 1, 2 and 4
              local ranks
    compute   blocks so large that computing them does, and the peak of memory
    compiled  I and W of a compiled stage against its whole backward, on this GPU and on the CPU;
              zbv against 1f1b, both with compiled stages, on one rank
    nccl      two processes on this GPU, which send and receive inside of the graph; under NVIDIA's
              Multi-Process Service if there is one: else only one of them computes at a time, and
              one that waits for a message keeps the other from sending it
    sharded   the same with four processes: two stages of small blocks, each in FSDP2 over two ranks

The plain loop accumulates the gradients of the same micro-batches with the whole model. All take
turns; medians, as ratios to the plain loop. Gradients are compared with those of eager steps.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

import taktline as tl

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}
MICROBATCHES = 16
LOSS = nn.functional.mse_loss
KINDS = ("launch", "compute", "compiled", "nccl", "sharded")


class Block(nn.Module):
    """A norm and an MLP around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def stages_of(count: int, blocks: int, width: int) -> list[nn.Module]:
    """So many blocks in so many stages."""
    torch.manual_seed(0)
    made = [Block(width) for _ in range(blocks)]
    each = blocks // count
    found = [nn.Sequential(*made[i * each : (i + 1) * each]) for i in range(count)]
    return [stage.to("cuda", torch.bfloat16) for stage in found]


def plain_loop(
    stages: list[nn.Module],
    x: Tensor,
    target: Tensor,
    prepare: Callable[[nn.Module], Any] = lambda stage: stage,
) -> Callable[[], object]:
    """Gradient accumulation with the whole model."""
    model = nn.Sequential(*map(prepare, copy.deepcopy(stages)))
    parts = list(zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True))

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        for one, other in parts:
            (LOSS(model(one), other) / MICROBATCHES).backward()

    return step


def pipelined(pipe: tl.Pipeline, x: Tensor, target: Tensor) -> Callable[[], object]:
    """A step of a pipeline, from no gradients."""

    def step() -> None:
        pipe.zero_grad()
        pipe.step(x, target=target)

    return step


def measure(
    calls: dict[str, Callable[[], object]], rounds: int, before: Callable[[], object] | None = None
) -> dict[str, float]:
    """Milliseconds of each, without what is called ``before`` it; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 6):
        for name, call in calls.items():
            if before is not None:
                before()
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if number >= 6:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(found) for name, found in times.items()}


def peak(call: Callable[[], object]) -> float:
    """What the allocator holds at most during a call, in MiB: what is in graphs counts, too."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() / 2**20


def exact(one: tl.Pipeline, other: tl.Pipeline) -> bool:
    """Whether both have the same gradients, or shards of them, on this rank."""
    mine, theirs = ([p.grad for p in pipe.parameters()] for pipe in (one, other))
    return all(
        g is not None and h is not None and torch.equal(local(g), local(h))
        for g, h in zip(mine, theirs, strict=True)
    )


def local(gradient: Tensor) -> Tensor:
    """The shard of this rank."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def compare(schedule: str, ranks: int, width: int, rows: int, rounds: int, **options: Any) -> str:
    """One schedule: plain loop, eager and captured."""
    count = ranks * SCHEDULES[schedule]
    stages = stages_of(count, 8, width)
    x, target = torch.randn(2, MICROBATCHES * rows, width, device="cuda").bfloat16().unbind()
    options |= {"schedule": schedule, "ranks": ranks, "microbatches": MICROBATCHES, "loss_fn": LOSS}
    pipes = [
        tl.Pipeline(copy.deepcopy(stages), cuda_graphs=graphs, **options)
        for graphs in (False, True)
    ]
    calls = {
        "plain": plain_loop(stages, x, target),
        "eager": pipelined(pipes[0], x, target),
        "captured": pipelined(pipes[1], x, target),
    }
    found = measure(calls, rounds)
    same = "exact" if exact(*pipes) else "NOT EXACT"
    return (
        f"{schedule:24} {ranks} ranks  plain {found['plain']:8.2f} ms  "
        f"eager {found['eager'] / found['plain']:.3f}  "
        f"captured {found['captured'] / found['plain']:.3f}  {same}"
    )


def launch(rounds: int) -> None:
    """Every schedule on local ranks."""
    for schedule in SCHEDULES:
        for ranks in (1, 2, 4):
            print(compare(schedule, ranks, 512, 4, rounds), flush=True)


def compute(rounds: int) -> None:
    """Large blocks, and memory."""
    for schedule in ("1f1b", "zbv"):
        print(compare(schedule, 2, 4096, 512, max(5, rounds // 4)), flush=True)
    stages = stages_of(2, 8, 4096)
    x, target = torch.randn(2, MICROBATCHES * 512, 4096, device="cuda").bfloat16().unbind()
    peaks: dict[bool, float] = {}
    for graphs in (False, True):
        pipe = tl.Pipeline(
            copy.deepcopy(stages),
            ranks=2,
            microbatches=MICROBATCHES,
            loss_fn=LOSS,
            cuda_graphs=graphs,
        )
        call = pipelined(pipe, x, target)
        for _ in range(6):
            call()
        peaks[graphs] = peak(call)
        del pipe, call
    print(
        f"peak memory: eager {peaks[False]:.0f} MiB, "
        f"captured {peaks[True] / peaks[False]:.3f} of it"
    )


def halves(device: str, width: int, rows: int, rounds: int) -> str:
    """I and W of a compiled stage against its whole backward."""
    torch._dynamo.reset()
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    made = nn.Sequential(*(Block(width) for _ in range(4))).to(device, kind)
    stage = tl.PipelineStage(tl.compile_stages(made), 0, 1, torch.device(device))
    stage.begin()
    x = torch.randn(rows, width, device=device, dtype=kind, requires_grad=True)
    gradient = [torch.ones_like(x)]

    def whole() -> None:
        for microbatch in range(8):
            stage.backward(microbatch, gradient)

    def split() -> None:
        for microbatch in range(8):
            stage.backward_input(microbatch, gradient)
            stage.backward_weight(microbatch)

    def forward() -> None:
        for microbatch in range(8):
            stage.keep(microbatch, [x], [stage.submod(x)])

    with torch.autograd.set_multithreading_enabled(False):
        found = measure({"whole": whole, "split": split}, rounds, before=forward)
    ratio = found["split"] / found["whole"]
    return f"compiled, {device}, {rows} rows of width {width}: I + W {ratio:.3f} of B"


def compiled(rounds: int) -> None:
    """Compiled stages: I and W, and what they cost on one rank."""
    for device, width, rows in (("cuda", 4096, 2048), ("cuda", 2048, 256), ("cpu", 256, 128)):
        print(halves(device, width, rows, rounds), flush=True)
    for width, rows in ((4096, 2048), (2048, 256)):
        for graphs in (False, True):
            print(one_rank(width, rows, rounds, graphs), flush=True)


def one_rank(width: int, rows: int, rounds: int, graphs: bool) -> str:
    """zbv, with two compiled stages, against 1f1b with one; eagerly also two modules against one.

    Each call of a compiled module takes torch some time before its first kernel, on any schedule.
    """
    torch._dynamo.reset()
    stages = stages_of(2, 8, width)
    x, target = torch.randn(2, MICROBATCHES * rows, width, device="cuda").bfloat16().unbind()
    calls = {}
    for schedule in ("1f1b", "zbv"):
        made = copy.deepcopy(stages)
        pipe = tl.Pipeline(
            made if schedule == "zbv" else [nn.Sequential(*made)],
            schedule=schedule,
            ranks=1,
            microbatches=MICROBATCHES,
            loss_fn=LOSS,
            compile=True,
            cuda_graphs=graphs,
        )
        calls[schedule] = pipelined(pipe, x, target)
    if not graphs:
        calls["one"] = plain_loop([nn.Sequential(*stages)], x, target, torch.compile)
        calls["two"] = plain_loop(stages, x, target, torch.compile)
    found = measure(calls, rounds)
    plain = "" if graphs else f"; plain loop, two modules {found['two'] / found['one']:.3f} of one"
    return (
        f"compiled, one rank, {rows} rows of width {width}, {'captured' if graphs else 'eager'}: "
        f"zbv {found['zbv'] / found['1f1b']:.3f} of 1f1b{plain}"
    )


def _rank(rank: int, port: int, schedule: str, rounds: int, lines: Any, sharded: bool) -> None:
    """One of several processes on one GPU; nccl takes them for different hosts."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "4" if sharded else "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": str(rank),
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")
    width = 64 if sharded else 512
    stages = stages_of(2 * SCHEDULES[schedule], 8, width)
    x, target = torch.randn(2, MICROBATCHES * 4, width, device="cuda").bfloat16().unbind()
    for value in (x, target):
        torch.distributed.broadcast(value, 0)
    options: dict[str, Any] = {
        "schedule": schedule,
        "microbatches": MICROBATCHES,
        "loss_fn": LOSS,
        "device": "cuda:0",
        "ranks": 2,
        "data_parallel": "fsdp" if sharded else None,
    }
    pipes = [
        tl.Pipeline(copy.deepcopy(stages), cuda_graphs=graphs, **options)
        for graphs in (False, True)
    ]
    calls = {
        "eager": pipelined(pipes[0], x, target),
        "captured": pipelined(pipes[1], x, target),
    }
    found = measure(calls, rounds)
    alone = measure({"plain": plain_loop(stages, x, target)}, rounds) if rank == 0 else {}
    same = exact(*pipes)
    if rank == 0:
        print(pipes[1])
        lines.put(
            f"nccl, {'2 ranks × FSDP2 over 2' if sharded else '2 ranks'}, {schedule:24} "
            f"eager {found['eager'] / alone['plain']:.3f}  "
            f"captured {found['captured'] / alone['plain']:.3f} of the plain loop, "
            f"{found['captured'] / found['eager']:.3f} of eager  "
            f"{'exact' if same else 'NOT EXACT'}"
        )
    torch.distributed.barrier()
    for pipe in pipes:
        pipe.close()
    torch.distributed.destroy_process_group()


@contextmanager
def sharing() -> Iterator[None]:
    """Inside, processes compute on this GPU at the same time, where the service is installed."""
    control = shutil.which("nvidia-cuda-mps-control")
    print("nccl: with" if control else "nccl: without", "Multi-Process Service", flush=True)
    if control is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([control], input="quit\n", text=True, check=False)
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


@sharing()
def nccl(rounds: int, *, sharded: bool = False) -> None:
    """Two processes, or four."""
    for schedule in ("1f1b", "zbv") if sharded else ("interleaved_1f1b", "interleaved_zero_bubble"):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        lines = mp.get_context("spawn").SimpleQueue()
        spawn(_rank, (port, schedule, rounds, lines, sharded), nprocs=4 if sharded else 2)
        print(lines.get(), flush=True)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    print(torch.cuda.get_device_name(), "with torch", torch.__version__)
    for kind in KINDS if options.only is None else (options.only,):
        run: dict[str, Callable[[int], object]] = {
            "launch": launch,
            "compute": compute,
            "compiled": compiled,
            "nccl": nccl,
            "sharded": partial(nccl, sharded=True),
        }
        run[kind](options.rounds)


if __name__ == "__main__":
    main()
