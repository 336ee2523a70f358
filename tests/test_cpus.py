"""A few of the tests that compare bits, on other CPUs; ``make cpus`` runs all of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.cpus import ROOT, SAMPLE, run
from tests.settled import settle
from tests.workers import Workers


@pytest.mark.parametrize("name", SAMPLE)
def test_the_sample_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text("utf-8")


@pytest.mark.processes
@pytest.mark.matrix
@pytest.mark.parametrize("cpu", ["SSE", "without oneDNN"])
def test_bits_are_equal_on_other_cpus(cpu: str) -> None:
    assert run(cpu, SAMPLE).returncode == 0


def switches(*_: Any) -> tuple[int, Any]:
    return torch.get_num_threads(), torch.backends.mkldnn.enabled


@pytest.mark.processes
def test_processes_compute_as_the_tests_do(workers: Workers) -> None:
    assert switches()[0] == 1
    assert workers.run(switches) == [switches(), switches()]


def test_a_switch_that_torch_turns_is_turned_before_the_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on an aarch64 CPU without bf16, whose first product warns."""

    def product(x: torch.Tensor, *_: Any) -> torch.Tensor:
        if x.dtype == torch.bfloat16 and torch.backends.mkldnn.enabled:
            torch.backends.mkldnn.enabled = False
            warnings.warn("mkldnn_matmul failed, switching to BLAS gemm", stacklevel=1)
        return x

    enabled = torch.backends.mkldnn.enabled
    monkeypatch.setattr("torch.nn.functional.linear", product)
    try:
        settle()
        assert not torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = enabled
