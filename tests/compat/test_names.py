"""The names that programs and suites take from torch, their signatures, and what is behind them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import taktline
from taktline.compat.torch_pipelining._schedule_visualizer import (
    get_schedule_ops,
    visualize_schedule,
)
from taktline.errors import MismatchError
from tests.compat.peer import MODULES, module

_RENAMED = ("validate_tensors_metadata", "_make_tensor_from_meta")
"""With other names for their arguments before 2.13, which everybody gives by position."""

_OLDER = not hasattr(module(".schedules").peer, "_TARGET_CHUNK_SPEC")  # than 2.13

_NEWEST = hasattr(module(".schedules").peer, "WAIT_REDUCE_GRAD")
"""Whether torch has all that ours has."""

_EARLIER = {".stage": "_RecvInfo _RootArgPlaceholder", "._utils": "PipeliningShapeError"}
"""Names that some versions of torch have, and suites import."""

_EARLIER_ON_A_STAGE = """
    get_outputs_meta _create_act_recv_info _create_act_send_info _get_init_p2p_neighbors_ops
    _validate_fwd_input _validate_fwd_outputs _shape_inference _configure_outputs_meta
    _check_chunk_id
"""


@pytest.mark.parametrize("name", MODULES)
def test_names(name: str) -> None:
    peer, ours = module(name)
    names = [*vars(peer), *_EARLIER.get(name, "").split()]
    assert [wanted for wanted in names if not hasattr(ours, wanted)] == []


def test_names_on_objects() -> None:
    runtime, stage = module(".schedules")._PipelineScheduleRuntime, module(".stage").PipelineStage
    wanted = {runtime: ["_get_pipeline_order"], stage: _EARLIER_ON_A_STAGE.split()}
    for (peer, ours), earlier in wanted.items():
        assert [name for name in [*dir(peer), *earlier] if not hasattr(ours, name)] == []


@pytest.mark.parametrize("name", MODULES)
def test_signatures(name: str) -> None:
    _require_signatures(*module(name), but=_RENAMED if _OLDER else ())


# Taktline's own stage takes its arguments as torch has had them since 2.13, under every torch.
def test_signatures_at_the_top_level() -> None:
    for name in ("", ".schedules", ".microbatch", "._backward"):
        _require_signatures(module(name).peer, taktline, but={"PipelineStage"} if _OLDER else ())


def _require_signatures(peer: Any, ours: Any, but: Collection[str] = ()) -> None:
    different: list[str] = []
    for key, value in vars(peer).items():
        if not str(getattr(value, "__module__", "")).startswith("torch.distributed.pipelining"):
            continue
        mine = getattr(ours, key, None)
        if mine is None or not callable(value) or key in but:
            continue
        pairs = [(key, value, mine)]
        if inspect.isclass(value):
            members = [m for m in vars(value) if not m.startswith("_") and hasattr(mine, m)]
            pairs += [(f"{key}.{m}", getattr(value, m), getattr(mine, m)) for m in members]
        different += [
            f"{where}: torch {_signature(one)}, ours {_signature(other)}"
            for where, one, other in pairs
            if not _fits(_signature(one), _signature(other))
        ]
    assert not different, "\n".join(different)


def _signature(function: Any) -> list[tuple[str, str, str]] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    plain = (bool, int, str, type(None), type)  # such as a factory of a default are not compared
    return [
        (p.name, p.kind.name, repr(p.default) if isinstance(p.default, plain) else "some")
        for p in parameters
    ]


def _fits(peer: Any, ours: Any) -> bool:
    """Whether all calls that fit the one fit the other: ours may add keywords, and defaults.

    Under an older torch, so may what later ones have added at the end.
    """
    if peer is None or ours is None:
        return True
    theirs = {name: (kind, default) for name, kind, default in peer}
    empty = repr(inspect.Parameter.empty)
    if [name for name, _, _ in ours if name in theirs] != list(theirs):
        return False
    if not _NEWEST:
        while ours and ours[-1][0] not in theirs and (ours[-1][2] != empty or "VAR" in ours[-1][1]):
            ours = ours[:-1]
    for name, kind, default in ours:
        if name not in theirs and kind == "VAR_KEYWORD":  # our options, of which none is required
            continue
        their_kind, their_default = theirs.get(name, ("KEYWORD_ONLY", empty))
        if kind != their_kind or (default != their_default and their_default != empty):
            return False
        if name not in theirs and default == empty:
            return False
    return True


def test_a_group_passed_as_the_seventh_argument_is_refused() -> None:
    group: Any = dist.ProcessGroup(0, 1)  # pyright: ignore
    with pytest.raises(MismatchError, match=r"as in torch before 2\.13; pass it by its name"):
        taktline.PipelineStage(nn.ReLU(), 0, 1, torch.device("cpu"), None, None, group)  # pyright: ignore


def test_drawings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = get_schedule_ops("GPipe", 2, 2)
    for name, beginning in {"a.svg": "<svg", "a.html": "<!doctype html>"}.items():
        visualize_schedule(rows, str(tmp_path / name))
        assert (tmp_path / name).read_text().lower().startswith(beginning)
    visualize_schedule(rows)
    assert "rank 1" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ImportError, match="matplotlib"):
        visualize_schedule(rows, "a.png")  # torch's own
