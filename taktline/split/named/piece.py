"""A piece of a model that was cut by names: of the model's own class, running its own forward."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from taktline.split.named.layout import Layout
from taktline.split.named.replacement import made_from
from taktline.split.named.stage_forward import StageForward

__all__ = ["piece"]


class _Piece:
    """Mixed into the class of a model that is cut."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage."""
        stage_forward: StageForward = vars(self)["_stage_forward"]
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        return stage_forward.run(self, forward, args, kwargs)  # pyright: ignore[reportArgumentType]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the submodules that are here: the forward itself runs with placeholders."""
        stage_forward: StageForward = vars(self)["_stage_forward"]
        for name in stage_forward.layout.twins:
            self.get_submodule(name).compile(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # pyright: ignore[reportAttributeAccessIssue]
        vars(self)["_stage_forward"].layout.retype(self, fn)
        return self


def piece(layout: Layout, model: nn.Module, stage: int) -> nn.Module:
    """One stage of a model."""
    made = layout.piece(model, stage)
    made.__class__ = made_from(type(model), _Piece)
    vars(made)["_stage_forward"] = StageForward(layout, stage)
    return made
