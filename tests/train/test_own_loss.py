"""Models that compute their own loss are trained without a loss function."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import taktline as tl
from tests.split.transformers_models import LANGUAGES, texts
from tests.train import models
from tests.train.models import LM, TARGET, TOKENS, loss_fn

Give = Callable[[Tensor, Tensor], Any]


class WithLoss(LM):
    """Returns its loss beside its output, in some way."""

    def __init__(self, give: Give | None = None) -> None:
        super().__init__()
        self.give = give or (lambda output, loss: (output, loss))

    def forward(self, tokens: Tensor, shift: Any = None, labels: Any = None) -> Any:
        output = super().forward(tokens)
        return output if labels is None else self.give(output, loss_fn(output, labels))


def pipeline(model: nn.Module, **options: Any) -> tl.Pipeline:
    """Without a loss function."""
    example = ((TOKENS[:2],), {"labels": TARGET[:2]})
    return models.pipeline(model, **({"loss_fn": None, "example": example} | options))


def expected() -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the plain model."""
    model = LM()
    loss = loss_fn(model(TOKENS), TARGET)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "give",
    [
        lambda output, loss: (output, loss),
        lambda output, loss: {"logits": output, "loss": loss},
        lambda output, loss: SimpleNamespace(logits=output, loss=loss),
        lambda output, loss: loss,
    ],
    ids=["tuple", "dict", "attribute", "number"],
)
def test_its_loss_is_trained(give: Give) -> None:
    pipe = pipeline(WithLoss(give))
    loss, gradients = expected()
    assert pipe.step(TOKENS, labels=TARGET).item() == pytest.approx(loss)
    torch.testing.assert_close({n: p.grad for n, p in pipe.named_parameters()}, gradients)
    assert pipe.eval(TOKENS, labels=TARGET).item() == pytest.approx(loss)
    assert pipe.eval(TOKENS, None, TARGET, return_outputs=False).item() == pytest.approx(loss)
    assert pipe.eval(TOKENS).shape == (*TOKENS.shape, 13)


def test_labels_weigh_the_losses() -> None:
    labels = TARGET.clone()
    labels[:3] = -100
    labels[3, 1:] = -100
    model = LM()
    loss = loss_fn(model(TOKENS), labels)
    pipe = pipeline(WithLoss())
    found = pipe.step(TOKENS, labels=labels, loss_weights=lambda labels: (labels != -100).sum())
    assert found.item() == pytest.approx(loss.item())


def of_transformers(mesh: DeviceMesh | None = None) -> list[float]:
    language = LANGUAGES["gpt2"]
    words, mask, _ = texts(8)
    call: dict[str, Any] = {"input_ids": words, "attention_mask": mask, "labels": words}
    example = ((), {name: value[:2] for name, value in call.items()})
    pipe = tl.Pipeline(
        language.make(), example=example, schedule="zbv", microbatches=4, ranks=2, mesh=mesh
    )
    return [pipe.step(**call).item(), pipe.grad_norm().item(), pipe.eval(**call).item()]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    model, (words, mask, _) = LANGUAGES["gpt2"].make(), texts(8)
    loss = model(words, attention_mask=mask, labels=words).loss
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return [loss.item(), norm.item(), loss.item()]


@pytest.mark.slow
def test_a_model_of_transformers(plain: list[float]) -> None:
    assert of_transformers() == pytest.approx(plain, rel=1e-4)


@pytest.mark.slow
def test_outputs_of_a_model_of_transformers_on_one_rank() -> None:
    model, (words, mask, _) = LANGUAGES["gpt2"].make(), texts(8)
    pipe = tl.Pipeline(model, microbatches=4)  # in one stage, and its config asks for a cache
    output = pipe.eval(words, attention_mask=mask)
    torch.testing.assert_close(output.logits, model.eval()(words, attention_mask=mask).logits)
    _, output = pipe.step(words, attention_mask=mask, labels=words, return_outputs=True)
    assert output.past_key_values is None


def test_what_is_refused() -> None:
    pipe = pipeline(WithLoss())
    with pytest.raises(tl.TaktlineError, match="there is a target, but no loss_fn"):
        pipe.step(TOKENS, target=TARGET)
    with pytest.raises(tl.TaktlineError, match="the model returns no loss in its Tensor"):
        pipe.step(TOKENS)
    with pytest.raises(tl.TaktlineError, match="returns several numbers in its tuple"):
        pipeline(WithLoss(lambda output, loss: (loss, loss))).step(TOKENS, None, TARGET)
