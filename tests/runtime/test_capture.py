"""Captured steps, as far as they need no GPU: a graph that runs its program again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.plan import Action
from taktline.runtime.capture.buffers import Adding
from taktline.runtime.capture.captures import Captures
from taktline.runtime.capture.cuda import is_loop
from taktline.runtime.capture.state import State
from taktline.stage import split_backward
from taktline.stage.kinds import note_part, nothing_compiled
from tests.stage.compiling import aot

WIDTH = 6


class Again:
    """A graph that is the program itself: a capture runs nothing."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._run: Callable[[], None] = lambda: None

    def capture(self, run: Callable[[], None]) -> None:
        if self._graphs.fails is not None:
            raise self._graphs.fails
        self._graphs.log.append("capture")
        self._run = run

    def replay(self) -> None:
        self._graphs.log.append("replay")
        self._run()


class Graphs:
    """Makes graphs, and notes captures and replays."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: Exception | None = None
        self.make: Callable[[Graphs], Any] = Again

    def __call__(self) -> Any:
        return self.make(self)


def capture(schedule: Any, graphs: Graphs) -> None:
    """Let a schedule capture its steps with these graphs."""
    runner = schedule._runner
    runner.captures = Captures(schedule._stages, runner.device, graphs)


class Stage(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(p)
        self.unused = nn.Parameter(torch.zeros(2))
        self.shifts = [0.0, 1.0]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop((self.norm(self.linear(x)) + self.shifts[1]).tanh())


class Scaled(Stage):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__(0.1)
        self.scale = torch.ones(WIDTH, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Pair:
    """The same pipeline with graphs and without."""

    def __init__(
        self,
        stages: Callable[[], Sequence[nn.Module]] | None = None,
        *,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        made = stages() if stages is not None else [Stage() for _ in range(4)]
        self.graphs = Graphs()
        options = {
            "schedule": "interleaved_1f1b",
            "microbatches": 4,
            "ranks": 2,
            "loss_fn": nn.functional.mse_loss,
            "device": device,
            **options,
        }
        self.plain = tl.Pipeline(copy.deepcopy(made), **options)
        self.pipe = tl.Pipeline(made, cuda_graphs=device != "cpu", **options)
        if device == "cpu":
            capture(self.pipe._built.schedule, self.graphs)

    @property
    def both(self) -> tuple[tl.Pipeline, tl.Pipeline]:
        return self.pipe, self.plain

    def each(self, do: Callable[[tl.Pipeline], Any]) -> None:
        """Do the same with both, with the same random numbers."""
        for pipe in self.both:
            do(pipe)

    def step(self, rows: int = 8, seed: int = 0, **options: Any) -> list[Any]:
        """A step of both, whose results are compared."""
        x, target = torch.randn(
            2, rows, WIDTH, generator=torch.Generator().manual_seed(seed)
        ).unbind()
        found = []
        for pipe in self.both:
            torch.manual_seed(seed)
            found.append(pipe.step(x, target=target, return_outputs=True, **options))
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
        self.compare()
        return found[0]

    def compare(self) -> None:
        ours, theirs = (dict(pipe.named_parameters()) for pipe in self.both)
        for name, parameter in ours.items():
            mine, other = parameter.grad, theirs[name].grad
            assert (mine is None) == (other is None), name
            assert mine is None or other is None or torch.equal(mine, other), name

    def train(self, steps: int, *, zeroes: bool = True, **options: Any) -> None:
        for seed in range(steps):
            self.step(seed=seed, **options)
            if zeroes:
                self.each(tl.Pipeline.zero_grad)

    def settle(self, **options: Any) -> None:
        """Run until the step is captured."""
        self.train(4, **options)
        assert self.graphs.log == ["capture", "replay"]


def count(pair: Pair, what: str) -> int:
    return pair.graphs.log.count(what)


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "v_half"]
)
def test_schedules(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[Action]] = []
    monkeypatch.setattr(
        "taktline.runtime.capture.captures.is_loop",
        lambda actions: (run.append(actions), is_loop(actions))[1],
    )
    per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
    pair = Pair(lambda: [Stage() for _ in range(2 * per_rank)], schedule=schedule)
    pair.settle()
    for seed in range(3):
        pair.step(seed=seed)
        pair.each(lambda pipe: torch.optim.SGD(pipe.parameters(), 0.1).step())
        pair.each(tl.Pipeline.zero_grad)
    assert pair.graphs.log == ["capture", *["replay"] * 4]
    assert all(map(is_loop, run))
    assert run


def test_results_are_copies() -> None:
    pair = Pair()
    pair.settle()
    losses: list[Tensor] = []
    loss, output = pair.step(seed=1, losses=losses)
    kept = [each.clone() for each in (loss, output, *losses)]
    pair.step(seed=2)
    for before, now in zip(kept, (loss, output, *losses), strict=True):
        assert torch.equal(before, now)


def test_a_kind_of_batch_has_its_own_graph() -> None:
    pair = Pair()
    pair.settle()
    for _ in range(4):
        pair.step(rows=12)
    assert count(pair, "capture") == 2
    pair.step(rows=8)
    pair.step(rows=12)
    assert count(pair, "capture") == 2
    assert count(pair, "replay") == 4


def test_too_many_kinds_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taktline.runtime.capture.captures._KINDS", 1)
    pair = Pair()
    pair.settle()
    pair.step(rows=12)
    with pytest.warns(UserWarning, match="there are more than 1 kinds of steps"):
        pair.step(rows=12)
    for _ in range(4):
        pair.step(rows=12)
    assert count(pair, "capture") == 1


def test_accumulation_and_zeroed_gradients() -> None:
    pair = Pair()
    pair.settle()
    pair.step(seed=1)
    pair.step(seed=2)
    pair.each(lambda pipe: pipe.zero_grad(set_to_none=False))
    pair.step(seed=3)
    for pipe in pair.both:
        next(iter(pipe.parameters())).grad = None
    pair.step(seed=4)
    assert count(pair, "capture") == 1
    assert count(pair, "replay") == 5


@pytest.mark.parametrize(
    "share", [lambda x: x, torch.Tensor.detach, torch.Tensor.flatten, lambda x: x[1:]]
)
def test_memory_of_a_gradient_that_is_kept_is_not_written_over(
    share: Callable[[Tensor], Tensor],
) -> None:
    pair = Pair()
    pair.settle()
    pair.step(seed=1)
    kept = [[share(p.grad) for p in pipe.parameters() if p.grad is not None] for pipe in pair.both]
    pair.each(tl.Pipeline.zero_grad)
    pair.train(4)
    assert all(map(torch.equal, *kept))
    assert count(pair, "capture") == 2
    assert pair.graphs.log[-1] == "replay"


def test_a_gradient_is_kept_after_every_step() -> None:
    pair = Pair()
    pair.settle()
    kept: list[Tensor | None] = []

    def train() -> None:
        for seed in range(20):
            pair.step(seed=seed)
            kept.append(pair.pipe.stages[0].get_parameter("linear.weight").grad)
            pair.each(tl.Pipeline.zero_grad)

    with pytest.warns(UserWarning, match="your code keeps or replaces gradients before every"):
        train()
    assert len({each.data_ptr() for each in kept if each is not None}) == 20


def test_gradients_that_were_replaced_are_put_back() -> None:
    pair = Pair()
    pair.settle()
    pair.step(seed=1)
    for pipe in pair.both:
        for parameter in pipe.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 2
    pair.step(seed=2)
    assert pair.graphs.log == ["capture", *["replay"] * 3]


def stage_of(pipe: tl.Pipeline, number: int) -> Stage:
    stage = pipe.stages[number]
    assert isinstance(stage, Stage)
    return stage


class Weighted(nn.Module):
    """A loss with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.weight: Tensor
        self.register_buffer("weight", torch.ones(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.weight * (output - target) ** 2).mean() * self.factor


def move(pipe: tl.Pipeline) -> None:
    for parameter in pipe.parameters():
        parameter.data = parameter.data.clone()


def replace_norm(pipe: tl.Pipeline) -> None:
    stage = stage_of(pipe, 1)
    stage.norm = nn.LayerNorm(WIDTH).to(stage.linear.weight.device)


def add_one(owner: Any, name: str | int) -> None:
    """To an attribute, or to a part of a list."""
    if isinstance(name, int):
        owner[name] += 1
    else:
        setattr(owner, name, getattr(owner, name) + 1)


CHANGES: dict[str, Callable[[tl.Pipeline], object]] = {
    "frozen": lambda pipe: next(iter(pipe.parameters())).requires_grad_(False),
    "moved": move,
    "mode": lambda pipe: stage_of(pipe, 1).drop.eval(),
    "module": replace_norm,
    "dropout": lambda pipe: setattr(stage_of(pipe, 1).drop, "p", 0.5),
    "tensor": lambda pipe: add_one(stage_of(pipe, 2), "scale"),
    "part of a list": lambda pipe: add_one(stage_of(pipe, 2).shifts, 1),
    "forward": lambda pipe: setattr(stage_of(pipe, 1).norm, "forward", torch.cos),
    "loss": lambda pipe: add_one(pipe._loss_fn, "factor"),
    "buffer of the loss": lambda pipe: add_one(pipe._loss_fn, "weight"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_captured_anew(change: str) -> None:
    pair = Pair(lambda: [Scaled() for _ in range(4)], ranks=1, loss_fn=Weighted())
    pair.settle()
    pair.each(CHANGES[change])
    pair.train(5)
    assert count(pair, "capture") == 2
    assert pair.graphs.log[-1] == "replay"


def test_a_change_before_the_capture() -> None:
    pair = Pair()
    pair.train(3)
    pair.each(CHANGES["forward"])
    pair.train(3)
    assert pair.graphs.log == ["capture", "replay", "replay"]


def test_a_change_before_every_step() -> None:
    pair = Pair()

    def train(steps: range) -> None:
        for seed in steps:
            for pipe in pair.both:
                stage_of(pipe, 0).shifts[0] = float(seed)
            pair.step(seed=seed)

    with pytest.warns(
        UserWarning,
        match="stage 0: 'shifts' changes before every step; keep it in a tensor",
    ):
        train(range(12))
    assert pair.graphs.log == []


def test_a_new_module_in_the_place_of_a_freed_one() -> None:
    model = nn.Sequential(nn.ReLU())
    stage = tl.PipelineStage(model, 0, 1, torch.device("cpu"))
    before, place = State([stage]), id(model[0])
    model[0] = nn.Identity()  # the state keeps the old one, so that its place is not free
    made = [nn.ReLU() for _ in range(100)]
    assert place not in map(id, made)
    model[0] = made[0]
    assert before.difference(State([stage])) == "stage 0: '0.training'"


def test_a_loss_in_a_partial_call() -> None:
    loss_fn = Weighted()
    pair = Pair(loss_fn=functools.partial(loss_fn))
    pair.settle()
    loss_fn.factor = 3.0
    pair.train(3, zeroes=False)
    assert count(pair, "capture") == 2


def test_a_loss_with_parameters_of_its_own() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.scale * output - target).square().mean()

    pair = Pair(loss_fn=Learned())
    with pytest.warns(UserWarning, match="loss_fn: it has parameters of its own; make them part"):
        pair.step()
    pair.train(4, zeroes=False)
    assert pair.graphs.log == []


def test_steps_with_a_seed_run_eagerly() -> None:
    pair = Pair(lambda: [Stage(0.5) for _ in range(4)], seed=3)
    with pytest.warns(UserWarning, match="a seed is set before each forward, which a replay"):
        pair.step()
    pair.train(4, zeroes=False)
    assert pair.graphs.log == []


def test_new_hooks_are_called() -> None:
    pair, calls = Pair(), []
    pair.settle()
    handle = pair.pipe.stages[2].register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match=r"stage 2: its module Stage has hooks, which a replay"):
        pair.step(seed=1)
    pair.step(seed=2)
    assert len(calls) == 8
    handle.remove()
    pair.step(seed=3)
    assert len(calls) == 8
    assert pair.graphs.log == ["capture", "replay", "replay"]


def test_hooks_of_parameters() -> None:
    pair = Pair()
    pair.settle()
    for pipe in pair.both:
        weight = pipe.stages[3].get_parameter("linear.weight")
        weight.register_hook(lambda gradient: gradient * 2)
    with pytest.warns(UserWarning, match=r"stage 3: its parameter 'weight' has hooks"):
        pair.step(seed=1)
    assert count(pair, "replay") == 1


def test_weights_and_scales_of_losses_may_change() -> None:
    pair = Pair()
    for seed in range(6):
        pair.step(seed=seed, loss_weights=[1.0, 2.0 + seed, 3.0, 4.0])
    assert count(pair, "capture") == 1
    pair.step(seed=1, loss_weights=[1.0, 0.0, 3.0, 4.0])
    pair.step(seed=2, loss_weights=[1.0, 9.0, 3.0, 4.0])
    assert count(pair, "capture") == 1
    assert count(pair, "replay") == 4


def test_the_scale_of_a_scaler() -> None:
    pair = Pair()
    x, target = torch.randn(2, 8, WIDTH).unbind()
    for number in range(6):
        for pipe in pair.both:
            pipe._built.schedule.step(x, target=target, grad_scale=2.0**number)
        pair.compare()
    assert count(pair, "replay") == 3


class AddingLoss(Stage):
    def forward(self, x: Tensor) -> Tensor:
        tl.add_loss(0.1 * x.square().mean())
        return super().forward(x)


def test_added_losses() -> None:
    pair = Pair(lambda: [AddingLoss() for _ in range(4)])
    for _ in range(6):
        lists: list[list[Tensor]] = [[], []]
        x, target = torch.randn(2, 8, WIDTH).unbind()
        for pipe, aux in zip(pair.both, lists, strict=True):
            pipe.step(x, target=target, aux_losses=aux)
        assert all(map(torch.equal, *lists))
        assert len(lists[0]) == 4
        pair.compare()
    assert count(pair, "replay") == 3


def test_evaluation() -> None:
    pair = Pair()
    for seed in range(5):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(*(pipe.eval(x) for pipe in pair.both))
    assert pair.graphs.log == ["capture", "replay", "replay"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.middle = nn.Linear(WIDTH, WIDTH, bias=False), Stage()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.inside.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.inside(x)))


