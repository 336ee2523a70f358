"""Nested values as a list of leaves and a structure: torch's private pytree, used only here.

Only torch knows the containers that users have registered with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from taktline.private import missing, private

if TYPE_CHECKING:
    from torch.utils._pytree import SUPPORTED_NODES as SUPPORTED_NODES
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import register_dataclass as register_dataclass
    from torch.utils._pytree import register_pytree_node as register_pytree_node
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_structure as tree_structure
    from torch.utils._pytree import tree_unflatten as tree_unflatten
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
