"""The split backward gives the gradients of a plain one, bit for bit, and frees what it can."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, save_on_cpu
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from taktline.errors import SplitError
from taktline.stage import PipelineStage
from taktline.stage.split_backward import Pending, Splitter
from tests.stage.compiling import computed_in_w, weights_of

Gradients = list[Tensor | None]
Forward = Callable[[Any, Tensor], Any]
MICROBATCHES = 4
I_ORDER, W_ORDER = (1, 0, 3, 2), (2, 1, 3, 0)


class Piece(nn.Module):
    """Parts by name, and a function of them and the input."""

    def __init__(self, function: Forward, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def freeze(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def tie(module: nn.Module, one: str, other: str) -> nn.Module:
    module.get_submodule(other).weight = module.get_submodule(one).weight
    return module


class Scaled(torch.autograd.Function):
    """Has a field that leaves have too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.variable = x
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x).sum(0)


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x.unsqueeze(0)).chunk(3, -1)
    return x + m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)).squeeze(0)


def experts(m: Any, x: Tensor) -> Tensor:
    """Rows go to the expert that they choose; some experts get none."""
    scores = m.gate(x).softmax(-1)
    best, chosen = scores.max(-1)
    out = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        rows = (chosen == index).nonzero().squeeze(-1)
        if len(rows):
            out = out.index_add(0, rows, expert(x[rows]) * best[rows, None])
    return out


def positive(x: Tensor) -> bool:
    return bool(x.detach().sum() > 0)


def two_branches(m: Any, x: Tensor) -> Tensor:
    return m.a(x) if positive(x) else m.b(x) * 2


def one_scale_or_other(m: Any, x: Tensor) -> Tensor:
    """Graphs of one shape and one product, with different leaves elsewhere."""
    return m.a(x * (m.p if positive(x) else m.q))


def once_or_twice(m: Any, x: Tensor) -> Tensor:
    """Graphs of one shape; in one of them the weight has another use."""
    return m.a(x) * (m.a.weight if positive(x) else m.b.weight).sum()


def one_layer_or_two(m: Any, x: Tensor) -> Tensor:
    """Graphs with as many edges at each node on the way, which join in one and not in the other."""
    y, z = m.a(x), m.b(x)
    return y.tanh() * (y if positive(x) else z).tanh()


def scaled_or_not(m: Any, x: Tensor) -> Tensor:
    return torch.addmm(m.b, x, m.w, alpha=1 if positive(x) else 2)


def checkpointed_or_not(m: Any, x: Tensor) -> Any:
    return m.a(x) if positive(x) else checkpoint(m.a, x, use_reentrant=False)


def input_or_own(m: Any, x: Tensor) -> Tensor:
    return m.a(x) * (x if positive(x) else m.p.view(-1)).sum()