def compare_tied(pipes: Sequence[tl.Pipeline], device: str = "cpu") -> None:
    """Steps with gradients that are added up over several."""
    for number in range(7):
        x, target = torch.randn(2, 8, WIDTH, device=device).unbind()
        assert torch.equal(*(pipe.step(x, target=target) for pipe in pipes))
        ours, theirs = (dict(pipe.named_parameters()) for pipe in pipes)
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter.grad, theirs[name].grad)
        if number % 2:
            for pipe in pipes:
                pipe.zero_grad()


def tied_pipelines(device: str = "cpu") -> list[tl.Pipeline]:
    model = Tied().to(device)
    options: dict[str, Any] = {
        "cuts": ["middle", "out"],
        "schedule": "1f1b",
        "ranks": 3,
        "microbatches": 4,
        "loss_fn": nn.functional.mse_loss,
    }
    return [
        tl.Pipeline(copy.deepcopy(model), cuda_graphs=graphs, **options)
        for graphs in (device != "cpu", False)
    ]


def test_tied_weights() -> None:
    pipes, graphs = tied_pipelines(), Graphs()
    capture(pipes[0]._built.schedule, graphs)
    compare_tied(pipes)
    assert graphs.log == ["capture", *["replay"] * 4]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = tl.DeferredBatchNorm.convert(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_deferred_batch_norm() -> None:
    pair = Pair(lambda: [Norm() for _ in range(4)])
    pair.settle()
    pair.step(seed=9)
    ours, theirs = (pipe.state_dict() for pipe in pair.both)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name])


