"""What stages and schedules share, as torch has it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.compat.peer import SINCE_2_12, SINCE_2_13, Failure, module, outcome, require_same

_utils = module("._utils")
_TENSORS = [
    torch.ones(2, 3),
    torch.ones(2, 3, requires_grad=True),
    torch.ones(2, 4),
    torch.ones(3, 2).t(),
    torch.ones(2, 3).double(),
    torch.ones(2, 3, dtype=torch.int64),
]
_tensors = st.sampled_from([*_TENSORS, None])


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def _both(name: str, *args: Any, **kwargs: Any) -> None:
    found: list[Any] = []
    for package in _utils:
        made = [made(package) if callable(made) else made for made in args]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = outcome(getattr(package, name), *made, **kwargs)
        if not isinstance(result, Failure):
            result = (result, [str(warning.message) for warning in caught])
        found.append(result)
    require_same(*found)


def _metas(tensors: list[Any]) -> Any:
    return lambda package: package.extract_tensor_metas(tensors, allow_none=True)


@SINCE_2_12
@given(st.lists(_tensors, max_size=3), st.lists(_tensors, max_size=3), st.booleans())
def test_tensors_and_what_was_announced(
    expected: list[Any], actual: list[Any], raises: bool
) -> None:
    for values in (tuple(actual), _metas(actual)):
        _both(
            "validate_tensors_metadata",
            *("stage 1", _metas(expected), values),
            raise_on_mismatch=raises,
            warn_on_mismatch=not raises,
        )
    if len(expected) and len(actual) and expected[0] is not None:
        _both(
            "validate_metadata",
            *("it", lambda p: p.extract_tensor_meta(expected[0]), actual[0]),
            raise_on_mismatch=raises,
        )


@SINCE_2_12
@given(st.lists(st.one_of(_tensors, st.just(3)), max_size=3), st.booleans())
def test_arguments(values: list[Any], allow_none: bool) -> None:
    for shape in (tuple(values), values, values[0] if values else None, {"a": values}):
        _both("validate_and_normalize_to_tuple", shape, allow_none)
    _both("extract_tensor_metas", values, allow_none=allow_none)
    _both("flatten_args", (values, {"a": values}))
    _both("flatten_args_detach", (values, {"a": values}))


@SINCE_2_12
@given(st.lists(st.tuples(st.sampled_from(_TENSORS), _tensors), max_size=2), st.booleans())
def test_arguments_and_their_gradients(pairs: list[tuple[Any, Any]], is_input: bool) -> None:
    args, grads = [value for value, _ in pairs], [gradient for _, gradient in pairs]
    _both("validate_static_arg_grad_correspondence", 3, args, grads, is_input)
    _both("validate_static_arg_grad_correspondence", 3, args, grads[1:], is_input)
    _both("_derive_grad_metas", _metas(args))


@given(st.integers(1, 4), st.integers(0, 9), st.sampled_from(["loop", "v", "zigzag"]))
def test_where_stages_lie(ranks: int, stages: int, style: str) -> None:
    _both("generate_stage_to_rank_mapping", ranks, stages, style)
    _both("generate_rank_to_stage_mapping", ranks, stages, style)


@SINCE_2_12
def test_checks_as_they_were_before() -> None:
    utils, one, other = _utils.ours, torch.ones(2, 3), torch.ones(2, 4)
    utils.validate_tensors_metadata("inputs", [one], [one])
    with pytest.raises(utils.PipeliningShapeError, match=r"it: shape mismatch: torch\.Size"):
        utils.validate_tensor_metadata("it", one, other)


def test_detached_leaves_keep_their_wish_for_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True) * 1
    (nested,), (leaf,) = _utils.ours.flatten_args_detach((x,))
    assert nested is leaf
    assert leaf.is_leaf
    assert leaf.requires_grad


@SINCE_2_12
def test_tensors_from_what_is_known() -> None:
    for package in _utils:
        meta = package.extract_tensor_meta(torch.ones(3, 2, requires_grad=True).t())
        made = meta.to_tensor("cpu")
        assert (made.shape, made.stride(), made.requires_grad) == ((2, 3), (1, 2), True)
        assert not package._make_tensor_from_meta(meta, "cpu").requires_grad
        assert hash(meta) == hash(package.extract_tensor_meta(made))


@SINCE_2_12
def test_shards() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    wide = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = torch.ones(2, 3, requires_grad=True)
    tensors = [
        DTensor.from_local(local, mesh, [Shard(0)]),
        DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()]),
        DTensor.from_local(torch.ones(2, 3), wide, [Shard(0), Shard(1)]),
        torch.ones(2, 3),
    ]
    for one in tensors:
        _both("extract_tensor_meta", one)
        for other in tensors:
            _both("validate_metadata", "it", lambda p, one=one: p.extract_tensor_meta(one), other)
    _both("validate_static_arg_grad_correspondence", 1, tensors[:1], tensors[3:], True)
    for package in _utils:
        meta = package.extract_tensor_meta(tensors[0])
        made = meta.to_dtensor("cpu", mesh)
        assert package.extract_tensor_meta(made) == meta
        shard = package.to_local_if_dtensor(tensors[0], detach=True)
        assert (shard.shape, shard.requires_grad) == ((2, 3), False)
        cache = package._MeshCache()
        cache.update_from_tensors((None, *tensors[:1]))
        assert cache.get_mesh(meta.mesh_cache_key) is mesh
        asked = package._MeshCache(lambda names, layout: {("tp",): mesh}.get(names))
        assert asked.get_mesh(meta.mesh_cache_key) is mesh
        key = package.extract_tensor_meta(tensors[2]).mesh_cache_key
        with pytest.raises(package.PipeliningMetadataError, match="callback returned None for"):
            asked.get_mesh(key)
        with pytest.raises(package.PipeliningMetadataError, match="no get_mesh callback"):
            cache.get_mesh(key)


@SINCE_2_12
def test_whether_shapes_must_be_learned() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    sharded = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    for tensor in (torch.ones(1), sharded):
        for known in ((), ("inputs",), ("inputs", "outputs"), ("inputs", "outputs", "input_grads")):
            for names in (known, (*known, "output_grads")):
                told = []
                for package in _utils:
                    meta = (package.extract_tensor_meta(tensor),)
                    stage = package._StageMeta(**dict.fromkeys(names, meta))
                    told.append(
                        [
                            *(stage.has_any(), stage.has_dtensors()),
                            stage.is_complete_for_forward(),
                            *(package.InferenceMode.needs_dynamic(stage, b) for b in (True, False)),
                        ]
                    )
                assert told[0] == told[1], names


def test_texts_for_debugging() -> None:
    x = torch.ones(2, requires_grad=True)
    for value in (x, [x, {"a": (x, None)}], 3, "text", slice(0, 2), {1: x}):
        for function in module("._debug").map_debug_info, module("._debug").friendly_debug_info:
            peer, ours = function
            assert ours(value) == peer(value)


@SINCE_2_13
def test_integers_have_no_gradients() -> None:
    for package in _utils:
        meta = package._TensorMeta(torch.Size([2]), (1,), torch.int64, True)
        assert not meta.to_tensor("cpu").requires_grad
