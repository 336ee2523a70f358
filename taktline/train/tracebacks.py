"""Leaves our own frames out of tracebacks, unless ``TAKTLINE_DEBUG=1``; explains torch's errors."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar
from weakref import ref

import torch

import taktline
from taktline.checks import known_keywords
from taktline.errors import TaktlineError
from taktline.transport.exit_hooks import notes

P = ParamSpec("P")
R = TypeVar("R")

_loss: ref[torch.Tensor] | None = None
"""The loss of the last step."""

_OURS = (f"{Path(taktline.__file__).parent}{os.sep}",)
_INSIDE = (*_OURS, f"{Path(torch.__file__).parent}{os.sep}")


def short_traceback(method: Callable[P, R]) -> Callable[P, R]:
    """Let errors of ours begin at ``method`` in tracebacks; their causes stay.

    With ``TAKTLINE_DEBUG=1`` in the environment tracebacks are whole. An unknown keyword is an
    error of ours, too.
    """
    inner = known_keywords(method)

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return inner(*args, **kwargs)
        except TaktlineError as error:
            if os.environ.get("TAKTLINE_DEBUG", "") not in ("", "0"):
                raise
            found = error
            cause = found.__cause__
        for part in _chain(cause):
            _shorten(part)
        try:
            raise found.with_traceback(None) from cause  # TAKTLINE_DEBUG=1 shows from where
        finally:
            del found, cause  # they hold this frame

    return called


def note_loss(loss: torch.Tensor | None) -> None:
    """Note the loss of a step, so that an error of its ``backward()`` can be explained."""
    global _loss
    _loss = None if loss is None else ref(loss)


def _explain_backward(error: BaseException) -> None:
    """Add a note to the error of ``loss.backward()`` after a step.

    torch says only that the loss requires no gradient. As an attribute of the loss would keep
    ``torch.load`` from reading it, this waits for the error that ends the program.
    """
    loss = None if _loss is None else _loss()
    frames = _frames(error, _OURS)
    if loss is not None and any(each.tb_frame.f_locals.get("self") is loss for each in frames):
        error.add_note(
            "pipe.step() has run the backward: gradients are in .grad. Leave out loss.backward()"
        )


notes.append(_explain_backward)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _shorten(error: BaseException) -> None:
    """Remove our own frames, and a context that has no other frames."""
    context = error.__context__
    if context is not None and error.__cause__ is None and not _frames(context, _INSIDE):
        error.__suppress_context__ = True
    rest: TracebackType | None = None
    for frame in reversed(_frames(error, _OURS)):
        rest = TracebackType(rest, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = rest


def _frames(error: BaseException, hidden: tuple[str, ...]) -> list[TracebackType]:
    """The frames of an error outside of the hidden folders."""
    found, frame = list[TracebackType](), error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(hidden):
            found.append(frame)
        frame = frame.tb_next
    return found
