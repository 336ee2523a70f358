"""Models of transformers, cut by names: the gradients are those of the model."""

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

SIZE, COUNT = 3, 2  # of a micro-batch, and how many of them
CPU = torch.device("cpu")
ATTENTION = {"gemma2": "eager"}
"""As transformers has no sdpa for it; all others have that."""


def cut(name: str, stages: int) -> tl.split.Pieces:
    language = LANGUAGES[name]
    return tl.split.by_names(language.make(ATTENTION.get(name, "sdpa")), language.cuts(stages))


def train(rank: int, group: dist.ProcessGroup | None, pieces: tl.split.Pieces) -> dict[str, Tensor]:
    """A step as one of two ranks; returns its gradients."""
    several = pieces.num_stages // 2
    schedule = "1f1b" if several == 1 else "interleaved_1f1b"
    plan = tl.build(schedule, ranks=2, microbatches=COUNT, stages_per_rank=several)
    mine = [pieces.build_stage(stage, CPU, group) for stage in plan.placement.stages_of(rank)]
    schedule = tl.ScheduleFromPlan(mine, plan, loss)
    words, mask, target = texts(SIZE * COUNT)
    output = None
    for _ in range(2):  # the second time with all shapes known
        for stage in mine:
            stage.submod.zero_grad()
        output = schedule.step(words, attention_mask=mask, target=target)
    assert (output is not None) == (pieces.num_stages - 1 in plan.placement.stages_of(rank))
    return gradients(*(stage.submod for stage in mine))


def plain(name: str) -> dict[str, Tensor]:
    """The same without stages."""
    model = LANGUAGES[name].make(ATTENTION.get(name, "sdpa"))
    words, mask, target = (part.chunk(COUNT) for part in texts(SIZE * COUNT))
    for part in range(COUNT):
        output = model(words[part], attention_mask=mask[part])
        (loss(output, target[part]) / COUNT).backward()
    return gradients(model)


def check(name: str, ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    found = {n: gradient for rank in ranks for n, gradient in rank.items()}
    tied = LANGUAGES[name].tied or ()
    for key, gradient in expected.items():
        if key not in found:  # another name of one that is there
            assert any(gradient is expected[other] for other in found), key
        elif key in tied:  # added up in another order
            torch.testing.assert_close(found[key], gradient)
        else:
            assert torch.equal(found[key], gradient), key


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LANGUAGES)
def test_four_stages(name: str) -> None:
    pieces = [cut(name, 4) for _ in range(2)]
    ranks = tl.local.run(lambda rank: train(rank, None, pieces[rank]), 2)
    check(name, ranks, plain(name))


def train_own(rank: int, group: dist.ProcessGroup, name: str, stages: int) -> dict[str, Tensor]:
    return train(rank, group, cut(name, stages))


def reference(rank: int, group: dist.ProcessGroup, name: str) -> dict[str, Tensor]:
    return plain(name)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_over_gloo(workers: Workers, name: str) -> None:
    # The reference there, too: a process with another number of threads adds up otherwise.
    (expected,) = workers.run(reference, name, ranks=1)
    for stages in (2, 4):
        check(name, workers.run(train_own, name, stages, ranks=2), expected)


# What else they can do


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
