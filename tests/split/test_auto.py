"""Models cut by what their layers cost."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from taktline.errors import PartitionError
from taktline.split import Pieces, auto, deferred, materialise
from tests.split.models import ResidualBlock
from tests.split.transformers_models import LANGUAGES

TOKENS = torch.arange(32).reshape(2, 16)


def sizes(pieces: Pieces) -> tuple[int, ...]:
    division: Any = pieces.division
    return division.partition.sizes


def starts(pieces: Pieces) -> tuple[str, ...]:
    division: Any = pieces.division
    return division.starts


class Language(nn.Module):
    """An embedding, blocks with rows of their own, and a large head."""

    def __init__(self, layers: int = 6, vocabulary: int = 60) -> None:
        super().__init__()
        self.head = nn.Linear(16, vocabulary)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(layers)})
        self.embed = nn.Embedding(vocabulary, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum((expert(x) for expert in self.experts), torch.zeros(()))


class Residual(nn.Module):
    """Groups of blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.group1 = nn.Sequential(ResidualBlock(8), ResidualBlock(8))
        self.wider = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.group2 = nn.Sequential(ResidualBlock(16), ResidualBlock(16), ResidualBlock(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group1(self.norm(self.stem(x)))
        return self.head(self.group2(self.wider(x)).mean((2, 3)))


class Skips(nn.Module):
    """What is drawn in one stage is used three layers on, so that no stage can begin there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        start = F.dropout(x, 0.5, self.training)
        for layer in list(self.layers)[1:4]:
            x = layer(x)
        x = x + start
        for layer in list(self.layers)[4:]:
            x = layer(x)
        return x


def test_the_embedding_and_the_head_count() -> None:
    even = auto(Language(vocabulary=60), 3, (TOKENS,))
    assert starts(even) == ("", "layers.2", "layers.4")
    heavy = auto(Language(vocabulary=10_000), 3, (TOKENS,))
    assert starts(heavy) == ("", "layers.3", "head")
    assert sizes(heavy) == (4, 3, 1)


def test_a_sequence_of_different_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    pieces = auto(model, 2, (torch.ones(2, 4),))
    assert starts(pieces) == ("", "2")
    x = torch.randn(3, 4)
    assert torch.equal(pieces(x), model(x))


def test_groups_of_blocks_are_opened() -> None:
    model = Residual().eval()
    x = torch.randn(2, 3, 8, 8)
    pieces = auto(model, 4, (x,))
    assert {"group1.1", "group2.2"} <= set(starts(pieces))
    torch.testing.assert_close(pieces(x), model(x))


def test_stages_begin_where_they_can() -> None:
    model = Skips()
    x = torch.randn(2, 4)
    pieces = auto(model, 3, (x,))
    assert starts(pieces) == ("", "layers.2", "layers.4")
    with pytest.raises(PartitionError, match=r"Skips cannot be cut into 7 stages, but into 6"):
        auto(model, 7, (x,))
    pieces = auto(model.eval(), 3, (x,))
    assert starts(pieces) == ("", "layers.2", "layers.4")
    assert torch.equal(pieces(x), model(x))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "bert"])
def test_a_model_of_transformers_that_has_no_values_yet(kind: str) -> None:
    usual = LANGUAGES[kind].make().eval()
    with deferred():
        model = LANGUAGES[kind].make().eval()
    pieces = auto(model, 3, ((), {"input_ids": TOKENS, "use_cache": False}))
    assert all(parameter.is_meta for parameter in model.parameters())
    for piece in pieces:
        materialise(piece, "cpu", state_dict=usual.state_dict())
    kwargs = {"input_ids": TOKENS, "use_cache": False}
    assert torch.equal(pieces(**kwargs).logits, usual(**kwargs).logits)


def test_limits() -> None:
    model = nn.Sequential(nn.Embedding(1000, 8), *(nn.Linear(8, 8) for _ in range(8)))
    tokens = torch.zeros(4, dtype=torch.int64)
    assert sizes(auto(model, 3, (tokens,))) == (3, 3, 3)
    assert sizes(auto(model, 3, (tokens,), limits=[32_000, 4_000, 4_000])) == (1, 4, 4)
    with pytest.raises(PartitionError, match="stage 0 needs 32,000 and can hold 30,000; raise"):
        auto(model, 3, (tokens,), limits=30_000)


def test_measured() -> None:
    class Slow(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            time.sleep(0.005)
            return super().forward(input)

    model = nn.Sequential(nn.BatchNorm1d(4), *(nn.Linear(4, 4) for _ in range(4)), Slow(4, 4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x, random = torch.randn(3, 4), torch.get_rng_state()
    pieces = auto(model, 2, (x,), measure=True)
    assert starts(pieces) == ("", "5")
    assert "milliseconds" in str(pieces)
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    with deferred():
        empty = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert starts(auto(empty, 2, (torch.ones(2, 4),), measure=True)) == ("", "1")
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_a_model_without_a_row_of_layers() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)

    with pytest.raises(
        PartitionError,
        match=r"One has no list of layers .*by_names, .*taktline.pipeline, .*by hand",
    ):
        auto(One(), 2, (torch.ones(1, 2),))
    with pytest.raises(PartitionError, match="example must be a tuple of arguments"):
        auto(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, None)


def test_submodules_one_after_the_other() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Named()

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    model, x = Outer(), torch.randn(3, 4)
    pieces = auto(model, 3, (x,))
    assert starts(pieces) == ("", "model.rnn", "model.head")
    torch.testing.assert_close(pieces(x), model(x))
    with pytest.raises(PartitionError, match=r"Outer cannot be cut into 4 stages, but into 3 st"):
        auto(model, 4, (x,))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


def test_an_encoder_and_a_decoder_are_both_cut() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in "1234")})
            self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in "1234")

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.encoder["layers"]:  # pyright: ignore
                x = layer(x)
            for layer in self.decoder:
                y = layer(y + x)
            return y

    model, x = Towers(), torch.randn(2, 4)
    pieces = auto(model, 4, (x, x))
    assert starts(pieces) == ("", "encoder.layers.2", "decoder.0", "decoder.2")
    assert torch.equal(pieces(x, -x), model(x, -x))


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TwoTowers(nn.Module):
    """Images and texts, of which a batch may have one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts, self.head = Tower(64), Tower(4), nn.Linear(4, 2)

    def forward(self, texts: Tensor, images: Tensor | None = None) -> Tensor:
        texts = self.texts(texts)
        return self.head(texts if images is None else texts + self.images(images).mean())


def test_a_row_of_layers_that_is_not_called() -> None:
    x, images = torch.ones(2, 4), torch.ones(2, 64)
    cuts = ("", "texts.layers.1", "texts.layers.3", "texts.layers.5")
    assert starts(auto(TwoTowers(), 4, (x,))) == cuts
    assert "images.layers.2" in starts(auto(TwoTowers(), 4, (x, images)))
