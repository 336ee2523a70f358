"""``torch.distributed.checkpoint`` takes a pipeline and its optimizer, in every layout."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import taktline as tl
from tests.checkpoint.training import Data, DropLM, mesh_of, pipeline
from tests.workers import Workers

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
STEPS = 2


def trained(pipe: Any, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    data, losses = Data(), []
    data.next = first
    for _ in range(STEPS):
        tokens, target = data.batch()
        losses.append(pipe.step(tokens, target=target).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def moved(
    rank: int, group: Any, folder: str, place: int, layout: Any, flat: bool
) -> tuple[list[float], list[float]]:
    """Some steps in one layout, from what the one before has saved."""
    schedule, stages, shape, way = layout
    mesh = mesh_of(group, shape)
    pipe: Any = pipeline(stages, schedule, dropout=0.0, mesh=mesh, data_parallel=way)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=5e-3 if place else 1e-2)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        if place:
            state: Any = dict(
                zip("mo", get_state_dict(pipe, optimizer, options=options), strict=True)
            )
            dcp.load(state, checkpoint_id=f"{folder}/{place - 1}", process_group=group)
            set_state_dict(
                pipe,
                optimizer,
                model_state_dict=state["m"],
                optim_state_dict=state["o"],
                options=options,
            )
        losses = trained(pipe, optimizer, STEPS * place)
        state = dict(zip("mo", get_state_dict(pipe, optimizer, options=options), strict=True))
        dcp.save(state, checkpoint_id=f"{folder}/{place}", process_group=group)
    return losses, [each["lr"] for each in optimizer.param_groups]


LAYOUTS: list[tuple[int, Any]] = [
    (2, ("1f1b", 2, None, None)),
    (2, ("zbv", 4, None, None)),
    (3, ("interleaved_1f1b", 6, None, None)),
    (4, ("1f1b", 2, (2, 2), "fsdp")),
    (2, ("1f1b", 2, None, None)),
]


@pytest.mark.processes
@pytest.mark.parametrize("flat", [False, True])
def test_into_every_schedule(workers: Workers, tmp_path: Path, flat: bool) -> None:
    whole = pipeline(4, ranks=4, dropout=0.0)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for place, (ranks, layout) in enumerate(LAYOUTS):
        told = workers.run(moved, str(tmp_path), place, layout, flat, ranks=ranks)
        expected = trained(whole, optimizer, STEPS * place)
        for losses, rates in told:
            torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
            assert rates == [1e-2]


def test_names_of_a_pipeline() -> None:
    model = DropLM()
    pipe = tl.Pipeline(model, microbatches=2)
    assert list(pipe.named_parameters()) == list(model.named_parameters())
    assert list(pipe.named_buffers()) == list(model.named_buffers())
    optimizer = torch.optim.AdamW(pipe.parameters())
    found: Any = get_state_dict(pipe, optimizer)  # pyright: ignore[reportArgumentType]
    expected: Any = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    assert list(found[0]) == list(expected[0])
    assert found[1]["state"].keys() == expected[1]["state"].keys()
    assert found[1]["param_groups"] == expected[1]["param_groups"]
