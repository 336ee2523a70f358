"""What a piece that was cut by names does beside its modules: takes part, and hands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from taktline.errors import PartitionError
from taktline.split.named.ghost import Ghost
from taktline.split.named.passage import Leave, OtherTypes, Passage
from taktline.split.named.recent import Recent
from taktline.split.named.skeleton import Skeleton
from taktline.split.named.twin import look
from taktline.split.named.walk import Course, device_of, walk

__all__ = ["Role"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Absent:
    """An argument of the model of which later stages need the shape alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def as_ghost(self, device: torch.device) -> Ghost:
        """What a forward sees of it."""
        meta = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return Ghost(meta, "an argument of the model", 0, device)


pytree.register_pytree_node(
    Absent,
    lambda absent: ([], [absent.dtype, *absent.shape]),
    lambda _, context: Absent(tuple(context[1:]), context[0]),
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What crosses into the next stage for calls that look alike."""

    crossing: frozenset[tuple[Any, ...]]
    """Places among the arguments of the unit with which it begins."""
    needed: tuple[bool, ...]
    """For each leaf of the model's arguments, whether a later stage needs its data."""


@dataclass(eq=False, slots=True)
class Role:
    """One stage of a model, and what it has learned of calls."""

    skeleton: Skeleton
    stage: int
    _known: Recent[Manifest] = field(default_factory=Recent)
    _types: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    """Types that other stages are known to give instead of those that their submodules have."""

    def run(
        self,
        forward: Callable[..., Any],
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The forward of this stage: what the next one needs, or the model's output."""
        values, call = self._received(args, kwargs)
        manifest = self._manifest(call, training)
        for _ in range(2):  # with the types that are known, and with none
            try:
                return self._pass(forward, values, call, manifest, last=False)
            except OtherTypes as other:
                self._types = other.types
        return self._pass(forward, values, call, manifest, last=True)

    def _pass(
        self,
        forward: Callable[..., Any],
        values: tuple[Any, ...],
        call: Call,
        manifest: Manifest,
        *,
        last: bool,
    ) -> Any:
        device = device_of((values, call))
        passage = Passage(self.skeleton, self.stage, values, device, self._types, last=last)
        with passage:
            try:
                output = forward(*call[0], **call[1])
            except Leave as leave:
                return _packed(leave.arguments, call, manifest)
        return passage.finish(output)

    def _received(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Call]:
        """What came from the stage before, and what the model was called with."""
        if self.stage == 0:
            return (), (args, self._without_cache(args, kwargs))
        if len(args) != 3 or not isinstance(args[0], tuple):
            raise PartitionError(
                f"stage {self.stage} takes what stage {self.stage - 1} gives, not the arguments "
                "of the model: those go to stage 0"
            )
        # Keywords of a rank reach all its stages; the model's have come with the rest.
        values, *call = args
        device = device_of(args)
        return values, pytree.tree_map_only(
            Absent,
            lambda absent: absent.as_ghost(device),
            tuple(call),
            is_leaf=lambda part: isinstance(part, Absent),
        )

    def _manifest(self, call: Call, training: bool) -> Manifest:
        """What such a call hands on; found out once."""
        return self._known.find((look(call), training), lambda: self._learn(call))

    def _learn(self, call: Call) -> Manifest:
        self._require_not_recorded(call[1])
        course = walk(self.skeleton, *call)
        self._require_at_home(course)
        if self.stage == self.skeleton.stages - 1:
            return Manifest(frozenset(), ())
        leaves, spec = pytree.tree_flatten(call)
        needed = tuple(
            isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, Ghost)
            # What is whole numbers is small, and may be what other micro-batches depend on.
            and (not leaf.is_floating_point() or self._is_missed(leaves, place, spec, course))
            for place, leaf in enumerate(leaves)
        )
        return Manifest(course.crossings[self.stage], needed)

    def _is_missed(
        self, leaves: list[Any], place: int, spec: pytree.TreeSpec, course: Course
    ) -> bool:
        """Whether later stages miss an argument: try and see."""
        leaf = leaves[place]
        ghost = Absent(tuple(leaf.shape), leaf.dtype).as_ghost(leaf.device)
        args, kwargs = pytree.tree_unflatten([*leaves[:place], ghost, *leaves[place + 1 :]], spec)
        try:
            without = walk(self.skeleton, args, kwargs)
        except Exception:
            return True  # somebody looks at its data
        return without.crossings[self.stage :] != course.crossings[self.stage :]

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keywords that keep a model of transformers from caching keys and values.

        Most do so unless told otherwise. No stage could give the cache of all layers.
        """
        names = self.skeleton.arguments
        if "use_cache" not in names[len(args) :] or kwargs.get("use_cache") is not None:
            return kwargs
        return {**kwargs, "use_cache": False}

    def _require_not_recorded(self, kwargs: dict[str, Any]) -> None:
        """Raise if a model of transformers is to collect what layers give, in all stages."""
        config = getattr(self.skeleton.bones, "config", None)
        for name in ("output_hidden_states", "output_attentions", "use_cache"):
            default = name != "use_cache" and getattr(config, name, False)
            if kwargs.get(name, default):
                raise PartitionError(
                    f"{name} asks for what the layers of all stages give, and each stage has only "
                    "its own; leave it out, or register hooks with the layers of the pieces"
                )

    def _require_at_home(self, course: Course) -> None:
        """Raise if a unit or parameter is used in another stage than that which has it."""
        text = "call by_names with an example= of what the model is called with"
        for name, stages in course.calls.items():
            home = self.skeleton.homes[name]
            if set(stages) != {home}:
                away = next(stage for stage in stages if stage != home)
                raise PartitionError(
                    f"the forward calls {name!r} in stage {away}, but it lies in stage {home}; "
                    f"{text}"
                )
        for name, used in course.uses.items():
            away = used - self.skeleton.users[name]
            if away:
                raise PartitionError(
                    f"the forward uses the parameter {name!r} in stage {min(away)}, but it lies in "
                    f"stage {min(self.skeleton.users[name])}; {text}"
                )


def _packed(arguments: Call, call: Call, manifest: Manifest) -> tuple[Any, ...]:
    """What crosses a boundary: values, and the arguments that the model was called with."""
    leaves, _ = pytree.tree_flatten_with_path(arguments)
    values = tuple(leaf for path, leaf in leaves if path in manifest.crossing)
    inputs, spec = pytree.tree_flatten(call)
    for place, leaf in enumerate(inputs):
        if isinstance(leaf, torch.Tensor) and not manifest.needed[place]:
            inputs[place] = Absent(tuple(leaf.shape), leaf.dtype)
    return values, *pytree.tree_unflatten(inputs, spec)
