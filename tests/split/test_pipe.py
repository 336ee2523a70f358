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
from taktline.errors import PartitionError, SkipError
from tests.split.models import BEGINNING, CASES, END, make

CPU = torch.device("cpu")


def names(pipe: Any) -> list[list[str]]:
    """The parameters of each stage."""
    pieces = (pipe.get_stage_module(stage) for stage in range(pipe.num_stages))
    return [sorted(name for name, _ in piece.named_parameters()) for piece in pieces]


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


@pytest.mark.parametrize("name", ["pipeline", "pipe_split", "build_stage", "Pipe"])
def test_signatures_are_those_of_torch(name: str) -> None:
    def told(function: Any) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert told(getattr(tl, name)) == told(getattr(peer, name))
    for method in ("forward", "get_stage_module", "info", "build_stage", "print_readable"):
        assert told(getattr(tl.Pipe, method)) == told(getattr(peer.Pipe, method))
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


def test_shared_parameters_are_told() -> None:
    model = make("rotated")
    pipe = tl.pipeline(model, (CASES["rotated"].batch(2)[0],), split_spec=CASES["rotated"].cuts[4])
    assert pipe.shared_parameters == [{0: "embed.weight", 3: "head.weight"}]
    assert pipe.replicated_params == [{"submod_pp_0": "embed.weight", "submod_pp_3": "head.weight"}]
    first, last = pipe.get_stage_module(0), pipe.get_stage_module(3)
    assert first.get_parameter("embed.weight") is last.get_parameter("head.weight")


def test_a_module_that_is_called_twice() -> None:
    class Twice(Three):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(self.a(x)))

    pipe = tl.pipeline(Twice(), (torch.ones(2, 4),), split_spec={"a": END})
    assert names(pipe) == [["a.bias", "a.weight"], ["a.bias", "a.weight", "b.bias", "b.weight"]]
    assert pipe.shared_parameters == [{0: "a.weight", 1: "a.weight"}, {0: "a.bias", 1: "a.bias"}]


class Options(nn.Module):
    """All kinds of arguments, and containers in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, pair: dict[str, Tensor], y: Tensor | None = None, *, scale: float = 2.0
    ) -> dict[str, Any]:
        x = self.a(pair["x"]) * scale
        tl.pipe_split()
        x = self.b(x)
        if y is not None:
            x = x + y
        return {"x": (x, pair["z"]), "scale": scale}


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
    """Sizes are constants of a trace: here the mean would be wrong, and nobody would notice."""

    class Mean(Three):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).sum(0) / x.shape[0]

    pipe = tl.pipeline(Mean(), (torch.ones(2, 4),), split_spec={"b": BEGINNING})
    with pytest.raises(
        PartitionError, match=r"x has the shape \[3, 4\], but .* \[2, 4\], and sizes"
    ):
        pipe(torch.ones(3, 4))


def test_none_where_a_tensor_comes_later() -> None:
    pair = {"x": torch.randn(2, 4), "z": torch.randn(2)}
    pipe = tl.pipeline(Options(), (pair, None))
    pipe(pair, None)
    with pytest.raises(
        PartitionError, match="y is a tensor, but the pipeline was traced with None"
    ):
        pipe(pair, torch.ones(2, 4))


class Counts(Three):
    """Assigns a buffer; a trace does so at its end."""

    total: Tensor

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.total = self.total + x.detach().sum(0)
        seen = x + self.total
        tl.pipe_split()
        return self.b(x + self.total.clone() if self.late else seen)


def test_a_buffer_is_assigned_where_it_is_computed() -> None:
    model = Counts(late=False)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,))
    assert [list(dict(pipe.get_stage_module(n).named_buffers())) for n in (0, 1)] == [["total"], []]
    for _ in range(3):
        assert torch.equal(pipe(x), twin(x))
    assert torch.equal(model.total, twin.total)


def test_a_buffer_that_one_stage_writes_and_another_reads() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(self.norm(x)))

    with pytest.raises(
        PartitionError, match=r"stage 1 changes 'norm.*' .*, which stage 0 uses too"
    ):
        tl.pipeline(Shared(), (torch.ones(2, 4),), split_spec={"linear": BEGINNING})


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
    twin = copy.deepcopy(pipe)
    for mode in (False, True, False):
        for each in (model, pipe, twin):
            each.train(mode)
        assert torch.equal(pipe(x), model(x))
        assert torch.equal(twin(x), model(x))
    twin.get_stage_module(1).get_parameter("b.weight").data.zero_()
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


def test_memory_that_is_shared_across_a_boundary_and_written_to() -> None:
    class Writes(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            view = x[0]
            tl.pipe_split()
            x.mul_(2)
            return self.b(x) + view

    with pytest.raises(
        PartitionError, match=r"stage 1 changes .* in place .* move the split point"
    ):
        tl.pipeline(Writes(), (torch.ones(2, 4),))


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
    pair = {"x": torch.randn(2, 4), "z": torch.randn(2)}
    assert tl.pipe_split() is None
    program = torch.export.export(Options(), (pair,), strict=False)
    assert "pipe_split" not in str(program.graph)


class Beside(Three):
    """A skip connection and two losses, one of them from a region without gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        tl.add_loss(x.square().mean())
        tl.skip.put("x", x)
        tl.pipe_split()
        y = self.b(x)
        tl.add_loss(y.abs().mean())
        with torch.no_grad():
            tl.add_loss(y.sum())
        return self.c(y) + tl.skip.get("x")


def test_losses_and_skips_of_a_traced_model() -> None:
    model, x = Beside(), torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,))
    with tl.collect_losses() as found:
        output = pipe(x)
    with tl.collect_losses() as expected:
        assert torch.equal(output, model(x))
    assert len(found) == 3
    assert found == expected

    def main(rank: int) -> list[float]:
        schedule = tl.ScheduleGPipe(pipe.build_stage(rank, CPU), 2, nn.functional.mse_loss)
        losses: list[Tensor] = []
        batch = torch.cat((x, x))
        schedule.step(batch, target=batch, aux_losses=losses, share_losses=True)
        return [loss.item() for loss in losses]

    total = sum(loss.item() for loss in expected)
    found_gradient = {}
    assert tl.local.run(main, 2)[1] == pytest.approx([total, total])
    for name, parameter in model.named_parameters():
        found_gradient[name], parameter.grad = parameter.grad, None
    with tl.collect_losses() as losses:
        main_loss = nn.functional.mse_loss(model(x), x)
    torch.stack([main_loss, *losses]).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found_gradient[name], parameter.grad)


def test_a_skip_that_nobody_gets() -> None:
    class Lost(Three):
        def forward(self, x: Tensor) -> Tensor:
            tl.skip.put("lost", x)
            return super().forward(x)

    with pytest.raises(SkipError, match="nobody gets 'lost'"):
        tl.pipeline(Lost(), (torch.ones(2, 4),), split_spec={"b": BEGINNING})
