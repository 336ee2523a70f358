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
        [
            *("head.weight", "layers.1.bias", "layers.1.weight", "layers.2.bias"),
            *("layers.2.weight", "unused.bias", "unused.weight"),
        ],
    ]
    for stage in range(2):
        piece = pipe.get_stage_module(stage)
        for name, parameter in piece.named_parameters():
            assert parameter is model.get_parameter(name)
        assert not [name for name in piece.state_dict() if name not in model.state_dict()]
    assert pipe.get_stage_module(0).get_buffer("rotary.speeds") is model.get_buffer("rotary.speeds")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages"), [("resnet", 4), ("rotated", 4), ("unet", 4), ("gpt", 2)]
)
def test_pieces_one_after_the_other_are_the_module(name: str, stages: int) -> None:
    case, model = CASES[name], make(name)
    reference, (x, target) = copy.deepcopy(model), case.batch(3)
    pipe = tl.pipeline(model, (x,), split_spec=case.cuts[stages])
    assert pipe.num_stages == stages
    for mode in (True, False, True):
        outputs: list[Tensor] = []
        for net in (pipe.train(mode), reference.train(mode)):
            torch.manual_seed(0)
            outputs.append(net(x))
            if mode:
                case.loss(outputs[-1], target).backward()
        assert torch.equal(*outputs)
    for (key, buffer), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(buffer, other), key
    for (key, parameter), other in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, other.grad, msg=key)


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
    with_unused = [f"{name}.{kind}" for name in "abc" for kind in ("bias", "weight")]
    assert names(pipe) == [["a.bias", "a.weight"], with_unused]
    assert pipe.ties == (
        tl.Tie({0: "a.weight", 1: "a.weight"}),
        tl.Tie({0: "a.bias", 1: "a.bias"}),
    )


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


def cut_after_linears(recorded: fx.GraphModule) -> fx.GraphModule:
    for node in list(recorded.graph.nodes):
        if node.op == "call_module" and isinstance(recorded.get_submodule(node.target), nn.Linear):
            with recorded.graph.inserting_after(node):
                recorded.graph.call_function(tl.pipe_split)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    return recorded


def test_a_split_policy() -> None:
    model, x = Three(), torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,), split_policy=cut_after_linears)
    assert names(pipe) == [[f"{name}.bias", f"{name}.weight"] for name in "abc"]
    assert torch.equal(pipe(x), model(x))


def test_a_split_policy_sees_the_steps_inside_of_blocks() -> None:
    model, (x, _) = make("gpt").eval(), CASES["gpt"].batch(2)
    seen: list[str] = []

    def policy(recorded: fx.GraphModule) -> fx.GraphModule:
        nodes = list(recorded.graph.nodes)
        seen.extend(node.op for node in nodes)
        with recorded.graph.inserting_before(nodes[len(nodes) // 2]):
            recorded.graph.call_function(tl.pipe_split)
        return recorded

    pipe = tl.pipeline(model, (x,), split_policy=policy)
    assert {"placeholder", "call_module", "call_function", "call_method", "output"} <= {*seen}
    assert pipe.num_stages == 2
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


class Marks(nn.Module):
    """Calls pipe_split() in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            tl.pipe_split()
        return self.b(x)


def test_other_split_points_in_the_other_mode() -> None:
    x = torch.ones(2, 4)
    pipe = tl.pipeline(Marks(), (x,))
    pipe(x)
    with pytest.raises(PartitionError, match="0 split points in this call, and 1 in the example"):
        pipe.eval()(x)


def test_a_split_point_deep_inside_of_blocks() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Moody()), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,))
    assert names(pipe) == [
        ["0.0.bias", "0.0.weight", "0.1.a.bias", "0.1.a.weight"],
        ["0.1.b.bias", "0.1.b.weight", "1.bias", "1.weight"],
    ]
    assert torch.equal(pipe(x), model(x))


def test_printing(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tl.pipeline(Three(), (torch.ones(2, 4),), split_spec={"b": BEGINNING})
    pipe.print_readable()
    printed = capsys.readouterr().out
    assert "submod_pp_1" in printed
    assert "    b  # " in printed
    assert "submod_pp_1" in str(pipe)


# What cannot be cut as asked

X = torch.ones(2, 4)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"no split point: pass split_spec, .* or call pipe_split\(\) in the forward"),
        ({"split_policy": lambda gm: gm}, r"let split_policy put pipe_split\(\) between the steps"),
        (
            {"split_spec": {"layer.1": BEGINNING}},
            r"names 'layer.1', but Layers has no such submodule; did you mean 'layers.1'",
        ),
        (
            {"split_spec": {"qqq": BEGINNING}},
            r"names 'qqq', but Layers has no such submodule; there are 'layers', 'layers.0'",
        ),
        (
            {"split_spec": {"spare": BEGINNING}},
            r"the forward does not call 'spare', so there is nothing to split at; name submodules",
        ),
        ({"split_spec": {"layers.1": "end"}}, r"must be SplitPoint.BEGINNING or SplitPoint.END"),
        ({"split_spec": {}, "split_policy": lambda gm: gm}, r"pass only one of them"),
        ({"split_policy": lambda gm: None}, r"split_policy must return the GraphModule"),
    ],
)
def test_split_points_that_are_none(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PartitionError, match=text):
        tl.pipeline(Layers(), (X,), **options)


def test_arguments_that_are_no_tuple() -> None:
    args: Any = X
    with pytest.raises(PartitionError, match="mb_args must be a tuple of arguments, not"):
        tl.pipeline(Layers(), args, split_spec={"layers.1": BEGINNING})


class Either(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            x = x + 1
            tl.pipe_split()
            return x * 2

        return torch.cond(x.sum() > 0, yes, lambda x: x - 1, (x,))


def test_a_split_point_inside_of_a_region() -> None:
    with pytest.raises(PartitionError, match=r"inside a region .*cond.*; move the split point"):
        tl.pipeline(Either(), (X,))


# Arguments


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
        stages = [pipe.build_stage(stage, torch.device("cpu")) for stage in (rank, 3 - rank)]
        schedule = tl.ScheduleZBVZeroBubble(stages, 2, nn.functional.mse_loss)
        kwargs: dict[str, Any] = {"shift": shift} if rank == 0 else {}
        return schedule.step(*((x,) if rank == 0 else ()), target=x, **kwargs)

    torch.testing.assert_close(tl.local.run(main, 2)[0], model(x, shift=shift))
