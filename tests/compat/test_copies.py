"""What is not replaced is torch's own code, in copies of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isclass, isfunction
from typing import Any

import pytest

from tests.compat.peer import MODULES, module

REPLACED = {
    "schedules": """
        _PipelineSchedule PipelineScheduleSingle PipelineScheduleMulti _PipelineScheduleRuntime
        _ScheduleForwardOnly ScheduleGPipe Schedule1F1B ScheduleLoopedBFS ScheduleInterleaved1F1B
        ScheduleInterleavedZeroBubble ScheduleZBVZeroBubble ScheduleDualPipeV _add_send_recv
        _check_torch_compile_compatibility
    """,
    "stage": """
        _PipelineStageBase PipelineStage _PipelineStage _RootArgPlaceholder _make_tensor_from_meta
    """,
    "_utils": "PipeInfo PipeliningMetadataError PipeliningShapeError _make_tensor_from_meta",
    "_recv_buffers": "_make_tensor_from_meta",
    "_IR": "Pipe SplitPoint pipe_split pipeline",
    "_schedule_visualizer": "visualize_schedule",
}


def _codes(value: Any) -> Iterator[Any]:
    """The code of a function, or of all methods of a class."""
    for each in vars(value).values() if isclass(value) else [value]:
        function = getattr(each, "__func__", getattr(each, "fget", each))
        if isfunction(function):
            yield function.__code__


@pytest.mark.parametrize("name", [name.removeprefix(".") for name in MODULES if name])
def test_all_else_is_torchs_own(name: str) -> None:
    peer, ours = module(f".{name}")
    replaced = REPLACED.get(name, "").split()
    for key, value in vars(peer).items():
        if getattr(value, "__module__", None) == peer.__name__ and key not in replaced:
            assert [*_codes(getattr(ours, key))] == [*_codes(value)], key
