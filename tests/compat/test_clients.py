"""Programs of others, as they are: accelerate, torchtitan, and what torch's documentation shows."""

from __future__ import annotations

import copy
import importlib.util
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from taktline.compat import install
from tests.compat import programs
from tests.workers import Workers

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def _needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


def _traced(rank: int, group: dist.ProcessGroup) -> None:
    """On Taktline's own stages, and call by call, as where somebody wraps a method of a stage."""
    install()
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    model, (x, target) = nn.Sequential(*programs.make_layers(4)), programs.make_batch()
    plain = copy.deepcopy(model)
    programs.loss_fn(plain(x), target).backward()
    pipe = pipeline(model, (x.chunk(4)[0],), split_spec={"2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, programs.CPU, group)
    schedule: Any = ScheduleGPipe(stage, 4, loss_fn=programs.loss_fn)
    for calls in (False, True):
        model.zero_grad()
        if calls:
            programs.wrapped(stage)
        output = schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank else {}))
        assert schedule._on_ours is not calls
        if rank == 1:
            torch.testing.assert_close(output, plain(x))
        for name, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_a_traced_model(clients: Workers) -> None:
    clients.run(_traced)


def make_language_model(name: str) -> tuple[Any, str]:
    """A tiny model, and the layers of which none may be cut."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "use_cache": False}
    if name == "gpt2":
        config = GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=16, **sizes)
        return GPT2LMHeadModel(config).eval(), "GPT2Block"
    sizes |= {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    sizes |= {"num_attention_heads": 2, "num_hidden_layers": 2}
    if name == "bert":
        return BertForMaskedLM(BertConfig(**sizes)).eval(), "BertLayer"
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval(), "LlamaDecoderLayer"


def _inference(rank: int, group: dist.ProcessGroup, names: list[str]) -> list[float]:
    install()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    # What accelerate and transformers themselves warn of is theirs.
    warnings.simplefilter("ignore")
    from accelerate import PartialState
    from accelerate.inference import prepare_pippy

    PartialState(cpu=True)
    differences = []
    for name in names:
        model, block = make_language_model(name)
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = model(ids).logits
            model = prepare_pippy(
                model, example_args=(ids[:1],), no_split_module_classes=[block], num_chunks=2
            )
            output = model(ids)
        assert type(model.pippy_stage).__module__.startswith("taktline.")
        if rank == 1:
            differences.append(float((output.logits - expected).abs().max()))
    return differences


@_needs("accelerate")
def test_prepare_pippy(clients: Workers) -> None:
    _, last = clients.run(_inference, ["gpt2", "bert", "llama"], timeout=300)
    assert len(last) == 3
    assert max(last) < 1e-5


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


@_needs("torchtitan")
def test_torchtitan(clients: Workers) -> None:
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
