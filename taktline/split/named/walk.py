"""A run through a model's forward without data, to see what is called when and what crosses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from taktline.errors import PartitionError
from taktline.split.named.ghost import ANYWHERE, Ghost, Scene
from taktline.split.named.skeleton import Skeleton
from taktline.split.named.twin import Twin

__all__ = ["Course", "device_of", "walk"]

Path = tuple[Any, ...]

_ELSE = (
    "cut the model elsewhere, or with taktline.pipeline, which traces it and hands such values on, "
    "or hand it on with taktline.skip"
)


@dataclass(slots=True)
class Course:
    """What a walk has seen."""

    calls: dict[str, list[int]] = field(default_factory=dict)
    """The stages in which each unit is called, in the order of its calls."""
    uses: dict[str, set[int]] = field(default_factory=dict)
    """The stages in which each parameter of a container is used."""
    crossings: list[frozenset[Path]] = field(default_factory=list)
    """For each cut the places, among the arguments of its unit, of what comes from before it."""


def walk(skeleton: Skeleton, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Course:
    """Go through the forward of a model with its arguments, but without its data."""
    device = device_of((args, kwargs))
    devices = [device] if device.type == "cuda" else []
    # Random numbers that the forward draws by itself are drawn when it runs.
    with torch.random.fork_rng(devices=devices), _fork_random(), torch.no_grad():
        scene = _Walk(skeleton, device)
        with scene:
            try:
                output = skeleton.kind.forward(skeleton.bones, *args, **kwargs)
            except PartitionError:
                raise
            except Exception as error:
                error.add_note(
                    f"taktline.split.by_names ran the forward of {skeleton.kind.__name__} without "
                    "data, to see in which order it calls its submodules"
                )
                raise
        scene.finish(output)
    return scene.course


@contextmanager
def _fork_random() -> Iterator[None]:
    """Leave the generator of Python as it is."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def device_of(tree: Any) -> torch.device:
    """Where the tensors of a tree are."""
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device


class _Walk(Scene):
    """The forward of a model in which all is foreign, and the stage that it has come to."""

    mixed = True

    def __init__(self, skeleton: Skeleton, device: torch.device) -> None:
        super().__init__(device)
        self.course = Course()
        self._skeleton = skeleton
        self._stage = 0

    def source(self, ghosts: Sequence[Ghost]) -> Ghost:
        """The one that the present stage lacks, if there is any; else one that it has."""
        self._note_uses(ghosts)
        first = min(ghosts, key=lambda ghost: ghost.stage)
        if first.stage == ANYWHERE:
            return next((ghost for ghost in ghosts if ghost.parameter), first)
        return first

    def stage_of(self, source: Ghost) -> int:
        """Anywhere if nothing but buffers that everybody has went into it."""
        if source.stage == ANYWHERE and not source.parameter:
            return ANYWHERE
        return min(source.stage, self._stage)

    def meet_foreign(
        self, twin: Twin, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note a call, and give its ghosts."""
        if twin.name in self._skeleton.cuts:
            self._begin(twin.name, args, kwargs)
        self.course.calls.setdefault(twin.name, []).append(self._stage)
        ghosts = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Ghost)]
        self._note_uses(ghosts)
        self._require_here(ghosts, repr(twin.name))
        return twin.output(args, kwargs, training=training, stage=self._stage, device=self.device)

    def finish(self, output: Any) -> None:
        """Check what has been seen, after the last call."""
        missing = self._skeleton.cuts[self._stage :]
        if missing:
            raise PartitionError(
                f"the forward of {self._skeleton.kind.__name__} does not call "
                f"{', '.join(map(repr, missing))}, so no stage can begin there; name submodules "
                "that it calls"
            )
        ghosts = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Ghost)]
        self._note_uses(ghosts)
        self._require_here(ghosts, "the output of the model")

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stage = self._skeleton.cuts.index(name) + 1
        if stage <= self._stage:
            raise PartitionError(
                f"the forward calls {name!r} several times, so it cannot begin a stage; cut at "
                "submodules that are called once"
            )
        if stage > self._stage + 1:
            raise PartitionError(
                f"the forward calls {name!r} before {self._skeleton.cuts[self._stage]!r}; list the "
                "cuts in the order of their calls"
            )
        crossing: set[Path] = set()
        for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
            if not isinstance(leaf, Ghost) or leaf.stage == ANYWHERE:
                continue
            self._require_here([leaf], repr(name))
            leaf.stage = stage
            crossing.add(path)
        self._stage = stage
        self.course.crossings.append(frozenset(crossing))

    def _note_uses(self, ghosts: Sequence[Ghost]) -> None:
        for ghost in ghosts:
            if ghost.parameter:
                self.course.uses.setdefault(ghost.maker, set()).add(self._stage)

    def _require_here(self, ghosts: Sequence[Ghost], user: str) -> None:
        """Raise if a value is used that was not handed on to the present stage."""
        for ghost in ghosts:
            if ghost.stage < self._stage:
                start = self._skeleton.starts(self._stage)
                raise PartitionError(
                    f"{user} in stage {self._stage} uses a value of {ghost.maker!r} in stage "
                    f"{ghost.stage}; by name, stage {self._stage} gets only what the forward hands "
                    f"to {start!r}, with which it begins: {_ELSE}"
                )