def test_a_failed_capture_leaves_nothing_behind() -> None:
    pair = Pair()
    pair.graphs.fails = ValueError("not here")
    pair.train(3, zeroes=False)
    with pytest.warns(UserWarning, match="so it runs eagerly: ValueError: not here"):
        pair.step(seed=3)
    pair.step(seed=4)
    assert pair.graphs.log == []
    assert "step() with 8 rows in 4 micro-batches: eagerly, ValueError: not here" in str(pair.pipe)


def test_a_closed_pipeline_keeps_no_graph() -> None:
    pair = Pair()
    pair.settle()
    captures = pair.pipe._built.schedule._runner.captures
    assert captures is not None
    assert captures._entries
    pair.pipe.close()
    assert not captures._entries
    assert not captures._buffers


class Odd(Stage):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("odd")
        return super().forward(x)


def test_a_step_that_fails_drops_the_graphs() -> None:
    pair = Pair(lambda: [Odd() for _ in range(4)])
    pair.settle()
    for pipe in pair.both:
        stage = pipe.stages[1]
        assert isinstance(stage, Odd)
        stage.fails = True
        with pytest.raises(tl.TaktlineError, match="odd"):
            pipe.step(torch.ones(12, WIDTH), target=torch.ones(12, WIDTH))
        stage.fails = False
        pipe.zero_grad()
    pair.train(4, zeroes=False)
    assert count(pair, "capture") == 2


