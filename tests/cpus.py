"""Runs the tests that compare numbers as other CPUs would: ``python -m tests.cpus``.

The CPUs differ in the instructions that torch and the libraries below it may use, and in whether
torch turns oneDNN off (see ``tests/settled.py``). pytest gets the arguments. An aarch64 CPU without
bf16 can be had as well: its wheel of torch runs under ``qemu-aarch64 -cpu neoverse-n1``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.settled import ONEDNN

ROOT = Path(__file__).parent.parent
CPUS = {
    "SSE": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "AVX-512 without bf16": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "without oneDNN": {ONEDNN: "off"},
}
"""By name, what is set for them; those of more instructions than there are change nothing."""
TESTS = (
    *(f"tests/{room}" for room in ("stage", "split", "runtime", "train", "checkpoint")),
    *("tests/transport/test_distributed.py", "tests/compat/test_steps.py", "tests/test_torture.py"),
)
SAMPLE = (
    "tests/test_torture.py::test_nothing_hangs_and_nothing_is_wrong[local-26]",
    "tests/test_torture.py::test_nothing_hangs_and_nothing_is_wrong[gloo-12]",
    "tests/split/test_idioms.py::test_a_scaled_loss_under_autocast",
    "tests/runtime/test_data_parallel.py::test_mixed_precision_is_that_of_fsdp_to_the_last_bit"
    "[ScheduleZBVZeroBubble]",
    "tests/test_cpus.py::test_processes_compute_as_the_tests_do",
)
"""A few that have failed on some CPU, for those who run all tests on one."""


def run(cpu: str, for_pytest: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest on such a CPU, with compiled kernels of its own.

    The compiler would take those of another CPU from its cache: it asks only for the same graph.
    """
    print(f"== {cpu}", flush=True)
    with TemporaryDirectory() as kernels:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *for_pytest],
            cwd=ROOT,
            env={**os.environ, **CPUS[cpu], "TORCHINDUCTOR_CACHE_DIR": kernels},
            text=True,
            check=False,
        )


def main() -> int:
    """Run all tests that compare numbers on each, or what is given; fails if one does."""
    codes = {cpu: run(cpu, sys.argv[1:] or TESTS).returncode for cpu in CPUS}
    for cpu, code in codes.items():
        print(f"{cpu}: {'passed' if code == 0 else f'failed ({code})'}")
    return max(codes.values())


if __name__ == "__main__":
    raise SystemExit(main())
