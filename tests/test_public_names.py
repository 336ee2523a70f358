"""The public names: all there, loaded lazily, documented."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import taktline
import taktline.errors
import taktline.plan

NAMES = """
Action Costs DeferredBatchNorm InvalidPlanError Link MismatchError Pipe Pipeline PipelineStage
Placement Plan Replicate Schedule1F1B ScheduleDualPipeV ScheduleFromPlan ScheduleGPipe
ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS ScheduleZBVZeroBubble
SplitPoint StageError TaktlineError TensorChunkSpec Tie Timeline Trace Violation add_loss
balance bound build build_stage checkpoint collect_losses compile_stages get_schedule_class local
lower merge_chunks optimise pipe_split pipeline register_container simulate skip split
split_args_kwargs_into_chunks validate
"""


def test_top_level_names() -> None:
    assert taktline.__all__ == NAMES.split()
    assert dir(taktline) == sorted([*taktline.__all__, "__version__"])
    for name in taktline.__all__:
        assert getattr(taktline, name) is not None


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'taktline' has no attribute 'nonsense'"):
        _ = taktline.nonsense


@pytest.mark.parametrize("module", [taktline, taktline.plan, taktline.errors])
def test_public_names_are_sorted_and_have_examples(module: object) -> None:
    names = getattr(module, "__all__")  # noqa: B009
    assert names == sorted(names)
    for name in names:
        thing = getattr(module, name)
        words = inspect.getdoc(thing) or ""
        raised = isinstance(thing, type) and issubclass(thing, taktline.errors.TaktlineError)
        assert words if raised else ">>>" in words, f"{name} has no example"


def test_every_error_is_in_the_drawn_tree() -> None:
    drawn = taktline.errors.__doc__ or ""
    for name in taktline.errors.__all__:
        assert name in drawn
        assert issubclass(getattr(taktline.errors, name), taktline.errors.TaktlineError)


@pytest.mark.processes
def test_training_does_not_import_the_compiler() -> None:
    code = "import taktline.runtime, sys; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.processes
@pytest.mark.parametrize("statement", ["import taktline", "import taktline.plan"])
def test_importing_does_not_import_torch(statement: str) -> None:
    code = f"{statement}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
