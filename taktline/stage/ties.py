"""Tied weights: one weight in several stages, such as that of an embedding and the head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from taktline.checks import require_instance, require_text, require_whole, shown
from taktline.errors import MismatchError
from taktline.stage.names import named_parameters, unwrapped

_MARK = "_taktline_ties"


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
        require_instance("uses", uses, Mapping, "a dict of stages and names of parameters")
        if len(uses) < 2:
            raise MismatchError(f"a tie names a parameter in two stages or more, not {shown(uses)}")
        stages = (require_whole("a stage of a tie", stage, least=0) for stage in uses)
        names = (require_text("a tied parameter", name) for name in uses.values())
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
        return dict(self.uses).get(require_whole("stage", stage))

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
    module.__dict__[_MARK] = tuple(ties)


def declared(module: nn.Module) -> tuple[Tie, ...]:
    """The ties that are attached to a module."""
    return getattr(unwrapped(module), _MARK, ())
