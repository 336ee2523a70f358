"""OFFLOAD, RELOAD and RECOMPUTE: they change what memory holds, and no bit of what is computed."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.plan import Action, Kind, Plan
from taktline.plan.action import Overlap
from taktline.stage.offload import Copies, copies_on
from taktline.stage.split_backward import Product
from tests.runtime import parallel
from tests.runtime.features import DYNAMIC, FEATURES, INEXACT
from tests.runtime.scenarios import (
    SCHEDULES,
    assert_same,
    plan_for,
    run_local,
    run_plain,
    run_stages,
)
from tests.runtime.test_capture import Graphs, capture
from tests.workers import Workers

CPU = torch.device("cpu")
Choose = Callable[[int, int], str]
"""Which of OFFLOAD, RECOMPUTE and "" a stage does with a micro-batch."""

MODES: dict[str, Choose] = {
    "offload all": lambda s, m: "OFFLOAD",
    "offload some": lambda s, m: "OFFLOAD" * ((s + m) % 2),
    "recompute some": lambda s, m: "RECOMPUTE" * ((s + m) % 2),
    "recompute all": lambda s, m: "RECOMPUTE",
    "both": lambda s, m: ("OFFLOAD", "RECOMPUTE", "")[(s + m) % 3],
}


def saving(plan: Plan, choose: Choose) -> Plan:
    """The same plan that saves memory: each copy begins right after F, and ends right before B."""
    by_rank: list[list[Any]] = []
    for rank in range(plan.ranks):
        found: list[Any] = []
        for action in plan.rows_of(rank).actions():
            parts = [action.forward, action.backward] if isinstance(action, Overlap) else [action]
            before, after = list[Action](), list[Action]()
            for part in parts:
                m = part.microbatch
                what = "" if m is None else choose(part.stage, m)
                if what and part.kind in (Kind.B, Kind.I):
                    back = Kind.RELOAD if what == "OFFLOAD" else Kind.RECOMPUTE
                    before.append(Action(part.stage, back, m))
                elif what == "OFFLOAD" and part.kind == Kind.F:
                    after.append(Action(part.stage, Kind.OFFLOAD, m))
            found += [*before, action, *after]
        by_rank.append(found)
    return Plan.from_actions(by_rank, name=f"{plan.name}, saving")


def run_saving(rank: int, group: Any, name: str, schedule: str, ranks: int, mode: str) -> Any:
    plan = saving(plan_for(schedule, ranks), MODES[mode])
    return run_stages(rank, group, FEATURES[name], plan, dynamic_shapes=name in DYNAMIC)


def check(found: Any, name: str, schedule: str, ranks: int) -> None:
    plain = run_plain(FEATURES[name], plan_for(schedule, ranks))
    assert_same(found, plain, exact=name not in INEXACT)


GRID = [*product(FEATURES, SCHEDULES, MODES)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "schedule", "mode"), GRID[::11])
def test_local_ranks(name: str, schedule: str, mode: str) -> None:
    plan = saving(plan_for(schedule, 2), MODES[mode])
    check(run_local(FEATURES[name], plan, dynamic_shapes=name in DYNAMIC), name, schedule, 2)


@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "schedule", "mode"), GRID[5::23])
def test_processes(workers: Workers, name: str, schedule: str, mode: str) -> None:
    ranks = 4 if name in ("unet", "skip", "nested") else 2
    given = name, schedule, ranks
    check(workers.run(run_saving, *given, mode, ranks=ranks), *given)


class Block(nn.Module):
    """Half of a transformer's block: saves an output (tanh), masks, and the inputs of products."""

    def __init__(self, *, p: float = 0.0, checkpoints: bool = False) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(p)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Tied(nn.Module):
    """The first and the last stage have one weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def tied(count: int) -> list[nn.Module]:
    weight = nn.Parameter(torch.randn(8, 8))
    return [Tied(weight), *(Block() for _ in range(count - 2)), Tied(weight)]


MODELS: dict[str, tuple[Callable[[int], list[nn.Module]], dict[str, Any]]] = {
    "dropout": (lambda n: [Block(p=0.3) for _ in range(n)], {}),
    "dropout with a seed": (lambda n: [Block(p=0.3) for _ in range(n)], {"seed": 3}),
    "checkpointed": (lambda n: [Block(p=0.3, checkpoints=True) for _ in range(n)], {}),
    "autocast": (lambda n: [Block() for _ in range(n)], {}),
    "tied": (tied, {}),
    "batch norm": (lambda n: [nn.Sequential(Block(), nn.BatchNorm1d(8)) for _ in range(n)], {}),
    "spectral norm": (
        lambda n: [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(n)],
        {},
    ),
}


def train(pipe: tl.Pipeline, *, steps: int = 4, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The losses, and then gradients and buffers, of some steps."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x, target = torch.randn(2, 8, 8).unbind()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            losses.append(pipe.step(x, target=target))
    modules = list(pipe.stages.values())
    grads = [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    return [*losses, *grads, *(b for m in modules for b in m.buffers()), torch.rand(1)]


def pipeline(modules: Sequence[nn.Module], plan: Plan, **options: Any) -> tl.Pipeline:
    given = {"loss_fn": nn.functional.mse_loss, "ranks": plan.ranks, **options}
    return tl.Pipeline(copy.deepcopy(list(modules)), schedule=plan, **given)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved_1f1b"])
@pytest.mark.parametrize("name", MODELS)
def test_as_the_same_plan_without(name: str, schedule: str) -> None:
    """Random numbers, and what the forwards change, as in the plan that saves nothing."""
    plan = tl.build(schedule, ranks=2, microbatches=4)
    make, options = MODELS[name]
    torch.manual_seed(0)
    modules = make(plan.stages)
    dtype = torch.bfloat16 if name == "autocast" else None
    # Each action by itself: the quick loop of such a plan would draw in another order.
    never = saving(plan, MODES["offload all"])
    expected = train(pipeline(modules, never, **options), dtype=dtype)
    with_trace = pipeline(modules, plan, **options)
    with with_trace.trace():
        assert_equal(train(with_trace, dtype=dtype), expected)
    for mode in ("offload some", "recompute all", "both"):
        found = train(pipeline(modules, saving(plan, MODES[mode]), **options), dtype=dtype)
        assert_equal(found, expected)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mode", MODES)
def test_w_computes_the_same_products(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Product] = []
    compute = Product.compute
    monkeypatch.setattr(
        Product, "compute", lambda self, *given: computed.append(self) or compute(self, *given)
    )
    plan = tl.build("interleaved_zero_bubble", ranks=2, microbatches=4)
    # The last stage's I is followed by its W, and both are joined to B.
    train(pipeline([Block() for _ in range(4)], saving(plan, MODES[mode])), steps=1)
    expected, computed[:] = len(computed), []
    with (pipe := pipeline([Block() for _ in range(4)], plan)).trace():
        train(pipe, steps=1)
    assert 0 < expected <= len(computed)


class Looks(Block):
    """Notes how many bytes all tensors on this machine have, before each forward."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self._seen = seen

    def forward(self, x: Tensor) -> Tensor:
        tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        memories = {each.untyped_storage().data_ptr(): each for each in tensors}
        self._seen.append(sum(each.untyped_storage().nbytes() for each in memories.values()))
        return super().forward(x)

    def __deepcopy__(self, _: Any) -> Looks:
        return self


