"""A piece of a model that was cut by names: of the model's own class, running its own forward."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from taktline.split.named.role import Role
from taktline.split.named.skeleton import Skeleton
from taktline.split.named.stand_in import made_from

__all__ = ["piece"]


class _Piece:
    """Mixed into the class of a model that is cut."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage."""
        role: Role = vars(self)["_role"]
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        return role.run(self, forward, args, kwargs)  # pyright: ignore[reportArgumentType]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # pyright: ignore[reportAttributeAccessIssue]
        vars(self)["_role"].skeleton.retype(self, fn)
        return self


def piece(skeleton: Skeleton, model: nn.Module, stage: int) -> nn.Module:
    """One stage of a model."""
    made = skeleton.piece(model, stage)
    made.__class__ = made_from(type(model), _Piece)
    vars(made)["_role"] = Role(skeleton, stage)
    return made
