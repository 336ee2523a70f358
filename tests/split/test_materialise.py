"""Models built without values, which get them piece by piece."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import taktline as tl
from taktline.errors import ArgumentError, StateError
from taktline.split import by_names, deferred, materialise
from tests.split.transformers_models import LANGUAGES


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


class File(Mapping[str, Tensor]):
    """A safetensors file that is read name by name."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, "pt")
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self._file.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file.keys()  # noqa: SIM118

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


class Peak(TorchDispatchMode):
    """The most bytes that lived on the CPU at one moment, of what operations made."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                memory = tensor.untyped_storage()
                self._alive[StorageWeakRef(memory)] = memory.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.most = max(self.most, sum(self._alive.values()))
        return result


def _deferred() -> tuple[Tied, Tied]:
    with deferred():
        return Tied(), Tied()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, under all of their names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return {**found, **dict(model.named_buffers(remove_duplicate=False))}


class Buffers(nn.Module):
    """Has buffers, plain tensors and numbers, which it computes, and what initialises others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)).bool())
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)).conj())
        self.norm = nn.BatchNorm2d(3)
        self.plain = torch.arange(3.0)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        shared = nn.Parameter(torch.ones(2))
        self.one, self.other = shared, shared
        self.lstm = nn.LSTM(3, 3, 2)
        self.attention = nn.MultiheadAttention(4, 2)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.one)


def test_buffers_have_their_values() -> None:
    usual = Buffers()
    with deferred():
        model = Buffers()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.one is model.other
    materialise(model, "cpu")
    assert model.one is model.other
    assert (model.rates, model.plain.tolist()) == (usual.rates, usual.plain.tolist())
    for name, buffer in usual.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    found, right = tensors(model), tensors(usual)
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert (found[name].shape, found[name].stride()) == (value.shape, value.stride()), name
        assert not found[name].isnan().any(), name
    x = torch.zeros(2, 1, 3)
    assert model.lstm(x)[0].shape == x.shape


def test_values_depend_on_the_seed_and_not_on_the_cut() -> None:
    def made(seed: int, cut: slice) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        with deferred():
            model = Tied()
        pieces = list(by_names(model, ["layers.2"]))
        state = torch.get_rng_state()
        for piece in [model] if cut == slice(2) else pieces[cut]:
            materialise(piece, "cpu")
        assert torch.equal(torch.get_rng_state(), state)
        return {name: value for name, value in tensors(model).items() if not value.is_meta}

    whole, other = made(0, slice(2)), made(1, slice(2))
    for part in (made(0, slice(1)), made(0, slice(1, 2))):
        for name in part.keys() - {"embed.weight", "head.weight"}:
            assert torch.equal(part[name], whole[name]), name
    assert not torch.equal(other["layers.0.weight"], whole["layers.0.weight"])
    assert not torch.equal(whole["layers.0.weight"], whole["layers.1.weight"])
    assert 0.2 < float(whole["layers.0.weight"].detach().abs().max()) < 8**-0.5  # as in nn.Linear


def test_a_model_of_transformers_is_initialised_as_it_says() -> None:
    with deferred():
        model: Any = LANGUAGES["gpt2"].make()
    for piece in by_names(model, LANGUAGES["gpt2"].cuts(2)):
        materialise(piece, "cpu")
    block = model.transformer.h[1]
    assert 0.015 < float(block.mlp.c_fc.weight.detach().std()) < 0.025
    assert float(block.mlp.c_proj.weight.detach().std()) < 0.012, (
        "divided by the square root of the depth"
    )
    assert torch.equal(block.mlp.c_fc.bias, torch.zeros_like(block.mlp.c_fc.bias))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_parameter_that_nothing_initialises() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    with deferred():
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    with pytest.raises(StateError, match=r"nothing initialises 1.scale; .* reset_parameters\(\)"):
        materialise(model, "cpu")


def test_memory_is_that_of_the_piece_and_one_tensor() -> None:
    with deferred():
        model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(20)), nn.BatchNorm1d(100))
    with Peak() as peak:
        piece = materialise(model[14:16], "cpu")
    own = sum(4 * tensor.numel() for tensor in tensors(piece).values())
    assert own <= peak.most <= own + 100 * 100 * 4 + 1000
    assert all(layer.weight.is_meta for layer in (*model[:14], *model[16:]))  # pyright: ignore


