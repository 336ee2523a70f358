"""A step beside the plain model: equal where it should be, and every seeded bug by its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from taktline import Pipeline
from taktline.errors import UseError
from taktline.runtime.stage_actions import Work
from taktline.train.verify import Verification
from tests.checkpoint.training import DropLM as LM
from tests.train.models import CUTS, PARTS, TARGET, TOKENS, WIDTH, Block, loss_fn
from tests.workers import Workers


def verified(model: nn.Module | None = None, *args: Any, **options: Any) -> Verification:
    """Of a pipeline over two ranks; ``plain`` is what it is compared with, if not the model."""
    model = LM() if model is None else model
    plain = options.pop("plain", None)
    target = options.pop("target", TARGET)
    keywords = {name: options.pop(name) for name in ("tolerance",) if name in options}
    options = {"schedule": "1f1b", "cuts": CUTS[2], "loss_fn": loss_fn} | options
    pipe = Pipeline(model, microbatches=PARTS, ranks=2, **options)
    return pipe.verify(plain or model, *(args or (TOKENS,)), target=target, **keywords)


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 2), ("1f1b", 2), ("zb_h1", 2), ("zbv", 4), ("dualpipev", 4)]
)
def test_a_sound_pipeline_is_equal(schedule: str, stages: int) -> None:
    found = verified(schedule=schedule, cuts=CUTS[stages])
    assert found, str(found)
    # Of every micro-batch, the outputs of embedding, head and the six parts of each block.
    assert found.compared > PARTS * (2 + 4 * 6)
    assert str(found) == f"equal to the plain model: {found.compared} tensors"


def test_a_module_that_two_stages_call() -> None:
    """Its second call was compared with the first one of the plain model."""

    class Twice(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            for layer in (*self, self[0]):
                input = torch.tanh(layer(input))
            return input

    model, x = Twice(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), torch.rand(8, WIDTH)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "ranks": 2}
    pipe = Pipeline(model, cuts=["2"], example=(x[:2],), microbatches=PARTS, **options)
    assert pipe.verify(model, x, target=x)


def test_nothing_is_changed() -> None:
    model = nn.Sequential(LM(), nn.BatchNorm1d(5))
    pipe = Pipeline(model, microbatches=PARTS, ranks=1, loss_fn=loss_fn)
    pipe.step(TOKENS, target=TARGET)
    before = copy.deepcopy(
        [model.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state()]
    )
    pipe.verify(model, TOKENS, target=TARGET)
    after = [model.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert pipe.schedules[0].steps == 1
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


# Mistakes in models and in how they are cut.


def other(change: Callable[[Block, Tensor], Tensor], at: int = 2) -> LM:
    """The model with a block that does something else in a pipeline than by itself."""
    model = LM()

    class Changed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return change(self, super().forward(x))

    model.blocks[at].__class__ = Changed
    return model


def only_micro_batches(change: Callable[[Tensor], Tensor]) -> LM:
    """Something that shows with fewer rows than the whole batch has."""
    return other(lambda _, y: change(y) if len(y) < len(TOKENS) else y)


def of_stages(stages: list[Any], plain: nn.Module) -> Verification:
    pipe = Pipeline(stages, microbatches=PARTS, ranks=2, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(1)
    return pipe.verify(plain, torch.rand(8, WIDTH), target=torch.rand(8, WIDTH))


class Skipping(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return self[0](input)


def forgotten() -> Verification:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    plain = nn.Sequential(nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:]))
    return of_stages([Skipping(*layers[:2]), plain[1]], plain)


def untied() -> Verification:
    class Copied(LM):
        def forward(self, tokens: Tensor, shift: Tensor | None = None) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return nn.functional.linear(x, self.head.weight.detach()) * self.get_buffer("scale")

    model = LM()
    model.__class__ = Copied
    return verified(model, plain=LM())


def remembers() -> Verification:
    model = other(lambda block, y: y + getattr(block, "last", 0.0), at=1)
    seen: list[Tensor] = []

    def remember(module: nn.Module, args: Any, output: Tensor) -> None:
        module.last = output.detach().mean()  # pyright: ignore[reportAttributeAccessIssue]
        seen.append(output)

    model.blocks[1].register_forward_hook(remember)
    return verified(model)


def ignored() -> Verification:
    target = TARGET.clone()
    target[:3, 1:] = -100  # so the mean is over other numbers of tokens in each micro-batch
    return verified(target=target)


MODELS: dict[str, tuple[Callable[[], Verification], str]] = {
    "a layer was forgotten": (
        forgotten,
        "stage 0, micro-batch 0, forward: the output of 0 differs",
    ),
    "a weight no longer tied": (untied, "gradient: the gradient of the parameter"),
    "remembers": (remembers, "stage 0, micro-batch 1, forward: the output of blocks.1"),
    "a mean over fewer tokens": (ignored, "stage 1, loss: the loss differs"),
    "rows that look at each other": (
        lambda: verified(other(lambda _, y: y - y.mean(0))),
        "stage 1, micro-batch 0, forward: the output of blocks.2 differs",
    ),
    "detached": (
        lambda: verified(only_micro_batches(lambda y: y.detach())),
        "stage 1, gradient: the gradient of the parameter head.weight differs",
    ),
    "a tolerance of one's own": (lambda: verified(tolerance=1e-12), "differs by"),
}


def test_a_mistake_of_the_runtime_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch gets the arguments of another one."""
    original = Work.forward

    def forward(work: Work, microbatch: int) -> None:
        if work._index == 0 and microbatch == 2:
            arguments: Any = work._feed.arguments
            arguments[2] = arguments[1]
        original(work, microbatch)

    assert verified()
    monkeypatch.setattr(Work, "forward", forward)
    found = verified()
    assert not found
    assert "stage 0, micro-batch 2, forward: the output of embed differs" in str(found)


@pytest.mark.parametrize("bug", MODELS)
def test_a_mistake_in_a_model_is_found(bug: str) -> None:
    make, expected = MODELS[bug]
    found = make()
    assert not found
    assert expected in str(found)


def over_processes(rank: int, group: Any, broken: bool) -> str:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    model = only_micro_batches(lambda y: y + 1e-2) if broken else LM()
    pipe = Pipeline(model, cuts=CUTS[2], microbatches=PARTS, loss_fn=loss_fn, mesh=mesh)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(TOKENS, target=TARGET)
    optimizer.step()
    return str(pipe.verify(model, TOKENS, target=TARGET))


@pytest.mark.processes
@pytest.mark.parametrize("broken", [False, True])
def test_over_processes(workers: Workers, broken: bool) -> None:
    first, second = workers.run(over_processes, broken, ranks=2)
    assert first == second
    if broken:
        assert "stage 1, micro-batch 0, forward: the output of blocks.2 differs" in first
    else:
        assert first.startswith("equal to the plain model: ")


def test_another_model_is_refused() -> None:
    pipe = Pipeline(LM(), cuts=CUTS[2], microbatches=PARTS, ranks=2, loss_fn=loss_fn)
    with pytest.raises(UseError, match="needs the plain model, with the names"):
        pipe.verify(nn.Linear(2, 2), TOKENS, target=TARGET)
