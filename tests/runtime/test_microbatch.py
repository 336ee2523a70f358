"""Cutting and merging: as torch does where torch does, and clear where it does not."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import microbatch as theirs
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import Replicate as Everywhere
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import (
    _deregister_pytree_node,
    register_pytree_node,
    tree_flatten,
    tree_map,
)

from taktline.errors import BatchError
from taktline.runtime import microbatch as ours
from taktline.runtime.microbatch import (
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    split_value,
)

HINT = (
    "; where dimension 0 is not the batch, pass a chunk spec: TensorChunkSpec(dim), or Replicate() "
    "for the whole in each micro-batch"
)
X = torch.zeros(3, 16)
DIM: Any = TensorChunkSpec

# ── Generated arguments ──────────────────────────────────────────────────────────────────────────


class Pair(NamedTuple):
    left: Any
    right: Any


class Output(OrderedDict[str, Any]):
    """Like the outputs of transformers: a dict of its own type, registered without key paths."""


register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
)


@dataclass(frozen=True)
class Item:
    """A leaf to be, and the dimension to cut it along; None: replicate it."""

    value: Any
    dim: int | None

    def spec(self, module: Any) -> Any:
        if self.dim is not None:
            return module.TensorChunkSpec(self.dim)
        return Replicate() if module is ours else module._Replicate()


class Case(NamedTuple):
    chunks: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def values(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map(lambda item: item.value, (self.args, self.kwargs))

    @property
    def is_for_torch(self) -> bool:
        """torch cannot cut arguments that are there, but are nothing but empty containers."""
        return all(not each or tree_flatten(each)[0] for each in self[1:])

    def specs(self, module: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map(lambda item: item.spec(module), (self.args, self.kwargs))


@st.composite
def tensors(draw: st.DrawFn, batch: int, any_dim: bool) -> Item:
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    dim = draw(st.integers(0, len(shape))) if any_dim else 0
    shape.insert(dim, batch)
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    if draw(st.booleans()):  # not contiguous
        value = value.t().contiguous().t() if value.ndim == 2 else value
    return Item(value, draw(st.sampled_from([dim, dim - len(shape)])) if any_dim else 0)


@st.composite
def cases(draw: st.DrawFn, any_dim: bool) -> Case:
    chunks = draw(st.integers(1, 5))
    batch = draw(st.integers(chunks, 12))
    plain = st.sampled_from([None, 3, 0.5, "text", True]).map(lambda value: Item(value, None))
    leaves = tensors(batch, any_dim) | plain
    if any_dim:
        leaves |= st.builds(lambda size: Item(torch.ones(size), None), st.integers(0, 5))
    nested = st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(Pair, inner, inner)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(Output)
        ),
        max_leaves=5,
    )
    args = tuple(draw(st.lists(nested, max_size=3)))
    return Case(chunks, args, draw(st.dictionaries(st.sampled_from("xyz"), nested, max_size=3)))


def place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.data_ptr(), tensor.dtype


def assert_same(mine: Any, expected: Any, *, views: bool = True) -> None:
    """The same structure and values; tensors at the same place in memory too, if views."""
    (my_leaves, my_tree), (leaves, tree) = tree_flatten(mine), tree_flatten(expected)
    assert my_tree == tree
    for my_leaf, leaf in zip(my_leaves, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            assert my_leaf is leaf
        else:
            assert torch.equal(my_leaf, leaf)
            assert not views or place(my_leaf) == place(leaf)


# ── As torch does ────────────────────────────────────────────────────────────────────────────────


def test_specs_read_like_those_of_torch() -> None:
    for module in (ours, theirs):
        specs = module.TensorChunkSpec.from_tuple((0, 2))
        assert isinstance(specs, tuple)
        assert [spec.split_dim for spec in specs] == [0, 2]
        assert str(specs[1]) == "TensorChunkSpec(2)"
        assert repr(specs[1]) == f"{module.__name__}.TensorChunkSpec(2)"
        named = module.TensorChunkSpec.from_dict({"id": 0, "mask": 1})
        assert {name: spec.split_dim for name, spec in named.items()} == {"id": 0, "mask": 1}


@pytest.mark.parametrize("by_specs", [False, pytest.param(True, marks=pytest.mark.slow)])
@given(data=st.data())
def test_cuts_as_torch_does_and_merging_undoes_it(by_specs: bool, data: st.DataObject) -> None:
    case = data.draw(cases(any_dim=by_specs))
    specs: Any = case.specs(ours) if by_specs else (None, None)
    args, kwargs = case.values
    mine = split_args_kwargs_into_chunks(args, kwargs, case.chunks, *specs)
    if case.is_for_torch:
        others: Any = case.specs(theirs) if by_specs else ()
        assert_same(mine, theirs.split_args_kwargs_into_chunks(args, kwargs, case.chunks, *others))
    for parts, value, spec in zip(mine, case.values, specs, strict=True):
        assert len(parts) == case.chunks
        assert_same(merge_chunks(parts, spec), value, views=False)


RETAINS = pytest.mark.skipif(
    not hasattr(theirs, "DTensor"), reason="torch retains the gradients of pieces since 2.13"
)


@pytest.mark.parametrize("module", [ours, pytest.param(theirs, marks=RETAINS)])
def test_a_leaf_hands_its_gradient_to_its_pieces(module: Any) -> None:
    """A stage reads the gradient of its input, and the pieces are the inputs."""
    leaf = torch.ones(4, requires_grad=True)
    pieces, _ = module.split_args_kwargs_into_chunks((leaf, leaf * 1), None, 2)
    torch.stack([(2 * piece).sum() for piece, _ in pieces]).sum().backward()
    assert [piece.grad.tolist() for piece, _ in pieces] == [[2.0, 2.0]] * 2
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 4
    assert not any(later.retains_grad for _, later in pieces)


# ── Better than torch ────────────────────────────────────────────────────────────────────────────


def test_each_micro_batch_has_containers_of_its_own() -> None:
    args, kwargs = split_args_kwargs_into_chunks(([1],), {"a": {}}, 2)
    args[0][0].append(2)
    kwargs[0]["a"]["b"] = kwargs[0]["c"] = 3
    assert (args[1], kwargs[1]) == (([1],), {"a": {}})
    _, empty = split_args_kwargs_into_chunks((), None, 2)
    assert empty[0] is not empty[1]


def test_nothing_to_cut() -> None:
    assert split_args_kwargs_into_chunks((), None, 3) == ([(), (), ()], [{}, {}, {}])
    specs = TensorChunkSpec.from_tuple((0,)), TensorChunkSpec.from_dict({"a": 0})
    assert split_args_kwargs_into_chunks((), {}, 2, *specs) == ([(), ()], [{}, {}])
    assert split_value(None, 2, name="target") == [None, None]
    scalar = torch.tensor(2.0)
    for whole in (scalar, "text", object()):
        assert all(piece is whole for piece in split_value(whole, 3, name="x"))
        assert split_value([whole], 2, name="x") == [[whole], [whole]]


def test_specs_of_keyword_arguments_go_by_name() -> None:
    """torch goes by their order."""
    x, y = torch.zeros(2, 4), torch.zeros(4, 2)
    specs = {"y": TensorChunkSpec(0), "x": TensorChunkSpec(1)}
    _, pieces = split_args_kwargs_into_chunks((), {"x": x, "y": y}, 4, None, specs)
    assert [(p["x"].shape, p["y"].shape) for p in pieces] == [((2, 1), (1, 2))] * 4


def test_one_spec_for_all_in_a_container_and_none_for_the_default() -> None:
    x = torch.arange(4).view(2, 2)
    spec = ({"a": TensorChunkSpec(1), "b": Replicate, "c": None}, None)
    args, _ = split_args_kwargs_into_chunks(({"a": [x, (x,)], "b": [x], "c": x}, x), {}, 2, spec)
    assert_same(
        args,
        [
            (
                {"a": [x[:, i : i + 1], (x[:, i : i + 1],)], "b": [x], "c": x[i : i + 1]},
                x[i : i + 1],
            )
            for i in range(2)
        ],
    )


def test_outputs_are_merged_in_their_structure() -> None:
    losses = [torch.tensor(1.0), torch.tensor(2.0)]
    for spec in (None, TensorChunkSpec(0)):
        assert merge_chunks(losses, spec).tolist() == [1.0, 2.0]
    output = Output(logits=torch.zeros(1, 2), cache=None)
    merged = merge_chunks([output, output], None)
    assert (type(merged), merged["logits"].shape, merged["cache"]) == (Output, (2, 2), None)
    x = torch.zeros(2, 2)
    merged = merge_chunks([[x, x], [x, x]], TensorChunkSpec.from_tuple((0, 1)))
    assert isinstance(merged, list)
    assert [tuple(each.shape) for each in merged] == [(4, 2), (2, 4)]
    counts = defaultdict(int, a=torch.zeros(1))
    assert merge_chunks([counts, counts], None).default_factory is int
    assert merge_chunks([x, x.clone()], Replicate()) is x


# ── What is said when it does not work ───────────────────────────────────────────────────────────


def cutting(args: Any, kwargs: Any, chunks: Any, *specs: Any) -> Callable[[], Any]:
    return lambda: split_args_kwargs_into_chunks(args, kwargs, chunks, *specs)


def by_spec(value: Any, spec: Any) -> Callable[[], Any]:
    return lambda: split_value(value, 2, spec=spec, name="it")


def merging(chunks: list[Any], spec: Any = None) -> Callable[[], Any]:
    return lambda: merge_chunks(chunks, spec)


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (
            cutting((X,), {}, 4),
            "argument 0 is float32[3, 16]: 3 along dimension 0 cannot be cut into 4 micro-batches; "
            "pass at least 4, or use at most 3 micro-batches",
        ),
        (
            cutting((1, {"mask": [0, X[:1].bool()]}), None, 2),
            "argument 1['mask'][1] is bool[1, 16]: 1 along dimension 0 cannot be cut into 2 "
            "micro-batches; pass at least 2, or use at most 1 micro-batch",
        ),
        (
            cutting((), {"mask": X[:0]}, 1),
            "keyword argument 'mask' is float32[0, 16]: 0 along dimension 0: it is empty; leave "
            "out batches without rows",
        ),
        (
            cutting((X,), {"a": Output(b=torch.zeros(6).long())}, 2),
            "not one batch: argument 0 is float32[3, 16]: 3 along dimension 0, "
            "but keyword argument 'a'['b'] is int64[6]: 6 along dimension 0" + HINT,
        ),
        (cutting((X,), {}, 0), "micro-batches must be a whole number from 1 up, not 0"),
        (cutting((X,), {}, 1.5), "micro-batches must be a whole number from 1 up, not 1.5"),
        (
            cutting((X, X), {}, 2, (None,)),
            "args is a tuple of [0, 1], but its chunk spec a tuple of [0]",
        ),
        (
            cutting((), {"a": X}, 2, None, {"b": None}),
            "kwargs is a dict of ['a'], but its chunk spec a dict of ['b']",
        ),
        (
            cutting((), {"a": X}, 2, None, (None,)),
            "kwargs is a dict of ['a'], but its chunk spec a tuple of [0]",
        ),
        (by_spec(X, DIM(2)), "it is float32[3, 16]: it has no dimension 2; use one from -2 to 1"),
        (by_spec(X, DIM(-3)), "it is float32[3, 16]: it has no dimension -3; use one from -2 to 1"),
        (
            by_spec(X, DIM("a")),
            "it is float32[3, 16]: it has no dimension 'a'; use one from -2 to 1",
        ),
        (by_spec(X[0, 0], DIM(0)), "it is float32[]: it has no dimension 0; use Replicate()"),
        (
            by_spec({"a": (HINT, object)}, {"a": (None, DIM(0))}),
            "it['a'][1] is a type, no tensor: use Replicate(), not TensorChunkSpec(0)",
        ),
        (by_spec(X, 0), "it: 0 is not a chunk spec; use a TensorChunkSpec, Replicate() or None"),
        (
            by_spec(X, theirs.TensorChunkSpec(0)),
            "it: torch.distributed.pipelining.microbatch.TensorChunkSpec(0) is not a chunk spec; "
            "use a TensorChunkSpec, Replicate() or None",
        ),
        (
            by_spec({"a": [X]}, {"a": {"b": None}}),
            "it['a'] is a list of [0], but its chunk spec a dict of ['b']",
        ),
        (by_spec(X, (None,)), "it is float32[3, 16], but its chunk spec a tuple of [0]"),
        (
            by_spec([X, X], [DIM(1), None]),
            "not one batch: it[0] is float32[3, 16]: 16 along dimension 1, "
            "but it[1] is float32[3, 16]: 3 along dimension 0" + HINT,
        ),
        (merging([]), "there is no micro-batch to merge"),
        (
            merging([(X, X), (X, [X])]),
            "micro-batch 0 has the structure TreeSpec(tuple, None, [*, *]), but micro-batch 1 has "
            "TreeSpec(tuple, None, [*, TreeSpec(list, None, [*])])",
        ),
        (
            merging([{"a": X}, {"a": X[:, :5]}]),
            "output['a'] cannot be joined along dimension 0: it is float32[3, 16], float32[3, 5] "
            "in the micro-batches (…",
        ),
        (
            merging([X, X[:2]], DIM(1)),
            "output cannot be joined along dimension 1: it is float32[3, 16], float32[2, 16]…",
        ),
        (
            merging([X[0, 0], X[0]]),
            "output cannot be joined along dimension 0: it is float32[], float32[16]…",
        ),
        (
            merging([X, None]),
            "output cannot be joined along dimension 0: it is float32[3, 16], None…",
        ),
        (
            merging([(X, 1), (X, 2)]),
            "output[1] is 1 in micro-batch 0, but another value in micro-batch 1, 2; return "
            "tensors, or equal values",
        ),
        (
            merging([torch.arange(3), torch.arange(4)], Replicate),
            "output is int64[3] in micro-batch 0, but another value in micro-batch 1, int64[4]…",
        ),
        (merging([X], DIM(2)), "output is float32[3, 16]: it has no dimension 2; use one from…"),
        (
            merging([(1,)], DIM(0)),
            "output[0] is 1, no tensor: use Replicate(), not TensorChunkSpec(0)",
        ),
        (
            merging([(X, X)], (None,)),
            "output is a tuple of [0, 1], but its chunk spec a tuple of [0]",
        ),
    ],
)
def test_what_cannot_be_cut_or_merged(refused: Callable[[], Any], text: str) -> None:
    with pytest.raises(BatchError) as caught:
        refused()
    beginning = text.removesuffix("…")
    assert str(caught.value)[: None if beginning == text else len(beginning)] == beginning


# ── Block masks and distributed tensors ──────────────────────────────────────────────────────────


def block_mask(samples: int) -> BlockMask:
    """A mask that is another for each sample: sample b sees the last 150 + 20b of those before."""

    def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv < 150 + 20 * b)

    return create_block_mask(seen, samples, 1, 512, 512, device="cpu")


def dense(mask: BlockMask) -> Tensor:
    """What the function of a mask says for each sample and pair of positions."""
    return create_mask(mask.mask_mod, mask.shape[0], 1, 512, 512, device="cpu")


def test_block_masks_are_cut_as_torch_does() -> None:
    mask = block_mask(5)
    pieces = split_value({"mask": mask}, 3, name="x")
    expected, _ = theirs.split_args_kwargs_into_chunks(({"mask": mask},), None, 3)
    for piece, (other,) in zip(pieces, expected, strict=True):
        piece, other = piece["mask"], other["mask"]
        assert piece.shape == other.shape
        assert torch.equal(dense(piece), dense(other))
        for name, value in vars(other).items():
            if isinstance(value, Tensor):
                assert torch.equal(getattr(piece, name), value), name
            elif name != "mask_mod":
                assert getattr(piece, name) == value
    assert torch.equal(torch.cat([dense(piece["mask"]) for piece in pieces]), dense(mask))
    assert mask.shape[0] == 5


@pytest.mark.parametrize("registered", [False, True])
def test_a_block_mask_for_all_samples_goes_to_each_micro_batch(registered: bool) -> None:
    """Also where the pytree takes it for a container."""
    mask = block_mask(1)
    if registered:
        register_pytree_node(
            BlockMask,
            lambda mask: ([mask.kv_num_blocks, mask.kv_indices], None),
            lambda blocks, _: BlockMask.from_kv_blocks(*blocks),
        )
    try:
        args, _ = split_args_kwargs_into_chunks((torch.zeros(4, 2), mask), None, 2)
        assert all(piece is mask for _, piece in args)
        assert split_value([mask], 2, spec=Replicate(), name="x") == [[mask], [mask]]
        assert merge_chunks([mask, mask], None) is mask
    finally:
        if registered:
            _deregister_pytree_node(BlockMask)


def test_block_masks_that_cannot_be_cut() -> None:
    mask = block_mask(2)
    with pytest.raises(BatchError) as caught:
        split_value([mask], 3, name="mask")
    assert str(caught.value) == (
        "mask[0] is a BlockMask: 2 along dimension 0 cannot be cut into 3 "
        "micro-batches; pass at least 3, or use at most 2 micro-batches"
    )
    with pytest.raises(BatchError, match=r"not one batch: argument 0 .* argument 1 is a BlockMask"):
        split_args_kwargs_into_chunks((torch.zeros(4), mask), None, 2)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two ranks, of which this process is the first; nothing is ever sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def distributed(mesh: Any, placement: Any) -> DTensor:
    """The part of rank 0."""
    local = torch.arange(40).view(10, 4)
    if isinstance(placement, Shard):
        local = local.chunk(2, placement.dim)[0].contiguous()
    return DTensor.from_local(local, mesh, [placement], run_check=False)


@pytest.mark.parametrize(
    ("placement", "dim", "sizes"),
    [(Everywhere(), 0, [4, 3, 3]), (Shard(1), 0, [4, 3, 3]), (Shard(0), 1, [2, 1, 1])],
)
def test_distributed_tensors_are_cut_and_joined_between_their_shards(
    mesh: Any, placement: Any, dim: int, sizes: list[int]
) -> None:
    whole = distributed(mesh, placement)
    pieces = split_value(whole, 3, spec=TensorChunkSpec(dim), name="x")
    assert [piece.shape[dim] for piece in pieces] == sizes
    for piece, mine in zip(pieces, whole.to_local().tensor_split(3, dim), strict=True):
        assert piece.placements == whole.placements
        assert torch.equal(piece.to_local(), mine)
    merged = merge_chunks(pieces, TensorChunkSpec(dim))
    assert isinstance(merged, DTensor)
    assert (merged.shape, merged.placements) == (whole.shape, whole.placements)
    assert torch.equal(merged.to_local(), whole.to_local())


def test_distributed_tensors_that_do_not_fit(mesh: Any) -> None:
    parts = [distributed(mesh, placement) for placement in (Shard(0), Everywhere())]
    text = (
        "x is int64[10, 4] (Shard(dim=0),), whose shards along dimension 0 are not cut or joined; "
        "redistribute it, or use it as a plain tensor with this rank's rows"
    )
    for refused in (
        lambda: split_value(parts[0], 2, name="x"),
        lambda: merge_chunks([parts[0], parts[0]], None),
    ):
        with pytest.raises(BatchError) as caught:
            refused()
        assert str(caught.value).replace("output", "x") == text
    with pytest.raises(BatchError, match="cannot be joined along dimension 0"):
        merge_chunks([parts[1], torch.zeros(10, 4)], None)


# ── Cheap to import ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.processes
def test_cutting_imports_neither_attention_nor_distributed_tensors() -> None:
    code = """
import sys, torch
from taktline.runtime import microbatch
pieces = microbatch.split_value([torch.nn.Parameter(torch.zeros(4)), 1], 2, name="x")
microbatch.merge_chunks(pieces, None)
for name in ("torch.nn.attention.flex_attention", "torch.distributed.tensor"):
    assert name not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", code], check=True)
