"""A piece of a model that was cut by names: the model's own class, running its own forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn
from torch.utils import _pytree as pytree

from taktline.errors import PartitionError
from taktline.split.passage import Leave, Passage
from taktline.split.skeleton import Skeleton
from taktline.split.stand_in import made_from
from taktline.split.twin import look
from taktline.split.walk import Course, device_of, walk

__all__ = ["piece"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False, slots=True)
class Role:
    """What a piece knows beside its modules."""

    skeleton: Skeleton
    stage: int
    _courses: dict[Any, Course] = field(default_factory=dict)

    def run(
        self, forward: Any, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The forward of this stage: what the next one needs, or the model's output."""
        values, call = self._received(args, kwargs)
        course = self._course(call, training)
        passage = Passage(self.skeleton, self.stage, values, device_of((call, values)))
        with passage:
            try:
                output = forward(*call[0], **call[1])
            except Leave as leave:
                # Its traceback would keep all that the forward has made alive.
                arguments = leave.with_traceback(None).arguments
                crossing = course.crossings[self.stage]
                leaves = pytree.tree_flatten_with_path(arguments)[0]
                return tuple(leaf for path, leaf in leaves if path in crossing), *call
        return passage.finish(output)

    def _received(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Call]:
        """What came from the stage before, and what the model was called with."""
        if self.stage == 0:
            return (), (args, kwargs)
        # Keywords of this rank's first stage reach all its stages; they came with the rest.
        if len(args) != 3:
            raise PartitionError(
                f"stage {self.stage} takes what stage {self.stage - 1} gives, not the arguments "
                "of the model; those go to stage 0"
            )
        values, model_args, model_kwargs = args
        return values, (model_args, model_kwargs)

    def _course(self, call: Call, training: bool) -> Course:
        """How such a call goes through the stages."""
        leaves, spec = pytree.tree_flatten(call)
        key = (*map(look, leaves), spec, training)
        if key not in self._courses:
            self._courses[key] = self._checked(walk(self.skeleton, *call))
        return self._courses[key]

    def _checked(self, course: Course) -> Course:
        homes, users = self.skeleton.homes, self.skeleton.users
        for name, stages in course.calls.items():
            if set(stages) != {homes[name]}:
                raise PartitionError(
                    f"the forward calls {name!r} in stage {stages[-1]}, but it lies in stage "
                    f"{homes[name]}; call by_names with an example= of what the model is called with"
                )
        for name, stages in course.uses.items():
            if not stages <= users[name]:
                raise PartitionError(
                    f"the forward uses the parameter {name!r} in stage {max(stages)}, but it lies "
                    f"in stage {min(users[name])}; call by_names with an example= of what the "
                    "model is called with"
                )
        return course


class _Piece:
    """Mixed into the class of a model that is cut."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage."""
        role: Role = vars(self)["_role"]
        return role.run(super().forward, vars(self)["training"], args, kwargs)  # pyright: ignore

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # pyright: ignore
        vars(self)["_role"].skeleton.retype(fn)
        return self


def piece(skeleton: Skeleton, model: nn.Module, stage: int) -> nn.Module:
    """One stage of a model."""
    made = skeleton.piece(model, stage)
    made.__class__ = made_from(type(model), _Piece)
    vars(made)["_role"] = Role(skeleton, stage)
    return made