def test_memory_of_the_device_is_free() -> None:
    """Of what is offloaded, one forward's is under way, and so still there in the next."""
    plan = Plan.from_actions([[f"0F{m}" for m in range(6)] + [f"0B{m}" for m in range(6)]])
    seen: list[int] = []
    pipe = pipeline([Looks(seen)], saving(plan, MODES["offload all"]))
    gc.collect()
    gc.freeze()
    train(pipe, steps=2)
    gc.unfreeze()
    before, *away = seen[6:12]
    assert away[0] > before
    assert max(away[1:]) < 1.1 * away[0]


class Output(nn.Module):
    """Notes which of its outputs and of its hidden values are alive before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.made: list[Any] = []
        self.alive: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        from torch.multiprocessing.reductions import StorageWeakRef

        alive = [[not each.expired() for each in pair] for pair in self.made]
        self.alive.append(tuple(map(sum, zip(*alive, strict=True))))
        hidden = torch.tanh(self.up(x))
        output = self.down(hidden)
        self.made.append([StorageWeakRef(x.untyped_storage()) for x in (hidden, output)])
        return output


def run_outputs(rank: int, group: Any, mode: str) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    module = Output()
    stage = tl.PipelineStage(module, rank, 2, CPU, group=group)
    plan = saving(tl.build("gpipe", ranks=2, microbatches=4), lambda s, m: mode)
    schedule = tl.ScheduleFromPlan([stage], plan, nn.functional.mse_loss)
    x = torch.ones(8, 8)
    for _ in range(3):
        module.made.clear()
        module.alive.clear()
        schedule.step(x, target=x, return_outputs=False)
    return module.alive[1:]


@pytest.mark.processes
def test_what_was_sent_is_not_kept(workers: Workers) -> None:
    """The first stage's output is not saved: it lives as long as its message is under way."""
    first, _ = workers.run(run_outputs, "", ranks=2)
    assert [hidden for hidden, _ in first] == [1, 2, 3]
    assert [output for _, output in first] == [0, 0, 0]
    for alive in workers.run(run_outputs, "RECOMPUTE", ranks=2):
        assert [hidden for hidden, _ in alive[:3]] == [0, 0, 0]


