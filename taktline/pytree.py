"""Nested values as a list of leaves and a structure: torch's own trees, from one place.

What users register with torch as a container is one here too, and only torch knows it.
"""

from torch.utils._pytree import (
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

__all__ = [
    "SUPPORTED_NODES",
    "TreeSpec",
    "register_dataclass",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]
