"""Forwards that register hooks in their first call, such as those that collect hidden states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import taktline as tl

WIDTH, WORDS, IMAGE = 16, 40, 39


def llava() -> nn.Module:
    """A model whose vision tower collects hidden states; those of the last layer but one count."""
    common: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**common, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**common, vocab_size=WORDS, num_key_value_heads=2),
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def words_and_image(rows: int) -> tuple[tuple[()], dict[str, Any]]:
    words = torch.randint(2, IMAGE, (rows, 8))
    words[:, 1:5] = IMAGE
    return (), {"input_ids": words, "pixel_values": torch.randn(rows, 3, 8, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.matrix), 4])
def test_hidden_states_of_a_vision_tower(ranks: int) -> None:
    torch.manual_seed(0)
    model = llava()
    plain = copy.deepcopy(model)
    _, batch = words_and_image(4)
    target = torch.zeros(4)

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return (output.logits - target[:, None, None]).square().mean()

    pipe = tl.Pipeline(
        model, example=words_and_image(2), microbatches=2, loss_fn=loss_fn, ranks=ranks
    )
    expected = loss_fn(plain(**batch), target)
    torch.testing.assert_close(pipe.step(**batch, target=target), expected)
    # The model itself has the hooks once, too.
    torch.testing.assert_close(loss_fn(model(**batch), target), expected)


class Hooking(nn.Module):
    """Adds up what is inside of it, with hooks that its first call registers."""

    hooked = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.found: list[Tensor] = []

    def note(self, layer: nn.Module, args: object, output: Tensor) -> None:
        self.found.append(output)

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            for layer in self.layers:
                layer.register_forward_hook(self.note)
        for layer in self.layers:
            x = layer(x)
        found, self.found = self.found, []
        return x + sum(found)


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hooking() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_run_without_data_leaves_no_hooks() -> None:
    torch.manual_seed(0)
    model, x = Row(), torch.randn(4, WIDTH)
    plain = copy.deepcopy(model)
    pipe = tl.Pipeline(
        model, example=(x[:2],), microbatches=2, loss_fn=nn.functional.mse_loss, ranks=2
    )
    expected = nn.functional.mse_loss(plain(x), x)
    torch.testing.assert_close(pipe.step(x, target=x), expected)
