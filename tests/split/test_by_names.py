"""Models cut by the names of their submodules."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline import skip
from taktline.stage import ties
from tests.split.models import ResNet
from tests.split.transformers_models import LANGUAGES, loss, texts

SIZE, COUNT = 3, 4  # of a micro-batch, and how many of them
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    """As in timm: tokens and positions are parameters of the model itself."""

    def __init__(self, width: int = 8, depth: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, width))
        self.patch_embed = PatchEmbed(width)
        self.pos_drop = nn.Dropout(0.0)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        return self.norm(self.blocks(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.arange(count) % 5


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        nn.Linear(8, 5),
    )  # fmt: skip


MODELS: dict[str, tuple[Any, dict[int, list[str]]]] = {
    "sequential": (sequential, {2: ["2"], 4: ["2", "3.0", "4"]}),
    "vit": (ViT, {2: ["blocks.2"], 4: ["blocks.0", "blocks.2", "norm"]}),
    "resnet": (ResNet, {2: ["blocks.1"], 4: ["blocks.0", "blocks.2", "head"]}),
}


def make(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name][0]()


def gradients(*modules: nn.Module) -> dict[str, Tensor]:
    named = (pair for module in modules for pair in module.named_parameters())
    return {name: p.grad for name, p in named if p.grad is not None}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shown", [True, False])
def test_a_step_has_the_gradients_of_the_model(name: str, stages: int, shown: bool) -> None:
    x, target = images(SIZE * COUNT)
    example = (x[:1],) if shown else None

    def main(rank: int) -> dict[str, Tensor]:
        pieces = tl.split.by_names(make(name), MODELS[name][1][stages], example=example)
        schedule = tl.Schedule1F1B(pieces.build_stage(rank, CPU), COUNT, F.cross_entropy)
        schedule.step(x, target=target)
        return gradients(pieces[rank])

    model = make(name)
    for part, part_target in zip(x.chunk(COUNT), target.chunk(COUNT), strict=True):
        (F.cross_entropy(model(part), part_target) / COUNT).backward()
    ranks = tl.local.run(main, stages)
    same({n: g for rank in ranks for n, g in rank.items()}, gradients(model))


@pytest.mark.parametrize("name", MODELS)
def test_together_the_pieces_are_the_model(name: str) -> None:
    model = make(name)
    x, _ = images(SIZE)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    pieces = tl.split.by_names(model, MODELS[name][1][4], example=(x,))
    assert {key: model.get_submodule(key) for key in modules} == modules
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for piece in pieces:
        assert isinstance(piece, type(model))
        assert not found.keys() & dict(piece.named_parameters()).keys()
        found.update(piece.named_parameters())
    assert found.keys() == parameters.keys()
    assert all(found[key] is parameters[key] for key in found)
    assert {key for piece in pieces for key in piece.state_dict()} == before.keys()
    for mode in (True, False):
        twin = copy.deepcopy(model).train(mode)
        for piece in pieces:
            piece.train(mode)
        assert torch.equal(pieces(x), twin(x))


def test_images_do_not_travel_to_stages_that_need_none() -> None:
    pieces = tl.split.by_names(ViT(), ["blocks.2"], example=(images(1)[0],))
    values, args, kwargs = pieces[0](images(SIZE)[0])
    assert [value.shape for value in values] == [(SIZE, 5, 8)]
    assert not any(isinstance(arg, Tensor) for arg in args)
    assert kwargs == {}


def test_only_its_own_parameters_stay_with_a_piece() -> None:
    model = LANGUAGES["llama"].make()
    foreign = weakref.ref(model.get_parameter("model.layers.0.mlp.up_proj.weight"))
    own = weakref.ref(model.get_parameter("model.layers.3.mlp.up_proj.weight"))
    piece = tl.split.by_names(model, LANGUAGES["llama"].cuts(2))[1]
    del model
    gc.collect()
    assert foreign() is None
    assert own() is piece.get_parameter("model.layers.3.mlp.up_proj.weight")


def test_what_a_forward_has_made_goes_with_it() -> None:
    pieces = tl.split.by_names(ViT(), ["blocks.2"], example=(images(1)[0],))
    made: list[Any] = []
    hook = lambda module, args, output: made.append(weakref.ref(output))  # noqa: E731
    pieces[0].get_submodule("patch_embed").register_forward_hook(hook)
    with torch.no_grad():
        pieces[0](images(SIZE)[0])
    assert len(made) == 1
    assert made[0]() is None


class Crossing(nn.Module):
    """Every layer takes what an earlier one has made, beside what the last one has."""

    def __init__(self, outside: bool = False) -> None:
        super().__init__()
        self.memory = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(4))
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x)
        for layer in self.layers:
            if self.outside:
                x = checkpoint(layer, x, memory, use_reentrant=False)
            else:
                x = layer(x, memory)
        return x


@pytest.mark.parametrize("outside", [False, True])
def test_a_value_that_every_layer_takes(outside: bool) -> None:
    torch.manual_seed(0)
    model = Crossing(outside)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4)
    pieces = tl.split.by_names(model, ["layers.1", "layers.3"], example=(x,))
    pieces(x).square().sum().backward()
    twin(x).square().sum().backward()
    same(gradients(model), gradients(twin))


class Down(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        skip.put("x", x)
        tl.add_loss(x.square().mean())
        return x


class Up(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + skip.get("x"))


def test_skips_and_losses_belong_to_the_stages_that_have_them() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Down(4, 4), nn.Linear(4, 4), Up(4, 4))

    x, target = torch.randn(4, 4), torch.randn(4, 4)

    def main(rank: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        stage = tl.split.by_names(model(), ["1", "2"], example=(x,)).build_stage(rank, CPU)
        aux: list[Tensor] = []
        tl.Schedule1F1B(stage, 2, F.mse_loss).step(x, target=target, aux_losses=aux)
        return gradients(stage.submod), aux

    plain = model()
    for part, part_target in zip(x.chunk(2), target.chunk(2), strict=True):
        with tl.collect_losses() as added:
            output = plain(part)
        ((F.mse_loss(output, part_target) + sum(added)) / 2).backward()
    ranks = tl.local.run(main, 3)
    assert [len(aux) for _, aux in ranks] == [2, 0, 0]
    for found, _ in ranks:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_a_tied_weight_is_declared() -> None:
    language = LANGUAGES["gpt2"]
    pieces = tl.split.by_names(language.make(), language.cuts(2))
    assert language.tied is not None
    assert ties.declared(pieces[1]) == (ties.Tie(dict(enumerate(language.tied))),)


def test_what_is_never_called_is_part_of_the_state() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "spare": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["b"](self.parts["a"](x))

    pieces = tl.split.by_names(Model(), ["parts.b"], example=(torch.zeros(1, 4),))
    assert "parts.spare.weight" in pieces[0].state_dict()


class Scaled(nn.Module):
    """Uses a parameter of its own in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


