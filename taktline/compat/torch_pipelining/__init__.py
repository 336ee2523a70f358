"""The module tree of torch.distributed.pipelining, over Taktline's own parts."""

from taktline.compat.torch_pipelining._IR import Pipe, SplitPoint, pipe_split, pipeline
from taktline.compat.torch_pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from taktline.compat.torch_pipelining.schedules import (
    _ScheduleForwardOnly as _ScheduleForwardOnly,
)
from taktline.compat.torch_pipelining.stage import PipelineStage, build_stage

__all__ = [
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "build_stage",
    "pipe_split",
    "pipeline",
]
