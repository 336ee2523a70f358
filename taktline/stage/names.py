"""Parameters, buffers and modules by their names in the user's model, ties, and blueprints.

The names leave out wrappers: DDP, ``torch.compile`` and checkpoint wrappers. A blueprint says what
a model consists of and where it was cut, as texts that ranks compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taktline.checks import check, shown
from taktline.errors import MismatchError

_TIES = "_taktline_ties"
_INSIDE = ("_orig_mod", "_checkpoint_wrapped_module")
"""The attributes in which ``torch.compile`` and checkpoint wrappers keep the wrapped module."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside of DDP, ``torch.compile`` and checkpoint wrappers."""
    names = ("module",) if isinstance(module, DistributedDataParallel) else _INSIDE
    inside = next((module._modules[name] for name in names if name in module._modules), None)
    return module if inside is None else unwrapped(inside)


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by their names in the user's model, tied ones by each of their names."""
    return {
        f"{path}{name}": parameter
        for path, inner in _walk(module, "")
        for name, parameter in inner._parameters.items()
        if parameter is not None
    }


def named_modules(module: nn.Module) -> dict[str, nn.Module]:
    """All modules by their names in the user's model, without wrappers."""
    return {path.removesuffix("."): inner for path, inner in _walk(module, "")}


def named_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, and the buffers of a state dict, by their names in the user's model."""
    buffers = {
        f"{path}{name}": buffer
        for path, inner in _walk(module, "")
        for name, buffer in inner._buffers.items()
        if buffer is not None and name not in inner._non_persistent_buffers_set
    }
    return {**named_parameters(module), **buffers}


def _walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    inner = unwrapped(module)
    yield path, inner
    for name, child in inner._modules.items():
        if child is not None:
            yield from _walk(child, f"{path}{name}.")


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the gradients and buffers of modules as they are; inside, there are no gradients."""
    inner = [each for module in modules for each in module.modules()]
    buffers = [
        (each._buffers, name, buffer, buffer.detach().clone())
        for each in inner
        for name, buffer in each._buffers.items()
        if buffer is not None
    ]
    parameters = (parameter for each in inner for parameter in each.parameters(recurse=False))
    gradients = {parameter: parameter.grad for parameter in parameters}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for table, name, buffer, value in buffers:
                buffer.copy_(value)
                table[name] = buffer  # it may have been replaced


@dataclass(frozen=True, slots=True, init=False)
class Tie:
    """One weight in several stages: the name of the parameter in each of them.

    Stages on one rank may share one parameter; on several ranks each has a copy. Before the first
    step a schedule gives all copies the values of the first stage, and each step adds up their
    gradients, so that the same optimizer steps keep them equal.

    >>> tie = Tie({0: "embed.weight", 3: "head.weight"})
    >>> tie.name, tie.stages
    ('embed.weight', (0, 3))
    """

    uses: tuple[tuple[int, str], ...]
    """Each stage with the name of the parameter there, in the order of stages."""

    def __init__(self, uses: Mapping[int, str]) -> None:
        check("uses", uses, Mapping, "a dict of stages and names of parameters")
        if len(uses) < 2:
            raise MismatchError(f"a tie names a parameter in two stages or more, not {shown(uses)}")
        stages = (check("a stage of a tie", stage, int, least=0) for stage in uses)
        names = (check("a tied parameter", name, str) for name in uses.values())
        named = dict(zip(stages, names, strict=True))
        object.__setattr__(self, "uses", tuple(sorted(named.items())))

    @property
    def name(self) -> str:
        """The name in the first stage, which norms and states use."""
        return self.uses[0][1]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that use it."""
        return tuple(stage for stage, _ in self.uses)

    def name_in(self, stage: int) -> str | None:
        """The name in a stage, None if the stage does not use it."""
        return dict(self.uses).get(check("stage", stage, int))

    def __str__(self) -> str:
        return " = ".join(f"{name} of stage {stage}" for stage, name in self.uses)


def find_ties(modules: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """The parameters that are one object in several stages.

    >>> embed, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    >>> head.weight = embed.weight
    >>> print(*find_ties([embed, nn.ReLU(), head]))
    weight of stage 0 = weight of stage 2
    """
    uses: dict[int, dict[int, str]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in named_parameters(module).items():
            uses.setdefault(id(parameter), {}).setdefault(stage, name)
    return tuple(Tie(found) for found in uses.values() if len(found) > 1)


def declare(module: nn.Module, ties: Iterable[Tie]) -> None:
    """Attach the ties of a model to the module of a stage."""
    module.__dict__[_TIES] = tuple(ties)


def declared(module: nn.Module) -> tuple[Tie, ...]:
    """The ties that are attached to a module."""
    return getattr(unwrapped(module), _TIES, ())


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
        for name, tensor in named_state(module).items()
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
        kind = f"{tensor.dtype}{[*tensor.shape]}".removeprefix("torch.")
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
