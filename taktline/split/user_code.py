"""Where the user's code is that runs."""

from __future__ import annotations

import contextlib
import copy
import os
import sys

import torch

import taktline

_OURS = os.path.dirname(os.path.abspath(taktline.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_SKIPPED = (_OURS, _TORCH, contextlib.__file__, copy.__file__, "<")


def line_of_user() -> str:
    """The innermost line that is neither of torch nor of this package, as ``file:line``."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            here = os.path.join(os.getcwd(), "")
            return f"{name.removeprefix(here)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the forward"
