"""The state of torch in which tests compare bits, the same in every process of the tests.

Two computations are equal to the last bit only if the same kernels did both. Which ones torch takes
depends on the number of threads, and on a switch that it turns by itself: on a CPU without bf16,
the first product of that type may warn and turn oneDNN off, in the whole process and for all types.
So each process of the tests calls :func:`settle` before it computes anything.
"""

from __future__ import annotations

import os
import warnings

import torch
from torch.nn import functional as F

ONEDNN = "TAKTLINE_TESTS_ONEDNN"
"""Set to ``off``, the tests run without oneDNN, as they end up on some CPUs."""

_SIZE = 64
"""Of the products; torch does not give small ones to oneDNN."""


def settle() -> None:
    """One thread, and the switch where products in half precision leave it."""
    torch.set_num_threads(1)
    if os.environ.get(ONEDNN) == "off":
        torch.backends.mkldnn.enabled = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.bfloat16, torch.float16):
            square = torch.ones(_SIZE, _SIZE, dtype=dtype)
            torch.mm(square, square)
            F.linear(square, square, square[0])
            torch.bmm(square[None], square[None])
