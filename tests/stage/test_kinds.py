"""Compiled modules that share what is compiled: how often torch compiles, and what it says."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import taktline as tl
from taktline.stage.kinds import CompiledCall, CompiledChain, compilations, summary
from tests.stage.compiling import COMPILER_WARNINGS

pytestmark = COMPILER_WARNINGS


class Block(nn.Module):
    def __init__(self, width: int = 4, factor: float = 1.0, dilation: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.factor, self.dilation = factor, (dilation,)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.linear(x).tanh() * self.factor + x.roll(self.dilation[0], -1)
        return x * 0.5 + mixed * 0.1


class Breaks(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + 1


class Counting:
    """A backend that only notes which graphs have sizes as arguments."""

    def __init__(self) -> None:
        self.dynamic: list[bool] = []

    def __call__(self, graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        self.dynamic.append(not all(isinstance(x, Tensor) for x in example))
        return graph.forward

    @property
    def count(self) -> int:
        return len(self.dynamic)


def compiled(modules: Sequence[nn.Module], backend: Counting) -> Sequence[nn.Module]:
    for number, module in enumerate(modules):
        call = CompiledCall(module, f"stage 0, h.{number}", backend=backend)
        vars(module)["_compiled_call_impl"] = call
    return modules


def call(modules: Sequence[nn.Module], rows: int = 3) -> None:
    """Compare every compiled module with itself, uncompiled."""
    for module in modules:
        x = torch.randn(rows, next(module.parameters()).size(-1), requires_grad=True)
        assert torch.equal(module(x), module.forward(x))


KINDS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "equal": (lambda _: Block(), 1),
    "equal layers of torch": (lambda _: nn.Linear(4, 4), 1),
    "widths": (lambda n: Block(4 + n), 12),
    "a number that may be dynamic": (lambda n: Block(factor=n / 10), 2),
    "a number that may not": (lambda n: Block(dilation=2**n), 12),
    "frozen in part": (lambda n: Block().requires_grad_(n % 2 == 0), 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_recompile_limit_is_not_reached(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    make, expected = KINDS[kind]
    backend = Counting()
    modules = compiled([make(number) for number in range(12)], backend)
    call(modules)
    assert backend.count == expected
    before = compilations()
    call(modules)
    assert compilations() == before
    with torch.no_grad():
        call(modules)
    assert "recompile_limit" not in caplog.text


def test_sizes_are_constants_until_they_have_changed_twice() -> None:
    torch._dynamo.reset()
    backend = Counting()
    modules = compiled([Block() for _ in range(3)], backend)
    for rows in (3, 5, 3, 5):
        call(modules, rows)
    assert backend.dynamic == [False] * 2
    for rows in (7, 9, 11, 13, 3, 5):
        call(modules, rows)
    assert backend.dynamic == [False] * 3 + [True]


def test_later_modules_are_not_compiled_again() -> None:
    torch._dynamo.reset()
    backend = Counting()
    first = compiled([Block()], backend)
    call(first)
    gone = weakref.ref(first[0])
    del first
    gc.collect()
    assert gone() is None
    call(compiled([Block()], backend))
    assert backend.count == 1


def test_what_runs_eagerly_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    modules = compiled([Block(), Breaks(), Breaks()], Counting())
    with caplog.at_level(logging.WARNING, "taktline"):
        call(modules)
    (message,) = [record.message for record in caplog.records if record.name == "taktline"]
    assert message.startswith(
        "stage 0, h.1 (Breaks) runs eagerly in part, as torch.compile says: Call to "
        "`torch._dynamo.graph_break()` Explanation: User-inserted graph break."
    )
    first, *partly = summary(modules).splitlines()
    assert first == "compiled: 3 modules of 2 kinds"
    assert [line.split(", Call")[0] for line in partly] == [
        "  stage 0, h.1: eagerly in part",
    ]


def test_a_limit_that_a_module_reaches_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    backend = Counting()
    (block,) = compiled([Block()], backend)
    with caplog.at_level(logging.WARNING, "taktline"):
        for step in range(12):
            vars(block)["dilation"] = (2**step,)
            call([block])
    assert backend.count == 8
    assert "stage 0, h.0 (Block) runs eagerly in part" in caplog.text
    assert "recompile limit" in caplog.text.lower()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_deep_model_compiles_as_often_as_a_shallow_one(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Counting()
    monkeypatch.setattr("taktline.stage.compiled._compiled", backend)
    counts: list[int] = []
    for depth in (2, 12):
        torch._dynamo.reset()
        monkeypatch.setattr("taktline.stage.kinds._latest", {})
        layers = [Block() for _ in range(depth)]
        plain = [Block() for _ in range(depth)]
        for ours, theirs in zip(layers, plain, strict=True):
            theirs.load_state_dict(ours.state_dict())
        pipe = tl.Pipeline(
            nn.Sequential(*layers),
            cuts=[str(depth // 2)],
            schedule="interleaved_1f1b" if ranks == 1 else "1f1b",
            microbatches=2,
            ranks=ranks,
            loss_fn=nn.functional.mse_loss,
            compile=True,
        )
        x, target = torch.randn(2, 4, 4).unbind()
        before = backend.count
        pipe.step(x, target=target)
        counts.append(backend.count - before)
        nn.functional.mse_loss(nn.Sequential(*plain)(x), target).backward()
        for ours, theirs in zip(layers, plain, strict=True):
            torch.testing.assert_close(ours.linear.weight.grad, theirs.linear.weight.grad)
        assert f"compiled: {depth} modules of 1 kind" in str(pipe)
        assert ("in 4 calls" in str(pipe)) == (depth == 12)
        assert "compiled" not in summary(copy.deepcopy([*pipe.stages.values()]))
    assert counts[0] == counts[1]


def chain(modules: Sequence[nn.Module], backend: Counting) -> CompiledChain:
    names = [f"h.{number}" for number in range(len(modules))]
    return CompiledChain(compiled(modules, backend), names, "stage 0")


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)


class Calls(Block):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) + 1


CHAINS: dict[str, tuple[Callable[[], list[nn.Module]], list[list[int]], int]] = {
    "few": (lambda: [nn.Linear(4, 4), *blocks(3), nn.Linear(4, 4)], [[0, 1, 2, 3, 4]], 1),
    "many": (lambda: [nn.Linear(4, 4), *blocks(8), nn.Tanh()], [[1, 2, 3, 4], [5, 6, 7, 8]], 3),
    "odd": (lambda: blocks(7), [[0, 1, 2], [3, 4, 5, 6]], 2),
    "hooked": (lambda: [*blocks(2), Hooked(), *blocks(2)], [[0, 1], [3, 4]], 2),
    "with a call of its own": (lambda: [*blocks(2), Calls()], [[0, 1]], 2),
}


def blocks(count: int) -> list[nn.Module]:
    return [Block() for _ in range(count)]


@pytest.mark.parametrize("name", CHAINS)
def test_neighbours_are_compiled_together(name: str) -> None:
    torch._dynamo.reset()
    make, parts, count = CHAINS[name]
    units, backend = make(), Counting()
    made = chain(units, backend)
    places = {id(unit): place for place, unit in enumerate(units)}
    assert [[places[id(unit)] for unit in part.units] for part in made.parts] == parts
    x = torch.randn(3, 4, requires_grad=True)
    found, expected = made(x), x
    for each in units:
        unit: Any = each
        expected = unit._call_impl(expected) + (type(unit) is Calls)
    assert torch.equal(found, expected)
    assert backend.count == count


def test_one_that_runs_eagerly_in_part_is_taken_out_of_its_chain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch._dynamo.reset()
    made = chain([Block(), Breaks(), Block()], Counting())
    x = torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, "taktline"):
        for _ in range(3):
            made(x)
    assert not made.parts
    (message,) = [record.message for record in caplog.records if record.name == "taktline"]
    assert message.startswith("stage 0, h.1 (Breaks) runs eagerly in part")
