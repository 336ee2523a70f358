"""The arguments of a traced model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import SignatureError
from tests.split.models import BEGINNING, Options, Three

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
    with pytest.raises(SignatureError, match=r"scale is 4.0, but .* traced with 3.0, .*by_names"):
        pipe(pair, scale=4.0)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (torch.ones(2, 5), r"torch.float32 and shape \[2, 5\]"),
        (torch.ones(3, 4), r"torch.float32 and shape \[3, 4\]"),
        (torch.ones(2, 4).double(), r"torch.float64 and shape \[2, 4\]"),
    ],
)
def test_another_tensor_than_that_of_the_trace(other: Tensor, kind: str) -> None:
    """Sizes and types are constants of a trace: `x.sum(0) / len(x)` would be wrong silently."""
    pipe = tl.pipeline(Three(), (torch.ones(2, 4),), split_spec={"b": BEGINNING})
    text = rf"x is a tensor of {kind}, but .* traced with a tensor of .*shape \[2, 4\]"
    with pytest.raises(SignatureError, match=text):
        pipe(other)


def test_other_arguments_than_those_of_the_trace() -> None:
    pair = {"x": torch.randn(2, 4), "z": torch.randn(2)}
    pipe = tl.pipeline(Options(), (pair,))
    with pytest.raises(SignatureError, match="traced with the arguments pair_x, pair_z; pass just"):
        pipe(pair, scale=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        pipe(pair, nonsense=1)
    pipe = tl.pipeline(Options(), (pair,), {"y": pair["x"], "scale": 3.0})
    for args, kwargs in (
        ((pair, pair["x"]), {"scale": 3.0}),
        ((pair,), {"scale": 3.0, "y": pair["x"]}),
        ((), {"scale": 3.0, "y": pair["x"], "pair": pair}),
    ):
        assert pipe(*args, **kwargs)["scale"] == 3.0


def test_none_where_a_tensor_comes_later() -> None:
    pair = {"x": torch.randn(2, 4), "z": torch.randn(2)}
    pipe = tl.pipeline(Options(), (pair, None))
    pipe(pair, None)
    with pytest.raises(
        SignatureError, match=r"y is a tensor of .*, but the pipeline was traced with None"
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
