"""Environment variables: those of a launcher, and numbers of seconds that users set."""

from __future__ import annotations

import math
import os

from taktline.checks.arguments import shown
from taktline.checks.warn import warn


def launched() -> bool:
    """Whether a launcher such as torchrun has started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def seconds_in_environment(name: str, default: float) -> float:
    """The number of seconds in an environment variable; anything else there is ignored.

    >>> seconds_in_environment("TAKTLINE_NO_SUCH_SECONDS", 60.0)
    60.0
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isfinite(seconds) and seconds > 0:
        return seconds
    # A warning, as this may be read while modules are imported, where an error helps nobody.
    warn(
        f"{name}={shown(text)} is ignored: it must be a number of seconds, more than 0; "
        f"{default:g} are used",
        RuntimeWarning,
    )
    return default
