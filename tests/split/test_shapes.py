"""The arguments of a model that pipeline() has cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
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


def test_another_call_than_the_example() -> None:
    model, pair, y = Options(), {"x": torch.randn(2, 4), "z": torch.randn(2)}, torch.randn(2, 4)
    pipe = tl.pipeline(model, (pair, None), {"scale": 3.0})
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((pair,), {"scale": 4.0}),
        ((pair, y), {}),
        ((), {"scale": 3.0, "y": y, "pair": pair}),
        (({"x": torch.randn(5, 4), "z": torch.randn(3)}, None), {}),
    ]
    for args, kwargs in calls:
        found, expected = pipe(*args, **kwargs), model(*args, **kwargs)
        assert torch.equal(found["x"][0], expected["x"][0])
        assert found["scale"] == expected["scale"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        pipe(pair, nonsense=1)


def test_sizes_are_those_of_each_call() -> None:
    class Sizes(Three):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)) / len(x) + x.sum(0) / x.shape[0])

    model = Sizes()
    pipe = tl.pipeline(model, (torch.ones(2, 4),), split_spec={"b": BEGINNING})
    for rows in (2, 3, 5, 2):
        x = torch.randn(rows, 4)
        assert torch.equal(pipe(x), model(x))
    pipe.double()
    assert torch.equal(pipe(x.double()), model(x.double()))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x5 and 4x4\)"):
        pipe(torch.ones(2, 5).double())


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
