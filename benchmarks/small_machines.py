"""Machines that are small and unequal, as nccl ranks that share one GPU.

    python benchmarks/small_machines.py                    all of it
    python benchmarks/small_machines.py --only stream      splits, stream, qlora or host
    python benchmarks/small_machines.py --tiny             gloo ranks on the CPU, where nothing is
                                                           limited: only to see that it runs

``splits``: three ranks with 16, 24 and 32 units of memory train a model that an even split does not
fit into. The cuts that ``ranks=[…]`` finds train within these limits. They are compared with every
other split, one by one, whose peaks are within them: by their times, and by those of the plan, as
ranks of one GPU take turns, so measured times differ little.
``stream``: weights of 1.5 times the memory of two ranks, streamed, beside the same plan with all
weights on the device. ``qlora``: NF4 and adapters on 2 and 4 ranks beside one process; needs peft
and bitsandbytes or torchao. ``host``: AdamW on the host. Limits are those of torch's allocator.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
from _peers import run_ranks

import taktline as tl

GIB = 2**30


@dataclass(frozen=True)
class Size:
    """What is trained."""

    width: int
    blocks: int
    microbatches: int
    length: int
    unit: float = 0.0
    """In GiB: what one unit of memory is; of the ranks that stream, the memory of each."""
    per_stage: int = 1
    steps: int = 4
    package: str = "bitsandbytes" if importlib.util.find_spec("bitsandbytes") else "torchao"
    """What quantises."""


SIZES = {
    "splits": Size(1536, 9, 8, 2048, unit=0.1, steps=3),
    "stream": Size(4096, 48, 6, 2048, unit=6.0, per_stage=3),
    "qlora": Size(1024, 8, 8, 512),
    "host": Size(4096, 2, 4, 256),
}
TINY = {
    "splits": Size(32, 6, 4, 8, unit=2e-5),
    "stream": Size(32, 8, 4, 8, unit=1.0),
    "qlora": Size(128, 4, 4, 8, steps=2),
    "host": Size(32, 2, 4, 8),
}
LORA = 16


class Linear(nn.Linear):
    """A frozen layer with an adapter, or a trained one."""

    def __init__(self, inside: int, outside: int, *, adapted: bool) -> None:
        super().__init__(inside, outside, bias=False)
        self.requires_grad_(not adapted)
        self.adapter: nn.Module | None = None
        if adapted:
            layers = nn.Linear(inside, LORA, bias=False), nn.Linear(LORA, outside, bias=False)
            self.adapter = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output if self.adapter is None else output + self.adapter(input)


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width: int, *, adapted: bool = False) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        linear = partial(Linear, adapted=adapted)
        self.q, self.k, self.v, self.out = (linear(width, width) for _ in range(4))
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = [
            each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        ]
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(tiny: bool) -> torch.device:
    return torch.device("cpu" if tiny else "cuda:0")


def cap(device: torch.device, gibibytes: float | None) -> None:
    """Let torch's allocator have no more; None: all of the GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 if gibibytes is None else gibibytes * GIB / whole
        torch.cuda.set_per_process_memory_fraction(share, device)
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def timed(
    step: Callable[[], object], count: int, device: torch.device, *, alone: bool = False
) -> tuple[float, float]:
    """The median of the seconds of a step, after a first one; and how far they are apart."""
    meet = (lambda: None) if alone else torch.distributed.barrier
    times: list[float] = []
    for _ in range(count):
        settle(device)
        meet()
        began = time.perf_counter()
        step()
        settle(device)
        meet()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]), (max(times[1:]) - min(times[1:])) / min(times[1:])


def on_all(number: float, device: torch.device) -> list[float]:
    """The numbers of all ranks."""
    mine = torch.tensor([number], dtype=torch.float64, device=device)
    found = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, mine)
    return [each.item() for each in found]


# Three unequal ranks.


