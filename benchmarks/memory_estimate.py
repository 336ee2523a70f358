"""What `pipe.memory()` expects each rank to hold, beside the peak that the GPU has measured.

    python benchmarks/memory_estimate.py            2 nccl ranks, on one GPU or two
    python benchmarks/memory_estimate.py --small    the estimates alone, over gloo, in a few seconds

A GPT, a Llama of transformers in bfloat16 and a convolutional network train with AdamW on 1F1B: as
they are, with checkpoints around their blocks, and compiled. Measured is what torch has allocated
at most on a rank, in a whole step with the optimizer's, after two such steps.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _peers import run_ranks
from torch import nn

import taktline as tl

MICROBATCHES = 4


class Case(NamedTuple):
    """A model with what it is trained on."""

    model: nn.Module
    example: Any
    """The arguments of one micro-batch."""
    target: torch.Tensor
    """For all micro-batches."""
    loss_fn: Callable[..., torch.Tensor]


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(wide[0], nn.GELU(), wide[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


def words_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all words."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt(small: bool) -> Case:
    """A GPT in float32."""
    width, layers, words, length, rows = (64, 4, 512, 32, 2) if small else (1280, 16, 32768, 512, 4)
    with torch.device("meta"):
        blocks = [Block(width, width // 64) for _ in range(layers)]
        ends = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        model = nn.Sequential(nn.Embedding(words, width), *blocks, *ends)
    ids = torch.randint(words, (MICROBATCHES * rows, length))
    return Case(model, (ids[:rows],), ids, words_loss)


def llama(small: bool) -> Case:
    """A Llama in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, words, length, rows = (
        (64, 4, 512, 32, 2) if small else (2048, 12, 32000, 1024, 2)
    )
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64 // (1 if small else 4),
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.randint(words, (MICROBATCHES * rows, length))
    return Case(model, {"input_ids": ids[:rows]}, ids, lambda out, y: words_loss(out["logits"], y))


class Residual(nn.Module):
    """Two convolutions with batch norm, around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [self._layer(width) for _ in range(2)]
        self.layers = nn.Sequential(*layers[0], nn.ReLU(), *layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layers(x))

    def _layer(self, width: int) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)


def convolutions(small: bool) -> Case:
    """A convolutional network in float32."""
    width, blocks, size, rows = (8, 4, 8, 2) if small else (256, 12, 56, 16)
    with torch.device("meta"):
        ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)
        first = nn.Conv2d(3, width, 3, padding=1)
        model = nn.Sequential(first, *[Residual(width) for _ in range(blocks)], *ends)
    images = torch.randn(MICROBATCHES * rows, 3, size, size)
    target = torch.randint(1000, (MICROBATCHES * rows,))
    return Case(model, (images[:rows],), target, nn.functional.cross_entropy)


def cases() -> Iterator[tuple[str, Callable[[bool], Case], dict[str, Any]]]:
    """Name, model, and options of the pipeline."""
    for make in (gpt, llama, convolutions):
        yield make.__name__, make, {}
    for make in (gpt, llama):
        yield f"{make.__name__}, checkpoints", make, {"checkpoint": "blocks"}
    yield "gpt, compiled", gpt, {"compile": True}


def repeated(part: torch.Tensor) -> torch.Tensor:
    """The same in every micro-batch."""
    return part.repeat(MICROBATCHES, *[1] * (part.ndim - 1))


def measured(rank: int, ranks: int, small: bool, only: list[str]) -> None:
    """Print a line for each case and rank."""
    known = {name: (make, options) for name, make, options in cases()}
    for name in only or known:
        make, options = known[name]
        torch.manual_seed(0)  # both ranks draw the same batch
        try:
            found = measure(make(small), small, options)
        except Exception as error:  # the other cases are worth knowing
            found = {"error": f"{type(error).__name__}: {error}"}
        for turn in range(ranks):
            if turn == rank:
                print(json.dumps({"case": name, "rank": rank, **found}), flush=True)
            dist.barrier()
        gc.collect()
        if not small:
            torch.cuda.empty_cache()


def measure(case: Case, small: bool, options: dict[str, Any]) -> dict[str, Any]:
    """MiB of this rank: the peaks of a step and of the optimizer's, and what each leaves."""
    named = isinstance(case.example, dict)
    parts = case.example if named else dict(enumerate(case.example))
    batch: Any = {name: repeated(part) for name, part in parts.items()}
    found: dict[str, Any] = {}
    begun = 0 if small else torch.cuda.memory_allocated()

    def mark(what: str) -> None:
        if small:
            return
        torch.cuda.synchronize()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        found[what] = [round((bytes - begun) / 2**20, 1) for bytes in peaks]
        torch.cuda.reset_peak_memory_stats()

    mark("before")
    pipe = tl.Pipeline(
        case.model.to_empty(device="cpu"),  # any numbers will do
        example=case.example,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        loss_fn=case.loss_fn,
        device="cpu" if small else "cuda",
        **options,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
    mark("built")
    for _ in range(3):
        args, kwargs = (() if named else batch.values()), (batch if named else {})
        pipe.step(*args, target=case.target, **kwargs)
        mark("step")
        optimizer.step()
        mark("optimizer")
        optimizer.zero_grad()
    expected = pipe.memory(optimizer).ranks[dist.get_rank()]
    parts = {**asdict(expected), "total": expected.total}
    found["expected"] = {part: round(bytes / 2**20, 1) for part, bytes in parts.items()}
    if not small:
        peak = max(found["step"][0], found["optimizer"][0])
        found["ratio"] = round(found["expected"]["total"] / peak, 3)
    pipe.close()
    return found


def main() -> None:
    """Run two ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--small", action="store_true", help="on the CPU: not measured")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    given = parser.parse_args()
    run_ranks(measured, 2, given.small, given.only, backend="gloo" if given.small else "nccl")


if __name__ == "__main__":
    main()
