"""The pipeline is like the user's model, trains it in place, and changes nothing else of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from taktline.errors import UseError
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


def test_an_optimizer_of_parameters_without_data_trains_them() -> None:
    with torch.device("meta"):
        model = LM()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = LM().state_dict()
    pipe = pipeline(model, state_dict=state)
    pipe.step(TOKENS, target=TARGET)
    optimizer.step()
    assert not any(torch.equal(p, state[name]) for name, p in pipe.named_parameters())


@pytest.mark.parametrize(
    "example", [{"tokens": TOKENS[:2]}, TOKENS[:2], (TOKENS[:2],), ((TOKENS[:2],), {"shift": None})]
)
def test_examples_of_all_kinds(example: Any) -> None:
    pipe = pipeline(example=example, cuts=None)
    assert "predicted bubble" in str(pipe)
    assert torch.equal(pipe.eval(tokens=TOKENS), pipe.eval(TOKENS))


def test_calling_it() -> None:
    model = LM()
    pipe = pipeline(model)
    with pytest.raises(UseError, match=r"call step\(x, target=y\), which runs forward and backw"):
        pipe(TOKENS)
    with torch.no_grad():
        assert torch.equal(pipe(TOKENS), pipe.eval(TOKENS))
    assert pipe.eval() is pipe
    assert not any(module.training for module in pipe.modules())
    torch.testing.assert_close(pipe(TOKENS), model.eval()(TOKENS).detach())
    assert pipe.train() is pipe
    assert all(module.training for module in pipe.modules())


def test_zero_grad() -> None:
    pipe = pipeline()
    pipe.step(TOKENS, target=TARGET)
    assert all(p.grad is not None for p in pipe.parameters())
    pipe.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in pipe.parameters())
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())


def test_modules_have_the_names_of_the_model() -> None:
    model = LM()
    assert set(dict(pipeline(model).named_modules())) == set(dict(model.named_modules()))
    pipe = pipeline([nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))])
    assert [name for name, _ in pipe.named_modules()] == ["0", "0.0", "1", "1.0"]
    assert len(list(pipe.modules())) == 4


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("forward", r"call step\(…\) to train"),
        ("to", r'Pipeline\(…, device="cuda"\)'),
        ("nonsense", "has no 'nonsense'$"),
    ],
)
def test_what_a_pipeline_does_not_have(name: str, advice: str) -> None:
    pipe = pipeline()
    assert not hasattr(pipe, name)
    with pytest.raises(AttributeError, match=advice):
        getattr(pipe, name)