def test_traced_steps_run_eagerly() -> None:
    pair = Pair()
    pair.settle()
    with pair.pipe.trace() as trace, pair.plain.trace():
        pair.step(seed=1)
    assert trace.timeline is not None
    pair.step(seed=2)
    assert count(pair, "replay") == 2


def test_arguments_that_cannot_be_copied() -> None:
    class Flag:
        pass

    class First(Stage):
        def forward(self, x: Tensor, flag: object = None) -> Tensor:
            return super().forward(x)

    pair = Pair(lambda: [First(), Stage(), Stage(), Stage()])
    mbs = [(torch.ones(2, WIDTH), Flag()) for _ in range(4)]
    target = torch.zeros(8, WIDTH)
    with pytest.warns(UserWarning, match="an argument is Flag, which may change by itself"):
        pair.pipe.step(arg_mbs=mbs, target=target)
    for _ in range(4):
        pair.pipe.step(arg_mbs=mbs, target=target)
    assert pair.graphs.log == []


def test_on_the_cpu_a_warning_says_why_there_is_none() -> None:
    pipe = tl.Pipeline(
        [Stage(), Stage()], microbatches=2, ranks=2, loss_fn=torch.dist, cuda_graphs=True
    )
    assert str(pipe).endswith("CUDA graphs:\n  no step has run")
    with pytest.warns(UserWarning, match="not captured .*: the stages compute on cpu"):
        pipe.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))
    pipe.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))
    assert str(pipe).endswith("CUDA graphs:\n  eagerly: the stages compute on cpu")


