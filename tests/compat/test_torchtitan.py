"""The pipeline part of torchtitan, from the package itself, with its debug-sized Llama."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from taktline.compat import install
from tests.workers import Workers

pytest.importorskip("torchtitan")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

BATCH, LENGTH, VOCABULARY = 4, 16, 2048


def _on_cpu() -> None:
    """torchtitan looks for a GPU, and takes none if it is told."""
    import torchtitan.distributed.parallel_dims as dims
    from torchtitan.tools import utils

    utils.device_type = dims.device_type = "cpu"


def make_model() -> tuple[Any, Any]:
    from torchtitan.models.common import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config: Any = llama3_configs["debugmodel"]("flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        return config.build(), config


def fill(module: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    module.to_empty(device="cpu")
    with torch.no_grad():
        module.init_weights()  # pyright: ignore[reportCallIssue]
        for name, parameter in module.named_parameters():
            parameter.copy_(whole[name])


def as_it_is(module: nn.Module, **options: Any) -> nn.Module:
    """What would shard or compile a part."""
    return module


def _train(rank: int, group: dist.ProcessGroup, names: list[str]) -> list[str]:
    install()
    warnings.simplefilter("ignore")
    _on_cpu()
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import pipeline_llm

    model, _ = make_model()
    torch.manual_seed(0)
    whole = {n: 0.1 * torch.randn(p.shape) for n, p in model.named_parameters()}
    tokens, labels = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH))
    reference, config = make_model()
    fill(reference, whole)
    loss_fn = CrossEntropyLoss(CrossEntropyLoss.Config())
    count = torch.tensor(float(BATCH * LENGTH))
    expected, _ = loss_fn(reference(tokens), labels, count)
    expected.backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    kinds = []
    for name in names:
        parallelism = ParallelismConfig(
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule=name,
            pipeline_parallel_microbatch_size=1,
        )
        dims = ParallelDims(1, 1, 1, 1, 2, 1, world_size=2)
        training: Any = type("Training", (), {"local_batch_size": BATCH})
        schedule, parts, first, last = pipeline_llm(
            make_model()[0],
            parallel_dims=dims,
            training=training,
            parallelism=parallelism,
            compile_config=None,  # pyright: ignore[reportArgumentType]
            ac_config=None,  # pyright: ignore[reportArgumentType]
            dump_folder="",
            device=torch.device("cpu"),
            model_config=config,
            parallelize_fn=as_it_is,  # pyright: ignore[reportArgumentType]
            loss_fn=loss_fn,  # pyright: ignore[reportArgumentType]
        )
        for part in parts:
            fill(part, whole)
        losses: list[torch.Tensor] = []
        schedule.step(  # as its trainer does
            arg_mbs=[(row,) for row in tokens.split(1)] if first else None,  # pyright: ignore
            kwarg_mbs=[{} for _ in range(BATCH)],  # pyright: ignore
            target_mbs=list(labels.split(1)) if last else None,  # pyright: ignore
            losses=losses if last else None,
            loss_kwargs={"global_valid_tokens": count},
            return_outputs=False,
        )
        for part in parts:
            for key, parameter in part.named_parameters():
                torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-6)
        if last:
            torch.testing.assert_close(sum(losses), expected)
        kinds.append(f"{type(schedule).__module__.partition('.')[0]}.{type(schedule).__name__}")
    return kinds


def test_training_steps(clients: Workers) -> None:
    # Here, as it imports torch's own package, which workers that load this file must not.
    from tests.compat.peer import SINCE_2_12

    if SINCE_2_12.args[0]:
        pytest.skip(SINCE_2_12.kwargs["reason"])
    first, second = clients.run(_train, ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"], timeout=300)
    assert first == second
    assert first == [
        "taktline.Schedule1F1B",
        "taktline.ScheduleInterleaved1F1B",
        "taktline.ScheduleZBVZeroBubble",
    ]
