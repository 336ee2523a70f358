"""How values travel: what is packed comes out again, and a signature survives as text."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from taktline.errors import SignatureError
from taktline.meta import Signature, TensorMeta, flatten
from taktline.transport.codec import decode, encode
from taktline.transport.wire import Layout
from tests.test_meta import DTYPES, arguments, shapes


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Random bits in any shape and type; some lie apart in memory, some require a gradient."""
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    apart = draw(st.sampled_from(["contiguous", "transposed", "every other", "expanded"]))
    if apart == "transposed":
        tensor = torch.randint(0, 99, shape[::-1], generator=generator)
        tensor = tensor.permute(tuple(reversed(range(len(shape)))))
    elif apart == "every other" and shape:
        tensor = torch.randint(0, 99, (2 * shape[0], *shape[1:]), generator=generator)[::2]
    elif apart == "expanded" and shape:
        tensor = torch.randint(0, 99, (1, *shape[1:]), generator=generator).expand(shape)
    else:
        tensor = torch.randint(0, 99, shape, generator=generator)
    tensor = tensor > 49 if dtype is torch.bool else tensor.to(dtype)
    return tensor.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


def layout_of(*packed: torch.Tensor) -> Layout:
    return Layout(tuple(TensorMeta.of(tensor) for tensor in packed))


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)


@given(st.lists(tensors(), max_size=5))
def test_what_is_packed_comes_out_again(packed: list[torch.Tensor]) -> None:
    layout = layout_of(*packed)
    parcel = layout.pack(packed)
    assert parcel.buffer.is_contiguous()
    assert parcel.buffer.nbytes == layout.nbytes
    assert parcel.marks == layout.unmarked
    # On the other rank it is in another buffer.
    arrived = layout.empty()
    assert (arrived.shape, arrived.dtype) == (parcel.buffer.shape, parcel.buffer.dtype)
    arrived.copy_(parcel.buffer)
    unpacked = layout.unpack(arrived)
    assert_equal(unpacked, packed)
    for tensor, meta in zip(unpacked, layout.tensors, strict=True):
        assert TensorMeta.of(tensor) == meta
        assert tensor.is_leaf
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        if tensor.numel():
            assert tensor.untyped_storage().data_ptr() == arrived.data_ptr()


@given(st.lists(tensors(), max_size=3))
def test_a_failure_is_a_message_of_the_same_size(packed: list[torch.Tensor]) -> None:
    layout = layout_of(*packed)
    ordinary, failure = layout.pack(packed), layout.failure()
    assert failure.buffer.shape == ordinary.buffer.shape
    assert len(failure.marks) == len(ordinary.marks) == 1 + len(packed)
    assert layout.failed(failure.marks)
    assert not layout.failed(ordinary.marks)
    assert not failure.buffer.to(torch.bool).any()


def test_a_buffer_is_used_again_once_it_is_taken_back() -> None:
    first, second = torch.ones(3), torch.zeros(3)
    layout = layout_of(first)
    parcel = layout.pack([first])
    other = layout.pack([second])
    assert other is not parcel
    assert other.buffer.data_ptr() != parcel.buffer.data_ptr()
    layout.recycle(parcel)
    again = layout.pack([second])
    assert again is parcel
    assert_equal(layout.unpack(again.buffer), [second])
    # It was given once, so it is free once.
    assert layout.pack([second]) is not parcel


def test_packing_records_nothing_for_autograd() -> None:
    weight = torch.ones(3, requires_grad=True)
    result = weight * 2
    layout = layout_of(result)
    parcel = layout.pack([result])
    assert not parcel.buffer.requires_grad
    assert [view.grad_fn for view in parcel.views] == [None]
    (arrived,) = layout.unpack(parcel.buffer)
    assert arrived.requires_grad
    assert arrived.grad_fn is None
    (arrived * 3).sum().backward()
    assert weight.grad is None
    assert torch.equal(arrived.grad, torch.full((3,), 3.0))  # pyright: ignore[reportArgumentType]


def test_what_is_unpacked_can_be_changed_in_place_without_touching_the_others() -> None:
    x, count = torch.ones(3, requires_grad=True), torch.zeros(3)
    layout = layout_of(x, count)
    x, count = layout.unpack(layout.pack([x, count]).buffer)
    result = (x * x).sum()
    # What autograd has kept of x has not changed, although both are in one buffer.
    count.add_(1)
    result.backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # pyright: ignore[reportArgumentType]
    assert torch.equal(count, torch.ones(3))


@given(arguments)
def test_a_signature_survives_as_text(given: tuple[Any, ...]) -> None:
    signature = Signature.of(*flatten(given))
    text = encode(signature)
    again = decode(text)
    assert again == signature
    # Equal is not enough: True equals 1.
    assert repr(again.leaves) == repr(signature.leaves)
    assert not again.difference(*flatten(given))
    # Nothing but JSON, all the way down: no pickle that could run code.
    leaves, spec = json.loads(text)
    assert len(leaves) == len(signature.leaves)
    assert (spec is None) == (signature.spec is None)
    assert spec is None or isinstance(spec, list)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "object"),
        (1 + 2j, "complex"),
        (b"bytes", "bytes"),
        (Fraction(1, 2), "Fraction"),
        (torch.float32, "dtype"),
        ({1, 2}, "set"),
        (slice(1, 2), "slice"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_an_object_that_cannot_travel_is_refused(value: Any, name: str, nested: bool) -> None:
    given = [torch.zeros(1), [value] if nested else value]
    with pytest.raises(SignatureError) as caught:
        encode(Signature.of(*flatten(given)))
    assert str(caught.value) == (
        f"{name} cannot be sent to another rank; tensors, None, numbers and strings can, and "
        "containers of them (for a dataclass or a named tuple of your own: "
        "taktline.register_container)"
    )


def test_a_missing_tensor_is_marked_and_lies_there_as_zeros() -> None:
    metas = tuple(TensorMeta((2,), torch.float32) for _ in range(20))
    layout = Layout(metas)
    given = [None if index in (0, 19) else torch.full((2,), float(index)) for index in range(20)]
    parcel = layout.pack(given)
    assert layout.missing(parcel.marks) == [0, 19]
    for index, tensor in enumerate(layout.unpack(parcel.buffer)):
        assert torch.equal(tensor, torch.full((2,), 0.0 if index in (0, 19) else float(index)))
    layout.recycle(parcel)
    # The marks must not be there the next time.
    again = layout.pack([torch.ones(2)] * 20)
    assert layout.missing(again.marks) == []


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
    ids=["sparse", "nested"],
)
def test_a_tensor_that_is_no_plain_block_of_memory_is_refused(
    tensor: torch.Tensor, kind: str
) -> None:
    with pytest.raises(SignatureError) as caught:
        Signature.of([tensor])
    assert str(caught.value) == (
        f"a {kind} tensor cannot be sent to another stage; pass the dense tensors that it is made "
        "of"
    )


def test_the_types_that_the_properties_leave_out() -> None:
    packed = [
        torch.arange(5).to(dtype)
        for dtype in (
            torch.int8,
            torch.float16,
            torch.float8_e4m3fn,
            torch.complex64,
            torch.int16,
            torch.complex128,
        )
    ]
    layout = layout_of(*packed)
    unpacked = layout.unpack(layout.pack(packed).buffer)
    assert [tensor.dtype for tensor in unpacked] == [tensor.dtype for tensor in packed]
    for one, other in zip(unpacked, packed, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
