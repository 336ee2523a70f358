"""Whether tensors are what was announced of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from taktline.compat.torch_pipelining._metadata import TensorMeta, extract_tensor_meta
from taktline.errors import PipeliningMetadataError

__all__ = [
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "validate_and_normalize_to_tuple",
    "validate_metadata",
    "validate_static_arg_grad_correspondence",
    "validate_tensor_metadata",
    "validate_tensors_metadata",
]

PipeliningShapeError = PipeliningMetadataError
"""What torch called it before 2.13."""


def validate_metadata(
    desc: str,
    expected: torch.Tensor | TensorMeta,
    actual: torch.Tensor | TensorMeta,
    *,
    raise_on_mismatch: bool = False,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Each difference in words; raises or warns, if asked to.

    >>> validate_metadata("input", extract_tensor_meta(torch.zeros(2)), torch.zeros(2).int())
    ['dtype mismatch: torch.float32 vs torch.int32']
    """
    if isinstance(expected, torch.Tensor):  # as before torch 2.13
        expected = extract_tensor_meta(expected)
    found = extract_tensor_meta(actual) if isinstance(actual, torch.Tensor) else actual
    if type(found) is type(expected):
        differences = expected.get_diff(found)
    else:
        differences = [f"type: expected {type(expected).__name__}, got {type(found).__name__}"]
    if differences and raise_on_mismatch:
        raise PipeliningMetadataError(f"{desc}: {'; '.join(differences)}")
    if differences and warn_on_mismatch:
        _warn(
            f"{desc}: Metadata mismatch. {'; '.join(differences)}. "
            "Using dynamically inferred metadata instead."
        )
    return differences


def validate_tensor_metadata(desc: str, expected: torch.Tensor, given: torch.Tensor) -> None:
    """The check of one tensor as it was before torch 2.13.

    >>> validate_tensor_metadata("input", torch.zeros(2), torch.ones(2))
    """
    validate_metadata(desc, expected, given, raise_on_mismatch=True)


def validate_tensors_metadata(
    desc: str,
    expected: Sequence[torch.Tensor | TensorMeta | None],
    actual: Sequence[torch.Tensor | TensorMeta | None],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """The same for several tensors, of which some may be None.

    >>> validate_tensors_metadata("inputs", (None,), (), raise_on_mismatch=False)
    ['inputs: expected 1 tensors, got 0']
    """

    def differ(text: str) -> list[str]:
        if raise_on_mismatch:
            raise PipeliningMetadataError(text)
        if warn_on_mismatch:
            _warn(text)
        return [text]

    if len(expected) != len(actual):
        return differ(f"{desc}: expected {len(expected)} tensors, got {len(actual)}")
    differences: list[str] = []
    for index, (wanted, found) in enumerate(zip(expected, actual, strict=True)):
        if wanted is None and found is None:
            continue
        if wanted is None:
            differences += differ(f"{desc}[{index}]: expected None, got metadata")
        elif found is None:
            differences += differ(f"{desc}[{index}]: expected metadata, got None")
        else:
            differences += validate_metadata(
                f"{desc}[{index}]",
                wanted,
                found,
                raise_on_mismatch=raise_on_mismatch,
                warn_on_mismatch=warn_on_mismatch,
            )
    return differences


def validate_and_normalize_to_tuple(
    args: Any, allow_none: bool = False
) -> tuple[torch.Tensor | None, ...] | None:
    """One tensor or several as a tuple; raises if there is anything else.

    >>> validate_and_normalize_to_tuple([torch.zeros(1)])
    (tensor([0.]),)
    """
    if args is None:
        return None
    if isinstance(args, torch.Tensor):
        return (args,)
    if not isinstance(args, tuple | list):
        raise PipeliningMetadataError(
            f"Stage args must be a tensor, tuple, or list of tensors, got {type(args).__name__}."
        )
    for index, value in enumerate(args):
        if value is None and not allow_none:
            raise PipeliningMetadataError(
                f"Stage arg[{index}] is None. Stage args must be tensors. "
                "Use kwargs for optional values."
            )
        if value is not None and not isinstance(value, torch.Tensor):
            raise PipeliningMetadataError(
                f"Stage arg[{index}] has type {type(value).__name__}. All stage args must be "
                "tensors. Use kwargs for non-tensor inputs."
            )
    return tuple(args)


def validate_static_arg_grad_correspondence(
    stage_index: int,
    args: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    is_input: bool,
) -> None:
    """Raise unless each tensor has a gradient that it can have.

    >>> validate_static_arg_grad_correspondence(0, (torch.zeros(1),), (None,), is_input=True)
    """
    side = "input" if is_input else "output"
    if len(args) != len(grads):
        raise PipeliningMetadataError(
            f"Stage {stage_index}: {side}_grads length ({len(grads)}) does not match {side}_args "
            f"length ({len(args)}). Each forward tensor must have a corresponding gradient entry "
            "(use None for tensors that don't require grad)."
        )
    for index, (value, gradient) in enumerate(zip(args, grads, strict=True)):
        value_name = f"Stage {stage_index}: {side}_args[{index}]"
        name, kind = f"{side}_grads[{index}]", type(gradient).__name__
        if not value.requires_grad:
            if gradient is not None:
                raise PipeliningMetadataError(
                    f"{value_name} has requires_grad=False, but {name} is not None ({kind}). "
                    "Non-differentiable tensors must have None as their gradient entry."
                )
        elif gradient is None:
            _warn(
                f"{value_name} has requires_grad=True, but {name} is None. This is legal at "
                "pipeline boundaries but may indicate a missing gradient."
            )
        elif isinstance(value, DTensor) and not isinstance(gradient, DTensor):
            raise PipeliningMetadataError(
                f"{value_name} is a DTensor with requires_grad=True, but {name} is {kind}, "
                "expected DTensor or None. DTensor gradients may have different placements than "
                "forward tensors."
            )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=3)