def test_which_programs_are_captured_is_printed() -> None:
    pair = Pair()
    pair.settle()
    assert str(pair.pipe).endswith("  step() with 8 rows in 4 micro-batches: captured, 1 replay")
    pair.step(rows=12)
    pair.step(rows=12)
    assert str(pair.pipe).endswith("  step() with 12 rows in 4 micro-batches: warms up")


def test_ranks_that_are_threads_run_eagerly() -> None:
    def run(rank: int) -> list[str]:
        graphs, x = Graphs(), torch.ones(4, WIDTH)
        stage = tl.PipelineStage(Stage(), rank, 2, torch.device("cpu"))
        schedule = tl.Schedule1F1B(stage, 2, nn.functional.mse_loss)
        capture(schedule, graphs)
        for _ in range(5):
            schedule.step(x, target=x)
        return graphs.log

    with pytest.warns(UserWarning, match="ranks are threads, which wait for each other"):
        assert tl.local.run(run, 2) == [[], []]


def test_shapes_that_depend_on_values() -> None:
    graphs = Graphs()
    stage = tl.PipelineStage(Stage(), 0, 1, torch.device("cpu"))
    captures = Captures([stage], stage.device, graphs, dynamic_shapes=True)
    assert captures._refusal is not None
    assert "dynamic_shapes" in captures._refusal


