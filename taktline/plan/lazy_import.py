"""Imports a module on first use, where an import at the top would be a cycle.

``Plan.show()`` draws with ``taktline.render``, which imports plans itself. All other imports of the
package run downwards.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal


def lazy_import(module: Literal["render", "plan.calibrate"]) -> Any:
    """A module of the package."""
    return import_module(f"taktline.{module}")
