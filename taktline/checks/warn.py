"""Warnings that point at the user's line."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line outside of the package that has called it."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
