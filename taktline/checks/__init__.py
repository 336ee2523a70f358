"""Checks of arguments, JSON and environment variables. Nothing in here imports torch."""

from taktline.checks.arguments import (
    refuse,
    require_callable,
    require_flag,
    require_instance,
    require_instances,
    require_iterable,
    require_number,
    require_one_of,
    require_path,
    require_text,
    require_whole,
    shown,
    with_article,
)
from taktline.checks.environment import launched, seconds_in_environment
from taktline.checks.json_text import Either, conform, loads, read
from taktline.checks.warn import warn

__all__ = [
    "Either",
    "conform",
    "launched",
    "loads",
    "read",
    "refuse",
    "require_callable",
    "require_flag",
    "require_instance",
    "require_instances",
    "require_iterable",
    "require_number",
    "require_one_of",
    "require_path",
    "require_text",
    "require_whole",
    "seconds_in_environment",
    "shown",
    "warn",
    "with_article",
]