@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["recompute all", "both"])
@pytest.mark.parametrize("wrapper", parallel.WRAPPERS)
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_stages_in_wrappers(workers: Workers, schedule: str, wrapper: str, mode: str) -> None:
    case = parallel.Case(schedule, parallel.WRAPPERS[wrapper], ("step", "update", "step"))
    plan = parallel.texts(saving(case.plan, MODES[mode]))
    parallel.assert_like_plain(workers.run(parallel.run_case, case, plan, ranks=4), case)


# What goes wrong.


class Fails(Block):
    """Fails once, in a forward or a backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "forward" and self.calls == 7:
            raise ValueError("as the test wants it")
        y = super().forward(x)
        if self.where == "backward" and self.calls == 5:
            y.register_hook(self._fail)
        return y

    def _fail(self, _: Tensor) -> None:
        raise ValueError("as the test wants it")


@pytest.mark.parametrize("mode", ["offload all", "recompute all", "both"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_a_failure_works(where: str, mode: str) -> None:
    plan = saving(tl.build("gpipe", ranks=2, microbatches=4), MODES[mode])
    torch.manual_seed(0)
    blocks = [Block(), Fails(where)]
    expected = train(pipeline([Block(), Fails("")], plan))  # of another seed, for its length only
    copies = copies_on(CPU)
    failing, working = (pipeline([blocks[0], each], plan) for each in (blocks[1], Fails("")))
    working.stages[1].load_state_dict(failing.stages[1].state_dict())
    with pytest.raises(tl.StageError, match="as the test wants it"):
        train(failing)
    setattr(failing.stages[1], "where", "")  # noqa: B010
    for p in failing.parameters():
        p.grad = None
    found, plain = train(failing), train(working)
    assert_equal(found, plain)
    assert len(found) == len(expected)
    assert is_given_back(copies)


def is_given_back(copies: Copies) -> bool:
    """Whether all memory on the host waits for the next step."""
    return copies.held == sum(size * len(free) for size, free in copies._free.items())


def failing(copies: Copies, what: str, error: BaseException) -> pytest.MonkeyPatch:
    """Until it is undone, there is no room on the host, or copies in a direction end half-way."""
    patch, copy_all = pytest.MonkeyPatch(), copies.copy

    def half(pairs: Any, *, inward: bool) -> Any:
        if inward != (what == "back"):
            return copy_all(pairs, inward=inward)
        target, source = next(iter(pairs))
        copy_all([(target[:8], source[:8])], inward=inward)
        raise error

    if what == "room":
        patch.setattr(copies, "_free", {})
        patch.setattr(copies, "limit", copies.held)
    else:
        patch.setattr(copies, "copy", half)
    return patch


def run_failing(rank: int, group: Any, what: str) -> str:
    """The error of a step in which rank 1 cannot copy; those around it find the same."""
    torch.manual_seed(0)
    plan = saving(tl.build("gpipe", ranks=2, microbatches=4), MODES["offload all"])
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    pipe, copies = pipeline([Block(), Block()], plan, ranks=None, mesh=mesh), copies_on(CPU)
    expected, text = copy.deepcopy(train(pipe, steps=1)), "nothing"
    patch = failing(copies, what, RuntimeError("the link is gone")) if rank else None
    try:
        train(pipe, steps=1)
    except tl.StageError as error:
        text = str(error)
    if patch is not None:
        patch.undo()
    for p in pipe.parameters():
        p.grad = None
    assert_equal(train(pipe, steps=1), expected)
    assert is_given_back(copies)
    return text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "room",
            r"rank 1, stage 1, micro-batch 0 \(1OFFLOAD0\).*no room on the host for \d+ B more",
        ),
        ("to the host", r"rank 1, stage 1, micro-batch 0 \(1OFFLOAD0\).*the link is gone"),
        ("back", r"rank 1, stage 1, micro-batch 0 \(1RELOAD0\).*the link is gone"),
    ],
)
def test_all_ranks_know_of_a_copy_that_fails(workers: Workers, what: str, text: str) -> None:
    for error in workers.run(run_failing, what, ranks=2):
        assert re.search(text, error), error


@pytest.mark.parametrize("what", ["to the host", "back"])
def test_an_interrupted_copy(what: str) -> None:
    """Ctrl-C while a copy is under way: the next step begins anew."""
    plan = saving(tl.build("gpipe", ranks=2, microbatches=4), MODES["offload all"])
    pipe = pipeline([Block(), Block()], plan)
    expected = copy.deepcopy(train(pipe))
    patch = failing(copies_on(CPU), what, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(pipe)
    patch.undo()
    for p in pipe.parameters():
        p.grad = None
    assert_equal(train(pipe), expected)
    assert is_given_back(copies_on(CPU))


class Wrong(Block):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "argument":
            y = super().forward(x)
            x.data.add_(0)
            x.add_(1)
            return y
        if self.what == "backward":
            y = super().forward(x)
            (slope,) = torch.autograd.grad(y.sum(), [self.up.weight], create_graph=True)
            return y + slope.sum()
        hidden = self.up(x).sigmoid()
        y = self.down(hidden)
        with torch.no_grad():
            hidden.add_(1)
        return y


@pytest.mark.parametrize(
    ("what", "mode", "text"),
    [
        ("saved", "offload all", r"\(0B0\): .*modified by an inplace operation.*version 1"),
        ("argument", "recompute all", r"\(0RECOMPUTE0\): .*was changed in place since"),
        ("backward", "recompute all", r"\(0F0\): .*calls a backward itself"),
    ],
)
def test_what_cannot_be_done_says_so(what: str, mode: str, text: str) -> None:
    plan = saving(tl.build("gpipe", ranks=2, microbatches=2), MODES[mode])
    with pytest.raises(tl.StageError, match=text):
        train(pipeline([Wrong(what), Block()], plan), steps=1)


def test_nothing_to_save() -> None:
    """A stage that saves nothing, or only what others hold, has nothing to copy."""
    plan = saving(tl.build("gpipe", ranks=2, microbatches=2), MODES["offload all"])
    train(pipeline([nn.Linear(8, 8), nn.Identity()], plan), steps=2)


# Captured steps.


@pytest.mark.parametrize("mode", MODES)
def test_captured(mode: str) -> None:
    plan = saving(tl.build("interleaved_1f1b", ranks=2, microbatches=4), MODES[mode])
    torch.manual_seed(0)
    modules = [Block() for _ in range(4)]
    graphs = Graphs()
    pipe = pipeline(modules, plan)
    capture(pipe._built.schedule, graphs)
    assert_equal(train(pipe, steps=6), train(pipeline(modules, plan), steps=6))
    assert graphs.log == ["capture", "replay", "replay", "replay"]


def test_recomputed_dropout_is_not_captured() -> None:
    plan = saving(tl.build("interleaved_1f1b", ranks=2, microbatches=4), MODES["both"])
    graphs = Graphs()
    pipe = pipeline([Block(p=0.1) for _ in range(4)], plan)
    capture(pipe._built.schedule, graphs)
    with pytest.warns(UserWarning, match="recomputed draws random numbers"):
        train(pipe, steps=6)
    assert graphs.log == []


@pytest.fixture(autouse=True)
def all_host_memory_is_given_back() -> Iterator[None]:
    yield
    copies = copies_on(CPU)
    assert copies.held >= sum(size * len(free) for size, free in copies._free.items())
