"""One stage's way through the model's forward: from where values come in to where they go out.

::

    forward of the model:   embed   layer 0   layer 1   layer 2   layer 3   norm   head
    stage 1 of 3:           ghost   ghost     ▶ real    real      ▶ leave
                                              what stage 0 sent   what stage 2 needs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from taktline.errors import PartitionError
from taktline.split.named.ghost import Ghost, Scene, resolved
from taktline.split.named.skeleton import Skeleton
from taktline.split.named.twin import Twin

__all__ = ["Leave", "OtherTypes", "Passage"]


class Leave(BaseException):
    """Ends a forward where the next stage begins.

    Not an Exception: no handler in the forward is meant for it.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = (args, kwargs)


class OtherTypes(BaseException):
    """Ends a forward whose ghosts have not the types of what came, to begin it anew."""

    def __init__(self, types: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.types = types


class Passage(Scene):
    """The forward of one micro-batch in one stage.

    ``types`` tells the types that submodules of other stages really give, where something that is
    not to be seen here, such as mixed precision, changes them; ``last``, not to try others.
    """

    mixed = True

    def __init__(
        self,
        skeleton: Skeleton,
        stage: int,
        values: Sequence[Any],
        device: torch.device,
        types: Mapping[torch.dtype, torch.dtype],
        *,
        last: bool,
    ) -> None:
        super().__init__(device)
        self._types = types
        self._last = last
        self._skeleton = skeleton
        self._stage = stage
        self._values = values
        self._is_in = stage == 0

    def meet_own(
        self, begins: bool, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for a unit of this stage, with what came from the stage before."""
        if not self._is_in:
            if not begins:
                raise PartitionError(
                    f"the forward calls a {kind} of stage {self._stage} before "
                    f"{self._skeleton.starts(self._stage)!r}, with which the stage begins; every "
                    "micro-batch must take the same way through the stages"
                )
            self._enter((args, kwargs))
        return self.require_data((args, kwargs), f"a {kind}")

    def meet_foreign(
        self, twin: Twin, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Ghosts, on the way in; or the way out."""
        if not self._is_in:
            output = twin.output(args, kwargs, training=training, stage=0, device=self.device)
            return pytree.tree_map_only(Ghost, self._typed, output) if self._types else output
        if twin.name != self._skeleton.starts(self._stage + 1):
            raise PartitionError(
                f"the forward calls {twin.name!r}, which lies in stage "
                f"{self._skeleton.homes[twin.name]}, in the middle of stage {self._stage}; "
                "call by_names with an example= of what the model is called with"
            )
        raise Leave(*self.require_data((args, kwargs), repr(twin.name)))

    def require_data(self, tree: Any, user: str) -> Any:
        """A tree with the data of all its ghosts."""
        tree = resolved(tree)
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Ghost):
                raise PartitionError(
                    f"{user} in stage {self._stage} uses a value of {leaf.maker!r}, which has not "
                    "come with what the stage begins with; call by_names with an example= of what "
                    "the model is called with, which tells more"
                )
        return tree

    def finish(self, output: Any) -> Any:
        """The output of the model, after its last stage."""
        if not self._is_in or self._stage < self._skeleton.stages - 1:
            name = self._skeleton.starts(self._stage + (1 if self._is_in else 0))
            raise PartitionError(
                f"the forward of {self._skeleton.kind.__name__} has ended without a call of "
                f"{name!r}; every micro-batch must take the same way through the stages"
            )
        return self.require_data(output, "the output of the model")

    def _enter(self, arguments: Any) -> None:
        """Give the ghosts among the arguments of the first unit their data."""
        self._is_in = True
        ghosts = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Ghost)]
        name = self._skeleton.starts(self._stage)
        if len(ghosts) != len(self._values):
            raise PartitionError(
                f"{name!r}, with which stage {self._stage} begins, waits for {len(ghosts)} tensors "
                f"from the stage before, but {len(self._values)} came; every rank must cut the "
                "same model"
            )
        types: dict[torch.dtype, torch.dtype] = {}
        changes = self._skeleton.twins[name].changes
        for ghost, value in zip(ghosts, self._values, strict=True):
            if ghost.shape != value.shape:
                raise PartitionError(
                    f"{name!r}, with which stage {self._stage} begins, waits for a tensor of the "
                    f"shape {list(ghost.shape)} from the stage before, but one of "
                    f"{list(value.shape)} came; every rank must cut the same model"
                )
            if ghost.dtype is not value.dtype:
                types[ghost.dtype] = value.dtype
            # Autograd refuses to change what a stage is given; a copy can be changed.
            ghost.value = value.clone() if changes else value
        if types and not self._last:
            raise OtherTypes({} if self._types else types)

    def _typed(self, ghost: Ghost) -> Ghost:
        return ghost.typed(self._types.get(ghost.dtype, ghost.dtype))
