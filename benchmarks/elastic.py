"""Training on after a lost rank: what copies of the state cost, and how long a recovery takes.

``python benchmarks/elastic.py``; with ``--device cuda`` its ranks share the GPU, over nccl.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import time
from contextlib import nullcontext
from multiprocessing.connection import wait
from statistics import median
from typing import Any

import torch
from torch import nn

import taktline as tl

PARTS = 8


class Block(nn.Module):
    """Some work for its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


def rank_of(rank: int, ranks: int, port: int, given: argparse.Namespace, pipe: Any) -> None:
    """Measure steps with copies and without by turns, and let one rank after the other end."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if given.device == "cuda":  # several ranks on one GPU, if each seems to have a host of its own
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
        os.environ |= {"NCCL_IB_DISABLE": "1"}
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(given.width) for _ in range(given.blocks)))
    x = torch.randn(given.rows, given.width)
    device = "cuda:0" if given.device == "cuda" else "cpu"
    built = tl.Pipeline(
        model,
        example=(x[: given.rows // PARTS],),
        microbatches=PARTS,
        loss_fn=nn.functional.mse_loss,
        device=device,
        timeout=60.0,
        elastic=True,
    )
    optimizer = torch.optim.AdamW(built.parameters())

    def steps(count: int) -> list[float]:
        times: list[float] = []
        for _ in range(count):
            begin = time.perf_counter()
            float(built.step(x, target=x))
            optimizer.step()
            optimizer.zero_grad()
            if given.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return times

    steps(3)
    found: dict[str, list[float]] = {"without": [], f"every {given.every}": []}
    for _ in range(given.turns):
        for name, times in found.items():
            around = (
                nullcontext() if name == "without" else built.elastic(optimizer, every=given.every)
            )
            with around:
                steps(2)  # in the first one its sockets and its memory are made
                times += [sum(steps(given.steps)) / given.steps]
    for name, times in found.items():
        pipe.send(f"{ranks} ranks, {name}: {1e3 * median(times):.1f} ms a step {times}")
    seconds: list[float] = []
    with built.elastic(optimizer, on_recovery=lambda each: seconds.append(each.seconds)):
        for lost in range(ranks - 1, ranks - 1 - given.losses, -1):
            steps(3)
            if rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.perf_counter()
            steps(1)
            whole = time.perf_counter() - begin
            after = median(steps(given.steps))
            pipe.send(
                f"rank {lost} killed: back after {seconds[-1]:.2f} s, committed after {whole:.2f} "
                f"s; then {1e3 * after:.1f} ms a step on {lost} ranks"
            )
    pipe.send("done")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in {"ranks": 4, "blocks": 8, "width": 256, "rows": 512, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--losses", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pipes: list[Any] = []
    for rank in range(given.ranks):
        here, there = context.Pipe()
        options = rank, given.ranks, port, given, there
        context.Process(target=rank_of, args=options, daemon=True).start()
        there.close()
        pipes.append(here)
    first = pipes[0]
    while pipes and (ready := wait(pipes, 120.0)):
        for pipe in (each for each in list(pipes) if each in ready):
            try:
                text = pipe.recv()
                if pipe is first:
                    print(text, flush=True)
            except EOFError:
                pipes.remove(pipe)


if __name__ == "__main__":
    main()
