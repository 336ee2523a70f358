"""Products of matrices are counted, whichever operation computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from taktline.errors import PartitionError
from taktline.split import auto, deferred
from taktline.split.costs import OperationCounter, measure_times
from tests.split.test_auto import sizes

ENDS = torch.tensor([8, 16, 24], dtype=torch.int32)


PRIVATE: Any = torch


def grouped(one: Tensor, other: Tensor) -> Tensor:
    product: Any = getattr(F, "grouped_mm", None) or PRIVATE._grouped_mm
    return product(one, other, offs=None if one.ndim == other.ndim == 3 else ENDS)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def counted(run: Callable[[], Any]) -> int:
    with OperationCounter() as counter:
        run()
    return counter.flops


@pytest.mark.parametrize(
    ("one", "other", "flops"),
    [
        ((24, 16), (3, 16, 8), 2 * 24 * 16 * 8),  # rows in groups: the experts of a layer
        ((3, 4, 16), (16, 24), 2 * 4 * 16 * 24),  # columns of the result in groups
        ((16, 24), (24, 8), 2 * 16 * 24 * 8),  # as in the backward of the first
        ((3, 4, 16), (3, 16, 8), 3 * 2 * 4 * 16 * 8),
    ],
)
def test_grouped_products(one: tuple[int, ...], other: tuple[int, ...], flops: int) -> None:
    first, second = (torch.ones(shape, dtype=torch.bfloat16) for shape in (one, other))
    assert counted(lambda: grouped(first, second)) == flops
    without = first.to("meta"), second.to("meta")
    ends = None if len(one) == len(other) == 3 else ENDS.to("meta")
    assert counted(lambda: PRIVATE._grouped_mm(*without, offs=ends)) == flops


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: torch.ones(4, 8) @ torch.ones(8, 2), 2 * 4 * 8 * 2),
        (lambda: torch.ones(4, 8) @ torch.ones(8), 2 * 4 * 8),
        (lambda: torch.ones(8) @ torch.ones(8), 2 * 8),
        (lambda: torch.ones(3, 4, 8) @ torch.ones(3, 8, 2), 3 * 2 * 4 * 8 * 2),
        (lambda: F.linear(torch.ones(3, 4, 8), torch.ones(2, 8), torch.ones(2)), 3 * 2 * 4 * 8 * 2),
        (
            lambda: PRIVATE._int_mm(*[torch.ones(32, 32, dtype=torch.int8)] * 2),
            2 * 32**3,
        ),
        (
            lambda: attention(*[torch.ones(2, 3, 4, 8)] * 3),
            2 * 2 * 2 * 3 * 4 * 4 * 8,
        ),
        (lambda: F.conv1d(torch.ones(1, 2, 8), torch.ones(4, 2, 3)), 2 * 4 * 6 * 2 * 3),
        (lambda: torch.ones(4, 8).exp(), 0),
    ],
)
def test_products(run: Callable[[], Any], flops: int) -> None:
    assert counted(run) == flops


def test_operations_of_other_libraries() -> None:
    pytest.importorskip("transformers.integrations.moe")
    product = torch.ops.transformers.grouped_mm_fallback
    one, other = torch.ones(24, 16), torch.ones(3, 16, 8)
    assert counted(lambda: product(one, other, ENDS)) == 2 * 24 * 16 * 8


def test_views_cost_nothing_and_other_operations_do() -> None:
    x = torch.ones(4, 8)
    with OperationCounter() as counter:
        x.view(8, 4).t()[1:]
    assert counter.cost == 0
    with OperationCounter() as once:
        x.exp()
    with OperationCounter() as twice:
        x.exp().exp()
    assert (once.numbers, once.calls) == (64, 1)
    assert twice.cost == 2 * once.cost > 0


def test_a_layer_costs_the_same_in_every_version_of_torch() -> None:
    """Some reshape its result by an operation that does not say that it is a view."""
    layer, x = nn.Linear(4, 8), torch.ones(2, 3, 4)
    with OperationCounter() as counter:
        layer(x)
    assert counter.calls == 1
    assert counter.numbers == 6 * 8 + 6 * 4 + 4 * 8 + 8


def test_a_table_is_not_read_as_a_whole() -> None:
    table, rows = torch.ones(1000, 8), torch.tensor([1, 2])
    for run in (lambda: F.embedding(rows, table), lambda: table[rows]):
        with OperationCounter() as counter:
            run()
        assert counter.numbers == 32


def experts(way: str, top: int = 1, wider: int = 1) -> Any:
    """Wide layers, and a head that costs as much as two of the smallest."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    kind: Any = Qwen3MoeConfig
    config = kind(
        vocab_size=2048,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=128 * wider,
        num_experts=8,
        num_experts_per_tok=top,
        use_cache=False,
    )
    config._experts_implementation = way
    with deferred():
        return Qwen3MoeForCausalLM(config)


WAYS = [
    "grouped_mm",
    *(pytest.param(way, marks=pytest.mark.matrix) for way in ("eager", "batched_mm")),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_experts_count(way: str) -> None:
    example = (), {"input_ids": torch.zeros(4, 128, dtype=torch.int64)}
    narrow, several, wide = (
        auto(experts(way, **change), 3, example) for change in ({}, {"top": 8}, {"wider": 8})
    )
    divisions: list[Any] = [pieces.division for pieces in (narrow, several, wide)]
    costs = [sum(division.partition.stage_costs) for division in divisions]
    assert min(costs[1:]) > 1.5 * costs[0]
    if way == "grouped_mm":  # others copy all weights, or give every token to every expert
        assert sizes(narrow)[-1] < sizes(several)[-1], "the head is less of the whole"
        assert sizes(narrow)[-1] < sizes(wide)[-1]


class Noted(nn.Module):
    """Counts its calls, and keeps its input; a copy must do that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        return self.linear(x).relu_()


@pytest.mark.parametrize("is_empty", [False, True])
def test_measuring_leaves_a_model_as_it_is(is_empty: bool) -> None:
    if is_empty:
        with deferred():
            model = nn.Sequential(Noted(), Noted())
    else:
        model = nn.Sequential(Noted(), Noted())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    times = measure_times(model, ["0", "1"], ((torch.ones(2, 4),), {}))
    assert [str(cut) for cut in times] == ["0", "1"]
    assert all(took > 0 for took in times.values())
    for module in model:
        assert isinstance(module, Noted)
        assert module.calls == 0
        assert "forward" not in vars(module)
        assert module.linear.weight.grad is None
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, before[name])
    assert all(parameter.is_meta is is_empty for parameter in model.parameters())


def test_layers_that_cannot_be_measured() -> None:
    class Fails(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise ValueError("no")

    model = nn.Sequential(nn.Linear(4, 4), Fails(4, 4))
    with pytest.raises(PartitionError, match="cannot be measured: ValueError: no; leave out"):
        measure_times(model, ["0", "1"], ((torch.ones(2, 4),), {}))
    assert "forward" not in vars(model[1])
