"""A table of what each stage sends to the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from taktline.split.named.stage_forward import crossings_of
from taktline.text import table
from taktline.train.measure import StageNeeds

__all__ = ["Boundaries", "Crossing"]


class Crossing(NamedTuple):
    """A tensor that goes from one stage to the next."""

    what: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Boundaries(Mapping[int, tuple[Crossing, ...]]):
    """What each stage sends to the next one for a micro-batch, as far as the example has shown.

    >>> import taktline as tl, torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> pipe = tl.Pipeline(model, example=(torch.ones(2, 4),), microbatches=2, ranks=2, cuts=["2"])
    >>> print(pipe.boundaries)
    from  to  what    type     shape   bytes
    0     1   output  float32  [2, 8]     64
    """

    def __init__(self, crossings: Mapping[int, Sequence[Crossing]]) -> None:
        self._crossings = {stage: tuple(found) for stage, found in crossings.items()}

    @classmethod
    def of(cls, modules: Mapping[int, nn.Module], needs: Sequence[StageNeeds | None]) -> Boundaries:
        """Those between some stages, and what was found out about them without data."""
        found: dict[int, list[Crossing]] = {}
        for stage, module in modules.items():
            names = crossings_of(module)
            need = needs[stage] if stage < len(needs) else None
            if stage < len(needs) - 1 and need is not None:
                rest = "an argument of the model" if names else "output"
                names += [rest] * (len(need.crosses) - len(names))
                found[stage] = [
                    Crossing(name, *crossing)
                    for name, crossing in zip(names, need.crosses, strict=True)
                ]
        return cls(found)

    def __getitem__(self, stage: int) -> tuple[Crossing, ...]:
        return self._crossings[stage]

    def __iter__(self) -> Iterator[int]:
        return iter(self._crossings)

    def __len__(self) -> int:
        return len(self._crossings)

    def __str__(self) -> str:
        lines = [["from", "to", "what", "type", "shape", "bytes"]]
        for stage, found in self._crossings.items():
            for place, (what, dtype, shape, nbytes) in enumerate(found):
                ends = ["", ""] if place else [str(stage), str(stage + 1)]
                lines.append([*ends, what, dtype, str(list(shape)), f"{nbytes:,}"])
        return table(lines, left=lines[0][:-1])