def test_only_own_names_are_read_from_a_file(tmp_path: Path) -> None:
    usual, (_, model) = Tied(), _deferred()
    state = dict(usual.state_dict())
    del state["head.weight"], state["norm.running_mean"]
    save_file(state, tmp_path / "model.safetensors")
    file = File(tmp_path / "model.safetensors")
    pipe = tl.pipeline(
        model,
        (torch.zeros(3, dtype=torch.int64, device="meta"),),
        split_spec={"layers.2": tl.SplitPoint.BEGINNING},
    )
    materialise(pipe.get_stage_module(0), "cpu", state_dict=file)
    names = ["embed.weight", "layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight"]
    assert sorted(file.read) == names
    materialise(pipe.get_stage_module(1), "cpu", state_dict=file)
    tokens = torch.tensor([3, 1, 4])
    assert torch.equal(pipe(tokens), usual(tokens))
    assert [tie.uses for tie in pipe.ties] == [((0, "embed.weight"), (1, "head.weight"))]


def test_a_tied_weight_is_found_under_the_name_of_another_stage() -> None:
    usual, (_, model) = Tied(), _deferred()
    state = dict(usual.state_dict())
    del state["head.weight"]
    last = by_names(model, ["layers.2"])[1]
    materialise(last, "cpu", state_dict=state)
    assert model.embed.weight is tensors(last)["head.weight"]
    assert torch.equal(tensors(last)["head.weight"], usual.embed.weight)
    assert model.layers[0].weight.is_meta


def test_names_and_shapes_that_do_not_fit() -> None:
    usual, (_, model) = Tied(), _deferred()
    state = dict(usual.state_dict())
    del state["layers.1.bias"], state["norm.weight"], state["embed.weight"]
    with pytest.raises(
        StateError,
        match=r"the state dict lacks layers.1.bias, norm.weight; .* with all parameters, by the "
        "model's names",
    ):
        materialise(model, "cpu", state_dict=state)
    assert all(parameter.is_meta for parameter in model.parameters())
    state = {**usual.state_dict(), "layers.1.bias": torch.zeros(3)}
    with pytest.raises(StateError, match=r"layers.1.bias has the shape \[3\] .* \[8\] here; build"):
        materialise(model, "cpu", state_dict=state)


def test_buffers_with_unknown_values_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].mask = torch.zeros(3, device="meta")
    with pytest.raises(
        StateError,
        match=r"the values are unknown of 0.mask, 1.running_mean, .*; "
        r"build the model in taktline.split.deferred\(\)",
    ):
        materialise(model, "cpu")
    state = {"0.weight": torch.eye(2), "0.bias": torch.ones(2)}
    state |= {"1.weight": torch.ones(2), "1.bias": torch.ones(2)}
    with pytest.raises(StateError, match=r"the state dict lacks 0.mask, 1.running_m"):
        materialise(model, "cpu", state_dict=state)


def test_a_stage_that_stays_without_values() -> None:
    _, model = _deferred()
    stage = by_names(model, ["layers.2"]).build_stage(1, torch.device("meta"))
    assert all(parameter.is_meta for parameter in stage.submod.parameters())
    with torch.device("meta"):
        unknown = Tied()
    with pytest.raises(StateError, match=r"are unknown of norm.running_mean, .*deferred\(\)"):
        by_names(unknown, ["layers.2"]).build_stage(1, torch.device("cpu"))


def test_what_has_values_keeps_them() -> None:
    with deferred():
        model = nn.Sequential(nn.Linear(2, 2))
    model.append(nn.Linear(2, 2))
    weight = model[1].weight
    assert materialise(model, "cpu")[1].weight is weight
    again = model[0].weight
    assert materialise(model, "cpu")[0].weight is again


def test_an_optimizer_that_was_made_before() -> None:
    with tl.split.deferred():
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
        model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pipe = tl.Pipeline(
        model, cuts=["2"], microbatches=2, loss_fn=nn.functional.cross_entropy, ranks=2
    )
    reference = copy.deepcopy(model)
    other = torch.optim.SGD(reference.parameters(), lr=0.5)
    x = torch.arange(4)
    for _ in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        pipe.step(x, target=x)
        nn.functional.cross_entropy(reference(x), x).backward()
        optimizer.step()
        other.step()
    assert model[2].weight is model[0].weight
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter)


@pytest.mark.parametrize("device", ["xla", "hpu", "mtia:0"])
def test_device_that_is_not_here(device: str) -> None:
    """torch says it by errors of three kinds, some of them pages long."""
    with pytest.raises(ArgumentError, match=f"^device {device} cannot be used here: "):
        materialise(nn.Linear(2, 2, device="meta"), device)
    with pytest.raises(ArgumentError, match=f"^device {device} cannot be used here: "):
        tl.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), device=device, ranks=2)
