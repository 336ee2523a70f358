"""Models as people write them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.architecture import Architecture
from tests.zoo.blocks import DEPTH, Block, features, image, tokens
from tests.zoo.others import (
    Autoencoder,
    Branching,
    Graph,
    Pyramid,
    Recommender,
    Towers,
    UNet,
    WaveNet,
)
from tests.zoo.texts import (
    GPT,
    Experts,
    FunctionalHead,
    Llama,
    LSTMs,
    Seq2Seq,
    StackedLSTM,
    TorchEncoder,
    Universal,
    row,
)


def _own(name: str, build: Any, feed: Any) -> Architecture:
    return Architecture(name, "Written by hand", build, feed)


OWN = [
    _own("Sequential", lambda: row(*(Block(True) for _ in range(DEPTH))), tokens),
    _own(
        "MLP",
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(9))),
        features,
    ),
    _own("GPT with a tied head", GPT, tokens),
    _own("GPT with checkpoint(block, x)", partial(GPT, True), tokens),
    _own("GPT with checkpoint(…, use_reentrant=False)", partial(GPT, False), tokens),
    _own("GPT whose head is F.linear(x, embed.weight)", FunctionalHead, tokens),
    _own("Llama as in torchtitan", Llama, tokens),
    _own(
        "mixture of experts with add_loss", lambda: row(*(Experts() for _ in range(DEPTH))), tokens
    ),
    _own("nn.TransformerEncoder", TorchEncoder, tokens),
    _own("nn.Transformer", Seq2Seq, lambda rows: (*tokens(rows), *tokens(rows))),
    _own("LSTMs in a list", LSTMs, tokens),
    _own("GRUs in a list", partial(LSTMs, nn.GRU), tokens),
    _own("nn.LSTM with 8 layers", StackedLSTM, tokens),
    _own("one layer, used 8 times", Universal, tokens),
    _own("autoencoder", Autoencoder, image),
    _own("U-Net", UNet, image),
    _own("WaveNet", WaveNet, lambda rows: (torch.randn(rows, 1, 32),)),
    _own("graph network", Graph, lambda rows: (torch.randn(rows, 6, 8), torch.rand(rows, 6, 6))),
    _own("DLRM", Recommender, lambda rows: (torch.randn(rows, 8), torch.randint(20, (rows, 3)))),
    _own("two towers", Towers, lambda rows: (*tokens(rows), *features(rows))),
    _own("every block's output used at the end", Pyramid, features),
    _own("branches on data", Branching, features),
]
