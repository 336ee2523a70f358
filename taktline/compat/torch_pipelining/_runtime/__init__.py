"""The schedule classes as torch's internals know them."""

from collections.abc import Sequence
from typing import Any

from taktline.compat.torch_pipelining._runtime.base import _PipelineSchedule
from taktline.compat.torch_pipelining._runtime.context import (
    _CustomFunctionProtocol,
    _PipelineContext,
)
from taktline.compat.torch_pipelining._runtime.multi import PipelineScheduleMulti
from taktline.compat.torch_pipelining._runtime.named import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
)
from taktline.compat.torch_pipelining._runtime.runtime import _PipelineScheduleRuntime
from taktline.compat.torch_pipelining._runtime.single import PipelineScheduleSingle

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "_CustomFunctionProtocol",
    "_PipelineContext",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "_ScheduleForwardOnly",
    "_check_torch_compile_compatibility",
]


def _check_torch_compile_compatibility(stages: Sequence[Any], schedule_name: str) -> None:
    """Nothing: compiled stages work under every schedule."""
