"""Names the keyword that was meant where a caller has passed an unknown one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from taktline.errors import ArgumentError
from taktline.text import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


def known_keywords(function: F) -> F:
    """Let an unknown keyword raise an error with the known ones; of a class, in its constructor.

    >>> @known_keywords
    ... def build(name, *, microbatches=1): ...
    >>> build("1f1b", micro_batches=8)
    Traceback (most recent call last):
    taktline.errors.ArgumentError: build() takes no 'micro_batches'; did you mean 'microbatches'?
    """
    if isinstance(function, type):
        made = cast(Any, function)
        made.__init__ = known_keywords(made.__init__)
        return made

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # it has begun
            known = _keywords(function)
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is None or not known:
                raise
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        raise ArgumentError(f"{name}() takes no {unknown!r}; {did_you_mean(unknown, known)}")

    return cast(F, called)


def _keywords(function: Callable[..., Any]) -> list[str]:
    """The keywords that a function takes; none if it takes any."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in parameters if each.kind in named and each.name != "self"]
