"""Torch's own package beside ours: called with the same arguments, they must do the same."""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
from torch.distributed import pipelining

MODULES = ("", *(f".{found.name}" for found in pkgutil.iter_modules(pipelining.__path__)))
"""The modules of the installed torch."""


class Pair(NamedTuple):
    """A module of torch's package, and ours of the same name."""

    peer: Any
    ours: Any

    def __getattr__(self, name: str) -> Pair:
        return Pair(getattr(self.peer, name), getattr(self.ours, name))


def module(name: str) -> Pair:
    """A module by its name in the package, with the dot in front."""
    return Pair(
        importlib.import_module(f"torch.distributed.pipelining{name}"),
        importlib.import_module(f"taktline.compat.torch_pipelining{name}"),
    )


class Failure(NamedTuple):
    """What a call has raised."""

    kind: type[BaseException]
    text: str


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call gives, or raises; what it prints is lost."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            return Failure(type(error), str(error))


def require_same(theirs: Any, ours: Any, *, texts: bool = True) -> None:
    """Fail unless both gave the same, or raised the same kind of error with the same beginning."""
    if isinstance(theirs, Failure):
        assert isinstance(ours, Failure), f"torch raises {theirs}, ours gives {ours!r}"
        builtin = next(base for base in theirs.kind.__mro__ if base.__module__ == "builtins")
        assert issubclass(ours.kind, builtin), f"torch raises {theirs}, ours {ours}"
        if texts:
            assert ours.text.startswith(theirs.text)
    else:
        assert not isinstance(ours, Failure), f"torch gives {theirs!r}, ours raises {ours}"
        assert repr(ours) == repr(theirs)


def actions(cls: Any, texts: Iterable[str]) -> list[Any]:
    """Actions of either package; a dash stands for None."""
    return [None if text == "-" else cls.from_str(text) for text in texts]


def orders(cls: Any, rows: Mapping[int, Iterable[str]]) -> dict[int, list[Any]]:
    """The orders of several ranks."""
    return {rank: actions(cls, texts) for rank, texts in rows.items()}


def _since(version: str, *, there: bool) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not there, reason=f"torch has it since {version}")


SINCE_2_12 = _since("2.12", there=hasattr(module("._utils").peer, "InferenceMode"))
SINCE_2_13 = _since("2.13", there=hasattr(module(".schedules").peer, "_TARGET_CHUNK_SPEC"))
"""Tests of what earlier versions of torch do not have."""
SINCE_2_15 = _since("2.15", there=hasattr(module(".schedules").peer, "WAIT_REDUCE_GRAD"))
DEFERS = hasattr(module(".schedules").peer, "_defer_recv_ops")
"""Whether schedules take ``defer_pp_recv``, as they do since 2.13."""
