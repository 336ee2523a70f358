"""Batches cut and merged as torch does, also where Taktline's own functions differ on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from tests.compat.peer import module, outcome, require_same

_microbatch = module(".microbatch")

_TENSORS = [
    torch.arange(6),
    torch.arange(12).view(6, 2),
    torch.arange(8).view(2, 4),
    torch.arange(3.0),
    torch.tensor(1.0),
]
_leaves = st.sampled_from([*_TENSORS, 1, "text", None])
_values = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2),
        st.dictionaries(st.sampled_from("ab"), inner, min_size=1, max_size=2),
        st.tuples(inner),
    ),
    max_leaves=3,
)
# Of each package its own classes: made from these words.
_words = st.sampled_from(["0", "1", "-1", "2", "replicate", "an instance", "sum", "nonsense"])
_specs = st.recursive(
    _words,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.tuples(inner)),
    max_leaves=2,
)


def _spec(package: Any, words: Any) -> Any:
    if isinstance(words, dict):
        return {key: _spec(package, value) for key, value in words.items()}
    if isinstance(words, list | tuple):
        return type(words)([_spec(package, value) for value in words])
    made = {
        None: None,
        "replicate": package._Replicate,
        "an instance": package._Replicate(),
        "sum": package._CustomReducer(0, lambda a, b: a + b),
        "nonsense": "nonsense",
    }
    return made[words] if words in made else package.TensorChunkSpec(int(words))


def _both(name: str, *args: Any, words: Any = None, texts: bool = False) -> None:
    theirs, ours = (
        outcome(getattr(package, name), *args, *(_spec(package, word) for word in words or ()))
        for package in _microbatch
    )
    require_same(theirs, ours, texts=texts)


@given(
    st.lists(_values, max_size=2).map(tuple),
    st.one_of(st.none(), st.dictionaries(st.sampled_from("kl"), _values, max_size=2)),
    st.integers(1, 7),
)
def test_cutting(args: tuple[Any, ...], kwargs: dict[str, Any] | None, chunks: int) -> None:
    _both("split_args_kwargs_into_chunks", args, kwargs, chunks)


@given(_leaves, st.lists(_words, max_size=2), st.integers(1, 4))
def test_cutting_with_specs(value: Any, words: list[Any], chunks: int) -> None:
    cut = "split_args_kwargs_into_chunks"
    _both(cut, (value,), None, chunks, words=[tuple(words), None])
    _both(cut, (), {"k": value}, chunks, words=[None, dict(zip("kl", words, strict=False))])
    # A batch that is too small makes fewer micro-batches of all arguments.
    _both(cut, (torch.arange(2), value), {"k": 1}, chunks, words=[("0", "replicate"), None])


@given(st.lists(_values, min_size=1, max_size=3), st.one_of(st.none(), _specs))
def test_merging(chunks: list[Any], words: Any) -> None:
    _both("merge_chunks", chunks, words=[words])
    _both("merge_chunks", [chunks[0]] * len(chunks), words=[words])


def test_texts_that_name_a_mismatch() -> None:
    x, y = torch.arange(6), torch.arange(2)
    _both("split_args_kwargs_into_chunks", (x, 1), None, 2, words=[("0",)], texts=True)
    _both("split_args_kwargs_into_chunks", (x, 1), None, 2, words=[("0", "0")], texts=True)
    _both("split_args_kwargs_into_chunks", (x,), None, 2, words=[("nonsense",)], texts=True)
    _both("split_args_kwargs_into_chunks", (x,), None, 0, texts=True)
    _both("split_args_kwargs_into_chunks", (torch.zeros(0),), None, 2, texts=True)
    _both("merge_chunks", [1, 2], words=["replicate"], texts=True)
    _both("merge_chunks", [(x,), (x, x)], words=[None], texts=True)
    for package in _microbatch:
        with pytest.raises(AssertionError, match="Tensor size 2 is smaller than num_chunks"):
            package._split_tensor(y, package.TensorChunkSpec(0), 3)


def test_pieces_are_views() -> None:
    x = torch.arange(6)
    pieces = _microbatch.ours._split_tensor(x, _microbatch.ours.TensorChunkSpec(0), 4)
    assert [len(piece) for piece in pieces] == [2, 2, 1, 1]
    assert pieces[0].data_ptr() == x.data_ptr()


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # by torch
def test_masked_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    package = _microbatch.ours
    monkeypatch.setattr(package, "_debug_mask_minibatches", True)
    x = torch.arange(1, 6)
    (first,), (second,) = package.split_args_kwargs_into_chunks((x,), None, 2)[0]
    assert (first.tolist(), second.tolist()) == ([1, 2, 3, 0, 0], [0, 0, 0, 4, 5])
    assert package.merge_chunks([first, second], package.TensorChunkSpec(0)).tolist() == x.tolist()
    with pytest.raises(AssertionError, match=r"Expected shape torch.Size\(\[5\]\), got"):
        package.merge_chunks([first, second[1:]], package.TensorChunkSpec(0))


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_block_masks(batch: int) -> None:
    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv + b

    mask = create_block_mask(visible, batch, 1, 256, 256, device="cpu")
    for chunks in (1, 2, 3, 5):
        told = []
        for package in _microbatch:
            pieces = outcome(package._split_block_mask, mask, chunks)
            if isinstance(pieces, list):
                zero, one = torch.tensor(0), torch.tensor(1)
                pieces = [
                    (p.shape, p.kv_num_blocks.tolist(), bool(p.mask_mod(zero, zero, one, zero)))
                    for p in pieces
                ]
            told.append(pieces)
        require_same(*told)
