"""Nested values as a list of leaves and a structure: torch's private pytree, used only here.

Only torch knows the containers that users have registered with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from taktline.private import missing, private

if TYPE_CHECKING:
    from torch.utils._pytree import (  # noqa: F401 -- names of this module
        SUPPORTED_NODES,
        TreeSpec,
        register_dataclass,
        register_pytree_node,
        tree_flatten,
        tree_flatten_with_path,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_structure,
        tree_unflatten,
    )
else:
    _NAMES = (
        "SUPPORTED_NODES TreeSpec register_dataclass register_pytree_node tree_flatten tree_leaves "
        "tree_flatten_with_path tree_map tree_map_only tree_structure tree_unflatten"
    )
    for _name in _NAMES.split():
        globals()[_name] = private(f"torch.utils._pytree.{_name}", "nested values")


def register_own(cls: Any, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    """Register a class of this package, if torch has what that needs."""
    if missing(register_pytree_node) is None:
        register_pytree_node(cls, flatten, unflatten)
