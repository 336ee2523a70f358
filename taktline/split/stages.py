"""The stages of a model, however it was cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup

from taktline.checks import check, check_list, shown
from taktline.errors import PartitionError
from taktline.meta import as_arguments
from taktline.split.on_meta import materialise
from taktline.stage import PipelineStage
from taktline.stage.names import Tie, attach, blueprint, declare, find_ties
from taktline.text import counted


class Pieces(Sequence[nn.Module]):
    """The stages of a model, in order. Calling them runs one after the other.

    A parameter that is one object in several stages becomes a :class:`Tie`, which schedules find in
    the modules.

    >>> embed, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    >>> head.weight = embed.weight
    >>> pieces = by_hand([embed, nn.Linear(4, 4), head])
    >>> pieces
    Pieces(3 stages: 32, 20, 32 parameters; tied: weight of stage 0 = weight of stage 2)
    >>> pieces(torch.tensor([1, 2])).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        cuts: Iterable[str] = (),
        model: nn.Module | None = None,
    ) -> None:
        """``cuts`` are the names at which ``model`` was cut into these, if it was."""
        self._modules = tuple(check_list("modules", modules, error=PartitionError))
        if not self._modules:
            raise PartitionError("a model without stages: pass at least one")
        for stage, module in enumerate(self._modules):
            if not isinstance(module, nn.Module):
                raise PartitionError(f"stage {stage} is {shown(module)}, not an nn.Module")
        self.division: object = None
        """The costs of the stages, if they decided where to cut."""
        self.ties: tuple[Tie, ...] = find_ties(self._modules)
        for module in self._modules:
            declare(module, self.ties)
        attach(self._modules, blueprint(dict(enumerate(self._modules)), cuts, model))

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._modules)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of one stage."""
        return self._modules[require_stage(stage_idx, self.num_stages)]

    def build_stage(
        self, stage_index: int, device: torch.device, group: ProcessGroup | None = None
    ) -> PipelineStage:
        """A stage to run in a schedule; its module is moved to a device, or materialised there."""
        module = materialise(self.get_stage_module(stage_index), device)
        return PipelineStage(module, stage_index, self.num_stages, device, group=group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; returns the output of the model."""
        value = self._modules[0](*args, **kwargs)
        for module in self._modules[1:]:
            value = module(*as_arguments(value))
        return value

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        return self._modules[index]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    def __repr__(self) -> str:
        counts = (sum(p.numel() for p in module.parameters()) for module in self._modules)
        listed = ", ".join(f"{count:,}" for count in counts)
        ties = [*map(str, self.ties[:3]), *(["…"] if len(self.ties) > 3 else [])]
        tied = f"; tied: {', '.join(ties)}" if ties else ""
        return f"Pieces({counted(self.num_stages, 'stage')}: {listed} parameters{tied})"

    def __str__(self) -> str:
        return repr(self) if self.division is None else f"{self!r}\n{self.division}"


def require_stage(stage: int, count: int) -> int:
    """The number of a stage; raises if there is no such stage."""
    if not 0 <= check("stage_idx", stage, int) < count:
        raise PartitionError(
            f"there is no stage {shown(stage)}: stages are numbered from 0 to {count - 1}"
        )
    return stage


def by_hand(modules: Iterable[nn.Module]) -> Pieces:
    """Take modules as the stages of a model."""
    return Pieces(modules)
