"""Fingerprints of data: the same for the same bits, another one for anything else."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from taktline.runtime.agreement import fingerprint
from tests.workers import Workers

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental", "ignore:torch.quantize_per_tensor"
)

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex32, torch.complex64, torch.complex128),
]
Point = namedtuple("Point", ["x", "y"])


def of(*values: Any) -> int:
    number = fingerprint(values)
    assert 0 < number < 2**63, "0 is free to say that there is none"
    return number


def bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Any bits as a tensor of that type, zeros and ones as bool."""
    raw = torch.randint(2 if dtype is torch.bool else 256, (count * dtype.itemsize,))
    return raw.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 900])
def test_by_bits_not_by_strides(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    tensor = bits(dtype, rows * 8).reshape(rows, 8)
    same = tensor.clone().t().contiguous().t()
    assert not same.is_contiguous()
    assert of(tensor) == of(same) == of(tensor.clone().requires_grad_(dtype.is_floating_point))
    assert of(tensor) != of(tensor.flip(0)), "the order counts"
    assert of(tensor) != of(tensor.reshape(rows * 8)), "the shape counts"


def test_types_of_equal_bits_differ() -> None:
    seen = {of(torch.zeros(4, dtype=dtype)) for dtype in DTYPES}
    assert len(seen) == len(DTYPES)


def test_views_that_are_computed_when_read() -> None:
    plain = torch.tensor([1 + 2j, 3 - 4j])
    assert of(plain.conj()) == of(plain.conj().resolve_conj())
    assert of(plain.conj()) != of(plain)
    assert of(plain.conj().imag) == of(torch.tensor([-2.0, 4.0]))


@pytest.mark.parametrize("shape", [(16, 4096), (64, 128), (4096, 4096), (3, 40961)])
def test_every_row_and_most_columns_are_looked_at(shape: tuple[int, int]) -> None:
    """As tokens have it: columns that all batches share, such as the first and the last one."""
    batch = torch.zeros(shape, dtype=torch.long)
    for share in (0.1, 0.5):
        other = batch.clone()
        other[:, int(share * shape[1]) :][:, : shape[1] // 10] = 1
        assert of(batch) != of(other)
    if shape[0] <= 64:
        for row in range(shape[0]):
            other = batch.clone()
            other[row] = 1
            assert of(batch) != of(other)


def test_float64_that_end_in_zeros() -> None:
    """Their last 40 bits are equal, which must not leave a few bits to tell them apart."""
    torch.manual_seed(0)
    drawn = torch.randint(16, (4000, 8)).double()
    assert len({of(row) for row in drawn}) == len({tuple(row.tolist()) for row in drawn})


def test_python_values_by_type_and_value() -> None:
    values = [0, -1, -2, 1, True, False, 1.0, 0.0, -0.0, 2**61 - 1, 10**5000, -(10**5000)]
    values += [None, "", "1", "None", b"1", 1j, float("nan"), float("inf"), "\ud800"]
    assert len({of(value) for value in values}) == len(values)
    assert of(float("nan")) == of(float("nan"))


def test_places_in_containers_and_other_objects() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    trees = [(x, y), (y, x), (x,), (x, y, y)]
    assert len({of(*tree) for tree in trees}) == len(trees)
    assert of([x, y]) == of((x, y)) == of(Point(x, y)) == of({"a": x, "b": y})
    assert of(object(), 1) == of(object(), 1) != of(slice(None), 1)


def test_tensors_without_plain_data() -> None:
    assert of(torch.zeros(2, device="meta")) == of(torch.ones(2, device="meta"))
    assert of(torch.zeros(2, device="meta")) != of(torch.zeros(3, device="meta"))
    sparse = torch.eye(3).to_sparse()
    assert of(sparse) == of(sparse)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert of(quantized) == of(quantized)
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert of(nested) == of(nested.clone())


def test_in_any_mode() -> None:
    tensor = torch.randn(10_000)
    with torch.inference_mode():
        first = of(tensor)
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            assert of(tensor) == first
    assert of(tensor) == of(tensor.clone().requires_grad_()) == first


def sharded(rank: int, group: Any) -> tuple[int, int, int]:
    mesh = DeviceMesh.from_group(group, "cpu")
    data = torch.arange(8).reshape(4, 2)
    whole, shard = (distribute_tensor(data, mesh, [kind]) for kind in (Replicate(), Shard(0)))
    return of(data), of(whole), of(shard)


@pytest.mark.processes
def test_of_a_tensor_in_shards_that_of_this_rank(workers: Workers) -> None:
    (plain, whole, first), (_, other, second) = workers.run(sharded, ranks=2)
    assert plain == whole == other
    assert first != second


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    cpu = {"x": torch.randn(100, 100), "y": torch.arange(7), "z": 3}
    gpu = {"x": cpu["x"].cuda(), "y": cpu["y"].cuda(), "z": 3}
    assert of(gpu) == of(cpu)
