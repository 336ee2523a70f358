"""I and W against one full backward, beside torch's split in the same run.

    python benchmarks/split_backward.py                  on the CPU
    python benchmarks/split_backward.py --device cuda
    python benchmarks/split_backward.py --compiled       compiled stages, against torch.compile

One small linear layer, where the split is all there is to pay for; and a stage of four transformer
blocks, once so small that launching operations takes the time, once so large that computing them
does. Medians of rounds in which all take turns; the ratio is to a plain ``backward()``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _figures import record
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from taktline.stage import compile_stages
from taktline.stage.split_backward import Splitter

BLOCKS = 4


class Block(nn.Module):
    """Attention and an MLP, each after a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def ways(model: nn.Module) -> dict[str, Callable[[Tensor, Tensor, Tensor], None]]:
    """The backward of (input, output, gradient), in each way."""
    weights, splitter = list(model.parameters()), Splitter()

    def plain(x: Tensor, y: Tensor, gradient: Tensor) -> None:
        y.backward(gradient)

    def taktline(x: Tensor, y: Tensor, gradient: Tensor) -> None:
        pending = splitter.run_input([y], [gradient], [x], weights)
        if pending is not None:
            pending.run()

    def torchs(x: Tensor, y: Tensor, gradient: Tensor) -> None:
        _, groups = stage_backward_input([y], [gradient], [x], iter(weights))
        stage_backward_weight(iter(weights), groups)

    return {"plain": plain, "torch": torchs, "taktline": taktline}


def blocks(width: int) -> nn.Module:
    """A stage."""
    return nn.Sequential(*(Block(width, 4) for _ in range(BLOCKS)))


def measure(
    model: nn.Module, batch_of: Tensor, rounds: int, *, compiled: bool = False
) -> dict[str, float]:
    """Seconds of each way."""
    device = batch_of.device.type
    model = model.to(device)
    ours = compile_stages(model) if compiled else model
    theirs = torch.compile(model) if compiled else model
    gradient = torch.randn_like(batch_of)
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times: dict[str, list[float]] = {}
    calls = ways(model)
    if compiled:
        del calls["torch"]  # which does not split what is compiled
    gc.disable()
    for number in range(rounds + 3):
        for name, call in calls.items():
            x = batch_of.detach().requires_grad_()
            y = (ours if name == "taktline" else theirs)(x)
            sync()
            start = time.perf_counter()
            with torch.autograd.set_multithreading_enabled(False):
                call(x, y, gradient)
            sync()
            if number >= 3:
                times.setdefault(name, []).append(time.perf_counter() - start)
            del x, y
    gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    large = (8, 1024, 2048) if options.device == "cuda" else (4, 128, 512)
    torch.set_num_threads(1)
    for label, model, shape, rounds in (
        ("one layer", nn.Linear(16, 16), (2, 16), 20 * options.rounds),
        ("launch-bound", blocks(32), (2, 8, 32), options.rounds),
        ("compute-bound", blocks(large[-1]), large, max(options.rounds // 5, 5)),
    ):
        batch = torch.randn(shape, device=options.device)
        found = measure(model, batch, rounds, compiled=options.compiled)
        ratios = "   ".join(
            f"{name} {found[name] / found['plain']:.2f}" for name in found if name != "plain"
        )
        print(f"{options.device} {label:14} plain {found['plain'] * 1e6:8.0f} µs   I + W: {ratios}")
        if options.device == "cpu" and label != "one layer" and not options.compiled:
            rows = {name: found[name] / found["plain"] for name in ("torch", "taktline")}
            record("split-backward", f"CPU, {label}", rows)
