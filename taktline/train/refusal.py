"""Explains why a model could not be cut, and what would work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from taktline import split
from taktline.errors import PartitionError, TaktlineError, text_of
from taktline.plan import Plan
from taktline.split.named.by_names import as_call
from taktline.text import counted

__all__ = ["explained"]


def explained(error: Exception, model: nn.Module, example: Any, plan: Plan | None) -> TaktlineError:
    """What to raise instead of an error in cutting a model.

    ``plan`` has the number of stages that were asked for, if the cuts were left to us.
    """
    name = type(model).__name__
    own = _own_error(model, example) if _is_from_the_model(error) else None
    if own is not None:
        own.__suppress_context__ = own.__suppress_context__ or own.__context__ is error
        told = PartitionError(
            f"{name} fails by itself on the example, without any pipeline: "
            f"{type(own).__name__}: {text_of(own)}; its traceback is above"
        )
        told.__cause__ = own
        return told
    if not isinstance(error, TaktlineError):
        told = PartitionError(
            f"{name} runs by itself, but not in stages that are cut by name: "
            f"{type(error).__name__}: {text_of(error)}; trace it with taktline.pipeline, or pass "
            "a list of stages, cut by hand"
        )
        told.__cause__ = error
        return told
    if plan is None or not (most := _most_stages(model, example, plan.stages)):
        return error
    return PartitionError(f"{error}; {_would_do(most, plan)}")


def _is_from_the_model(error: Exception) -> bool:
    """Whether code that is not ours has raised it, or what it is about."""
    cause = error.__cause__ or error.__context__
    return not isinstance(error, TaktlineError) or (
        cause is not None and not isinstance(cause, TaktlineError)
    )


def _own_error(model: nn.Module, example: Any) -> Exception | None:
    """What the model raises by itself; None if nothing, or if it has no data to run with."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if example is None or any(tensor.is_meta for tensor in tensors.values()):
        return None
    # Its buffers are to stay as they are, and so are random numbers.
    copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        args, kwargs = as_call(model, example)
        with torch.random.fork_rng(), torch.enable_grad():
            functional_call(model, copies, args, kwargs)
    except Exception as error:  # whatever it is, the user's code has raised it
        return None if isinstance(error, TaktlineError) else error
    return None


def _most_stages(model: nn.Module, example: Any, stages: int) -> int:
    """The largest number of stages, fewer than these, that a model can be cut into; 0: unknown."""
    for fewer in range(stages - 1, 1, -1):
        try:
            split.auto(model, fewer, example)
        except Exception:  # the error that counts is known
            continue
        return fewer
    return 0


def _would_do(most: int, plan: Plan) -> str:
    """Which numbers of ranks would do."""
    each = plan.stages // plan.ranks
    ranks = most // each
    if ranks > 1:
        return f"{plan.name} with {counted(each, 'stage')} a rank runs on up to {ranks} ranks"
    return f"1f1b, with one stage a rank, runs on up to {most} ranks"
