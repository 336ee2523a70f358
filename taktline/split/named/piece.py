"""A piece of a model that was cut by names: of the model's own class, running its own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from taktline.split.named.layout import Layout
from taktline.split.named.replacement import is_own_unit, made_from
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
        for name in stage_forward.layout.probes:
            unit: nn.Module = self.get_submodule(name)  # pyright: ignore[reportAttributeAccessIssue]
            if is_own_unit(unit):
                unit._compiled_call_impl = torch.compile(_call_of(unit), *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # pyright: ignore[reportAttributeAccessIssue]
        vars(self)["_stage_forward"].layout.retype(self, fn)
        return self


def _call_of(unit: nn.Module) -> Callable[..., Any]:
    """The call of a module, by a function of ours: torch does not compile what is its own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return unit._call_impl(*args, **kwargs)

    return call


def piece(layout: Layout, model: nn.Module, stage: int) -> nn.Module:
    """One stage of a model."""
    made = layout.piece(model, stage)
    made.__class__ = made_from(type(model), _Piece)
    vars(made)["_stage_forward"] = StageForward(layout, stage)
    return made
