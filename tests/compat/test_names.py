"""The names that programs and suites take from torch, their signatures, and what is behind them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator
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

_SCHEDULES = """
    Schedule1F1B ScheduleGPipe ScheduleInterleaved1F1B ScheduleLoopedBFS ScheduleDualPipeV
    ScheduleInterleavedZeroBubble ScheduleZBVZeroBubble _ScheduleForwardOnly
"""

_NAMES = {
    "": f"""
        Pipe pipe_split SplitPoint pipeline PipelineStage build_stage {_SCHEDULES}
    """,
    ".schedules": f"""
        {_SCHEDULES} PipelineScheduleSingle PipelineScheduleMulti _PipelineSchedule
        _PipelineScheduleRuntime _PipelineContext get_schedule_class _Action _ComputationType
        _CustomFunctionProtocol FORWARD F FULL_BACKWARD B BACKWARD_INPUT I BACKWARD_WEIGHT W UNSHARD
        RESHARD REDUCE_GRAD SEND_F RECV_F SEND_B RECV_B OVERLAP_F_B _add_send_recv
        _add_unshard_reshard _add_reduce_grad _merge_bw _defer_recv_ops _validate_schedule
        _simulate_comms_compute _format_pipeline_order _dump_chrometrace _batch_p2p
        _sorted_batch_p2p _wait_batch_p2p _get_1f1b_rank_ops _get_warmup_ops _requires_reduce_grad
        _get_profiler_function_name _check_torch_compile_compatibility _action_regex dist torch
        logger TensorChunkSpec merge_chunks split_args_kwargs_into_chunks PipelineStage
        _PipelineStageBase generate_rank_to_stage_mapping generate_stage_to_rank_mapping
    """,
    ".stage": """
        PipelineStage build_stage _PipelineStageBase _PipelineStage _RecvInfo _RootArgPlaceholder
        _normalize_model_output_as_tuple
    """,
    ".microbatch": """
        TensorChunkSpec split_args_kwargs_into_chunks merge_chunks _Replicate _LossReducer
        _CustomReducer _split_tensor _split_block_mask sum_reducer DEFAULT_CHUNK_DIM
    """,
    "._backward": """
        stage_backward stage_backward_input stage_backward_weight get_param_groups
        construct_reverse_graph reverse_closure
    """,
    "._utils": """
        PipeInfo PipeliningShapeError PipeliningMetadataError flatten_args flatten_args_detach
        generate_stage_to_rank_mapping generate_rank_to_stage_mapping validate_tensors_metadata
        extract_tensor_metas InferenceMode TensorMeta GetMeshCallback
    """,
    "._IR": """
        Pipe pipeline pipe_split SplitPoint annotate_split_points PipeSequential LossWrapper
        TrivialLossWrapper MultiUseParameterConfig get_submod_name PipeInfo aten_pipe_split_alias
    """,
    "._unflatten": "_outline_submodules",
    "._debug": "map_debug_info friendly_debug_info",
    "._schedule_visualizer": """
        get_schedule_ops add_schedule_op_spacing visualize_schedule OpKey
        action_type_to_color_mapping
    """,
    "._p2p": "_stage_rank_assignment",
    "._recv_buffers": "_RecvInfo",
}

_ON_A_SCHEDULE = """
    _get_pipeline_order _prepare_schedule_with_comms _load_csv _dump_csv _simulate
    _maybe_compute_loss _maybe_get_loss _step_microbatches register_custom_function
    _validate_and_set_stage_mapping step eval
"""

_ON_A_STAGE = """
    has_backward is_first is_last forward_one_chunk backward_one_chunk backward_weight_one_chunk
    forward_maybe_with_nosync backward_maybe_with_nosync perform_reduce_grad scale_grads
    clear_runtime_states get_fwd_recv_ops get_fwd_send_ops get_bwd_recv_ops get_bwd_send_ops
    set_local_fwd_input set_local_bwd_input get_local_bwd_output get_outputs_meta
    _prepare_forward_infra _prepare_backward_infra _create_grad_recv_info _create_act_recv_info
    _create_act_send_info _get_init_p2p_neighbors_ops _retrieve_recv_activations
    _retrieve_recv_grads _validate_fwd_input _validate_fwd_outputs _shape_inference
    _configure_outputs_meta _check_chunk_id
"""


@pytest.mark.parametrize("name", MODULES)
def test_names(name: str) -> None:
    peer, ours = module(name)
    missing = [wanted for wanted in _NAMES[name].split() if not hasattr(ours, wanted)]
    assert not [wanted for wanted in missing if hasattr(peer, wanted) or not _OLDER]


def test_names_on_objects() -> None:
    schedules, stage = module(".schedules").ours, module(".stage").ours
    runtime = schedules._PipelineScheduleRuntime
    assert [name for name in _ON_A_SCHEDULE.split() if not hasattr(runtime, name)] == []
    assert [n for n in _ON_A_STAGE.split() if not hasattr(stage.PipelineStage, n)] == []


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


# What is not replaced is torch's own code, in copies of its modules.

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
    for each in vars(value).values() if inspect.isclass(value) else [value]:
        function = getattr(each, "__func__", getattr(each, "fget", each))
        if inspect.isfunction(function):
            yield function.__code__


@pytest.mark.parametrize("name", [name.removeprefix(".") for name in MODULES if name])
def test_all_else_is_torchs_own(name: str) -> None:
    peer, ours = module(f".{name}")
    replaced = REPLACED.get(name, "").split()
    for key, value in vars(peer).items():
        if getattr(value, "__module__", None) == peer.__name__ and key not in replaced:
            assert [*_codes(getattr(ours, key))] == [*_codes(value)], key


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
