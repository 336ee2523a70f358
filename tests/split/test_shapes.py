"""The arguments of a traced model, and batches of other sizes than the example's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError
from tests.split.models import BEGINNING, CASES, Options, Three, make
from tests.split.test_deferred import MODELS

CPU = torch.device("cpu")


def test_keywords_defaults_and_containers() -> None:
    model = Options()
    pair, y = {"x": torch.randn(2, 4), "z": torch.randn(2)}, torch.randn(2, 4)
    calls: list[dict[str, Any]] = [{}, {"y": y}, {"scale": 3.0, "y": y}]
    for kwargs in calls:
        pipe = tl.pipeline(model, (pair,), kwargs)
        found, expected = pipe(pair, **kwargs), model(pair, **kwargs)
        assert found.keys() == expected.keys()
        assert torch.equal(found["x"][0], expected["x"][0])
        assert torch.equal(found["x"][1], pair["z"])
        assert found["scale"] == expected["scale"]


def test_another_constant_than_that_of_the_trace() -> None:
    pair = {"x": torch.randn(2, 4), "z": torch.randn(2)}
    pipe = tl.pipeline(Options(), (pair,), {"scale": 3.0})
    with pytest.raises(
        PartitionError, match=r"scale is 4.0, but .* traced with 3.0, .* pipeline\("
    ):
        pipe(pair, scale=4.0)


def test_another_shape_than_that_of_the_trace() -> None:
    pipe = tl.pipeline(Three(), (torch.ones(2, 4),), split_spec={"b": BEGINNING})
    with pytest.raises(
        PartitionError, match=r"x has the shape \[2, 5\], but .* for \[2 or more, 4\], and sizes"
    ):
        pipe(torch.ones(2, 5))
    with pytest.raises(PartitionError, match=r"x has the shape \[1, 4\], but"):
        pipe(torch.ones(1, 4))


def test_none_where_a_tensor_comes_later() -> None:
    pair = {"x": torch.randn(2, 4), "z": torch.randn(2)}
    pipe = tl.pipeline(Options(), (pair, None))
    pipe(pair, None)
    with pytest.raises(
        PartitionError, match="y is a tensor, but the pipeline was traced with None"
    ):
        pipe(pair, torch.ones(2, 4))


def test_keywords_on_a_rank_with_several_stages() -> None:
    """They go to all stages of a rank, and only the first one takes them."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            x = self.a(x)
            tl.pipe_split()
            x = self.b(x) + shift
            tl.pipe_split()
            x = self.c(x)
            tl.pipe_split()
            return x * shift

    model, x, shift = Shifted(), torch.randn(4, 4), torch.randn(4, 4)
    pipe = copy.deepcopy(tl.pipeline(model, (x[:2],), {"shift": shift[:2]}))

    def main(rank: int) -> Any:
        stages = [pipe.build_stage(stage, CPU) for stage in (rank, 3 - rank)]
        schedule = tl.ScheduleZBVZeroBubble(stages, 2, nn.functional.mse_loss)
        kwargs: dict[str, Any] = {"shift": shift} if rank == 0 else {}
        return schedule.step(*((x,) if rank == 0 else ()), target=x, **kwargs)

    torch.testing.assert_close(tl.local.run(main, 2)[0], model(x, shift=shift))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        pipe.get_stage_module(1)(x[:2], shift[:2], nonsense=x)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_any_batch(name: str) -> None:
    case, model = CASES[name], make(name).eval()
    pipe = tl.pipeline(model, (case.batch(4)[0],), split_spec=case.cuts[2])
    for size in (2, 5, 4):
        x, _ = case.batch(size)
        torch.testing.assert_close(pipe(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_any_batch_of_a_model_of_transformers_with_a_mask(kind: str) -> None:
    model = MODELS[kind]().eval()
    cut = {"gpt2": "transformer.h.1", "llama": "model.layers.1"}[kind]
    tokens, mask = torch.arange(24).reshape(4, 6), torch.ones(4, 6, dtype=torch.int64)
    kwargs = {"attention_mask": mask, "use_cache": False}
    pipe = tl.pipeline(model, (tokens,), kwargs, split_spec={cut: BEGINNING})
    mask[1, :3] = 0
    kwargs["attention_mask"] = mask[:3]
    found = pipe(tokens[:3], **kwargs).logits
    torch.testing.assert_close(found, model(tokens[:3], **kwargs).logits)
    with pytest.raises(PartitionError, match=r"input_ids has 4 along dim.* attention_mask 3; they"):
        pipe(tokens, **kwargs)


class Mean(Three):
    """Computes with the size of the batch, in a later stage than the one that knows the input."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0]
        x = self.b(self.a(x))
        return self.c(x.sum(0) / size).expand(size * 2, 4).reshape(size, 2, 4)


def test_stages_read_the_size_off_what_they_take() -> None:
    model = Mean()
    pipe = tl.pipeline(model, (torch.ones(4, 4),), split_spec={"b": BEGINNING, "c": BEGINNING})
    x = torch.randn(3, 4)
    assert torch.equal(pipe(x), model(x))
    arguments = [
        [node.name for node in stage.graph.nodes if node.op == "placeholder"]
        for stage in map(pipe.get_stage_module, range(3))
        if isinstance(stage, torch.fx.GraphModule)
    ]
    # The third one gets a sum, off which it cannot read the size: it is handed on.
    assert list(map(len, arguments)) == [1, 2, 2]
    pipe = tl.pipeline(model, (torch.ones(4, 4),), split_spec={"b": BEGINNING})
    assert torch.equal(pipe(x), model(x))
    second = pipe.get_stage_module(1)
    assert isinstance(second, torch.fx.GraphModule)
    assert [node.op for node in second.graph.nodes].count("placeholder") == 1


def test_a_forward_that_depends_on_the_size() -> None:
    """A trace has gone one of its ways, so it holds for the example's size alone."""

    class Branches(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(x) if x.shape[0] > 3 else self.c(x)

    pipe = tl.pipeline(Branches(), (torch.ones(4, 4),), split_spec={"b": BEGINNING})
    pipe(torch.ones(4, 4))
    with pytest.raises(PartitionError, match=r"x has the shape \[5, 4\], but .* for \[4, 4\]"):
        pipe(torch.ones(5, 4))


def test_an_uneven_batch_and_evaluation_with_another() -> None:
    model, x = Three(), torch.randn(7, 4)
    pipe = tl.pipeline(model, (x[:2],), split_spec={"b": BEGINNING})

    def main(rank: int) -> Any:
        stage = pipe.build_stage(rank, CPU)
        loss_fn = nn.MSELoss(reduction="sum")
        schedule = tl.ScheduleGPipe(stage, 3, loss_fn, scale_grads=False)
        args = (x,) if rank == 0 else ()
        schedule.step(*args, target=x)
        return schedule.eval(*((x.repeat(2, 1),) if rank == 0 else ()))

    output = tl.local.run(main, 2)[1]
    torch.testing.assert_close(output, model(x.repeat(2, 1)))
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    nn.functional.mse_loss(model(x), x, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
