"""Compiled stages: their backward, whole and in halves."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode

import taktline as tl
from taktline.stage.compiled import Halves, Undivided, divide
from taktline.stage.split_backward import Pending, Splitter
from tests.stage.compiling import (
    COMPILER_WARNINGS,
    aot,
    assert_alike,
    block,
    compiled,
    computed_in_w,
    run,
    weights_of,
)

pytestmark = COMPILER_WARNINGS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embed(x))


class Broken(nn.Module):
    """Two graphs, and a weight that both use."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(x).relu()
        torch._dynamo.graph_break()
        return self.once(self.twice(x))


@pytest.mark.parametrize(
    ("make", "x", "later"),
    [
        (block, torch.randn(3, 8), ["0.weight", "2.weight"]),
        (
            Attention,
            torch.arange(10).view(2, 5),
            [
                "embed.weight",
                *(f"layer.{name}.weight" for name in ("self_attn.out_proj", "linear1", "linear2")),
                "layer.self_attn.in_proj_weight",
            ],
        ),
        (Broken, torch.randn(3, 4), ["once.weight"]),
    ],
)
def test_split_as_in_eager_mode_or_better(
    make: Callable[[], nn.Module], x: Tensor, later: list[str]
) -> None:
    module = make()
    found = {name.removeprefix("_orig_mod.") for name in computed_in_w(compiled(module), x)}
    assert found == set(later)
    if make is not Broken:
        assert found >= set(computed_in_w(module, x))


def test_sizes_that_change() -> None:
    torch._dynamo.reset()
    made = torch.compile(block(), backend=aot(), dynamic=True)
    for rows in (3, 5):
        assert len(computed_in_w(made, torch.randn(rows, 8))) == 2  # pyright: ignore[reportArgumentType]


def test_a_weight_with_a_hook_gets_its_gradient_at_once() -> None:
    module, seen = compiled(block()), []
    weight = next(module.parameters())
    assert len(computed_in_w(module, torch.randn(3, 8))) == 2
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    assert computed_in_w(module, torch.randn(3, 8)) == ["_orig_mod.2.weight"]
    assert len(seen) >= 1


def test_what_was_changed_in_place_is_refused() -> None:
    module, x = compiled(nn.Linear(4, 4)), torch.ones(2, 4, requires_grad=True)
    held = x * 2
    output = module(held)
    pending = Splitter().run_input(
        [output], [torch.ones_like(output)], [x], list(module.parameters())
    )
    assert pending is not None
    with torch.no_grad():
        held.add_(1)
    with pytest.raises(tl.TaktlineError, match="changed in place between"):
        pending.run()


def test_halves_that_do_not_compile_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "taktline"):
        assert_alike(block(), torch.randn(3, 3, 8).unbind(), where="stage 3", fails="no such luck")
    expected = "stage 3: its compiled backward stays whole, so W is empty there: its halves do not"
    assert [expected in message for message in caplog.messages] == [True]
    assert "RuntimeError: no such luck" in caplog.messages[0]


def traced(function: Callable[..., Any], *example: Tensor) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*example)


