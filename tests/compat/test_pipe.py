"""Models cut at split points, under torch's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from taktline.compat.torch_pipelining import (
    _IR,
    Pipe,
    ScheduleGPipe,
    SplitPoint,
    pipe_split,
    pipeline,
)
from taktline.compat.torch_pipelining._utils import PipeliningShapeError
from taktline.errors import SignatureError
from tests.compat.peer import module

_X = torch.randn(2, 4)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor, constant: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        pipe_split()
        if constant is not None:
            x = x + constant
        return self.second(x) + self.shift


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block0, self.block1 = _Block(), _Block()

    def forward(self, x: torch.Tensor, constant: torch.Tensor | None = None) -> torch.Tensor:
        x = self.block0(x, constant=constant)
        pipe_split()
        return self.block1(x, constant=constant)


def test_a_pipe_gives_a_tuple_and_keeps_the_names() -> None:
    model, constant = _Model(), torch.ones(2, 4)
    pipe = pipeline(model, (_X,), {"constant": constant})
    assert pipe.num_stages == 4
    (out,) = pipe(_X, constant=constant)
    torch.testing.assert_close(out, model(_X, constant))
    (out,) = pipe(_X, constant)
    torch.testing.assert_close(out, model(_X, constant))
    stages = [pipe.get_stage_module(stage) for stage in range(4)]
    assert {name for stage in stages for name in stage.state_dict()} == {*model.state_dict()}
    parameters = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(parameters) == sorted(name for name, _ in model.named_parameters())
    value: Any = (_X, constant)
    for stage in stages:  # they give each other plain tensors
        value = stage(*value)
    assert torch.equal(value, model(_X, constant))


def test_where_a_model_is_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert pipeline(model, (_X,)).num_stages == 1
    assert pipeline(model, (_X,), split_spec={"1": SplitPoint.END}).num_stages == 2

    def policy(recorded: fx.GraphModule) -> fx.GraphModule:
        for node in recorded.graph.nodes:
            if node.op == "call_function" and "relu" in node.name:
                with recorded.graph.inserting_after(node):
                    recorded.graph.call_function(_IR.aten_pipe_split_alias, (), {})
        recorded.recompile()
        return recorded

    pipe = Pipe.from_tracing(model, (_X,), split_policy=policy)
    assert (pipe.num_stages, Pipe._number_and_count_forward_stages(pipe.split_gm)) == (2, 2)
    _IR.annotate_split_points(model, {"0": SplitPoint.END, "2": SplitPoint.BEGINNING})
    pipe = Pipe.from_tracing(model, (_X,))
    assert (pipe.num_stages, pipe.info().num_stages) == (3, 3)
    assert _IR.get_submod_name(1) in dict(pipe.split_gm.named_children())
    torch.testing.assert_close(pipe(_X)[0], model(_X))


@pytest.mark.parametrize(
    ("kind", "spec"), [(AttributeError, {"zz": SplitPoint.END}), (ValueError, {"0": 3})]
)
def test_points_that_there_are_not(kind: type[Exception], spec: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(kind):
        pipeline(model, (_X,), split_spec=spec)
    with pytest.raises(kind):
        _IR.annotate_split_points(model, spec)
    example: Any = _X
    with pytest.raises(RuntimeError, match="mb_args must be a tuple of arguments, not"):
        pipeline(model, example)


class Fussy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x if x.sum() > 0 else -x


def test_a_model_that_cannot_be_cut_is_a_runtime_error() -> None:
    for package in module("._IR"):
        with pytest.raises(RuntimeError):
            package.pipeline(Fussy(), (_X,))


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        pipe_split()
        return y if x.sum() > 0 else -y


def test_another_way_than_that_of_the_example_is_refused() -> None:
    """Only tensors go from stage to stage, which may be others on another way."""
    pipe = pipeline(Reads(), (torch.ones(2, 4),))
    torch.testing.assert_close(pipe(torch.ones(2, 4))[0], torch.full((2, 4), 2.0))
    with pytest.raises(SignatureError, match=r"reads other numbers from its arguments .* example"):
        pipe(-torch.ones(2, 4))


def test_another_batch_size_than_that_of_the_example() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"2": SplitPoint.BEGINNING})
    for rows in (5, 2, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(pipe(x)[0], model(x), rtol=0, atol=0)
    with pytest.raises(SignatureError, match=r"float32\[3, 5\], not float32\[3, 4\]"):
        pipe(torch.ones(3, 5))


def test_any_output_becomes_a_tuple_of_its_tensors() -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = x + 1
            pipe_split()
            return {"a": y * 2, "b": [y, x]}

    found = pipeline(Nested(), (_X,))(_X)
    for one, other in zip(found, ((_X + 1) * 2, _X + 1, _X), strict=True):
        torch.testing.assert_close(one, other)


def test_a_stage_of_a_pipe() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    pipe = pipeline(model, (_X,), split_spec={"1": SplitPoint.BEGINNING})
    assert "submod_pp_0" in repr(pipe)
    assert str(pipe) == str(pipe.split_gm)


@pytest.mark.usefixtures("fake_group")
def test_another_shape_than_that_of_the_example_is_torchs_error() -> None:
    pipe = pipeline(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (_X,))
    for batch, kind in ((torch.ones(6, 4), "shape"), (_X.double().repeat(2, 1), "dtype")):
        stage = pipe.build_stage(0, torch.device("cpu"))
        with pytest.raises(
            PipeliningShapeError, match=rf"input 0 is .*, not .* \({kind} mismatch\)"
        ):
            ScheduleGPipe(stage, 2).step(batch)


def test_an_executor_that_begins_anew_at_each_stage() -> None:
    model = _Model()
    pipe = pipeline(model, (_X,))
    found = []
    for index in range(pipe.num_stages):
        stage = pipe.get_stage_module(index)
        stage.register_forward_hook(lambda stage, args, output: found.append((args[0], output)))
    output = _IR.DetachExecutor(pipe.split_gm).run(_X)
    torch.testing.assert_close(output, model(_X))
    assert all(args.is_leaf for args, _ in found)
    assert [args.requires_grad for args, _ in found] == [False, True, True, True]
