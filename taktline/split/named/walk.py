"""A run through a model's forward without data, to see what is called when and what crosses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.example import Args, Kwargs
from taktline.split.named.carried import find_uncarried
from taktline.split.named.changes import Changes
from taktline.split.named.course import Course, Cut
from taktline.split.named.layout import Layout
from taktline.split.named.numbers import Guess, Sizes
from taktline.split.named.of_transformers import INSTALLED
from taktline.split.named.walk_context import Walk
from taktline.split.named.watch import watching

__all__ = ["device_of", "find_refused", "walk"]


def walk(
    layout: Layout,
    args: Args,
    kwargs: Kwargs,
    *,
    anew: bool = False,
    thorough: bool = False,
) -> Course:
    """Go through the forward of a model with its arguments, but without its data.

    Several times, if it asks for numbers that are not known, with other guesses; ``thorough`` is
    whether to try each of them by itself. ``anew`` is whether every call of a unit is to run, also
    one that is like another.
    """
    course, *others = _courses(layout, args, kwargs, thorough=thorough, anew=anew)
    for other in others:
        course.join(other)
    for error in _uncarried(course, layout, args, kwargs).values():
        raise error
    return course


def find_refused(layout: Layout, args: Args, kwargs: Kwargs) -> set[Cut]:
    """Those of a layout's cuts with which no stage can begin, even if it is the only cut."""
    refused: set[Cut] = set()
    try:
        course, *_ = _courses(layout, args, kwargs, refused=refused)
    except PartitionError:
        return set(layout.cuts)
    return refused | _uncarried(course, layout, args, kwargs).keys()


def _courses(
    layout: Layout,
    args: Args,
    kwargs: Kwargs,
    *,
    thorough: bool = False,
    **options: Any,
) -> list[Course]:
    """What walks with several guesses have seen."""
    found: list[Course] = []
    failed: list[Exception] = []
    guesses = [Guess(0)]
    for guess in guesses:
        course = Course()
        try:
            _walk(course, layout, args, kwargs, guess=guess, **options)
            found.append(course)
        except PartitionError:
            raise
        except Exception as error:  # a wrong guess leads anywhere
            failed.append(error)
        if course.is_guessed and guess is guesses[0]:
            guesses += Guess.others(course.guessed if thorough else ())
    if not found:
        raise failed[0]
    return found


def _uncarried(
    course: Course, layout: Layout, args: Args, kwargs: Kwargs
) -> dict[Cut, PartitionError]:
    if not course.changed or not layout.cuts:
        return {}

    def run(at_end: Callable[[int], None]) -> None:
        _walk(Course(), layout, args, kwargs, guess=Guess(0), refused=set(), at_end=at_end)

    return find_uncarried(layout.common, course.changed, layout.cuts, run)


def _walk(
    course: Course,
    layout: Layout,
    args: Args,
    kwargs: Kwargs,
    *,
    guess: Guess,
    anew: bool = False,
    refused: set[Cut] | None = None,
    at_end: Callable[[int], None] | None = None,
) -> None:
    """Go through the forward once.

    ``refused`` gets the cuts with which no stage can begin; without it, they raise an error.
    ``at_end`` is called where a stage ends; what the forward changes then stays.
    """
    device = device_of((args, kwargs))
    devices = [device] if device.type == "cuda" else []
    # Random numbers that the forward draws by itself are drawn when it runs.
    with torch.random.fork_rng(devices=devices), _fork_random(), torch.no_grad():
        context = Walk(
            course, layout, device, guess=guess, anew=anew, refused=refused, at_end=at_end
        )
        context.arguments = set(map(id, pytree.tree_leaves((args, kwargs))))
        changes = Changes(layout.all_of(layout.empty_model))
        changes.keep()
        installed = _installed(layout)
        drawn = _drawn_by_now(device)
        with context, context.numbers, Sizes(context), watching(context, layout.inner):
            try:
                output = layout.kind.forward(layout.empty_model, *args, **kwargs)
            except PartitionError:
                raise
            except Exception as error:
                error.add_note(
                    f"taktline.split.by_names ran the forward of {layout.kind.__name__} without "
                    "data, to see in which order it calls its submodules"
                )
                raise
            finally:
                course.changed = layout.common_in(changes.changed())
                course.hooked = frozenset(_installed(layout) - installed)
                course.is_guessed |= bool(context.numbers.guessed) or context.numbers.is_sized
                course.is_asking |= len(context.numbers) > 0
                course.is_drawing |= drawn != _drawn_by_now(device)
                kept = changes.values()
                if at_end is None:
                    changes.undo()
        context.finish(output, [kept.get(name) for name in sorted(course.changed)])


def _installed(layout: Layout) -> set[str]:
    """The models in a model that have registered hooks with their layers."""
    return {name for name, module in layout.common.items() if vars(module).get(INSTALLED)}


def _drawn_by_now(device: torch.device) -> list[Any]:
    """Changes when random numbers are drawn."""
    with _disable_current_modes():
        states = [torch.get_rng_state()]
        states += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [random.getstate(), *(state.numpy().tobytes() for state in states)]


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
