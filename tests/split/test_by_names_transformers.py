"""What else models of transformers that are cut by names can do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import taktline as tl
from tests.runtime.parallel import mesh_of
from tests.split.training import gradients, require_same
from tests.split.transformers_models import LANGUAGES, loss, texts
from tests.workers import Workers

SIZE = 3  # of a micro-batch
CPU = torch.device("cpu")


def test_only_its_own_parameters_stay_with_a_piece() -> None:
    model = LANGUAGES["llama"].make()
    foreign = weakref.ref(model.get_parameter("model.layers.0.mlp.up_proj.weight"))
    own = weakref.ref(model.get_parameter("model.layers.3.mlp.up_proj.weight"))
    piece = tl.split.by_names(model, LANGUAGES["llama"].cuts(2))[1]
    del model
    gc.collect()
    assert foreign() is None
    assert own() is piece.get_parameter("model.layers.3.mlp.up_proj.weight")


def test_checkpoints_of_transformers() -> None:
    language = LANGUAGES["llama"]
    model: Any = language.make()
    later = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
    (later or model.gradient_checkpointing_enable)()
    reference = language.make()
    words, mask, target = texts(SIZE)
    pieces = tl.split.by_names(model, language.cuts(2))
    loss(pieces(words, attention_mask=mask), target).backward()
    loss(reference(words, attention_mask=mask), target).backward()
    require_same(gradients(model), gradients(reference))


def test_labels_reach_the_last_stage() -> None:
    language = LANGUAGES["gemma2"]
    model: Any = language.make()
    words, mask, _ = texts(SIZE)
    pieces = tl.split.by_names(model, language.cuts(4))
    output = pieces(input_ids=words, attention_mask=mask, labels=words)
    assert type(output) is type(model(words))
    assert torch.equal(output.loss, model(words, attention_mask=mask, labels=words).loss)


def train_replicas(
    rank: int, group: dist.ProcessGroup, wrapper: str, words: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """A step on two pipelines of two stages, each with half of the batch; returns the gradients."""
    mesh = mesh_of(group)
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    language = LANGUAGES["llama"]
    piece: Any = tl.split.by_names(language.make(), language.cuts(2))[place]
    module = piece
    if wrapper == "ddp":
        module = DistributedDataParallel(piece, process_group=mesh["dp"].get_group())
    else:
        dtype = torch.bfloat16 if wrapper == "mixed" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for layer in piece.model.layers[2 * place : 2 * place + 2]:
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(piece, mesh=mesh["dp"], mp_policy=policy)
    stage = tl.PipelineStage(module, place, 2, CPU, group=mesh["pp"].get_group())
    schedule = tl.Schedule1F1B(stage, 2, loss)
    half = words.chunk(2)[replica]
    schedule.step(half, target=target.chunk(2)[replica], return_outputs=False)
    whole = {n: p.grad for n, p in piece.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in whole.items()}


@pytest.mark.processes
@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "mixed"])
def test_pieces_in_wrappers(workers: Workers, wrapper: str) -> None:
    words, _, target = texts(8)
    model = LANGUAGES["llama"].make()
    loss(model(words), target).backward()
    ranks = workers.run(train_replicas, wrapper, words, target, ranks=4)
    found = {n: gradient for rank in ranks for n, gradient in rank.items()}
    expected = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if wrapper == "mixed":  # computed with 8 bits of a number
            torch.testing.assert_close(found[name], gradient, rtol=0.1, atol=1e-3)
        else:
            torch.testing.assert_close(found[name], gradient)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu() -> None:
    language, device = LANGUAGES["llama"], torch.device("cuda")
    words, mask, _ = (part.to(device) for part in texts(SIZE))
    pieces = tl.split.by_names(language.make(), language.cuts(4))
    for piece in pieces:
        piece.to(device)
    expected = language.make().to(device)(words, attention_mask=mask).logits
    assert torch.equal(pieces(words, attention_mask=mask).logits, expected)
