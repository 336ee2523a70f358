"""Nested values as a list of leaves and a structure: torch's private pytree, imported only here.

Only torch knows the containers that users have registered with it.
"""

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
