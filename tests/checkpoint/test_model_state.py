"""The names of tensors in a state, with the number of the stage where names repeat."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from taktline.checkpoint.model_state import ModelState, Processes, joined
from taktline.stage.names import Tie, declare

NAMES = st.sampled_from("abcdef")
TABLES = st.lists(st.dictionaries(NAMES, NAMES), max_size=4)


@given(TABLES)
def test_names_that_tables_join_are_one_and_no_others(tables: list[dict[str, str]]) -> None:
    groups = {name: {name} for name in "abcdef"}
    for name, known in (pair for aliases in tables for pair in aliases.items()):
        both = groups[name] | groups[known]
        groups |= dict.fromkeys(both, both)
    table = joined(tables)
    for group in groups.values():
        found = {table.get(name, name) for name in group}
        assert len(found) == 1
        assert found <= group


@pytest.mark.parametrize("processes", [None, Processes()])
def test_names_of_stages(processes: Processes | None) -> None:
    same: dict[int, nn.Module] = {0: nn.Linear(2, 2), 1: nn.Linear(2, 2)}
    names = ModelState.of_stages(same, processes).names
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    other: dict[int, nn.Module] = {
        0: nn.Sequential(nn.Linear(2, 2)),
        1: nn.Linear(2, 2, bias=False),
    }
    assert ModelState.of_stages(other, processes).names == ["0.weight", "0.bias", "weight"]


def test_stages_with_one_name_for_a_tied_parameter() -> None:
    stages: dict[int, nn.Module] = {n: nn.Linear(2, 2, bias=False) for n in range(3)}
    for stage in stages.values():
        declare(stage, [Tie({0: "weight", 1: "weight"})])
    assert ModelState.of_stages({0: stages[0], 1: stages[1]}, Processes()).names == ["weight"]
    third = ModelState.of_stages(stages, Processes())
    assert third.names == ["0.weight", "1.weight", "2.weight"], "the third one is another weight"
    assert third.first_names() == {"1.weight": "0.weight"}


def test_a_buffer_that_every_process_has_a_copy_of() -> None:
    def stage() -> nn.Module:
        module = nn.Module()
        module.register_buffer("mask", torch.ones(2))
        return module

    stages = {0: stage(), 1: stage()}
    assert ModelState.of_stages(stages, Processes()).names == ["mask"]
    assert ModelState.of_stages(stages).names == ["0.mask", "1.mask"], "all of them are here"