def test_a_parameter_of_the_model_itself_that_several_stages_use() -> None:
    torch.manual_seed(0)
    model = Scaled()
    twin, x = copy.deepcopy(model), torch.randn(2, 4)
    pieces = tl.split.by_names(model, ["layers.1", "layers.2"], example=(x,))
    assert pieces.ties == (ties.Tie(dict.fromkeys(range(3), "scale")),)
    pieces(x).sum().backward()
    twin(x).sum().backward()
    same(gradients(model), gradients(twin))


def test_types_change_with_the_pieces() -> None:
    language = LANGUAGES["llama"]
    words, mask, _ = texts(SIZE)
    expected = language.make().to(torch.bfloat16)(words, attention_mask=mask).logits
    pieces = tl.split.by_names(language.make(), language.cuts(4))
    for piece in pieces:
        piece.to(torch.bfloat16)
    assert torch.equal(pieces(words, attention_mask=mask).logits, expected)


def test_under_autocast() -> None:
    language = LANGUAGES["llama"]
    words, mask, _ = texts(SIZE)
    pieces = tl.split.by_names(language.make(), language.cuts(4))
    with torch.autocast("cpu", torch.bfloat16):
        expected = language.make()(words, attention_mask=mask).logits
        assert torch.equal(pieces(words, attention_mask=mask).logits, expected)


def test_a_piece_can_be_copied() -> None:
    model, (x, _) = make("vit"), images(SIZE)
    pieces = tl.split.by_names(model, ["blocks.2"], example=(x,))
    copies = [copy.deepcopy(piece) for piece in pieces]
    assert torch.equal(copies[1](*copies[0](x)), model(x))
    copies[1](*copies[0](x)).sum().backward()
    assert gradients(model) == {}
    assert gradients(*copies).keys() == dict(model.named_parameters()).keys()


def test_shapes_may_change() -> None:
    language = LANGUAGES["gpt2"]
    model = language.make()
    pieces = tl.split.by_names(model, language.cuts(2))
    words, mask, _ = texts(SIZE)
    for length in (10, 7, 10):
        call = {"input_ids": words[:, :length], "attention_mask": mask[:, :length]}
        assert torch.equal(pieces(**call).logits, model(**call).logits)


def test_checkpoints_of_transformers() -> None:
    language = LANGUAGES["llama"]
    model: Any = language.make()
    model.gradient_checkpointing_enable()
    twin = language.make()
    words, mask, target = texts(SIZE)
    pieces = tl.split.by_names(model, language.cuts(2))
    loss(pieces(words, attention_mask=mask), target).backward()
    loss(twin(words, attention_mask=mask), target).backward()
    same(gradients(model), gradients(twin))


def test_labels_reach_the_last_stage() -> None:
    language = LANGUAGES["gemma2"]
    model: Any = language.make()
    words, mask, _ = texts(SIZE)
    pieces = tl.split.by_names(model, language.cuts(4))
    output = pieces(input_ids=words, attention_mask=mask, labels=words)
    assert type(output) is type(model(words))
    assert torch.equal(output.loss, model(words, attention_mask=mask, labels=words).loss)


def test_keywords_on_every_rank() -> None:
    words, mask, target = texts(SIZE * 2)

    def main(rank: int) -> Tensor | None:
        pieces = tl.split.by_names(LANGUAGES["bert"].make(), ["bert.encoder.layer.2"])
        schedule = tl.ScheduleGPipe(pieces.build_stage(rank, CPU), 2, loss)
        output = schedule.step(words, attention_mask=mask, target=target)
        return None if output is None else output.logits

    expected = LANGUAGES["bert"].make()(words, attention_mask=mask).logits
    torch.testing.assert_close(tl.local.run(main, 2)[1], expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_without_data(name: str) -> None:
    language = LANGUAGES[name]
    with torch.device("meta"):
        model = language.make()
    pieces = tl.split.by_names(model, language.cuts(4))
    names = [key for piece in pieces for key, _ in piece.named_parameters()]
    assert set(names) == {key for key, _ in model.named_parameters(remove_duplicate=False)}
    words, mask, _ = texts(SIZE)
    real = language.make()
    for piece in pieces:
        for path, module in piece.named_modules():
            for key in module._parameters:
                full = f"{path}.{key}" if path else key
                if module._parameters[key] is not None:
                    module._parameters[key] = real.get_parameter(full)
            for key in module._buffers:
                full = f"{path}.{key}" if path else key
                module._buffers[key] = real.get_buffer(full)
    expected = real(words, attention_mask=mask).logits
    assert torch.equal(pieces(words, attention_mask=mask).logits, expected)