def roots_change(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = m.a(x)
    return (y, m.a(y)) if positive(x) else (m.a(y),)


def leaf_or_not(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x, m.a(x)) if positive(x) else (m.a(x), x)


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.mul_(2)
    y[:, :2] += 1
    y.relu_()
    return m.b(y.view(-1, 4)).add_(1)


def added_view(m: Any, x: Tensor) -> Tensor:
    """The engine gives the parameter a gradient in the memory of the layer's."""
    p = m.p.view(1, 5, 4)
    return m.a(m.n(x).view(1, 5, 4)) + p


def lora(m: Any, x: Tensor) -> Tensor:
    return m.base(x) + x @ m.down.t() @ m.up.t() * 0.5


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.b(F.gelu(m.a(x)))


def autocast_shared(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.a(F.gelu(m.a(x)))


def offloaded(m: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        y = F.gelu(m.a(x))
    return m.b(y)


def checkpointed(reentrant: bool) -> Forward:
    return lambda m, x: m.c(checkpoint(m.a, m.b(x), use_reentrant=reentrant))


def recurrent(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y, (h, c) = m.rnn(x.unsqueeze(1))
    return y, h, c


def linear(**kwargs: Any) -> nn.Linear:
    return nn.Linear(4, 4, **kwargs)


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))


MODULES: dict[str, Callable[[], nn.Module]] = {
    # Layers
    "linear": lambda: nn.Linear(4, 4),
    "one out": lambda: nn.Linear(4, 1),
    "one in": lambda: Piece(lambda m, x: m.a(x[:, :1]), a=nn.Linear(1, 4)),
    "one by one": lambda: Piece(lambda m, x: x[:, :1] @ m.w + m.a(x[:, :1]), w=matrix(1, 1),
                                a=nn.Linear(1, 1)),
    "non-contiguous": lambda: Piece(lambda m, x: m.a(x.t()), a=nn.Linear(5, 3)),
    "non-contiguous 3-D": lambda: Piece(
        lambda m, x: m.b(m.a(x.expand(2, 5, 4).transpose(0, 1)).transpose(0, 1)),
        a=linear(), b=linear(bias=False)),
    "mlp": mlp,
    "norms": lambda: nn.Sequential(linear(), nn.RMSNorm(4), linear(), nn.BatchNorm1d(4)),
    "conv": lambda: Piece(lambda m, x: m.a(m.c(x.view(1, 1, 5, 4))), a=linear(),
                          c=nn.Conv2d(1, 2, 3, padding=1)),
    "embedding": lambda: Piece(lambda m, x: m.a(m.e((x * 2).long().abs() % 7)) + x[:, :, None],
                               e=nn.Embedding(7, 4), a=linear()),
    "einsum": lambda: Piece(lambda m, x: m.a(torch.einsum("bi,io->bo", x, m.w)), w=matrix(4, 4),
                            a=linear()),
    "x @ w": lambda: Piece(lambda m, x: (x @ m.w).tanh() @ m.v.t(), w=matrix(4, 8), v=matrix(4, 8)),
    "w @ x": lambda: Piece(lambda m, x: m.w @ m.a(x), w=matrix(3, 5), a=linear()),
    "addmm": lambda: Piece(
        lambda m, x: torch.addmm(m.b, torch.addmm(m.b, x, m.w, beta=3), m.v, alpha=2),
        b=matrix(4), w=matrix(4, 4), v=matrix(4, 4)),
    "function": lambda: Piece(lambda m, x: m.a(Scaled.apply(m.a(x), m.p)), a=linear(), p=matrix(4)),
    # Sharing
    "used four times": lambda: Piece(lambda m, x: m.a(m.a(m.a(m.a(x).tanh()).sin()).cos()),
                                     a=linear()),
    "turned once": lambda: Piece(
        lambda m, x: (lambda w: ((x @ w).tanh() @ w).tanh() @ w)(m.w.t()), w=matrix(4, 4)),
    "turned or not": lambda: Piece(lambda m, x: x @ m.w + x @ m.w.t(), w=matrix(4, 4)),
    "tied": lambda: tie(nn.Sequential(linear(), nn.Tanh(), linear()), "0", "2"),
    "tied embedding": lambda: tie(
        Piece(lambda m, x: m.a(m.e((x * 2).long().abs() % 7).sum(1) + x), e=nn.Embedding(7, 4),
              a=nn.Linear(4, 7, bias=False)), "e", "a"),
    # Several outputs of a node
    "chunk": lambda: Piece(
        lambda m, x: torch.cat([h.tanh() for h in m.a(x).chunk(2, -1)][::-1], -1), a=linear()),
    "unbind": lambda: Piece(lambda m, x: [m.b(y) for y in m.a(x).view(5, 2, 2).unbind(1)],
                            a=linear(), b=nn.Linear(2, 3)),
    "lstm": lambda: Piece(recurrent, rnn=nn.LSTM(4, 3, 2)),
    "attention": lambda: Piece(attention, qkv=nn.Linear(4, 12), out=linear()),
    "hands its input on": lambda: Piece(lambda m, x: (x, m.a(x).sin()), a=linear()),
    "hands on nothing else": lambda: Piece(lambda m, x: x, a=linear()),
    # Who gets gradients
    "frozen": lambda: freeze(mlp(), "1.weight", "3.bias"),
    "all frozen": lambda: mlp().requires_grad_(False),
    "lora": lambda: Piece(lora, base=linear().requires_grad_(False), down=matrix(2, 4),
                          up=matrix(4, 2)),
    "unused": lambda: Piece(lambda m, x: m.a(x), a=linear(), b=linear()),
    "branches": lambda: Piece(two_branches, a=linear(), b=linear()),
    "other leaf": lambda: Piece(one_scale_or_other, a=linear(), p=matrix(4), q=matrix(4)),
    "other use": lambda: Piece(once_or_twice, a=linear(), b=linear()),
    "other joints": lambda: Piece(one_layer_or_two, a=linear(), b=linear()),
    "other alpha": lambda: Piece(scaled_or_not, w=matrix(4, 4), b=matrix(4)),
    "other end": lambda: Piece(input_or_own, a=linear(), p=matrix(4)),
    "other roots": lambda: Piece(roots_change, a=linear()),
    "other leaf out": lambda: Piece(leaf_or_not, a=linear()),
    "experts": lambda: Piece(experts, gate=nn.Linear(4, 3),
                             experts=nn.ModuleList(mlp() for _ in range(3))),
    # Outputs
    "input out, used twice": lambda: Piece(
        lambda m, x: (x, m.a(x) + m.b(x).tanh()), a=linear(), b=linear()),
    "parameter out": lambda: Piece(lambda m, x: (m.a(x), m.a.weight, m.a.bias), a=linear()),
    "weight shown": lambda: Piece(lambda m, x: (m.a(x), m.a.weight.t()), a=linear()),
    "used weight shown": lambda: Piece(
        lambda m, x: (lambda w: (x @ w, w))(m.a.weight.t()), a=linear()),
    "twice out": lambda: Piece(lambda m, x: [m.a(x)] * 2, a=linear()),
    "view out": lambda: Piece(lambda m, x: (lambda y: (y, y.view(-1), y[1:]))(m.a(x)), a=linear()),
    "no gradient": lambda: Piece(lambda m, x: {"skip": m.a(x), "y": m.b(m.a(x))}, a=linear(),
                                 b=linear()),
    "in place": lambda: Piece(in_place, a=linear(), b=linear()),
    "added view": lambda: Piece(added_view, n=nn.LayerNorm(4), a=linear(), p=matrix(20)),
    # Ways to run
    "checkpoint": lambda: Piece(checkpointed(False), a=dropped(), b=linear(), c=linear()),
    "checkpoint, re-entrant": lambda: Piece(checkpointed(True), a=dropped(), b=linear(),
                                            c=linear()),
    "checkpoint at times": lambda: Piece(checkpointed_or_not, a=dropped()),
    "dropout": dropped,
    "save_on_cpu": lambda: Piece(offloaded, a=linear(), b=linear()),
    "autocast": lambda: Piece(autocast, a=nn.Linear(4, 8), b=nn.Linear(8, 4, bias=False)),
    "autocast, shared": lambda: Piece(autocast_shared, a=linear()),
    "bfloat16": lambda: Piece(lambda m, x: m.b(m.a(x.bfloat16())).float(), a=mlp().bfloat16(),
                              b=linear(dtype=torch.bfloat16)),
    "double": lambda: Piece(lambda m, x: m.a(x.double()) @ m.b.weight.double().t(),
                            a=linear(dtype=torch.double), b=linear()),
}  # fmt: skip


def example(index: int, *, grad: bool = True) -> Tensor:
    """One micro-batch's input; their sums differ in sign."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(5, 4, generator=generator) + (1 if index % 2 else -1)
    return x.requires_grad_(grad)


def outputs_of(module: nn.Module, x: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Outputs that get gradients, and these."""
    torch.default_generator.manual_seed(seed)  # the other one notes where it was called
    output = module(x)
    if isinstance(output, dict):
        output.pop("skip", None)
    roots = [y for y in pytree.tree_leaves(output) if y.requires_grad]
    return [(y, torch.randn(y.shape).to(y)) for y in roots]


def plain(module: nn.Module, *, grad: bool = True) -> list[list[tuple[Gradients, Gradients]]]:
    """Gradients of the input and of the parameters: for two iterations, each micro-batch alone."""
    found: list[list[tuple[Gradients, Gradients]]] = []
    for iteration in range(2):
        xs = [example(index, grad=grad) for index in range(MICROBATCHES)]
        pairs = [outputs_of(module, x, index + 10 * iteration) for index, x in enumerate(xs)]
        alone: dict[int, tuple[Gradients, Gradients]] = {}
        for index in I_ORDER:
            module.zero_grad()
            if pairs[index]:
                roots, gradients = zip(*pairs[index], strict=True)
                torch.autograd.backward(roots, gradients)
            own = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            alone[index] = ([xs[index].grad], own)
        found.append([alone[index] for index in range(MICROBATCHES)])
    return found


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def check_exact(module: nn.Module, *, grad: bool = True) -> set[str]:
    """Compare the split with a plain backward; returns the names of what W has done."""
    expected = plain(deepcopy(module), grad=grad)
    splitter, parameters = Splitter(), list(module.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    totals: Gradients = [None] * len(parameters)
    later: set[Tensor] = set()

    def add(iteration: int, index: int, chosen: Callable[[Tensor], bool]) -> None:
        for position, value in enumerate(expected[iteration][index][1]):
            if value is not None and chosen(parameters[position]):
                known = totals[position]
                totals[position] = value if known is None else known + value

    for iteration in range(2):
        xs = [example(index, grad=grad) for index in range(MICROBATCHES)]
        ready = [outputs_of(module, x, index + 10 * iteration) for index, x in enumerate(xs)]
        due: dict[int, Pending | None] = {}
        for index in I_ORDER:
            roots, gradients = [y for y, _ in ready[index]], [g for _, g in ready[index]]
            inputs = [x for x in xs[index : index + 1] if x.requires_grad]
            due[index] = pending = (
                splitter.run_input(roots, gradients, inputs, trainable) if roots else None
            )
            weights = set(weights_of(pending) if pending else ())
            add(iteration, index, lambda p, weights=weights: p not in weights)
            assert same(xs[index].grad, expected[iteration][index][0][0])
        for index in W_ORDER:
            pending = due[index]
            weights = set(weights_of(pending) if pending else ())
            if pending is not None:
                pending.run()
            add(iteration, index, lambda p, weights=weights: p in weights)
            later |= weights
        for (name, parameter), total in zip(module.named_parameters(), totals, strict=True):
            assert same(parameter.grad, total), name
    return {name for name, p in module.named_parameters() if p in later}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grad", [True, False], ids=["", "no input gradient"])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_equal_plain_ones(name: str, grad: bool) -> None:
    if name == "checkpoint, re-entrant" and not grad:
        pytest.skip("torch gives no gradients then")
    torch.manual_seed(0)
    check_exact(MODULES[name](), grad=grad)


def test_w_does_what_it_can() -> None:
    torch.manual_seed(0)
    later = {
        "mlp": {"1.weight", "3.weight"},
        "lora": {"down", "up"},
        "attention": {"qkv.weight", "out.weight"},
        "autocast": {"a.weight", "b.weight"},
        "checkpoint": {"b.weight", "c.weight"},
        "frozen": {"3.weight"},
        "hands its input on": {"a.weight"},
        "x @ w": {"w", "v"},
    }
    later |= {name: set() for name in ("tied", "used four times", "turned once")}
    assert {name: check_exact(MODULES[name]()) for name in later} == later


def begin(
    module: nn.Module,
    x: Tensor,
    gradient: Tensor | None = None,
    splitter: Splitter | None = None,
) -> Pending | None:
    """I of a backward; returns what is left to W."""
    y = module(x)
    gradient = torch.ones_like(y) if gradient is None else gradient
    inputs, weights = [x] if x.requires_grad else [], list(module.parameters())
    return (splitter or Splitter()).run_input([y], [gradient], inputs, weights)


def begin_w(*given: Any) -> Pending:
    """The same, where something is left."""
    pending = begin(*given)
    assert pending is not None
    return pending


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert same(p.grad, q.grad)


def test_the_graph_may_change_between_steps() -> None:
    """Freezing, unfreezing and hooks between two uses of one splitter."""
    torch.manual_seed(0)
    module, splitter = mlp(), Splitter()
    reference = deepcopy(module)
    calls: list[str] = []

    def step() -> None:
        reference.zero_grad()
        module.zero_grad()
        reference(example(0)).sum().backward()
        pending = begin(module, example(0), None, splitter)
        if pending is not None:
            pending.run()
        assert_same_gradients(module, reference)

    step()
    for part in (module, reference):
        freeze(part, "1.bias", "3.weight", "0.weight")
    step()
    for part in (module, reference):
        part.requires_grad_(True)
    step()
    module.get_parameter("3.weight").register_hook(lambda gradient: calls.append("hook"))
    step()
    assert calls == ["hook"]


@pytest.mark.parametrize("name", ["1.weight", "1.bias"])
def test_hooks_run_once_for_each_backward(name: str) -> None:
    module, calls = mlp(), list[Tensor]()
    module.get_parameter(name).register_hook(calls.append)
    module.get_parameter(name).register_post_accumulate_grad_hook(calls.append)
    pending = begin_w(module, example(0))
    assert len(calls) == 2
    pending.run()
    assert len(calls) == 2


def test_a_hook_may_change_the_gradient() -> None:
    torch.manual_seed(0)

    def hooked(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        z = m.a(y)
        z.register_hook(lambda gradient: gradient * 2)
        return m.b(z)

    plain = Piece(hooked, norm=nn.LayerNorm(4), a=linear(), b=linear())
    split = deepcopy(plain)
    for part in (plain, split):
        part.get_parameter("b.weight").register_hook(lambda gradient: gradient * 3)
    plain(example(0)).sum().backward()
    begin_w(split, example(0)).run()
    assert_same_gradients(split, plain)


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_a_hook_on_the_node_of_a_parameter_runs(kind: str) -> None:
    """Wrappers that reduce gradients themselves put their hooks there."""
    layer, calls = linear(), []
    node = get_gradient_edge(layer.weight).node
    getattr(node, kind)(lambda *gradients: calls.append(gradients))
    pending = begin(layer, example(0))
    if pending is not None:
        pending.run()
    assert len(calls) == 1


def test_gradients_share_no_memory_where_a_parameter_has_hooks() -> None:
    torch.manual_seed(0)
    module, splitter = MODULES["added view"](), Splitter()
    expected = deepcopy(module)
    module.get_parameter("a.bias").register_hook(lambda gradient: None)
    for index in range(2):
        expected(example(index)).sum().backward()
    due = [begin_w(module, example(index), None, splitter) for index in range(2)]
    for pending in due:
        pending.run()
    assert_same_gradients(module, expected)


def test_an_optimizer_in_the_backward() -> None:
    """Each parameter learns, and loses its gradient, as soon as it has one."""
    torch.manual_seed(0)
    split = mlp()
    plain = deepcopy(split)
    for part in (split, plain):
        for parameter in part.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def learn(p: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(learn)
    splitter = Splitter()
    for index in range(3):
        plain(example(index)).sum().backward()
        assert begin(split, example(index), None, splitter) is None
        for p, q in zip(plain.parameters(), split.parameters(), strict=True):
            assert q.grad is None
            assert torch.equal(p, q)


def test_a_factor_must_stay_as_it_is_until_w() -> None:
    x = example(0, grad=False)
    pending = begin_w(linear(), x)
    x.zero_()
    with pytest.raises(SplitError, match="changed in place between"):
        pending.run()


def test_gradients_that_are_differentiated_themselves() -> None:
    """Neither what a backward begins with nor what it is added to ties W to a graph."""
    torch.manual_seed(0)
    module = linear()
    plain = deepcopy(module)
    for part in (module, plain):
        part.weight.grad = torch.ones(4, 4, requires_grad=True)
    plain(example(0)).backward(torch.ones(5, 4))
    begin_w(module, example(0), torch.ones(5, 4, requires_grad=True)).run()
    assert module.weight.grad is not None
    assert module.weight.grad.grad_fn is None
    assert same(module.weight.grad, plain.weight.grad)


def test_gradients_of_another_type() -> None:
    layer = linear(dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    for _ in range(2):
        begin_w(layer, example(0).bfloat16().detach()).run()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def products(run: Callable[[], object]) -> int:
    """How many matrix products a call does."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    return sum(
        event.name in ("aten::mm", "aten::addmm", "aten::bmm") for event in profiler.events() or ()
    )


def test_i_leaves_the_products_of_weights_to_w() -> None:
    layers = nn.Sequential(linear(), nn.Tanh(), linear(bias=False), nn.Tanh(), linear())
    splitter, due = Splitter(), list[Pending]()
    for _ in range(2):
        # Three of the forward.
        assert products(lambda: due.append(begin_w(layers, example(0), None, splitter))) == 6
        assert products(due.pop().run) == 3


class Keep(nn.Module):
    """Notes the tensors that pass."""

    def __init__(self, seen: dict[str, weakref.ref[torch.UntypedStorage]], name: str) -> None:
        super().__init__()
        self.seen, self.name = seen, name

    def forward(self, x: Tensor) -> Tensor:
        self.seen[self.name] = weakref.ref(x.untyped_storage())
        if x.requires_grad:
            x.register_hook(self.note)
        return x

    def note(self, gradient: Tensor) -> None:
        self.seen[f"d{self.name}"] = weakref.ref(gradient.untyped_storage())


def test_after_i_only_what_w_needs_is_alive() -> None:
    seen: dict[str, weakref.ref[torch.UntypedStorage]] = {}
    parts: list[nn.Module] = []
    for index in range(4):
        parts += [nn.LayerNorm(4), Keep(seen, f"X{index}"), linear(), Keep(seen, f"Y{index}")]
        parts += [nn.GELU(), Keep(seen, f"Z{index}")]
    module = nn.Sequential(*parts)

    def alive() -> set[str]:
        gc.collect()
        return {name for name, ref in seen.items() if ref() is not None}

    x = example(0)
    output = module(x)
    loss = output.sum()
    del output
    before = alive()
    assert before >= {f"{kind}{index}" for kind in "XY" for index in range(4)}
    pending = Splitter().run_input([loss], [torch.tensor(1.0)], [x], [*module.parameters()])
    assert pending is not None
    assert alive() == {f"{kind}{index}" for kind in ("X", "dY") for index in range(4)}
    pending.run()
    # The loss, and with it the emptied graph, is still there.
    assert loss.grad_fn is not None
    assert alive() == set()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler loads
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_what_cannot_be_split_is_computed_in_i() -> None:
    torch._dynamo.reset()
    block: Any = torch.compile(mlp(), backend="aot_eager")
    assert computed_in_w(nn.Sequential(linear(), block), example(0)) == ["0.weight"]
    hooked = nn.Sequential(linear(), linear())
    hooked[0].get_parameter("weight").register_hook(lambda gradient: None)
    assert computed_in_w(hooked, example(0)) == ["1.weight"]


def test_a_backward_that_is_not_split_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    module, splitter = MODULES["checkpoint, re-entrant"](), Splitter("stage 3")
    for index in range(2):
        assert begin(module, example(index), None, splitter) is None
    assert caplog.messages == [
        "stage 3: its backward is not split: re-entrant checkpointing runs its backward at once; "
        "pass use_reentrant=False"
    ]


def test_a_stage_with_its_own_weight_gradients() -> None:
    calls: list[str] = []
    built: list[Any] = [lambda: calls.append("W"), lambda: calls.append("W"), None]
    stage = PipelineStage(
        linear(), 0, 2, torch.device("cpu"), dw_builder=lambda: calls.append("b") or built.pop(0)
    )
    stage.begin()
    for m in range(3):
        x = example(m)
        stage.keep(m, [x], [stage.submod(x)])
    assert stage.backward_input(0, [torch.ones(5, 4)])[0] is not None
    assert stage.submod.get_parameter("weight").grad is not None
    assert calls == ["b"]
    stage.backward_weight(0)
    stage.backward_weight(0)
    assert calls == ["b", "W"]
    stage.backward(1, [torch.ones(5, 4)])
    assert calls == ["b", "W"] * 2
    text = (
        "dw_builder of stage 0 must return a function that computes the gradients of the weights, "
        "not None"
    )
    with pytest.raises(SplitError, match=text):
        stage.backward_input(2, [torch.ones(5, 4)])


@st.composite
def modules(draw: st.DrawFn) -> nn.Module:
    """Pieces in a row; some layers are used again, some parameters are frozen."""
    torch.manual_seed(draw(st.integers(0, 9)))
    layers: list[nn.Linear] = []

    def piece(depth: int) -> nn.Module:
        kinds = ["linear", "again", "norm", "tanh", "relu", "turn"]
        kind = draw(st.sampled_from(kinds + ["residual", "chunk"] * (depth < 2)))
        if kind == "again" and layers:
            return draw(st.sampled_from(layers))
        if kind in ("linear", "again"):
            layers.append(nn.Linear(4, 4, bias=draw(st.booleans())))
            return layers[-1]
        if kind in ("residual", "chunk"):
            inner = nn.Sequential(*(piece(depth + 1) for _ in range(draw(st.integers(1, 3)))))
            if kind == "residual":
                return Piece(lambda m, x: x + m.a(x), a=inner)
            return Piece(lambda m, x: m.a(torch.cat(x.chunk(2, -1)[::-1], -1)), a=inner)
        if kind == "relu":
            return Piece(lambda m, x: (x + 0).relu_())
        if kind == "turn":
            return Piece(lambda m, x: x @ m.w, w=matrix(4, 4))
        return nn.LayerNorm(4) if kind == "norm" else nn.Tanh()

    module = nn.Sequential(*(piece(0) for _ in range(draw(st.integers(1, 6)))))
    for parameter in module.parameters():
        parameter.requires_grad_(draw(st.integers(0, 3)) > 0)
    shape: Sequence[int] = draw(st.sampled_from([(5, 4), (1, 5, 4), (5, 1, 4), (20,), (2, 2, 5)]))
    if shape[-1] == 4:
        return Piece(lambda m, x: m.a(x.view(shape)), a=module)
    if len(shape) == 1:
        return Piece(lambda m, x: m.a(x[:1]), a=module)
    return Piece(lambda m, x: m.a(x.expand(3, 5, 4).transpose(0, 1)), a=module)


@settings(max_examples=60, deadline=None)
@given(module=modules(), grad=st.booleans())
def test_random_modules(module: nn.Module, grad: bool) -> None:
    check_exact(module, grad=grad)
