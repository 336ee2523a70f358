"""A pipeline in one process trains as the model does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import taktline as tl
from taktline.plan import write
from tests.train.models import (
    CUTS,
    LM,
    PARTS,
    TARGET,
    TOKENS,
    Record,
    batches,
    loss_fn,
    pipeline,
    plain,
    train,
)

WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *[
        ({"schedule": schedule, "ranks": ranks, "cuts": CUTS[stages]}, {})
        for schedule, ranks, stages in [
            ("gpipe", 2, 2),
            ("1f1b", 4, 4),
            ("interleaved_1f1b", 2, 4),
            ("zbv", 2, 4),
            ("dualpipev", 2, 4),
        ]
    ],
    ({"ranks": None, "cuts": None}, {}),  # one rank
    ({"schedule": "zbv", "cuts": None}, {}),  # cut by itself
    ({}, {"norm_type": float("inf")}),
    ({}, {"norm_type": 1.0}),
    ({}, {"cast": True}),
    ({"schedule": "zbv", "cuts": CUTS[4]}, {"cast": True}),
    ({"checkpoint": "blocks"}, {}),
    ({"schedule": "zbv", "cuts": CUTS[4], "checkpoint": lambda name, module: "1" in name}, {}),
]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("options", "training"), WAYS)
def test_equals_plain_training(
    options: dict[str, Any], training: dict[str, Any], tied: bool
) -> None:
    model = LM(tied=tied)
    expected = plain(model, **training)
    record = train(pipeline(model, **options), **training)
    limits = {"rtol": 1e-4, "atol": 1e-5} if training.get("cast") else {}
    record.require_close(expected, **limits)
    assert list(record.state) == list(expected.state)


def test_stages_that_are_cut_already() -> None:
    layers = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 13))
    expected = plain(layers)
    stages = [layers[:2], layers[2:]]
    for model in (
        stages,
        tl.split.by_hand(copy.deepcopy(stages)),
        dict(enumerate(copy.deepcopy(stages))),
    ):
        train(pipeline(model)).require_close(expected)


def test_stages_whose_names_repeat() -> None:
    stages = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    pipe = pipeline(stages, loss_fn=nn.functional.mse_loss)
    names = ["0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"]
    assert list(pipe.state_dict()) == [name for name, _ in pipe.named_parameters()] == names


def test_plans_files_and_classes(tmp_path: Path) -> None:
    plan = tl.build("zbv", ranks=2, microbatches=PARTS)
    write(plan, tmp_path / "plan.csv")
    for schedule in (plan, tmp_path / "plan.csv", str(tmp_path / "plan.csv")):
        pipe = pipeline(schedule=schedule, ranks=None, microbatches=None, cuts=CUTS[4])
        assert pipe.plan == plan
    pipe = pipeline(schedule=tl.ScheduleZBVZeroBubble, cuts=CUTS[4])
    assert pipe.plan == plan


def test_a_norm_that_is_not_finite() -> None:
    pipe = pipeline()
    pipe.step(TOKENS, target=TARGET)
    next(pipe.parameters()).grad.fill_(float("nan"))  # pyright: ignore
    with pytest.raises(tl.TaktlineError, match="the norm of the gradients is nan"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_added_losses() -> None:
    model = LM(adds=True)
    expected, added = plain(model), []
    train(pipeline(model), aux_losses=added).require_close(expected)
    assert len(added) == PARTS
    assert all(loss > 0 for loss in added)


def test_losses_of_tokens() -> None:
    pipe = pipeline(LM())
    target = TARGET.clone()
    target[2:, 1:] = -100
    losses: list[torch.Tensor] = []
    loss = pipe.step(
        TOKENS, target=target, loss_weights=lambda part: (part != -100).sum(), losses=losses
    )
    model = LM()
    expected = loss_fn(model(TOKENS), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert len(losses) == PARTS
    gradients = dict(pipe.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad)


def test_accumulation() -> None:
    model, pipe = LM(), pipeline()
    with pipe.accumulate():
        for tokens, target in batches(2):
            pipe.step(tokens, target=target)
    for tokens, target in batches(2):
        loss_fn(model(tokens), target).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])  # pyright: ignore
    torch.testing.assert_close(pipe.grad_norm(), expected)


def test_evaluation() -> None:
    model = LM()
    model.blocks[1] = nn.Dropout(0.9)
    expected = copy.deepcopy(model).eval()
    pipe = pipeline(model)
    pipe.stages[0].eval()
    before = [m.training for stage in pipe.stages.values() for m in stage.modules()]
    torch.testing.assert_close(pipe.eval(TOKENS), expected(TOKENS))
    loss, output = pipe.eval(TOKENS, target=TARGET, return_outputs=True)
    torch.testing.assert_close(output, expected(TOKENS))
    torch.testing.assert_close(loss, loss_fn(expected(TOKENS), TARGET))
    assert pipe.eval(TOKENS, target=TARGET) == loss
    assert before == [m.training for stage in pipe.stages.values() for m in stage.modules()]
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_keyword_arguments_reach_the_stage_that_takes_them() -> None:
    shift = torch.linspace(0, 1, TOKENS.numel()).reshape(TOKENS.shape)
    pipe = pipeline(example=((TOKENS[:2],), {"shift": shift[:2]}))
    torch.testing.assert_close(pipe.eval(TOKENS, shift=shift), LM()(TOKENS, shift))


def scaled(parameters: Any, scaler: torch.amp.GradScaler, step: Any, clip: Any) -> Record:
    """Train with a scaler, and an overflow in the second step."""
    parameters, record = list(parameters), Record()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for number, (tokens, target) in enumerate(batches()):
        record.losses.append(step(tokens, target).item())
        if number == 1:
            parameters[0].grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        record.norms.append(clip().item())
        scaler.step(optimizer)
        scaler.update()
        record.norms.append(scaler.get_scale())
        optimizer.zero_grad()
    return record


def test_a_scaler() -> None:
    model = LM()
    plain_model, pipe = copy.deepcopy(model), pipeline(model)
    options = {"init_scale": 64.0, "growth_interval": 1}
    scaler, ours = torch.amp.GradScaler("cpu", **options), pipe.scaler(**options)

    def step(tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(plain_model(tokens), target)
        scaler.scale(loss).backward()
        return loss

    weights = list(plain_model.parameters())
    expected = scaled(weights, scaler, step, lambda: nn.utils.clip_grad_norm_(weights, 1.0))
    found = scaled(
        pipe.parameters(),
        ours,
        lambda tokens, target: pipe.step(tokens, target=target, scaler=ours),
        lambda: pipe.clip_grad_norm_(1.0),
    )
    expected.state, found.state = plain_model.state_dict(), pipe.state_dict()
    found.require_close(expected)


def test_dropout_is_drawn_anew_in_each_step_and_alike_with_a_seed() -> None:
    found = []
    for schedule, seed in (("1f1b", 3), ("gpipe", 3), ("1f1b", None)):
        model = LM()
        model.blocks[3] = nn.Dropout(0.5)
        pipe = pipeline(model, schedule=schedule, seed=seed)
        found.append([pipe.step(TOKENS, target=TARGET).item() for _ in range(2)])
        assert found[-1][0] != found[-1][1]
    assert found[0] == found[1] != found[2]


def test_what_it_prints() -> None:
    lines = str(pipeline()).splitlines()
    assert lines[0] == "Pipeline(1f1b on 2 ranks (in one process): 2 stages, 4 micro-batches, cpu)"
    columns = ["rank", "stage", "layers", "parameters", "sends", "keeps", "peak", "total"]
    assert lines[1].split() == columns
    assert lines[2].split()[:6] == ["0", "0", "embed–blocks.1", "696", "320", "B"]
    assert lines[3].split()[:4] == ["1", "1", "blocks.2–head", "696"]
    assert lines[4].startswith("predicted bubble 2")
    lines = str(pipeline(example=None)).splitlines()
    assert lines[1].split() == ["rank", "stage", "layers", "parameters", "peak"]
    assert "\n".join(lines[4:]) == (
        "predicted bubble 20.0%; no plan at this memory is below 7.7% (all stages alike)\n"
        "peak: activations of a rank, in micro-batches"
    )


def test_a_model_without_values() -> None:
    with tl.split.deferred():
        model = LM()
    text = str(pipeline(model))
    assert "sends" in text
    with tl.split.deferred():
        model = LM()
    pipe = pipeline(model, schedule="zbv", cuts=CUTS[4])
    expected = plain(copy.deepcopy(model))
    train(pipe).require_close(expected)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "1f2b"}, "no schedule is called '1f2b'; did you mean 1f1b?"),
        ({"schedule": 7}, "schedule is a name, a plan, a file or a Schedule class, not 7"),
        ({"schedule": "none.csv"}, "none.csv"),
        ({"microbatches": None}, "pass microbatches=…, the number of micro-batches for 1f1b"),
        ({"microbatches": 0}, "microbatches must be a whole number from 1 up, not 0"),
        ({"ranks": 0}, "ranks must be a whole number from 1 up, not 0"),
        ({"ranks": 4}, "2 stages cannot be placed on 4 ranks evenly; cut the model into 4"),
        ({"schedule": "zbv"}, "zbv runs 2 stages per rank, not 1"),
        ({"cuts": None, "example": None}, "pass example=(…), the arguments of one micro-batch"),
        ({"cuts": ["blocks.9"]}, "cuts name 'blocks.9', but LM has no such submodule"),
        ({"data_parallel": "ddp"}, "data_parallel='ddp' needs several processes"),
        ({"data_parallel": "zero"}, "data_parallel is one of ddp, fsdp, not 'zero'"),
        (
            {"prepare": lambda module, stage: None},
            "prepare must return the module to use for stage 0",
        ),
        ({"checkpoint": "all"}, "checkpoint is 'blocks', or a function of a submodule's name and"),
        ({"checkpoint": 1}, "returns whether to checkpoint it, not 1"),
        (
            {"checkpoint": lambda name, module: name == "block"},
            "checkpoint= chooses no submodule of any stage, which are called 'embed', 'blocks', ",
        ),
        (
            {"schedule": tl.build("gpipe", ranks=3, microbatches=4)},
            "plan 'gpipe' is for 3 ranks, 4 micro-batches and 3 stages, not 2, 4 and 2; start as",
        ),
        (
            {"schedule": tl.build("gpipe", ranks=2, microbatches=8)},
            "plan 'gpipe' is for 2 ranks, 8 micro-batches and 2 stages, not 2, 4 and 2",
        ),
        (
            {"schedule": tl.build("gpipe", ranks=2, microbatches=4), "cuts": CUTS[4]},
            "4 micro-batches and 2 stages, not 2, 4 and 4; start as many ranks",
        ),
        ({"model": 7}, "a model is an nn.Module, a list of stages or a dict of them, not 7"),
        ({"model": [nn.Linear(1, 1), 7]}, "stage 1 is 7, not an nn.Module"),
        ({"model": [nn.Linear(1, 1)] * 3}, "3 stages cannot be placed on 2 ranks evenly"),
        ({"model": {0: nn.Linear(1, 1)}}, "of which [0, 1] run here; pass these, not [0]"),
        *[
            ({"timeout": wrong}, "timeout must be a number from 0.001 up")
            for wrong in (0, "soon", float("nan"))
        ],
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(tl.TaktlineError) as refused:
        pipeline(**options)
    assert text in str(refused.value)


def test_steps_that_are_refused() -> None:
    with pytest.raises(tl.TaktlineError, match="forward_only has no backward; call eval"):
        pipeline(schedule="forward_only").step(TOKENS, target=TARGET)
    with pytest.raises(tl.TaktlineError, match="needs target="):
        pipeline().step(TOKENS)


def test_states_that_are_refused() -> None:
    pipe, state = pipeline(), LM().state_dict()
    with pytest.raises(tl.TaktlineError, match="the model lacks nonsense of the state"):
        pipe.load_state_dict(state | {"nonsense": torch.ones(1)})
    with pytest.raises(tl.TaktlineError, match="the state lacks scale; pass strict=False"):
        pipe.load_state_dict({name: value for name, value in state.items() if name != "scale"})
    with pytest.raises(tl.TaktlineError, match=r"scale is \[\] in the model, but \[2\] in the"):
        pipe.load_state_dict({name: x + 1 for name, x in state.items()} | {"scale": torch.ones(2)})
    torch.testing.assert_close(dict(pipe.state_dict()), dict(state))  # none of it was loaded


def test_a_state_with_one_name_for_a_tied_weight() -> None:
    state = {name: value + 0.1 for name, value in LM().state_dict().items()}
    expected, pipe = LM(), pipeline()
    expected.load_state_dict(state)
    del state["head.weight"]
    pipe.load_state_dict(state)
    torch.testing.assert_close(pipe.eval(TOKENS), expected(TOKENS))


def test_stages_that_are_prepared() -> None:
    """A new module in the place of a stage is what is trained, and what is saved."""

    def frozen(module: nn.Module, stage: int) -> nn.Module:
        module.requires_grad_(False)
        return nn.Sequential(module, nn.Linear(4, 4))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipeline([model[0], model[1]], prepare=frozen, loss_fn=nn.functional.mse_loss)
    pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    assert [name for name, p in pipe.named_parameters() if p.grad is not None] == [
        "0.1.weight",
        "0.1.bias",
        "1.1.weight",
        "1.1.bias",
    ]
    pipe.load_state_dict(pipe.state_dict())


def test_members_of_a_sequence_run_again_as_a_whole() -> None:
    """A stage that was cut out of a sequence is none itself: layers in its members ran again."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    example = (torch.ones(2, 4),)
    pipe = tl.Pipeline(model, example=example, microbatches=2, ranks=2, checkpoint="blocks")
    parts = [part for stage in pipe.stages.values() for part in stage.named_modules()]
    assert [name for name, part in parts if "forward" in vars(part)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("chosen", "runs"),
    [
        (None, [1, 1, 1]),
        ("blocks", [1, 2, 1]),
        (lambda name, module: name == "head" or isinstance(module, nn.Tanh), [1, 1, 2]),
    ],
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_blocks_that_run_again(chosen: Any, runs: list[int], by_hand: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (self.embed, *self.blocks, self.head):
                x = block(x)
            return x

    model, counts = Model(), dict[str, int]()
    first: Any = model.blocks[0]
    parts = {"embed": model.embed, "blocks": first[0], "head": model.head}
    for name, part in parts.items():
        forward = part.forward

        def counted(x: torch.Tensor, name: str = name, forward: Any = forward) -> torch.Tensor:
            counts[name] = counts.get(name, 0) + 1
            return forward(x)

        part.forward = counted
    stages: Any = [model] if by_hand else model
    for _ in range(2):  # a second pipeline of the same model changes nothing
        pipe = tl.Pipeline(
            stages,
            example=(torch.ones(2, 4),),
            microbatches=3,
            ranks=1 if by_hand else 2,
            loss_fn=nn.functional.mse_loss,
            checkpoint=chosen,
        )
        for _ in range(2):
            counts.clear()
            pipe.step(torch.ones(6, 4), target=torch.zeros(6, 4))
            assert [counts[name] for name in parts] == [3 * run for run in runs]


def test_a_model_cut_at_split_points() -> None:
    model = LM()
    expected = plain(model)
    cut = tl.pipeline(model, (TOKENS[:2],), split_spec={"blocks.2": tl.SplitPoint.BEGINNING})
    train(pipeline(cut)).require_close(expected)
