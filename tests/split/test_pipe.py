"""What a Pipe is made of: names, shared parameters, arguments, modes."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as peer
from torch import Tensor, fx, nn

import taktline as tl
from taktline.errors import PartitionError
from tests.split.models import BEGINNING, CASES, END, Three, make

CPU = torch.device("cpu")


def names(pipe: Any) -> list[list[str]]:
    """The parameters of each stage."""
    pieces = (pipe.get_stage_module(stage) for stage in range(pipe.num_stages))
    return [sorted(name for name, _ in piece.named_parameters()) for piece in pieces]


@pytest.mark.parametrize("name", ["pipeline", "pipe_split", "build_stage", "Pipe"])
def test_signatures_are_those_of_torch(name: str) -> None:
    def signature_of(function: Any) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert signature_of(getattr(tl, name)) == signature_of(getattr(peer, name))
    for method in ("forward", "get_stage_module", "info", "build_stage", "print_readable"):
        assert signature_of(getattr(tl.Pipe, method)) == signature_of(getattr(peer.Pipe, method))
    assert [point.name for point in tl.SplitPoint] == [point.name for point in peer.SplitPoint]


def test_a_stage_has_the_parameters_it_uses_under_their_names() -> None:
    model = make("rotated")
    pipe = tl.pipeline(model, (CASES["rotated"].batch(2)[0],), split_spec=CASES["rotated"].cuts[2])
    assert names(pipe) == [
        ["embed.weight", "layers.0.bias", "layers.0.weight"],
        ["head.weight", "layers.1.bias", "layers.1.weight", "layers.2.bias", "layers.2.weight"],
    ]
    for stage in range(2):
        piece = pipe.get_stage_module(stage)
        for name, parameter in piece.named_parameters():
            assert parameter is model.get_parameter(name)
        assert not [name for name in piece.state_dict() if name not in model.state_dict()]
    assert pipe.get_stage_module(0).get_buffer("rotary.speeds") is model.get_buffer("rotary.speeds")


def test_shared_parameters_are_reported() -> None:
    model = make("rotated")
    pipe = tl.pipeline(model, (CASES["rotated"].batch(2)[0],), split_spec=CASES["rotated"].cuts[4])
    assert pipe.ties == (tl.Tie({0: "embed.weight", 3: "head.weight"}),)
    assert pipe.replicated_params == [{"submod_pp_0": "embed.weight", "submod_pp_3": "head.weight"}]
    first, last = pipe.get_stage_module(0), pipe.get_stage_module(3)
    assert first.get_parameter("embed.weight") is last.get_parameter("head.weight")
    assert copy.deepcopy(pipe).ties == pipe.ties


def test_a_module_that_is_called_twice() -> None:
    class Twice(Three):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(self.a(x)))

    pipe = tl.pipeline(Twice(), (torch.ones(2, 4),), split_spec={"a": END})
    assert names(pipe) == [["a.bias", "a.weight"], ["a.bias", "a.weight", "b.bias", "b.weight"]]
    assert pipe.ties == (
        tl.Tie({0: "a.weight", 1: "a.weight"}),
        tl.Tie({0: "a.bias", 1: "a.bias"}),
    )


def test_the_module_is_left_as_it_was() -> None:
    model = Three()
    model.b.eval()
    state = {name: dict(vars(part)) for name, part in model.named_modules()}
    tl.pipeline(model, (torch.ones(2, 4),), split_spec={"b": BEGINNING, "c": BEGINNING})
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == state
    with pytest.raises(PartitionError):
        tl.pipeline(model, (torch.ones(2, 3),), split_spec={"b": BEGINNING})
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == state


@pytest.mark.parametrize(
    ("spec", "stages"),
    [
        ({}, 1),
        ({"a": BEGINNING}, 1),
        ({"c": END}, 1),
        ({"a": END, "b": BEGINNING}, 2),
        ({"a": END, "b": END, "c": BEGINNING}, 3),
    ],
)
def test_split_points_with_nothing_between_them(spec: dict[str, Any], stages: int) -> None:
    pipe = tl.pipeline(Three(), (torch.ones(2, 4),), split_spec=spec)
    assert pipe.num_stages == pipe.info().num_stages == stages


def test_a_split_policy() -> None:
    def policy(traced: fx.GraphModule) -> fx.GraphModule:
        for node in list(traced.graph.nodes):
            if node.target is torch.ops.aten.linear.default:
                with traced.graph.inserting_after(node):
                    traced.graph.call_function(tl.pipe_split)
        return traced

    model, x = Three(), torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,), split_policy=policy)
    assert names(pipe) == [[f"{name}.bias", f"{name}.weight"] for name in "abc"]
    assert torch.equal(pipe(x), model(x))


def test_marks_made_for_torch() -> None:
    class Marked(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            peer.pipe_split()
            return self.b(x)

    assert tl.pipeline(Marked(), (torch.ones(2, 4),)).num_stages == 2
    spec: dict[str, Any] = {"b": peer.SplitPoint.END}
    assert tl.pipeline(Three(), (torch.ones(2, 4),), split_spec=spec).num_stages == 2


class Moody(nn.Module):
    """Another model in training than in evaluation, with constants and a region in both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        tl.pipe_split()
        with torch.no_grad():
            shift = x.mean() * 2 if self.training else x.sum()
        return self.b(x) + shift * torch.tensor(2.0 if self.training else 5.0)


def test_modes() -> None:
    model, x = Moody(), torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,))
    reference = copy.deepcopy(pipe)
    for mode in (False, True, False):
        for each in (model, pipe, reference):
            each.train(mode)
        assert torch.equal(pipe(x), model(x))
        assert torch.equal(reference(x), model(x))
    reference.get_stage_module(1).get_parameter("b.weight").data.zero_()
    assert torch.equal(pipe(x), model(x))


def test_a_mode_that_cannot_be_traced() -> None:
    class Trained(Three):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and x.sum() > 0:
                x = -x
            return super().forward(x)

    model, x = Trained(), torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,), split_spec={"b": BEGINNING})
    assert torch.equal(pipe(x), model(x))
    with pytest.raises(PartitionError, match=r"eval\(\) of a stage: .* could not be traced"):
        pipe.eval()
    pipe.train()


def test_building_a_stage_moves_what_it_creates() -> None:
    class Positions(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            tl.pipe_split()
            return self.b(x) + torch.arange(4, device=x.device) * torch.tensor(2.0)

    pipe = tl.pipeline(Positions(), (torch.ones(2, 4),))
    stage = pipe.build_stage(1, torch.device("meta"))
    assert stage.submod(torch.ones(2, 4, device="meta")).device.type == "meta"
    assert pipe.build_stage(0, CPU).submod(torch.ones(2, 4)).shape == (2, 4)


def test_printing(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tl.pipeline(Three(), (torch.ones(2, 4),), split_spec={"b": BEGINNING})
    pipe.print_readable()
    printed = capsys.readouterr().out
    assert "submod_pp_1" in printed
    assert "torch.ops.aten.linear" in printed
    assert "submod_pp_1" in str(pipe)


def test_split_points_are_nothing_outside_of_a_trace() -> None:
    assert tl.pipe_split() is None
