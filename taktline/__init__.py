"""Taktline: pipeline-parallel training for PyTorch.

>>> import taktline as tl
>>> plan = tl.build("1f1b", ranks=4, microbatches=8)
>>> tl.validate(plan)
()
>>> tl.simulate(plan).makespan
33.0
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taktline import checkpoint as checkpoint
    from taktline import split as split
    from taktline.batch_norm import DeferredBatchNorm as DeferredBatchNorm
    from taktline.errors import InvalidPlanError as InvalidPlanError
    from taktline.errors import MismatchError as MismatchError
    from taktline.errors import StageError as StageError
    from taktline.errors import TaktlineError as TaktlineError
    from taktline.plan import Action as Action
    from taktline.plan import Costs as Costs
    from taktline.plan import Link as Link
    from taktline.plan import Links as Links
    from taktline.plan import Placement as Placement
    from taktline.plan import Plan as Plan
    from taktline.plan import Timeline as Timeline
    from taktline.plan import Violation as Violation
    from taktline.plan import balance as balance
    from taktline.plan import bound as bound
    from taktline.plan import build as build
    from taktline.plan import lower as lower
    from taktline.plan import optimise as optimise
    from taktline.plan import simulate as simulate
    from taktline.plan import validate as validate
    from taktline.runtime import *  # noqa: F403 -- all of its names
    from taktline.side_values import add_loss as add_loss
    from taktline.side_values import collect_losses as collect_losses
    from taktline.side_values import skip as skip
    from taktline.split import Pipe as Pipe
    from taktline.split import SplitPoint as SplitPoint
    from taktline.split import build_stage as build_stage
    from taktline.split import pipe_split as pipe_split
    from taktline.split import pipeline as pipeline
    from taktline.stage import *  # noqa: F403 -- all of its names
    from taktline.train import Pipeline as Pipeline
    from taktline.transport import local as local
    from taktline.transport import register_container as register_container

__version__ = "0.1.0"

# The public names of each room, or the room itself, imported on first use.
_NAMES = {
    "batch_norm": "DeferredBatchNorm",
    "checkpoint": "checkpoint",
    "errors": "InvalidPlanError MismatchError StageError TaktlineError",
    "plan": (
        "Action Costs Link Links Placement Plan Timeline Violation balance bound build lower "
        "optimise simulate validate"
    ),
    "runtime": (
        "Replicate Schedule1F1B ScheduleDualPipeV ScheduleFromPlan ScheduleGPipe "
        "ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS "
        "ScheduleZBVZeroBubble TensorChunkSpec Trace get_schedule_class merge_chunks "
        "offload_optimizer split_args_kwargs_into_chunks"
    ),
    "side_values": "add_loss collect_losses skip",
    "split": "Pipe SplitPoint build_stage pipe_split pipeline split",
    "stage": "PipelineStage Tie compile_stages",
    "train": "Pipeline",
    "transport": "local register_container",
}
_ROOM_OF = {name: room for room, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_ROOM_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'taktline' has no attribute {name!r}")
    room = import_module(f"taktline.{_ROOM_OF[name]}")
    value = room if _ROOM_OF[name] == name else getattr(room, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _end(imported_in: int = os.getpid()) -> None:
    """Let ranks that wait for this process know that it ends, if it has made no pipeline."""
    distributed: Any = sys.modules.get("torch.distributed")
    if os.getpid() != imported_in or distributed is None:  # or it is forked, and the rank goes on
        return
    if distributed.is_available() and (distributed.is_initialized() or "RANK" in os.environ):
        import_module("taktline.transport.exit_hooks").leave_word()


atexit.register(_end)
if "multiprocessing.util" in sys.modules:  # its processes end without calling what atexit knows
    sys.modules["multiprocessing.util"].Finalize(None, _end, exitpriority=100)
