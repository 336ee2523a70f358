"""Private names of torch, each looked up by its path.

A version of torch may lack one. Then the package is imported all the same, and what needs the name
says so when it is used::

    private("torch._C.name", "feature") ──▶ torch's object
                                        ──▶ one that raises what is missing, when it is used
    private(…, otherwise=value)         ──▶ torch's object, or the value

docs/architecture.md lists the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

import torch

from taktline.errors import TorchVersionError

_RAISE: Any = object()


class _Missing(type):
    """A class in place of a name that torch lacks: a function, a class, or the base of classes."""

    reason: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TorchVersionError(cls.reason)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these
            raise AttributeError(name)
        raise TorchVersionError(cls.reason)


def private(name: str, feature: str, otherwise: Any = _RAISE) -> Any:
    """What torch has under a private name; ``feature`` is what needs it, for the error.

    >>> lookup = private("torch._C._no_such_name", "this example")
    >>> missing(lookup).replace(torch.__version__, "2.99")
    'this example needs torch._C._no_such_name, which torch 2.99 does not have'
    """
    try:
        return resolve_name(name)
    except (AttributeError, ImportError):
        if otherwise is not _RAISE:
            return otherwise
    return _Missing(name.rpartition(".")[2], (), {"reason": _reason(name, feature)})


def for_all(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's function for many tensors at once; without it, a loop over their method."""

    def one_by_one(*lists: Sequence[Any]) -> None:
        for each in zip(*lists, strict=True):
            method(*each)

    return private(name, "many tensors at once", one_by_one)


def missing(*found: Any) -> str | None:
    """Why the first of these objects of :func:`private` cannot be used; None if all can."""
    return next((each.reason for each in found if type(each) is _Missing), None)


def lacking(owner: Any, *names: str, feature: str) -> str | None:
    """Which private attribute an object or class of torch lacks; None if it has them all."""
    kind = owner if isinstance(owner, type) else type(owner)
    absent = next((name for name in names if not hasattr(owner, name)), None)
    return None if absent is None else _reason(f"{kind.__name__}.{absent}", feature)


def _reason(name: str, feature: str) -> str:
    return f"{feature} needs {name}, which torch {torch.__version__} does not have"
