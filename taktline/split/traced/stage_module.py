"""The module of one stage of a trace, and the modules in it for the arguments and the output."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, Self

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from taktline import pytree
from taktline.errors import PartitionError, SignatureError
from taktline.split.arguments import Args, Call, Kwargs


class StageModule(fx.GraphModule):
    """A stage with a graph for each mode of the model, which dropout and batch norm depend on."""

    def __init__(
        self,
        graphs: dict[bool, fx.Graph],
        parts: Mapping[str, tuple[Any, bool]],
        training: bool,
        why_not: str,
    ) -> None:
        """``parts`` are the attributes of the graphs, and whether each is in the state dict."""
        super().__init__(nn.Module(), fx.Graph(), "StageModule")
        for name, (part, persistent) in parts.items():
            _install(self, name, part, persistent)
        self._graphs, self._why_not = graphs, why_not
        self.training, self.graph = training, graphs[training]

    def train(self, mode: bool = True) -> Self:
        """Change to the graph for training, or for evaluation."""
        if mode not in self._graphs:
            raise PartitionError(
                f"{'train()' if mode else 'eval()'} of a stage: its model could not be traced in "
                f"that mode too: {self._why_not}; call pipeline() on the model in the mode that "
                "you need, or cut it with taktline.split.by_names"
            )
        super().train(mode)
        if self.graph is not self._graphs[mode]:
            self.graph = self._graphs[mode]
        return self

    def set_graph_device(self, device: torch.device) -> None:
        """Let the graph create tensors, such as positions and masks, on a device."""

        def moved(part: Any) -> Any:
            return device if isinstance(part, torch.device) else part

        inner = [part for part in self.modules() if isinstance(part, fx.GraphModule)]
        for graph in {*(part.graph for part in inner), *self._graphs.values()}:
            for node in graph.nodes:
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), moved)
        for part in inner:
            part.recompile()

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        made = super().__deepcopy__(memo)  # it keeps just what the graph uses
        vars(made).update(memo[id(vars(self))])
        return made


def _install(module: nn.Module, name: str, part: Any, persistent: bool) -> None:
    """Put a part into a module, under a name with dots."""
    *path, last = name.split(".")
    for step in path:
        if step not in module._modules:
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
        module.register_buffer(last, part, persistent=persistent)
    else:
        setattr(module, last, part)


class Arguments(nn.Module):
    """The tensors among the arguments of a call; raises if the trace does not hold for them."""

    def __init__(self, forward: Any, example: Call, names: Collection[str]) -> None:
        super().__init__()
        leaves, tree = pytree.tree_flatten(example)
        self._signature = inspect.signature(forward)
        self._places = pytree.tree_unflatten(range(len(leaves)), tree)
        self._kinds = dict(zip(names, map(_kind, leaves), strict=True))

    def forward(self, args: Args, kwargs: Kwargs) -> list[Any]:
        """All leaves, in the order of the trace."""
        leaves, tree = pytree.tree_flatten(self._bound(args, kwargs))
        places, known = pytree.tree_flatten(self._bound(*self._places))
        if tree != known:
            raise SignatureError(
                f"the pipeline was traced with the arguments {', '.join(self._kinds)}; pass just "
                "these, in the same containers, or call pipeline() with what you need"
            )
        given = dict(zip(places, leaves, strict=True))
        for place, (name, kind) in enumerate(self._kinds.items()):
            if (found := _kind(given[place])) != kind:
                error = SignatureError(
                    f"{name} is {''.join(found)}, but the pipeline was traced with "
                    f"{''.join(kind)}, which is fixed now: make every micro-batch like the "
                    "example, call pipeline() with an example of what you need, or cut the model "
                    "with taktline.split.by_names"
                )
                error.differs = "dtype" if found[0] != kind[0] else "shape"
                raise error
        return [given[place] for place in range(len(leaves))]

    def _bound(self, args: Args, kwargs: Kwargs) -> Call:
        """The arguments as the forward takes them, whether by their places or by their names."""
        bound = self._signature.bind(*args, **kwargs)
        return bound.args, dict(sorted(bound.kwargs.items()))


def _kind(leaf: Any) -> tuple[str, str]:
    """What a trace knows of an argument: the type and shape of a tensor, or else the value."""
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype}", f" and shape {list(leaf.shape)}"
    return repr(leaf), ""


class Output(nn.Module):
    """The output of the model, from its tensors."""

    def __init__(self, tree: pytree.TreeSpec) -> None:
        super().__init__()
        self._places = pytree.tree_unflatten(range(tree.num_leaves), tree)

    def forward(self, *leaves: Any) -> Any:
        """The output, in the containers of the model."""
        return pytree.tree_map(leaves.__getitem__, self._places)
