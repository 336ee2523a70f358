"""One stage's way through the model's forward: from where values come in to where they go out.

::

    forward of the model:   embed   layer 0   layer 1   layer 2   layer 3   norm   head
    stage 1 of 3:           ghost   ghost     ▶ real    real      ▶ leave
                                              what stage 0 sent   what stage 2 needs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from taktline.errors import PartitionError
from taktline.split.named.ghost import Ghost, Scene, resolved
from taktline.split.named.kind import found_at
from taktline.split.named.program import Seen, versions_of
from taktline.split.named.script import Coming, Event, Script, Step, Surroundings, is_like, written
from taktline.split.named.skeleton import Skeleton
from taktline.split.named.twin import Twin

__all__ = ["FirstPassage", "Leave", "OtherTypes", "Passage", "Repeat", "Unlike"]


class Leave(BaseException):
    """Ends a forward where the next stage begins.

    Not an Exception: no handler in the forward is meant for it.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = (args, kwargs)


class Unlike(BaseException):
    """Ends a forward that does not go the way of a script, to begin it anew."""


class OtherTypes(BaseException):
    """Ends a forward whose ghosts have not the types of what came, to begin it anew."""

    def __init__(self, types: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.types = types


class Passage(Scene):
    """The forward of one micro-batch in one stage."""

    mixed = True

    def __init__(
        self, skeleton: Skeleton, stage: int, values: Sequence[Any], device: torch.device
    ) -> None:
        super().__init__(device)
        self._skeleton = skeleton
        self._stage = stage
        self._values = values
        self._is_in = stage == 0

    def note_own(
        self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note what a unit of this stage has returned."""

    def require_data(self, tree: Any, user: str) -> Any:
        """A tree with the data of all its ghosts."""
        if type(tree) is torch.Tensor:
            return tree
        tree = resolved(tree)
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Ghost):
                raise PartitionError(
                    f"{user} in stage {self._stage} uses a value of {leaf.maker!r}, which has not "
                    "come with what the stage begins with; call by_names with an example= of what "
                    "the model is called with, which tells more"
                )
        return tree

    def require_exit(self, twin: Twin) -> None:
        """Raise unless the next stage begins with a submodule."""
        if twin.name != self._skeleton.starts(self._stage + 1):
            raise PartitionError(
                f"the forward calls {twin.name!r}, which lies in stage "
                f"{self._skeleton.homes[twin.name]}, in the middle of stage {self._stage}; "
                "call by_names with an example= of what the model is called with"
            )

    def require_handed_on(self, arguments: Any) -> Any:
        """The arguments with which the next stage begins, with their data."""
        return self.require_data(arguments, repr(self._skeleton.starts(self._stage + 1)))

    def finish(self, output: Any) -> Any:
        """The output of the model, after its last stage."""
        if not self._is_in or self._stage < self._skeleton.stages - 1:
            name = self._skeleton.starts(self._stage + (1 if self._is_in else 0))
            raise PartitionError(
                f"the forward of {self._skeleton.kind.__name__} has ended without a call of "
                f"{name!r}; every micro-batch must take the same way through the stages"
            )
        return self.require_data(output, "the output of the model")


class FirstPassage(Passage):
    """A forward of which nothing is known.

    ``types`` tells the types that submodules of other stages really give, where something that is
    not to be seen here, such as mixed precision, changes them; ``last``, not to try others.
    ``around`` is what must not change if others are to be like it.
    """

    script: Script | None = None
    """The way to where the stage begins."""
    seen: list[Seen] | None = None
    """The calls of own submodules, unless the forward has done something else between them."""

    def __init__(
        self,
        skeleton: Skeleton,
        stage: int,
        values: Sequence[Any],
        device: torch.device,
        types: Mapping[torch.dtype, torch.dtype],
        around: Surroundings | None,
        *,
        last: bool,
    ) -> None:
        super().__init__(skeleton, stage, values, device)
        self._types = types
        self._last = last
        self._around = around
        self._events: list[Event] = []
        self._versions: dict[int, int] = {}
        if self._is_in and around is not None:
            self.script = Script((), ())

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
        else:
            self.check_around()
        args, kwargs = self.require_data((args, kwargs), f"a {kind}")
        if self.seen is not None:
            self._versions = versions_of((*args, *kwargs.values()))
        return args, kwargs

    def note_own(
        self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note what a unit of this stage has returned."""
        if self.seen is not None and self._around is not None:
            after = versions_of((*args, *kwargs.values(), output))
            self.seen.append(Seen(unit, args, kwargs, self._versions, output, after))
            self._around.renew()

    def check_around(self) -> None:
        """Forget what was seen if the forward has done something beside its submodules."""
        if self.seen is not None and self._around is not None and self._around.changed():
            self.seen = None

    def meet_foreign(
        self, twin: Twin, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Ghosts, on the way in; or the way out."""
        if self._is_in:
            self.require_exit(twin)
            self.check_around()
            raise Leave(args, kwargs)
        output = twin.output(args, kwargs, training=training, stage=0, device=self.device)
        if self._types:
            output = pytree.tree_map_only(Ghost, self._typed, output)
        self._events.append(Event(twin, training, args, kwargs, output))
        return output

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch that is given ghosts."""
        output = super().call(func, args, kwargs)
        if not self._is_in:
            self._events.append(Event(func, None, args, kwargs, output))
        return output

    def note_change(self) -> None:
        """A ghost does not look as it did when it was made, so a script cannot give it away."""
        if not self._is_in:
            self._around = None

    def _enter(self, arguments: Any) -> None:
        """Give the ghosts among the arguments of the first unit their data."""
        self._is_in = True
        leaves, _ = pytree.tree_flatten_with_path(arguments)
        ghosts = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Ghost)]
        name = self._skeleton.starts(self._stage)
        if len(ghosts) != len(self._values):
            raise PartitionError(
                f"{name!r}, with which stage {self._stage} begins, waits for {len(ghosts)} tensors "
                f"from the stage before, but {len(self._values)} came; every rank must cut the "
                "same model"
            )
        types: dict[torch.dtype, torch.dtype] = {}
        for (_, ghost), value in zip(ghosts, self._values, strict=True):
            if ghost.shape != value.shape:
                raise PartitionError(
                    f"{name!r}, with which stage {self._stage} begins, waits for a tensor of the "
                    f"shape {list(ghost.shape)} from the stage before, but one of "
                    f"{list(value.shape)} came; every rank must cut the same model"
                )
            if ghost.dtype is not value.dtype:
                types[ghost.dtype] = value.dtype
        if types and not self._last:
            raise OtherTypes({} if self._types else types)
        if not types and self._around is not None and not self._around.changed():
            self.script = written(self._events, ghosts)
            self.seen = None if self.script is None or torch.is_inference_mode_enabled() else []
            self._around.renew()
        self._events.clear()
        for (_, ghost), value in zip(ghosts, self._values, strict=True):
            ghost.value = value

    def _typed(self, ghost: Ghost) -> Ghost:
        return ghost.typed(self._types.get(ghost.dtype, ghost.dtype))


class Repeat(Passage):
    """A forward that goes the way of a script."""

    repeats = True

    def __init__(
        self,
        skeleton: Skeleton,
        stage: int,
        values: Sequence[Any],
        device: torch.device,
        script: Script,
    ) -> None:
        super().__init__(skeleton, stage, values, device)
        self.bare = self._is_in
        self._script = script
        self._steps = iter(script.steps)

    def meet_own(
        self, begins: bool, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make sure that all values have come where the stage begins."""
        if not begins or next(self._steps, None) is not None:
            raise Unlike
        arguments = (args, kwargs)
        for path, value in self._script.places:
            if found_at(arguments, path) is not self._values[value]:
                raise Unlike
        self.bare = self._is_in = True
        return arguments

    def meet_again(
        self, twin: Twin, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the script says; or the way out."""
        if self.bare:
            self.require_exit(twin)
            raise Leave(args, kwargs)
        step = next(self._steps, None)
        if step is None or step.who is not twin or step.training is not training:
            raise Unlike
        if len(args) == 1 and args[0] is step.only and not kwargs:
            return step.output
        return self._played(step, args, kwargs)

    meet_foreign = meet_again

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the script says; afterwards, whatever there are ghosts for yet."""
        if self.bare:
            return super().call(func, args, kwargs)
        step = next(self._steps, None)
        if step is None or step.who != func:
            raise Unlike
        return self._played(step, args, kwargs)

    def _played(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a step, if these are its arguments."""
        values = self._values
        if not is_like(step.args, args, values) or (
            (kwargs or step.kwargs) and not is_like(step.kwargs, kwargs, values)
        ):
            raise Unlike
        if step.makes is None:
            return super().call(step.who, args, kwargs) if step.runs else step.output
        parts, tree = step.makes
        parts = [values[part.value] if type(part) is Coming else part for part in parts]
        return parts[0] if tree.is_leaf() else pytree.tree_unflatten(parts, tree)
