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
    """The error to raise in place of an error in cutting a model.

    ``plan`` has the number of stages, if the user has not said where to cut.
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
    return PartitionError(f"{error}; {_advice(most, plan)}")


def _is_from_the_model(error: Exception) -> bool:
    """Whether the model's own code has raised an error, or its cause."""
    cause = error.__cause__ or error.__context__
    return not isinstance(error, TaktlineError) or (
        cause is not None and not isinstance(cause, TaktlineError)
    )


def _own_error(model: nn.Module, example: Any) -> Exception | None:
    """The error that the model raises by itself; None if none, or if it has no data to run with."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if example is None or any(tensor.is_meta for tensor in tensors.values()):
        return None
    # Buffers and random numbers must stay as they are.
    copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        args, kwargs = as_call(model, example)
        with torch.random.fork_rng(), torch.enable_grad():
            functional_call(model, copies, args, kwargs)
    except Exception as error:  # the user's code may raise anything
        return None if isinstance(error, TaktlineError) else error
    return None


def _most_stages(model: nn.Module, example: Any, stages: int) -> int:
    """The largest number of stages below this one that a model can be cut into; 0: unknown."""
    for fewer in range(stages - 1, 1, -1):
        try:
            split.auto(model, fewer, example)
        except Exception:  # the first error is the one to report
            continue
        return fewer
    return 0


def _advice(most: int, plan: Plan) -> str:
    """On how many ranks the model can run."""
    each = plan.stages // plan.ranks
    ranks = most // each
    if ranks > 1:
        return f"{plan.name} with {counted(each, 'stage')} a rank runs on up to {ranks} ranks"
    return f"1f1b, with one stage a rank, runs on up to {most} ranks"
