"""Calls of a stage that look like one before: as exact, without its price."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.split.named.placeholder import Placeholder
from tests.split.models import ResNet, ViT

WIDTH = 4
FLAG = True


class Chain(nn.Module):
    """Layers, one after the other; the other models differ in what is around them."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = 2.0
        self.flag = True
        self.order = list(range(layers))
        self.count = 0
        self.drop = nn.Dropout(0.5)
        self.offset = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Positions(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x) + torch.arange(x.shape[-1], device=x.device) * self.scale
        x = self.drop(x)
        for i in range(len(self.layers)):
            x = self.layers[i](x)
        return self.norm(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.inner(x))


class Residual(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return {"x": self.norm(x), "count": len(self.order)}


class Branches(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for i in self.order:
            x = self.layers[i](x)
            if self.flag:
                x = x * self.scale
        return self.norm(x), self.flag


class Conditions(Chain):
    """Conditions on attributes alone."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        if not self.flag:
            x = x * self.scale
        for layer in self.layers:
            if self.drop is not None:
                x = layer(x)
        if self.training:
            x = self.norm(x)
        return x


class Shapes(Chain):
    """Conditions on shapes, and on attributes together with them."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if x.shape[-1] * 2 > x.size(0) and self.flag else layer(2 * x)
            if x.shape[0] > 2 * self.scale or x.ndim == 5:
                x = x * self.scale
        return self.norm(x)


class Data(Chain):
    """A condition on data, which every stage has."""

    def forward(self, x: Tensor, positive: Tensor | None = None) -> Any:
        positive = x[0, 0] > 0
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if positive else layer(2 * x)
        return self.norm(x)


class Global(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if FLAG else layer(2 * x)
        return self.norm(x)


def applied(layer: nn.Module, x: Tensor) -> Tensor:
    return same(layer(x) if FLAG else layer(x * FACTOR))


def same(x: Tensor) -> Tensor:
    return x


def mirrored(x: Tensor) -> Tensor:
    return -x


FACTOR = 0.5
SAME = same


class Helpers(Chain):
    """Calls functions of its own, which are as plain as it is."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = applied(layer, x)
        return self.norm(x)


class Draws(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if torch.rand(()) < 0.5 else layer(x) * 2
        return self.norm(x)


class DrawsInPython(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x if random.random() < 0.5 else 2 * x)
        return self.norm(x)


class Counts(Chain):
    def forward(self, x: Tensor) -> Any:
        self.count += 1
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x * 2 if self.count % 3 == 0 else x)
        return self.norm(x)


class InPlace(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        x += 1
        for layer in self.layers:
            x = layer(x)
            x *= 2
        return self.norm(x)


class Noise(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            torch.rand(())
            x = layer(x)
        return self.norm(x)


class Dropped(Chain):
    """Draws between its layers, by a module that every stage has."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.norm(x)


class Number(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return super().forward(input), int(input.sum() > 0) if type(input) is Tensor else 0


class Numbers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Number(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x, number = layer(x)
            x = x + number
        return self.norm(x)


class Masked(nn.Linear):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, mask: Tensor, *, scale: float = 1.0
    ) -> Tensor:
        return super().forward(input) * mask * scale


class Masks(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        mask = (x > 0).float()
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, mask, scale=self.scale)
        return self.norm(x)


class Keywords(Masks):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(input=x, mask=x, scale=2.0)
        return self.norm(x)


class Memory(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        memory = self.embed(x)
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


class Checkpointed(Memory):
    def forward(self, x: Tensor) -> Any:
        memory = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, memory, use_reentrant=False)
        return self.norm(x)


class Offset(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) + self.offset
        return self.norm(x)


class Hooks(Chain):
    """Changes gradients on their way back."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 0.5)
        return self.norm(x)


class Batches(Chain):
    """Has buffers that change, and random numbers in its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
            for _ in range(6)
        )


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[5].weight = self.layers[0].weight


MODELS: list[Callable[[], nn.Module]] = [
    *(Chain, Positions, Inner, Residual, Branches, Global, Helpers, Draws, DrawsInPython),
    *(Counts, InPlace),
    *(
        Conditions,
        Shapes,
        Data,
        Noise,
        Dropped,
        Numbers,
        Masks,
        Keywords,
        Memory,
        Checkpointed,
        Offset,
        Hooks,
        Batches,
        Tied,
    ),
]


def split(model: nn.Module) -> tl.split.Pieces:
    path = "inner.layers" if isinstance(model, Inner) else "layers"
    cuts = [f"{path}.1", f"{path}.3", f"{path}.5"]
    return tl.split.by_names(model, cuts, example=(torch.zeros(3, WIDTH),))


def step(pieces: tl.split.Pieces, x: Tensor) -> tuple[Any, list[Tensor | None]]:
    """What the pieces return, and the gradients, with each stage on its own as in a pipeline."""
    for piece in pieces:
        piece.zero_grad()
    output = pieces(x)
    loss = sum(leaf.square().sum() for leaf in pytree.tree_leaves(output)
               if isinstance(leaf, Tensor))  # fmt: skip
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return output, [p.grad for piece in pieces for p in piece.parameters()]


def cold(pieces: tl.split.Pieces) -> tl.split.Pieces:
    """A copy that knows of no call."""
    return tl.split.by_hand(copy.deepcopy(list(pieces)))


def same_as_cold(pieces: tl.split.Pieces, x: Tensor) -> None:
    """Compare a step with that of pieces that know nothing, random numbers included."""
    expected = cold(pieces)
    states = torch.get_rng_state(), random.getstate()
    found, gradients = step(pieces, x)
    after = torch.get_rng_state(), random.getstate()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    wanted, wanted_gradients = step(expected, x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=0, atol=0)
    assert torch.equal(after[0], torch.get_rng_state())
    assert after[1] == random.getstate()
    for one, other in zip(pieces, expected, strict=True):
        torch.testing.assert_close(dict(one.named_buffers()), dict(other.named_buffers()))
        assert getattr(one, "count", 0) == getattr(other, "count", 0)


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_a_later_call_does_what_a_first_one_does(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    random.seed(0)
    pieces = split(make())
    for size in (3, 2, 3):
        same_as_cold(pieces, torch.randn(size, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize("make", [make for make in MODELS if make not in (Draws, DrawsInPython)])
def test_a_later_call_does_what_the_model_does(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    if isinstance(model, (Batches, Positions, Dropped)):
        model.eval()
    plain = copy.deepcopy(model)
    pieces = split(model)
    for size in (3, 2, 3):
        x = torch.randn(size, WIDTH)
        found, _ = step(pieces, x)
        plain.zero_grad()
        wanted, _ = step(tl.split.by_hand([plain]), x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        if isinstance(model, (Tied, Offset, Masks)):
            continue  # gradients that are summed up over stages, in another order
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, msg=name)


def toggle_flag(piece: Any) -> None:
    piece.flag = not piece.flag


def scale(piece: Any) -> None:
    piece.scale += 1.0


def toggle_global(piece: Any) -> None:
    global FLAG
    FLAG = not FLAG


def exchange_function(piece: Any) -> None:
    global same
    same = SAME if same is mirrored else mirrored


def change_factor(piece: Any) -> None:
    global FACTOR
    FACTOR += 1.0


ONCE = (toggle_global, exchange_function, change_factor)


def evaluate(piece: Any) -> None:
    piece.drop.eval()


def evaluate_all(piece: Any) -> None:
    piece.eval()


def hook(piece: Any) -> None:
    for layer in piece.layers:
        layer.register_forward_hook(lambda module, args, output: output * 3)


def wrap(piece: Any) -> None:
    for name, layer in list(piece.layers.named_children()):
        if any(True for _ in layer.parameters()):
            piece.layers[int(name)] = nn.Sequential(layer, nn.Tanh())


def double(piece: Any) -> None:
    piece.double()


CHANGES: list[tuple[Callable[[], nn.Module], Callable[[Any], None]]] = [
    (Branches, toggle_flag), (Branches, scale), (Residual, scale), (Masks, scale),
    (Global, toggle_global), (Positions, scale), (Positions, evaluate), (Dropped, evaluate),
    (Conditions, toggle_flag), (Conditions, evaluate_all), (Chain, hook), (Chain, wrap),
    (Chain, double), (Helpers, exchange_function), (Helpers, change_factor),
    (Positions, wrap), (Residual, double), (Shapes, toggle_flag), (Shapes, scale),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_what_changes_between_calls_is_noticed(
    make: Callable[[], nn.Module], change: Callable[[Any], None]
) -> None:
    torch.manual_seed(0)
    pieces = split(make())
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        for _ in range(2):
            same_as_cold(pieces, x)
        for piece in pieces:
            change(piece)
            if change in ONCE:
                break
        x = x.to(next(pieces[0].parameters()).dtype)
    same_as_cold(pieces, x)


class Late(Chain):
    """A condition on data that only counts once an attribute is another."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) if self.flag or x[0, 0] > 0 else self.norm(self.norm(x))


def test_a_condition_on_data_that_an_attribute_brings() -> None:
    torch.manual_seed(0)
    pieces = tl.split.by_names(Late(), ["layers.5"], example=(torch.zeros(3, WIDTH),))
    for turn in range(4):
        for sign in (1, -1, 1):
            same_as_cold(pieces, sign * torch.full((3, WIDTH), 9.0))
        if turn % 2 == 0:
            toggle_flag(pieces[1])


def test_another_mode_is_another_kind() -> None:
    torch.manual_seed(0)
    model = Chain()
    pieces, plain = split(model), copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        assert torch.equal(pieces(x), plain(x))
        with torch.no_grad():
            assert torch.equal(pieces(x), plain(x))
        with torch.inference_mode():
            assert torch.equal(pieces(x), plain(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(pieces(x), plain(x))
        y = x.t().contiguous().t()
        assert torch.equal(pieces(y), plain(y))


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_what_another_stage_has(late: bool) -> None:
    pieces, x = split(Chain()), torch.randn(3, WIDTH)
    called: list[object] = []
    given = pieces[0](x)
    for _ in range(2 if late else 0):
        pieces[1](*given)
    embed = pieces[1].get_submodule("embed")
    embed.register_forward_hook(lambda module, args, output: called.append(output))
    embed.register_forward_pre_hook(lambda module, args: called.append(args))
    for count in (2, 4):
        pieces[1](*given)
        assert len(called) == count


def test_inference_comes_first() -> None:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(3, WIDTH)
    pieces = split(model)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(pieces(x), model(x))
    with torch.no_grad():
        assert torch.equal(pieces(x), model(x))


class Leaks(Chain):
    """Hands on a value of the stage before, under a condition, that has not come with the rest."""

    def forward(self, x: Tensor) -> Any:
        early = x = self.embed(x)
        for place, layer in enumerate(self.layers, 1):
            x = layer(x)
            if place == self.count:
                x = early
        return self.norm(x)


def test_a_value_that_has_not_come_is_not_handed_on() -> None:
    pieces, x = split(Leaks()), torch.randn(3, WIDTH)
    piece: Any = pieces[2]
    given = pieces[1](*pieces[0](x))
    piece(*given)
    piece.count = 5
    with pytest.raises(tl.errors.PartitionError, match=r"'embed', which has not come with"):
        piece(*given)


def test_tensors_without_data_are_another_kind() -> None:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(3, WIDTH)
    pieces = split(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for _ in range(2):
        with mode:
            assert pieces(mode.from_tensor(x)).shape == (3, WIDTH)
        assert torch.equal(pieces(x), model(x))


def events(function: Callable[[], object]) -> list[str]:
    """The names of the functions in Python that run."""
    names: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return names


@pytest.mark.parametrize("kind", [Chain, Positions, Conditions, Shapes, Global, Helpers])
def test_the_price_does_not_depend_on_the_layers_before(kind: type[Chain]) -> None:
    runs: list[list[str]] = []
    for before in (2, 40):
        model = kind(before + 3).eval()
        cuts = [f"layers.{before}", f"layers.{before + 2}"]
        x = torch.randn(3, WIDTH)
        pieces = tl.split.by_names(model, cuts, example=(x,))
        given = pieces[0](x)
        pieces[1](*given)
        runs.append(events(lambda piece=pieces[1], given=given: piece(*given)))
    assert runs[0] == runs[1]
    assert f"{kind.__name__}.forward" not in runs[0]
    assert sum(name == "Linear.forward" for name in runs[0]) == 2


class Listed(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in [layer for layer in self.layers]:  # noqa: C416 - a function of its own
            x = layer(x)
        return self.norm(x)


class Mode(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            with torch.enable_grad():
                x = layer(x)
        return self.norm(x)


class Same(Chain):
    def forward(self, x: Tensor) -> Any:
        first = x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if x is not self.embed else layer(first)
        return self.norm(x)


@pytest.mark.parametrize("kind", [Listed, Mode, Same, Branches, Counts, DrawsInPython, Hooks])
def test_a_forward_that_may_do_something_else_runs_each_time(kind: type[Chain]) -> None:
    pieces, x = split(kind()), torch.randn(3, WIDTH)
    given = pieces[0](x)
    for _ in range(2):
        assert f"{kind.__name__}.forward" in events(lambda: pieces[1](*given))


def test_a_first_stage_that_draws_is_known_again() -> None:
    pieces, x = split(Noise()), torch.randn(3, WIDTH)
    pieces[0](x)
    assert not any("FirstRun" in name for name in events(lambda: pieces[0](x)))


@pytest.mark.parametrize(
    "make", [Residual, Branches, Global, Masks, Memory, Checkpointed, ViT, ResNet]
)
def test_later_calls_make_no_placeholders(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = make()
    path = "layers" if hasattr(model, "layers") else "blocks"
    x = torch.randn(2, 3, 8, 8) if path == "blocks" else torch.randn(3, WIDTH)
    pieces = tl.split.by_names(model, [f"{path}.1", f"{path}.2"], example=(x,))
    wanted = pieces(x)
    made: list[object] = []
    new: Any = Placeholder.__new__
    monkeypatch.setattr(
        Placeholder, "__new__", staticmethod(lambda *args, **kw: made.append(0) or new(*args, **kw))
    )
    found = pieces(x)
    assert not made
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_value_is_freed_when_the_next_one_is_there() -> None:
    """Without gradients, a stage of many layers has two activations, not all."""
    model = Chain()
    pieces = tl.split.by_names(model, ["layers.0", "norm"], example=(torch.zeros(3, WIDTH),))
    alive: list[int] = []
    made: list[Any] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        made.append(weakref.ref(output))
        alive.append(sum(each() is not None for each in made))

    for layer in model.layers:
        layer.register_forward_hook(note)
    with torch.no_grad():
        given = pieces[0](torch.randn(3, WIDTH))
        for _ in range(2):
            made.clear()
            alive.clear()
            pieces[1](*given)
    assert len(alive) == 6
    assert max(alive) == 2


def test_operations_after_the_last_layer() -> None:
    class Mean(Chain):
        def forward(self, x: Tensor) -> Any:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return F.relu(self.norm(x)).mean()

    torch.manual_seed(0)
    pieces = split(Mean())
    for _ in range(3):
        same_as_cold(pieces, torch.randn(3, WIDTH))
