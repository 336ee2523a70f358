"""Products of matrices are counted, whichever operation computes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from taktline.errors import PartitionError
from taktline.split import auto, costs, deferred
from taktline.split.costs import OperationCounter
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


def test_recurrent_layers() -> None:
    """Each of 8 vectors, and of 8 states, is multiplied with 4 matrices of 8 × 8."""
    assert counted(lambda: nn.LSTM(8, 8)(torch.ones(4, 2, 8))) == 2 * (8 + 8) * 4 * 8 * 8


@pytest.mark.parametrize(
    ("one", "other", "flops"),
    [
        ((24, 16), (3, 16, 8), 2 * 24 * 16 * 8),  # rows in groups: the experts of a layer
        ((3, 4, 16), (3, 16, 8), 3 * 2 * 4 * 16 * 8),
    ],
)
def test_grouped_products(one: tuple[int, ...], other: tuple[int, ...], flops: int) -> None:
    first, second = (torch.ones(shape, dtype=torch.bfloat16) for shape in (one, other))
    assert counted(lambda: grouped(first, second)) == flops
    without = first.to("meta"), second.to("meta")
    ends = None if len(one) == 3 else ENDS.to("meta")
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


def test_layers_that_cannot_be_measured() -> None:
    class Fails(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if type(input) is Tensor:  # with data
                raise ValueError("no")
            return super().forward(input)

    model = nn.Sequential(nn.Linear(4, 4), Fails(4, 4))
    with pytest.raises(PartitionError, match="cannot be measured: ValueError: no; leave out"):
        auto(model, 2, (torch.ones(2, 4),), measure=True)


def test_attention_that_torch_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of torch refuse to count queries that share keys; a step went down with it."""

    def refuses(*args: Any, **kwargs: Any) -> int:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    query, key = torch.randn(1, 8, 16, 32), torch.randn(1, 2, 16, 32)
    for operation in list(costs.flop_registry):
        if "attention" in str(operation):
            monkeypatch.setitem(costs.flop_registry, operation, refuses)
    run = partial(F.scaled_dot_product_attention, query, key, key, enable_gqa=True)
    assert counted(run) == 2 * 8 * 16 * 16 * (32 + 32)