class Twice(Stage):
    """Adds two gradients to its weights in one backward, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
        return x


def test_gradients_are_added_in_their_order() -> None:
    pair = Pair(lambda: [Stage(), Twice(), Stage(), Twice()])
    pair.train(6, zeroes=False)
    assert count(pair, "replay") == 3


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "looped_bfs"])
def test_gradients_are_added_many_at_a_time(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = 2 if schedule == "1f1b" else 4
    pair = Pair(lambda: [Stage() for _ in range(stages)], schedule=schedule)
    pair.settle()
    added: list[int] = []
    add = split_backward.add_all

    def note(buffers: Any, gradients: Any) -> None:
        added.append(len(buffers))
        add(buffers, gradients)

    monkeypatch.setattr(split_backward, "add_all", note)
    pair.step()
    assert sum(added) == 4 * stages * 4  # each parameter's, once a micro-batch
    assert min(added) >= 8


def test_large_gradients_are_added_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taktline.stage.split_backward.SMALL", 4 * WIDTH)  # bytes of a bias
    pair = Pair()
    added: list[int] = []
    add = split_backward.add_all
    monkeypatch.setattr(
        split_backward, "add_all", lambda *both: (added.append(both[0][0].dim()), add(*both))
    )
    pair.train(6, zeroes=False)
    assert set(added) == {1}


def test_few_gradients_wait_to_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taktline.runtime.capture.buffers._MOST", 4 * WIDTH)
    pair = Pair()
    pair.train(6, zeroes=False)
    assert count(pair, "replay") == 3


def test_the_gradients_of_weights_are_left_to_w() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    weight, bias = layer.parameters()
    buffers = {weight: torch.zeros(WIDTH, WIDTH), bias: torch.zeros(WIDTH)}
    stage = tl.PipelineStage(layer, 0, 1, torch.device("cpu"))
    stage.begin()
    x = torch.ones(2, WIDTH, requires_grad=True)
    with Adding([weight, bias], buffers).instead() as adding:
        stage.keep(0, [x], [layer(x)])
        stage.backward_input(0, [torch.ones(2, WIDTH)])
        adding.take_all()
        adding.add()
        assert not buffers[weight].any()
        assert torch.equal(buffers[bias], torch.full((WIDTH,), 2.0))
        stage.backward_weight(0)
    assert torch.equal(buffers[weight], torch.full((WIDTH, WIDTH), 2.0))


class Precompiled(Again):
    """A graph in which nothing may be compiled, as in a capture on a GPU."""

    def replay(self) -> None:
        with nothing_compiled():
            super().replay()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler loads
def test_all_is_compiled_before_a_capture(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("taktline.stage.compiled._compiled", aot())
    count = 2 if schedule == "1f1b" else 4
    pair = Pair(lambda: [Stage() for _ in range(count)], schedule=schedule, compile=True)
    pair.graphs.make = Precompiled
    for rows in (8, 12, 16, 8, 12):
        for seed in range(5):
            pair.step(rows=rows, seed=seed)
            pair.each(tl.Pipeline.zero_grad)
    assert str(pair.pipe).count("captured") == 3, str(pair.pipe)
    assert "compiled: " in str(pair.pipe)


def test_a_part_of_a_backward_is_not_compiled_too_late() -> None:
    with nothing_compiled(), pytest.raises(tl.TaktlineError, match="too late here"):
        note_part()


def test_what_compiles_in_every_step_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(100))
    monkeypatch.setattr("taktline.runtime.capture.captures.compilations", lambda: next(numbers))
    pair = Pair()
    with pytest.warns(UserWarning, match="compiles something new in every step"):
        pair.train(12)
    assert pair.graphs.log == []


# W leaves the gradients of several weights at once. When the first one was taken, those that waited
# were added, by way of `.grad`: the new ones of the other weights were lost, in each captured
# schedule that splits its backward over several processes.
def test_new_gradients_of_several_weights_stay_while_earlier_ones_are_added() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    buffers = {weight: torch.zeros(2) for weight in weights}
    with Adding(weights, buffers).instead() as adding:
        for number in range(1, 4):
            for weight in weights:
                weight.grad = torch.full((2,), float(number))
            adding.take_all()
    assert [buffer.tolist() for buffer in buffers.values()] == [[6.0, 6.0]] * 3


class Experts(nn.Module):
    """A mixture of experts; with a capacity each expert gets as many rows, or padding."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(WIDTH, 3), capacity
        self.up = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        mine = nn.functional.one_hot(expert, 3)
        if self.capacity is None:
            return sum(
                torch.zeros_like(x).index_put((rows,), (x[rows] @ up) * weight[rows, None])
                for up, rows in zip(self.up, (each.nonzero()[:, 0] for each in mine.T), strict=True)
            )  # pyright: ignore[reportReturnType]
        places = nn.functional.one_hot(((mine.cumsum(0) - 1) * mine).sum(-1), x.size(0))
        place = mine[:, :, None] * places[:, None, : self.capacity]
        place = place.to(x.dtype)
        rows = torch.einsum("rec,rw->ecw", place, x) @ self.up
        return torch.einsum("rec,ecw->rw", place * weight[:, None, None], rows)


class Mixed(Stage):
    """A stage with experts, which adds the loss that balances them."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.experts = Experts(capacity)

    def forward(self, x: Tensor) -> Tensor:
        tl.add_loss(self.experts.router(x).softmax(-1).mean(0).square().sum())
        return super().forward(x) + self.experts(x)


class Strict(Again):
    """A graph in whose capture nothing may have a size that depends on data."""

    def capture(self, run: Callable[[], None]) -> None:
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if torch.Tag.dynamic_output_shape in func.tags:
                    raise RuntimeError("operation not permitted when stream is capturing")
                return func(*args, **(kwargs or {}))

        with Mode():
            run()
        super().capture(run)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_experts_with_a_capacity_are_captured(schedule: str) -> None:
    count = 2 if schedule == "1f1b" else 4
    pair = Pair(lambda: [Mixed(2) for _ in range(count)], schedule=schedule)
    pair.graphs.make = Strict
    pair.settle()
    pair.train(2)


def test_experts_of_any_size_are_refused_by_name() -> None:
    pair = Pair(lambda: [Stage(), Mixed(None), Stage(), Stage()])
    pair.graphs.make = Strict
    pair.train(3)
    where = r"in 'experts' \(Experts, .*test_capture.py:\d+\)"
    with pytest.warns(UserWarning, match=rf"stage 1, .* stream is capturing, {where}"):
        pair.step(seed=3)
    pair.train(2)
    assert pair.graphs.log == []