def splits(rank: int, ranks: int, size: Size, tiny: bool) -> None:
    device = device_of(tiny)
    units = [16.0, 24.0, 32.0]
    spare = 0.0 if tiny else 0.3  # for what an operation needs for a moment
    limits = [{"memory": (each * size.unit - spare) * GIB} for each in units]
    torch.manual_seed(1)
    x = torch.randn(size.microbatches, size.length, size.width, device=device, dtype=torch.bfloat16)
    names = [str(block) for block in range(size.blocks)]

    def trained(cuts: list[str] | None, *, limited: bool) -> tuple[tl.Pipeline, float, list[float]]:
        """The pipeline, the seconds of a step, and the peaks of all ranks."""
        torch.manual_seed(0)
        with torch.device(device):
            model = nn.Sequential(*(Block(size.width) for _ in names)).to(torch.bfloat16)
        pipe = tl.Pipeline(
            model.cpu(),
            example=(x[:1],),
            microbatches=size.microbatches,
            loss_fn=F.mse_loss,
            device=device,
            cuts=cuts,
            ranks=limits if cuts is None else None,
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            pipe.step(x, target=x)
            optimizer.step()
            optimizer.zero_grad()

        cap(device, units[rank] * size.unit if limited else None)
        seconds, _ = timed(step, size.steps, device)
        return pipe, seconds, on_all(peak(device), device)

    even = [names[size.blocks * at // ranks] for at in range(1, ranks)]
    pipe, chosen, peaks = trained(None, limited=True)
    starts, planned = pipe._built.starts, pipe._built.table.predicted().makespan
    if not rank:
        print("\n".join(str(pipe).splitlines()[-ranks - 1 :]))
        print(
            f"found: {starts}, {chosen:.3f} s, peaks {[f'{p:.2f} GiB' for p in peaks]}", flush=True
        )
    pipe.close()
    others: list[tuple[float, float, list[str]]] = []
    for first in range(1, size.blocks - 1):
        for second in range(first + 1, size.blocks):
            cuts = [names[first], names[second]]
            blocks = first, second - first, size.blocks - second
            if cuts != even and any(
                n > size.blocks * u / 40 for n, u in zip(blocks, units, strict=True)
            ):
                continue  # far beyond what a rank can hold
            pipe, seconds, peaks = trained(cuts, limited=False)
            time_ = pipe._built.table.predicted().makespan
            pipe.close()
            fits = all(p <= u * size.unit for p, u in zip(peaks, units, strict=True))
            if fits:
                others.append((seconds, time_, cuts))
            if not rank:
                print(
                    f"{blocks}: {seconds:.3f} s, {'fits' if fits else 'does not fit'}", flush=True
                )
    if not rank:
        best, quickest = min(others), min(others, key=lambda each: each[1])
        print(
            f"{len(others)} splits fit; the best {best[0]:.3f} s {best[2]}: found / best "
            f"{chosen / best[0]:.3f}; by the plan {planned / quickest[1]:.3f} {quickest[2]}",
            flush=True,
        )


# Weights that stream.


def stream(rank: int, ranks: int, size: Size, tiny: bool) -> None:
    device = device_of(tiny)
    dtype = torch.float32 if tiny else torch.bfloat16
    count = size.blocks // size.per_stage
    shape = size.microbatches, size.length, size.width
    torch.manual_seed(1)
    x = torch.randn(shape, device=device, dtype=dtype)
    losses: list[Tensor] = []
    results: list[tuple[float, float, list[float]]] = []
    for streams in (False, True):
        with torch.device("meta"):
            stages = [
                nn.Sequential(*(Block(size.width, adapted=True) for _ in range(size.per_stage)))
                for _ in range(count)
            ]
        weights = sum(p.numel() for s in stages for p in s.parameters()) * x.itemsize / GIB
        torch.manual_seed(0)
        cap(device, size.unit if streams else None)
        began = time.perf_counter()
        pipe = tl.Pipeline(
            [stage.to(dtype) for stage in stages],
            schedule="looped_bfs",
            microbatches=size.microbatches,
            loss_fn=F.mse_loss,
            device=device,
            checkpoint="blocks",
            stream_weights=streams,
        )
        optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], fused=True)

        def step(pipe: tl.Pipeline = pipe, optimizer: Any = optimizer) -> None:
            losses.append(pipe.step(x, target=x))
            optimizer.step()
            optimizer.zero_grad()

        built = time.perf_counter() - began
        seconds, noise = timed(step, size.steps, device)
        results.append((seconds, noise, on_all(peak(device), device)))
        if not rank:
            kind = "streamed" if streams else "resident"
            limit = f", {size.unit:g} GiB for each rank" if streams else ""
            peaks = ", ".join(f"{each:.2f}" for each in results[-1][2])
            print(
                f"{kind}: {weights:.1f} GiB of weights in {count} stages{limit}: {seconds:.3f} s "
                f"(±{noise:.1%}), peaks {peaks} GiB, built in {built:.0f} s",
                flush=True,
            )
        pipe.close()
        del pipe, optimizer, step, stages
    if not rank:
        same = torch.equal(torch.stack(losses[: size.steps]), torch.stack(losses[size.steps :]))
        print(f"streamed / resident {results[1][0] / results[0][0]:.3f}; equal losses: {same}")


# Adapters on a base in 4 bits.


def quantised(size: Size, device: torch.device) -> Any:
    """A Llama whose blocks are in NF4, on the CPU."""
    import transformers

    torch.manual_seed(0)
    options: dict[str, Any] = {"attn_implementation": "eager"}
    config: Any = transformers.LlamaConfig(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.blocks,
        num_attention_heads=max(2, size.width // 128),
        num_key_value_heads=max(2, size.width // 128),
        vocab_size=4096,
        **options,
    )
    with torch.device(device):
        made: Any = transformers.LlamaForCausalLM(config)
        made.to(torch.bfloat16)
    names = [name for name, each in made.model.named_modules() if isinstance(each, nn.Linear)]
    for name in names:
        made.model.set_submodule(name, in_4_bits(made.model.get_submodule(name), size.package))
    return made.to("cpu")


def in_4_bits(linear: Any, package: str) -> nn.Module:
    """The layer in NF4."""
    if package == "bitsandbytes":
        import bitsandbytes as bnb  # pyright: ignore

        options: Any = {"compute_dtype": torch.bfloat16, "quant_type": "nf4"}
        made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, False, **options)
        made.load_state_dict(linear.state_dict())
        return made.to(linear.weight.device)
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4  # pyright: ignore

    linear.weight = nn.Parameter(to_nf4(linear.weight.detach()), requires_grad=False)
    return linear


def adapted(size: Size, device: torch.device) -> Any:
    import peft

    base = quantised(size, device)
    torch.manual_seed(1)
    lora: Any = peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(base, lora).train()


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


def qlora(rank: int, ranks: int, size: Size, tiny: bool, folder: str) -> None:
    """The first rank also runs the plain loop, whose gradients the others are compared with."""
    warnings.simplefilter("ignore")
    device = device_of(tiny)
    torch.use_deterministic_algorithms(True, warn_only=True)
    rows = torch.arange(size.microbatches)[:, None] * 7 + torch.arange(size.length)
    ids, wanted = rows % 4096, Path(folder, "wanted.pt")
    if not rank and not wanted.exists():
        model = adapted(size, device).to(device)
        cap(device, None)
        parts = ids.to(device).chunk(size.microbatches)

        def plain() -> None:
            for part in parts:
                (model(input_ids=part, labels=part).loss / len(parts)).backward()

        plain()
        torch.save(gradients(model), wanted)
        seconds, noise = timed(plain, size.steps, device, alone=True)
        print(
            f"{size.package}, one process: {seconds:.3f} s (±{noise:.1%}), peak "
            f"{peak(device):.2f} GiB",
            flush=True,
        )
        del model
    model = adapted(size, device)
    cap(device, None)
    torch.distributed.barrier()
    example = {"input_ids": ids[:1], "labels": ids[:1]}
    pipe = tl.Pipeline(model, example=example, microbatches=size.microbatches, device=device)
    pipe.step(input_ids=ids, labels=ids)
    known, mine = torch.load(wanted), gradients(pipe)
    differ = float(sum(not torch.equal(each, known[name]) for name, each in mine.items()))
    differing, compared = sum(on_all(differ, device)), sum(on_all(float(len(mine)), device))
    seconds, noise = timed(lambda: pipe.step(input_ids=ids, labels=ids), size.steps, device)
    peaks = ", ".join(f"{each:.2f}" for each in on_all(peak(device), device))
    pipe.save_pretrained(f"{folder}/{ranks}")
    logits = pipe.eval(input_ids=ids).logits
    if not rank:
        loaded = loaded_by_peft(size, device, f"{folder}/{ranks}")
        with torch.no_grad():
            there = torch.cat([loaded(input_ids=part.to(device)).logits for part in ids.split(1)])
        print(
            f"{size.package}, {ranks} ranks: {seconds:.3f} s (±{noise:.1%}), peaks {peaks} GiB; "
            f"{differing:.0f} of {compared:.0f} gradients differ ({len(known)} in one process); "
            f"loaded by peft, equal logits: {torch.equal(there, logits)}",
            flush=True,
        )
    torch.distributed.barrier()


def loaded_by_peft(size: Size, device: torch.device, folder: str) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(quantised(size, device), folder).to(device).eval()


# AdamW on the host.


def host(rank: int, ranks: int, size: Size, tiny: bool) -> None:
    device, weights = device_of(tiny), list[list[Tensor]]()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(1)
    x = torch.randn(size.microbatches, size.length, size.width, device=device)
    for on_host in (False, True):
        torch.manual_seed(0)
        with torch.device(device):
            blocks = [Block(size.width) for _ in range(size.blocks)]
        cap(device, None)
        options: Any = {"microbatches": size.microbatches, "ranks": 2, "device": device}
        pipe = tl.Pipeline(blocks, loss_fn=F.mse_loss, **options)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4, fused=True)
        if on_host:
            tl.offload_optimizer(optimizer)
        pipe.step(x, target=x)
        seconds, noise = timed(optimizer.step, size.steps, device)
        parameters = [*pipe.parameters()]
        count = sum(each.numel() for each in parameters)
        weights.append([each.detach().cpu() for each in parameters])
        print(
            f"{'host' if on_host else 'device'}: AdamW of {count / 1e6:.0f} million parameters in "
            f"float32: {seconds:.3f} s (±{noise:.1%}), peak {peak(device):.2f} GiB",
            flush=True,
        )
        del pipe, optimizer, parameters, blocks
    pairs = zip(*weights, strict=True)
    print(f"largest difference {max((a - b).abs().max().item() for a, b in pairs):.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--only", choices=SIZES, nargs="*", default=[*SIZES])
    parser.add_argument("--package", choices=("bitsandbytes", "torchao"), help="what quantises")
    options = parser.parse_args()
    backend = "gloo" if options.tiny else "nccl"
    sizes = TINY if options.tiny else SIZES
    parts: dict[str, tuple[Callable[..., None], Sequence[int]]] = {
        "stream": (stream, (2,)),
        "qlora": (qlora, (2, 4)),
        "splits": (splits, (3,)),
        "host": (host, (1,)),
    }
    for name in (name for name in parts if name in options.only):
        print(f"\n{name}", flush=True)
        run, counts = parts[name]
        with tempfile.TemporaryDirectory() as folder:
            more = [folder] * (name == "qlora")
            for ranks in counts:
                size = sizes[name]
                size = replace(size, package=options.package or size.package)
                run_ranks(run, ranks, size, options.tiny, *more, backend=backend)
        if name == "qlora" and importlib.util.find_spec("deepspeed") is None:
            print("DeepSpeed is not installed, so there is nothing to compare with")


if __name__ == "__main__":
    main()
