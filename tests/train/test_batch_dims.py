"""Arguments without a batch in front are cut by comparing a batch with the example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import taktline as tl
from tests.split.transformers_models import LANGUAGES, texts
from tests.workers import Workers

ROWS, PARTS, LENGTH, WIDTH = 8, 4, 5, 6


class Streams(nn.Module):
    """Rows in front, in the middle, and none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, *, ids: Tensor, scale: Tensor) -> Tensor:
        x = (x + memory.transpose(0, 1)) * torch.cos(ids)[:, None] * scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def call(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(rows))
    ids = torch.arange(LENGTH) / 10
    return (x, x.transpose(0, 1) + 1), {"ids": ids, "scale": torch.full((1, LENGTH, 1), 0.5)}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, None, None]).square().mean()


def pipeline(**options: Any) -> tl.Pipeline:
    usual = {
        "example": call(ROWS // PARTS),
        "cuts": ["layers.2"],
        "microbatches": PARTS,
        "loss_fn": loss_fn,
        "ranks": 2,
    }
    return tl.Pipeline(Streams(), **(usual | options))


@pytest.mark.parametrize("rows", [ROWS, LENGTH])
def test_arguments_without_a_batch_stay_whole(rows: int) -> None:
    args, kwargs = call(rows)
    target = torch.arange(float(rows))
    model, pipe = Streams(), pipeline()
    expected = loss_fn(model(*args, **kwargs), target)
    expected.backward()
    assert pipe.step(*args, target=target, **kwargs).item() == pytest.approx(expected.item())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
    told = "cut along dimension 0, but ids, scale whole for each micro-batch; argument 1 along dim"
    assert told in str(pipe)


def test_what_was_found_holds_for_a_batch_like_the_example() -> None:
    pipe, model = pipeline(), Streams()
    args, kwargs = call(ROWS)
    pipe.eval(*args, **kwargs)
    args, kwargs = call(ROWS // PARTS)
    torch.testing.assert_close(pipe.eval(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.slow
@pytest.mark.parametrize("length", [10, 6], ids=["as long", "shorter"])
def test_positions_of_transformers(length: int) -> None:
    language, (words, mask, _) = LANGUAGES["llama"], texts(ROWS)
    positions = torch.arange(words.shape[1])[None] + 3
    example = (
        (words[:2, :length],),
        {"attention_mask": mask[:2, :length], "position_ids": positions[:, :length]},
    )
    both: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
    pipe = tl.Pipeline(language.make(), example=example, microbatches=PARTS, ranks=2)
    expected = language.make().eval()(words, **both).logits
    torch.testing.assert_close(pipe.eval(words, **both).logits, expected)


UNCLEAR = [
    # A part of the rows; rows along two dimensions; packed texts; time in front; other lengths.
    ({"x": (2, 3), "y": (2, 3)}, {"x": (8, 3), "y": (2, 3)}, "y"),
    ({"x": (2, 3), "y": (2, 2)}, {"x": (8, 3), "y": (8, 8)}, "y"),
    ({"x": (40,), "y": (5,)}, {"x": (160,), "y": (17,)}, "y"),
    ({"x": (10, 2, 3)}, {"x": (10, 8, 3)}, "x"),
    ({"x": (2, 3), "y": (7, 3)}, {"x": (8, 3), "y": (9, 3)}, "y"),
]


class Sum(nn.Module):
    """Takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize(("example", "batch", "unclear"), UNCLEAR)
def test_what_is_unclear_is_refused(example: Any, batch: Any, unclear: str) -> None:
    example = {name: torch.zeros(shape) for name, shape in example.items()}
    batch = {name: torch.zeros(shape) for name, shape in batch.items()}
    options: dict[str, Any] = {"microbatches": PARTS, "ranks": 2}
    pipe = tl.Pipeline([Sum(), nn.Identity()], example=((), example), **options)
    told = rf"unclear how to cut {unclear}, .* in this batch .* kwargs_chunk_spec=\{{'{unclear}'"
    with pytest.raises(tl.TaktlineError, match=told):
        pipe.eval(**batch)
    spec = dict.fromkeys(batch, tl.Replicate())
    tl.Pipeline([Sum(), nn.Identity()], example=((), example), kwargs_chunk_spec=spec, **options)


def over_processes(rank: int, group: Any) -> tuple[float, str]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    pipe = pipeline(mesh=mesh, ranks=None)
    args, kwargs = call(ROWS)
    loss = pipe.step(*args, target=torch.arange(float(ROWS)), **kwargs)
    kwargs["ids"] = torch.zeros(9)
    with pytest.raises(tl.TaktlineError) as refused:
        pipe.step(*args, target=torch.zeros(ROWS), **kwargs)
    return loss.item(), str(refused.value)


@pytest.mark.processes
def test_over_processes(workers: Workers) -> None:
    args, kwargs = call(ROWS)
    expected = loss_fn(Streams()(*args, **kwargs), torch.arange(float(ROWS))).item()
    first, second = workers.run(over_processes)
    assert first == second
    assert first[0] == pytest.approx(expected)
    assert "unclear how to cut ids" in first[1]
