"""Models built without values: what they get is what a model built as usual has."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from taktline.errors import StateError
from taktline.split import deferred, materialise

_HF = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


class Inits(nn.Module):
    """Every way to make a parameter that draws, or that returns early on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Embedding(5, 4, padding_idx=2)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(4, 5)))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 4)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 4), 0.5))
        self.xavier = nn.Parameter(nn.init.xavier_normal_(torch.empty(6, 4).t()))
        self.drawn = nn.Parameter(torch.bernoulli(torch.rand(5)))
        self.shuffled = nn.Embedding.from_pretrained(torch.randn(4, 3)[torch.randperm(4)])
        self.half = nn.Linear(3, 3).half()
        self.double = nn.Linear(3, 3, dtype=torch.float64)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.square = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
        self.lstm = nn.LSTM(3, 3, 2)
        self.behind = nn.Linear(3, 3)


class Buffers(nn.Module):
    """Buffers that are computed, from constants, numbers, arrays and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        steps = torch.arange(0, 8, 2, dtype=torch.int64).float()
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)).bool())
        self.register_buffer("positions", torch.arange(7)[None].expand(2, -1), persistent=False)
        self.register_buffer("given", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("frequencies", 1.0 / (10000 ** (steps / 8)), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("back", torch.polar(torch.ones(3), torch.arange(3.0)).conj())
        self.register_buffer("below", torch.polar(torch.ones(3), torch.arange(3.0)).conj().imag)
        self.register_buffer("array", torch.from_numpy(np.arange(4.0))[1:])
        changed = torch.zeros(4)
        changed[changed == 0] = 3.0
        changed[1:3] = torch.randn(2)
        self.register_buffer("changed", changed)
        self.register_buffer("found", torch.nonzero(torch.randn(6) > 0))
        self.norms = nn.ModuleList(copy.deepcopy(nn.BatchNorm2d(3)) for _ in range(2))
        self.plain = torch.randn(3)


class Seeds(nn.Module):
    """Generators of its own, and a global one that is seeded and set back."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(7)
        self.first = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.randn(3, generator=own))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.forked = nn.Linear(2, 2)
        self.behind = nn.Linear(2, 2)
        self.again = nn.Parameter(torch.randn(3, generator=own))
        torch.manual_seed(5)
        self.seeded = nn.Linear(2, 2)


class SameSeeds(nn.Module):
    """Several draws that begin in one state, with others between them."""

    def __init__(self) -> None:
        super().__init__()
        first, second = (torch.Generator().manual_seed(7) for _ in range(2))
        self.one = nn.Parameter(torch.randn(3, generator=first))
        self.two = nn.Parameter(torch.randn(5, generator=second))
        self.rest = nn.Parameter(torch.randn(2, generator=first))
        torch.manual_seed(3)
        self.layer = nn.Linear(2, 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.forked = nn.Linear(3, 3)
        self.behind = nn.Linear(2, 2)
        self.counts = nn.Parameter(torch.poisson(torch.full((4,), 9.0), first))
        self.last = nn.Linear(2, 2)


class DryRun(nn.Module):
    """A forward in the constructor, which changes statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(self.features(torch.randn(5, 3)).shape[1], 2)


def small(config: type, model: type, **more: object) -> Callable[[], nn.Module]:
    """A constructor of a small model of transformers."""
    return lambda: model(config(**{**_HF, **more}))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "inits": Inits,
    "buffers": Buffers,
    "seeds": Seeds,
    "same seeds": SameSeeds,
    "dry run": DryRun,
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "gpt2": small(
        transformers.GPT2Config, transformers.GPT2LMHeadModel, bos_token_id=0, eos_token_id=0
    ),
    "llama": small(transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "gemma2": small(transformers.Gemma2Config, transformers.Gemma2ForCausalLM, head_dim=8),
    "bert": small(transformers.BertConfig, transformers.BertForMaskedLM),
}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model, under all of their names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, Tensor)}
        found.update({f"{prefix}.{key}": value for key, value in plain.items()})
    return found


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model as usual and one without values, from the same seed."""
    torch.manual_seed(3)
    usual = make()
    torch.manual_seed(3)
    with deferred():
        model = make()
    return usual, model


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_values_are_those_of_a_model_built_as_usual(make: Callable[[], nn.Module]) -> None:
    usual, model = build(make)
    assert all(tensor.is_meta for tensor in tensors(model).values())
    materialise(model, "cpu")
    expected, values = tensors(usual), tensors(model)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value), name
        assert values[name].stride() == value.stride(), name
        assert values[name].requires_grad == value.requires_grad, name
    assert _ties(values) == _ties(expected)


