"""The pipeline trains the user's own model, and changes nothing else of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import taktline as tl
from tests.train.models import LM, TARGET, TOKENS, batches, loss_fn, pipeline, plain

WAYS: dict[str, Any] = {
    "by name": {},
    "by cost": {"cuts": None, "schedule": "zbv"},
    "in one stage": {"cuts": None, "ranks": 1, "schedule": "gpipe"},
}


def _structure(model: nn.Module) -> list[Any]:
    """Each submodule with its class, flags, hooks and tensors, as objects."""
    return [
        (
            name,
            type(module),
            id(module),
            module.training,
            sorted(vars(module)),
            [list(map(id, module._forward_hooks.values())), len(module._forward_pre_hooks)],
            {key: id(value) for key, value in module._parameters.items()},
            {key: id(value) for key, value in module._buffers.items()},
            {key: id(value) for key, value in module._modules.items()},
        )
        for name, module in model.named_modules(remove_duplicate=False)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_trained_in_place_and_otherwise_as_it_was(way: str) -> None:
    model = LM()
    expected = plain(model)
    model.blocks[1].eval()
    seen: list[int] = []
    model.blocks[2].register_forward_hook(lambda *_: seen.append(1))
    before = _structure(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # made before the pipeline
    pipe = pipeline(model, **WAYS[way])
    for tokens, target in batches():
        pipe.step(tokens, target=target)
        pipe.eval(tokens)
        assert pipe.clip_grad_norm_(0.5) > 0
        optimizer.step()
        optimizer.zero_grad()
    assert _structure(model) == before
    assert seen
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(dict(model.state_dict()), expected.state)
    torch.testing.assert_close(dict(pipe.state_dict()), expected.state)
    torch.testing.assert_close(pipe.eval(TOKENS), copy.deepcopy(model).eval()(TOKENS))


def test_a_model_in_a_pipeline_can_be_copied_and_pickled() -> None:
    model = LM()
    pipe = pipeline(model)
    pipe.step(TOKENS, target=TARGET)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.head.weight is other.embed.weight
        assert other.embed.weight is not model.embed.weight
        torch.testing.assert_close(other(TOKENS), model(TOKENS))


def test_stages_in_a_list_stay_tied() -> None:
    embed, head = nn.Embedding(13, 8), nn.Linear(8, 13, bias=False)
    head.weight = embed.weight
    plain_model = copy.deepcopy(nn.Sequential(embed, nn.Tanh(), head))
    pipe = pipeline([embed, nn.Sequential(nn.Tanh(), head)])
    pipe.step(TOKENS, target=TARGET)
    loss_fn(plain_model(TOKENS), TARGET).backward()
    assert head.weight is embed.weight
    assert [parameter is embed.weight for parameter in pipe.parameters()] == [True]
    gradient = plain_model.get_parameter("0.weight").grad
    assert gradient is not None
    torch.testing.assert_close(embed.weight.grad, gradient)
    torch.testing.assert_close(pipe.grad_norm(), gradient.norm())


def test_a_model_without_values_gets_them_as_a_whole() -> None:
    with tl.split.deferred():
        model = LM()
    pipe = pipeline(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(pipe.eval(TOKENS), model(TOKENS))


def test_a_second_pipeline_goes_on_with_the_same_model() -> None:
    model = LM()
    expected, optimizer = plain(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for (tokens, target), way in zip(batches(), WAYS.values(), strict=True):
        pipe = pipeline(model, **way)
        pipe.step(tokens, target=target)
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), expected.state)
