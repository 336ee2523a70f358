"""The state of torch in which tests compare bits, the same in every process of the tests.

Two computations are equal to the last bit only if the same kernels did both. Which ones torch takes
depends on the number of threads, and on a switch that it turns by itself: where the CPU or its
library has no product in half precision, the first such product warns and turns oneDNN off, in the
whole process and for all types. So each process of the tests calls :func:`settle` before it
computes anything, and nothing changes after that.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

_SIZE = 64
"""Of the products; torch does not give small ones to oneDNN."""


def settle() -> None:
    """One thread, and every switch where a product in half precision leaves it."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.bfloat16, torch.float16):
            _products(torch.ones(_SIZE, _SIZE, dtype=dtype))


def _products(square: Tensor) -> None:
    """Each kind of product that torch may give to oneDNN."""
    square @ square
    square @ square[0]
    F.linear(square, square)
    F.linear(square, square, square[0])
    torch.bmm(square[None], square[None])
    torch.baddbmm(square[None], square[None], square[None])