def _ties(values: dict[str, Tensor]) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, value in values.items():
        names.setdefault(id(value), set()).add(name)
    return {frozenset(group) for group in names.values()}


@pytest.mark.parametrize("part", ["padded", "behind", "lstm", "spectral"])
def test_one_part_alone(part: str) -> None:
    usual, model = build(Inits)
    values = tensors(materialise(model.get_submodule(part), "cpu"))
    expected = tensors(usual.get_submodule(part))
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    assert tensors(model)["orthogonal"].is_meta


def test_the_global_generator() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with deferred():
        model = nn.Linear(3, 3)
    moved = torch.get_rng_state()
    assert not torch.equal(moved, state)
    materialise(model, "cpu")
    assert torch.equal(torch.get_rng_state(), moved)


def test_values_can_be_read_while_building() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
            self.weight = nn.Parameter(torch.randn(4))
            self.lowest = float(self.weight.detach().min()), f"{self.weight.detach().max():.3f}"
            if self.weight.sum() > 0:
                self.weight.data.neg_()
            self.where = (str(self.weight.device), self.weight.is_meta, torch.zeros(1).device.type)

    usual, model = build(Reads)
    assert (model.rates, model.lowest, model.where) == (usual.rates, usual.lowest, usual.where)
    assert torch.equal(tensors(materialise(model, "cpu"))["weight"], tensors(usual)["weight"])


def test_models_of_two_blocks_are_apart() -> None:
    torch.manual_seed(3)
    usual = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.manual_seed(3)
    with deferred():
        both = nn.Linear(2, 2), nn.Linear(2, 2)
    with deferred():
        other = nn.Linear(2, 2)
        with pytest.raises(StateError, match=r"is from outside of this deferred\(\)"), deferred():
            nn.Linear(2, 2)
    for want, got in zip(usual, both, strict=True):
        assert torch.equal(materialise(got, "cpu").weight, want.weight)
    assert not torch.equal(materialise(other, "cpu").weight, usual[0].weight)


def test_a_log_goes_with_its_tensors() -> None:
    with deferred():
        model = nn.Linear(2, 2)
        outside = torch.ones(3)
        model.constant = outside
    log = weakref.ref(vars(model.weight.untyped_storage())["taktline_log"][0])
    del model.weight, outside
    gc.collect()
    assert log() is not None
    del model
    gc.collect()
    assert log() is None


def test_what_comes_from_outside() -> None:
    outside = nn.Linear(2, 2)
    with torch.device("meta"):
        unknown = torch.empty(3)
    with deferred():
        model = nn.Linear(2, 2)
        model.weight.data.copy_(outside.weight * 2)
        assert (outside.bias + 1).device.type == "cpu"
        with pytest.raises(StateError, match="changes a tensor from outside of deferred"):
            nn.init.normal_(outside.weight)
        with pytest.raises(StateError, match=r"shape \[3\] on the meta device is from outside"):
            unknown.add_(1)
    outside.weight.data.zero_()
    assert not torch.equal(materialise(model, "cpu").weight, outside.weight)
    with pytest.raises(RuntimeError, match="item") as caught, deferred():
        torch.tensor([torch.randn(2)[0], 1.0])
    assert "read with item(), or build it outside" in caught.value.__notes__[0]
    with pytest.raises(StateError, match=r"cannot record aten.binomial.default; build"), deferred():
        torch.binomial(torch.ones(3), torch.rand(3))
    with pytest.raises(RuntimeError, match="negative dimension"), deferred():
        nn.Linear(2, -3)


def test_each_use_of_a_tensor_with_data_sees_its_values_then() -> None:
    outside = torch.ones(2)
    model = nn.Module()
    with deferred():
        copied = outside.clone()
        for name in ("before", "after"):
            model.register_buffer(name, torch.zeros(2).add_(copied))
            copied.fill_(5)
    materialise(model, "cpu")
    values = tensors(model)
    assert (values["before"].tolist(), values["after"].tolist()) == ([1, 1], [5, 5])
