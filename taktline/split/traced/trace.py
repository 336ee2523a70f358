"""Traces a model by torch.export, with marks where it is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect

from taktline.errors import PartitionError, TaktlineError
from taktline.side_values import Aside
from taktline.split.arguments import Args, Kwargs
from taktline.text import did_you_mean

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_library = torch.library.Library("taktline", "DEF")
_library.define("pipe_split() -> ()")
# It has no tensor for the dispatcher.
_library.impl("pipe_split", lambda: None, "BackendSelect")
has_side_effect(torch.ops.taktline.pipe_split.default)  # so that no pass removes it as dead code


class SplitPoint(Enum):
    """Whether a model is cut before or after a submodule.

    >>> import taktline as tl
    >>> tl.SplitPoint.BEGINNING
    <SplitPoint.BEGINNING: 1>
    """

    BEGINNING = 1
    END = 2


def pipe_split():
    """Begin a new stage here, inside a forward; does nothing unless torch.export traces it.

    >>> import taktline as tl
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
    ...
    ...     def forward(self, x):
    ...         x = self.first(x)
    ...         tl.pipe_split()
    ...         return self.second(x)
    >>> tl.pipeline(Model(), (torch.zeros(2, 4),)).num_stages
    2
    """
    if torch.compiler.is_exporting():
        torch.ops.taktline.pipe_split()


def is_mark(node: fx.Node) -> bool:
    """Whether a node is where a stage ends and the next one begins; torch's own marks are, too."""
    name = getattr(node.target, "__name__", "")
    return name.removesuffix(".default") in ("pipe_split", "_pipe_split")


def trace(
    module: nn.Module, args: Args, kwargs: Kwargs | None, spec: Mapping[str, SplitPoint]
) -> ExportedProgram:
    """The operations of the module in its present mode; the module stays unchanged."""
    from torch.export import export  # here, because it loads the compiler

    if not isinstance(args, tuple):
        raise PartitionError(f"mb_args must be a tuple of arguments, not {type(args).__name__}")
    with _marked(module, spec), Aside(0, {}) as aside:
        try:
            program = export(module, args, kwargs, strict=False)
        except TaktlineError:
            raise
        except Exception as error:  # of any type
            reason = str(error).strip() or type(error).__name__
            caches = getattr(getattr(module, "config", None), "use_cache", False)
            raise PartitionError(
                f"{reason}\n\ntorch.export cannot export {type(module).__name__} (see above). "
                f"{'Set model.config.use_cache = False. ' if caches else ''}Change what it "
                "refuses, or cut the model with taktline.split.by_names, which does not export "
                "it, or by hand"
            ) from error
    aside.finish()  # a skip is an edge of the trace
    if aside.losses or aside.observed:
        raise PartitionError(
            f"the forward has {'add_loss()' if aside.losses else 'DeferredBatchNorm'}, which a "
            "trace does not keep; cut the model with taktline.split.by_names, or by hand"
        )
    return program


@contextmanager
def _marked(module: nn.Module, spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Let calls of submodules leave marks; at the end the module is as before."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    called: set[str] = set()
    before, after = dict[str, Any](), dict[str, Any]()
    with ExitStack() as hooks:
        first = module.register_forward_pre_hook(lambda *_: before.update(module.named_buffers()))
        last = module.register_forward_hook(lambda *_: after.update(module.named_buffers()))
        hooks.callback(first.remove)
        hooks.callback(last.remove)
        for name, point in spec.items():
            if name not in names:
                raise PartitionError(
                    f"split_spec names {name!r}, but {type(module).__name__} has no such "
                    f"submodule; {did_you_mean(name, names)}"
                )
            if getattr(point, "name", "") not in SplitPoint.__members__:  # torch's own will do
                raise PartitionError(
                    f"split_spec[{name!r}] must be SplitPoint.BEGINNING or SplitPoint.END, "
                    f"not {point!r}"
                )

            def mark(*_: Any, name: str = name) -> None:
                called.add(name)
                pipe_split()

            part = module.get_submodule(name)
            begins = point.name == SplitPoint.BEGINNING.name
            hook = (part.register_forward_pre_hook if begins else part.register_forward_hook)(mark)
            hooks.callback(hook.remove)
        yield
    if missing := [name for name in spec if name not in called]:
        raise PartitionError(
            f"the forward does not call {', '.join(map(repr, missing))}, so there is nothing to "
            "split at; name submodules in split_spec that the forward calls, or call pipe_split() "
            "in the forward"
        )
    for name, buffer in before.items():
        if "." in name and after[name] is not buffer:
            raise PartitionError(
                f"the forward assigns {name!r}, a buffer of a submodule, which torch.export does "
                "not trace; change it in place, with copy_()"
            )


@contextmanager
def in_mode(*modules: nn.Module, training: bool) -> Iterator[None]:
    """Put modules into training or evaluation; at the end each part is as before."""
    before = {part: part.training for module in modules for part in module.modules()}
    try:
        for module in modules:
            module.train(training)
        yield
    finally:
        for part, mode in before.items():
            part.training = mode
