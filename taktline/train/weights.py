"""Weights that are quantised, by bitsandbytes or torchao, or have an adapter."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from taktline.errors import MismatchError
from taktline.plan import Plan
from taktline.plan.estimate import AT_ONCE
from taktline.split.steps import all_tensors
from taktline.text import counted

_QUANTISED = ("bitsandbytes.", "torchao.quantization", "torchao.dtypes")
"""Where the types of quantised weights are defined."""


def is_quantised(tensor: torch.Tensor) -> bool:
    """Whether a weight is one of bitsandbytes or torchao."""
    return type(tensor).__module__.startswith(_QUANTISED)


def require_trainable(model: nn.Module, data_parallel: str | None) -> None:
    """Raise if the weights of a model cannot be trained as they are set up."""
    uses = defaultdict[int, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)].append(name)
        if not is_quantised(parameter):
            continue
        kind = f"{name} is quantised ({type(parameter).__name__})"
        if parameter.requires_grad:
            raise MismatchError(
                f"{kind}, and would need a gradient, which it cannot have: freeze it by "
                "requires_grad_(False), and train adapters beside it, by peft.get_peft_model()"
            )
        # DDP copies all weights to replicas as plain tensors.
        if data_parallel == "fsdp" or (data_parallel and hasattr(parameter, "__tensor_flatten__")):
            raise MismatchError(
                f"{kind}, which {data_parallel} cannot copy to replicas; quantise with "
                'bitsandbytes, and pass data_parallel="ddp"'
            )
    for names in uses.values():
        adapted = next((name for name in names if ".base_layer." in name), None)
        if adapted is not None and len(names) > 1:
            other = next(name for name in names if name != adapted)
            raise MismatchError(
                f"an adapter is on {adapted}, which is tied to {other}: the adapter would change "
                "one use of the weight, but not the other; leave that module out of "
                "target_modules, or untie the weights (tie_word_embeddings=False)"
            )


def check_streams(given: Any, *, is_auto: bool) -> None:
    """Raise if weights cannot stream with the other arguments of a pipeline."""
    if not given.stream_weights:
        return
    if is_auto:
        raise MismatchError(
            'schedule="auto" measures stages whose weights stay; with stream_weights=True name '
            'one: schedule="looped_bfs"'
        )
    if given.data_parallel == "fsdp":
        raise MismatchError(
            "stream_weights=True keeps whole weights on the host, which fsdp has cut up; pass "
            'data_parallel="ddp", or leave one of them out'
        )
    models = [given.model] if given.is_whole else given.model.values()
    if not given.is_own and all(p.requires_grad for model in models for p in model.parameters()):
        raise MismatchError(
            "stream_weights=True is for frozen weights, and the model has none: freeze them by "
            "requires_grad_(False), or leave it out"
        )


def require_streams(plan: Plan) -> None:
    """Raise if a plan has no rank with enough stages to gain anything."""
    most = max(len(plan.placement.stages_of(rank)) for rank in range(plan.ranks))
    if most <= AT_ONCE:
        raise MismatchError(
            f"stream_weights=True has the weights of {AT_ONCE} stages of a rank on the device, and "
            f"{plan.name!r} has {counted(most, 'stage')} on a rank; cut the model into more: "
            f'schedule="looped_bfs", stages_per_rank={2 * AT_ONCE}'
        )


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; of a quantised one, of all that it consists of.

    >>> bytes_of(torch.zeros(2, 3))
    24
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        return sum(bytes_of(getattr(tensor, name)) for name in names)
    found, state = tensor.nbytes, getattr(tensor, "quant_state", None)  # of bitsandbytes
    while state is not None:
        found += sum(part.nbytes for part in all_tensors(list(vars(state).values())))
        state = getattr(state, "state2", None)
    return found
