"""What lies above and is found only when it is asked for.

``Plan.show()`` draws with ``taktline.render``, which imports plans itself. Nowhere else does a
module reach for one that imports it: every import runs downwards.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, TypeAlias

__all__ = ["Above", "above"]

Above: TypeAlias = Literal["render", "plan.calibrate"]


def above(module: Above) -> Any:
    """A module of the package that imports the one which asks for it.

    >>> above("render").to_svg.__name__
    'to_svg'
    """
    return import_module(f"taktline.{module}")
