"""Models cut by tracing, under torch's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from taktline.compat.torch_pipelining import (
    _IR,
    Pipe,
    PipelineStage,
    SplitPoint,
    pipe_split,
    pipeline,
)
from taktline.compat.torch_pipelining._unflatten import _outline_submodules
from taktline.compat.torch_pipelining.stage import _PipelineStageBase

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
    names = [name for stage in range(4) for name in pipe.get_stage_module(stage).state_dict()]
    assert sorted(names) == sorted(model.state_dict())


def test_where_a_model_is_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert pipeline(model, (_X,)).num_stages == 1
    assert pipeline(model, (_X,), split_spec={"1": SplitPoint.END}).num_stages == 2

    def policy(traced: fx.GraphModule) -> fx.GraphModule:
        for node in traced.graph.nodes:
            if node.op == "call_function" and "relu" in node.name:
                with traced.graph.inserting_after(node):
                    traced.graph.call_function(_IR.aten_pipe_split_alias, (), {})
        traced.recompile()
        return traced

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
    with pytest.raises(ValueError, match="there is no stage 2"):
        pipe.get_stage_module(2)
    assert issubclass(PipelineStage, _PipelineStageBase)
    assert "submod_pp_0" in repr(pipe)
    assert str(pipe) == str(pipe.split_gm)


def test_wrappers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    cut = _IR.PipeSequential.from_sequential(model)
    torch.testing.assert_close(cut(_X), model(_X))
    assert pipeline(cut, (_X,)).num_stages == 3
    loss = _IR.TrivialLossWrapper(model, nn.MSELoss())
    assert loss(_X, model(_X)) == 0
    assert _IR.TrivialLossWrapper.loss_spec
    with pytest.raises(NotImplementedError, match="LossWrapper needs a forward"):
        _IR.LossWrapper(model, nn.MSELoss())(_X)
    assert [config.name for config in _IR.MultiUseParameterConfig] == ["TRANSMIT", "REPLICATE"]


def test_a_graph_as_a_module() -> None:
    model = _Block()
    traced = torch.export.export(model, (_X,)).module(check_guards=False)
    again = _outline_submodules(traced.graph)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(again(_X), model(_X))
    assert sorted(again.state_dict()) == sorted(model.state_dict())
