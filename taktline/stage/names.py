"""The parameters, buffers and modules of a stage by their names in the user's model, and its ties.

The names leave out wrappers: DDP, ``torch.compile`` and checkpoint wrappers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """A faster ``module.parameters()``, for every step."""
    found: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [module]
    while waiting:
        inner = waiting.pop()
        if inner is None or id(inner) in seen:
            continue
        seen.add(id(inner))
        for parameter in inner._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
        if inner._modules:
            waiting.extend(reversed(inner._modules.values()))
    return list(found.values())


def named_buffers(module: nn.Module, *, persistent: bool = False) -> dict[str, torch.Tensor]:
    """All buffers by their names in the user's model, or only those of a state dict."""
    return {
        f"{path}{name}": buffer
        for path, inner in _walk(module, "")
        for name, buffer in inner._buffers.items()
        if buffer is not None and not (persistent and name in inner._non_persistent_buffers_set)
    }


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
