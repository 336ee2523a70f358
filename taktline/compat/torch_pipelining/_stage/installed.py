"""The order of a stage's arguments, which torch has changed: as the installed torch has it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

__all__ = ["as_installed"]


def as_installed(init: Callable[..., None]) -> Callable[..., None]:
    """An ``__init__`` that takes its positional arguments in the order of the installed torch.

    Before 2.13 a stage knew nothing of examples of gradients, and ``group`` came in their place.
    What the installed torch does not have can be given by name.
    """
    known = _arguments_of_a_stage()
    parameters = list(inspect.signature(init).parameters.values())
    if [p.name for p in parameters[: len(known)]] == list(known):
        return init
    by_name = {p.name: p for p in parameters}
    order = [by_name[name] for name in known if name in by_name]
    later = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name not in known]
    signature = inspect.Signature([*order, *later])

    @wraps(init)
    def reordered(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        init(**bound.arguments)

    reordered.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return reordered


@cache
def _arguments_of_a_stage() -> tuple[str, ...]:
    """Read, not imported: an import would give what stands in the place of torch's own."""
    source = Path(torch.__file__).parent / "distributed" / "pipelining" / "stage.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "PipelineStage":
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    return tuple(argument.arg for argument in part.args.args)
    return ()
