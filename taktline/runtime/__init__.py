"""Runs plans: binds them to stages and a transport, and cuts batches into micro-batches."""

from __future__ import annotations

from taktline.runtime.host_optimizer import offload_optimizer
from taktline.runtime.microbatch import (
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from taktline.runtime.schedule import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleFromPlan,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from taktline.runtime.trace import Trace

__all__ = [
    "Replicate",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleFromPlan",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "TensorChunkSpec",
    "Trace",
    "get_schedule_class",
    "merge_chunks",
    "offload_optimizer",
    "split_args_kwargs_into_chunks",
]
