"""Nested values as a list of leaves and a structure: torch's private pytree, imported only here.

Only torch knows the containers that users have registered with it.
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
