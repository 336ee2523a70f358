"""Schedules: their classes, their actions, and the steps from an order to one that can run.

This is but a list: programs find here what torch's module of this name shows.
"""

import torch as torch
from torch.distributed.fsdp import FSDPModule as FSDPModule
from torch.profiler import record_function as record_function

from taktline.compat.torch_pipelining._action import *  # noqa: F403
from taktline.compat.torch_pipelining._checks import *  # noqa: F403
from taktline.compat.torch_pipelining._lowering import *  # noqa: F403
from taktline.compat.torch_pipelining._orders import *  # noqa: F403
from taktline.compat.torch_pipelining._p2p import *  # noqa: F403
from taktline.compat.torch_pipelining._passes import *  # noqa: F403
from taktline.compat.torch_pipelining._runtime import *  # noqa: F403
from taktline.compat.torch_pipelining._utils import InferenceMode as InferenceMode
from taktline.compat.torch_pipelining._utils import (
    generate_rank_to_stage_mapping as generate_rank_to_stage_mapping,
)
from taktline.compat.torch_pipelining._utils import (
    generate_stage_to_rank_mapping as generate_stage_to_rank_mapping,
)
from taktline.compat.torch_pipelining.microbatch import TensorChunkSpec as TensorChunkSpec
from taktline.compat.torch_pipelining.microbatch import _split_tensor as _split_tensor
from taktline.compat.torch_pipelining.microbatch import merge_chunks as merge_chunks
from taktline.compat.torch_pipelining.microbatch import (
    split_args_kwargs_into_chunks as split_args_kwargs_into_chunks,
)
from taktline.compat.torch_pipelining.stage import PipelineStage as PipelineStage
from taktline.compat.torch_pipelining.stage import _PipelineStageBase as _PipelineStageBase
from taktline.compat.torch_pipelining.stage import _RecvInfo as _RecvInfo

__all__ = [  # noqa: F405
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]
