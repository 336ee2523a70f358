"""The public names: all there, loaded lazily, documented."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from difflib import unified_diff
from types import ModuleType

import pytest

import taktline
import taktline.errors
import taktline.plan
from tests.documents import ROOT
from tests.public_api import STORED, text

NAMES = """
Action Costs DeferredBatchNorm InvalidPlanError Link Links MismatchError Pipe Pipeline PipelineStage
Placement Plan Replicate Schedule1F1B ScheduleDualPipeV ScheduleFromPlan ScheduleGPipe
ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS ScheduleZBVZeroBubble
SplitPoint StageError TaktlineError TensorChunkSpec Tie Timeline Trace Violation add_loss
balance bound build build_stage checkpoint collect_losses compile_stages get_schedule_class local
lower merge_chunks offload_optimizer optimise pipe_split pipeline register_container simulate skip
split split_args_kwargs_into_chunks validate
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


def test_the_public_api_is_as_it_was() -> None:
    """What is new or gone here is so for users: say it in CHANGELOG.md, and refresh the text."""
    lines = unified_diff(STORED.read_text().splitlines(), text().splitlines(), lineterm="", n=0)
    assert "\n".join(lines) == "", "refresh with: python -m tests.public_api"


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    described = set(re.findall(r"^::: taktline\.(?:\w+\.)*(\w+)$", page, re.M))
    for module in (taktline, taktline.plan):
        names = [
            name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)
        ]
        missing = set(names) - described
        assert not missing, f"docs/reference.md lacks {sorted(missing)}"
