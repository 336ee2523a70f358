"""What a model consists of and where it was cut, as texts that ranks compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from taktline.meta import TensorMeta
from taktline.stage.names import named_buffers, named_modules, named_parameters, unwrapped

Entry: TypeAlias = tuple[str, str, str]
"""A topic, a name, and what is said of it."""
Blueprint: TypeAlias = tuple[Entry, ...]

OPTION, PLACE, CUTS = "option", "place", "cuts"
"""Topics: what was passed, in which stages a tensor is, where new stages begin."""
TOPICS = (OPTION, "parameter", "buffer", "tied weight", PLACE, CUTS, "module")
"""All topics, in the order in which differences are looked for."""
_MARK = "_taktline_blueprint"


def blueprint(
    stages: Mapping[int, nn.Module], cuts: Iterable[str] = (), model: nn.Module | None = None
) -> Blueprint:
    """Names, shapes and types of the tensors of stages, ties, places, and kinds of modules.

    ``cuts`` are the names at which a ``model`` was cut into them, if it was.

    >>> for topic, name, text in blueprint({0: nn.Linear(4, 2, bias=False)}):
    ...     print(f"{topic} {name}: {text}")
    parameter weight: float32[2, 4], trained
    place weight: stage 0
    module of stage 0: Linear(in_features=4, out_features=2, bias=False)
    """
    held = [
        (stage, name, tensor)
        for stage, module in stages.items()
        for named in (named_parameters(module), named_buffers(module, persistent=True))
        for name, tensor in named.items()
    ]
    different = {(name, id(tensor)) for _, name, tensor in held}
    prefixed = len(different) > len({name for name, _ in different})
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, list[str]] = {}
    alike: dict[int, dict[str, None]] = {}
    for stage, name, tensor in held:
        full = f"{name} of stage {stage}" if prefixed else name
        tensors[full] = tensor
        places.setdefault(full, []).append(str(stage))
        alike.setdefault(id(tensor), {})[full] = None
    ties = [list(names) for names in alike.values() if len(names) > 1]
    # Stages of one model have all its modules, without data for those of other stages.
    wholes = {f"of stage {s}": m for s, m in stages.items()} if model is None else {"": model}
    named = {
        f"{name} {of}".strip() or "of the model": inner
        for of, module in wholes.items()
        for name, inner in named_modules(module).items()
    }
    return (
        *(_tensor(name, tensor) for name, tensor in tensors.items()),
        *(("tied weight", names[0], " = ".join(names)) for names in ties),
        *((PLACE, name, f"stage {', '.join(found)}") for name, found in places.items()),
        *((CUTS, "", text) for text in [", ".join(cuts)] if text),
        *(("module", name, _kind(inner)) for name, inner in named.items()),
    )


def _tensor(name: str, tensor: torch.Tensor) -> Entry:
    kind = "of any shape"  # a lazy layer finds it in its first forward
    if not nn.parameter.is_lazy(tensor):
        kind = str(TensorMeta(tuple(tensor.shape), tensor.dtype))
    if not isinstance(tensor, nn.Parameter):
        return "buffer", name, kind
    return "parameter", name, f"{kind}, {'trained' if tensor.requires_grad else 'frozen'}"


def _kind(module: nn.Module) -> str:
    """The class; of torch's own layers, with their options."""
    kind = type(module)
    options = ""
    # Other classes may write anything, such as an address in memory.
    if kind.__module__.startswith("torch.nn.modules."):
        with suppress(AttributeError, KeyError):  # a stage has no attributes of other stages
            options = module.extra_repr()
    return f"{kind.__name__}({options})"


@dataclass(frozen=True, slots=True)
class _Attached:
    """Keeps those away who look through the containers in a module."""

    whole: Blueprint = ()


def attach(modules: Iterable[nn.Module], whole: Blueprint) -> None:
    """Attach the blueprint of all stages to their modules."""
    for module in modules:
        module.__dict__[_MARK] = _Attached(whole)


def attached(module: nn.Module) -> Blueprint:
    """The blueprint that is attached to a module; empty if there is none."""
    return getattr(unwrapped(module), _MARK, _Attached()).whole