def test_the_products_alone_are_divided_off() -> None:
    def backward(x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
        return [g @ w, g.t() @ x, g.sum(0)]

    x, w, g = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5)
    graph = traced(backward, x, w, g)
    division = divide(graph, [1, 2])
    assert isinstance(division, Halves)
    assert division.later == (1,)
    assert division.takes_first == (1, 2)
    assert division.takes_second == (0, 2)
    assert division.crossing == ()
    dx, nothing, db = division.first(w, g)
    (dw,) = division.second(x, g)
    assert nothing is None
    for ours, theirs in zip((dx, dw, db), backward(x, w, g), strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_to_put_off() -> None:
    assert divide(traced(lambda g: [g.sum(0)], torch.ones(2, 2)), [0]) is None


def test_what_changes_in_place_is_not_divided() -> None:
    graph = traced(lambda x, g: [g.add_(1).t() @ x], torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(Undivided, match=r"changes a tensor in place \(aten.add_.Tensor\)"):
        divide(graph, [0])


# Gradients.


class Alike(nn.Module):
    """Weights that have the same gradient as others, as the output, or as the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.left, self.right = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.alike = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.alike(self, x)


SAME_GRADIENT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of the output": lambda self, x: x @ self.one + self.left,
    "in a sum": lambda self, x: x @ (self.one + self.other),
    "not of products": lambda self, x: x @ self.one + (self.left + self.right),
    "of the input": lambda self, x: x + self.left + torch.ones(3, 4) @ self.one,
    "in part": lambda self, x: x @ (self.one + torch.cat([self.left, self.right[:1]])),
    "chosen": lambda self, x: x @ (self.one + torch.stack([self.other, self.other])[0]),
    "expanded": lambda self, x: x @ self.one + x @ self.other.sum(1, keepdim=True),
    "turned": lambda self, x: x @ (self.one + self.other.t()),
}


@pytest.mark.parametrize("name", SAME_GRADIENT)
def test_weights_with_the_same_gradient_do_not_share_it(name: str) -> None:
    module = Alike(SAME_GRADIENT[name])
    assert_alike(module, torch.randn(4, 3, 4).unbind())
    assert all(p.grad.is_contiguous() for p in module.parameters() if p.grad is not None)


def test_a_hooked_weight_does_not_share_the_gradient_of_another() -> None:
    module = Alike(lambda self, x: x @ self.one + 2 * (self.left + self.right.view(12).view(3, 4)))
    module.right.register_hook(lambda gradient: None)
    inputs = torch.randn(3, 3, 4).unbind()
    _, (_, _, left, right) = run(compiled(module), inputs, split=True)
    assert left is not None
    assert right is not None
    assert torch.equal(left, torch.full((3, 4), 6.0))
    assert torch.equal(right, left)


def test_autocast_does_not_reach_into_w() -> None:
    module = nn.Linear(4, 4)
    made, x = compiled(module), torch.randn(3, 4, requires_grad=True)
    output = made(x)
    with torch.autocast("cpu", torch.bfloat16):
        pending = Splitter().run_input([output], [x.detach()], [x], list(made.parameters()))
        assert pending is not None
        pending.run()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, x.detach().t() @ x.detach())


@pytest.mark.parametrize("frozen", [False, True])
def test_micro_batches_in_flight(frozen: bool) -> None:
    module = block()
    next(module.parameters()).requires_grad_(not frozen)
    assert_alike(module, torch.randn(4, 3, 8).unbind())


def test_a_complex_weight() -> None:
    module = Alike(lambda self, x: x @ self.one.conj())
    module.one = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    assert_alike(module, torch.randn(3, 2, 4, dtype=torch.complex64).unbind())
    assert module.one.grad is not None
    assert not module.one.grad.is_conj()  # operations on lists of tensors refuse such


class Products(TorchDispatchMode):
    """Counts the products of matrices, and the most of them that are in memory at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.most = 0
        self._alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten.mm.default:
            self._alive.add(result)
            self.count += 1
            self.most = max(self.most, len(self._alive))
        return result


def test_w_holds_one_gradient_at_a_time() -> None:
    module = nn.Sequential(block(), block())
    run(module, torch.randn(1, 3, 8).unbind(), split=True)  # gradients to add to
    x = torch.randn(3, 8, requires_grad=True)
    output = module(x)
    pending = Splitter().run_input(
        [output], [torch.ones_like(output)], [x], list(module.parameters())
    )
    assert pending is not None
    with Products() as products:
        pending.run()
    assert (products.count, products.most) == (4, 1)


# With Inductor.


@pytest.mark.slow
def test_a_stage_whose_i_has_nothing_to_compute() -> None:
    torch._dynamo.reset()
    module = tl.compile_stages(nn.Linear(4, 4, bias=False))
    splitter, weights, x = Splitter(), list(module.parameters()), torch.randn(3, 4)
    for _ in range(2):
        output = module(x)
        pending = splitter.run_input([output], [torch.ones_like(output)], [], weights)
        assert pending is not None
        pending.run()
    torch.testing.assert_close(weights[0].grad, 2 * torch.ones(4, 3) @ x)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("cuts", [True, False], ids=["cut", "by hand"])
# Without processes to compile in: to start them takes longer than these few kernels.
@inductor.patch({"compile_threads": 1})
def test_pipeline_with_inductor(cuts: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    stages = (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))
    model = nn.Sequential(*stages)
    plain = copy.deepcopy(model)
    pipe = tl.Pipeline(
        model if cuts else list(model),
        cuts=["1"] if cuts else None,
        schedule="zb_h1",
        microbatches=2,
        ranks=2,
        loss_fn=nn.functional.mse_loss,
        compile=True,
    )
    x, target = torch.randn(2, 4, 8).unbind()
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch, pipe.trace():  # which keeps I and W apart
        run = Pending.run

        def count(pending: Pending) -> None:
            done.append(len(weights_of(pending)))
            run(pending)

        patch.setattr(Pending, "run", count)
        pipe.step(x, target=target)
    nn.functional.mse_loss(plain(x), target).backward()
    assert done == [2] * 4
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
