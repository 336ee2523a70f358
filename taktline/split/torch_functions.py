"""What functions of torch read and do, where a recorder must know it."""

from __future__ import annotations

from typing import Any

METADATA = frozenset(
    [
        *("shape", "size", "dtype", "device", "ndim", "dim", "numel", "nelement", "stride"),
        *("is_floating_point", "is_complex", "layout", "is_contiguous", "requires_grad", "is_cuda"),
        *("element_size", "storage_offset", "names", "__len__", "is_nested", "is_sparse"),
        *("itemsize", "nbytes", "type", "is_leaf", "grad_fn", "is_meta", "_version", "get_device"),
        *("is_shared", "is_cpu", "is_quantized", "is_mkldnn", "__hash__", "__repr__", "__format__"),
        *("__str__", "is_inference", "is_signed", "result_type", "is_same_size", "dim_order"),
        *("output_nr", "is_conj", "is_neg", "is_mps", "is_xpu", "_backward_hooks", "is_pinned"),
        *("untyped_storage", "is_tensor", "is_storage", "name", "is_sparse_csr", "ndimension"),
        *("promote_types", "can_cast", "__dir__", "is_xla", "has_names", "__reduce_ex__"),
    ]
)
"""Functions that read what a kind of call has in common: no data."""
SIZES = frozenset(("shape", "size", "numel", "nelement", "__len__", "stride", "nbytes"))
"""Functions that read sizes, which may depend on data."""
REFUSED = {
    "backward": "runs a backward in the forward, which a stage cannot; use torch.autograd.grad",
    "__set__": "sets an attribute of a tensor, such as x.data or x.grad; use x.copy_() instead",
}
"""Functions that no stage can run."""
EFFECTS = frozenset(
    ("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "call_aside")
)
"""Functions that do something beside what they return."""
STATISTICS = frozenset(("batch_norm", "instance_norm"))
"""Functions that change buffers, which torch does not show."""
PIPE_SPLIT = frozenset(("pipe_split", "_pipe_split", "_pipe_split.default"))
"""Functions with which stages begin: ours, and the operator of torch."""


def name_of(func: Any) -> str:
    """What a function, a method or an attribute of torch is called."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name
