"""Runs a model's forward without data, to see its calls, and which tensors cross the cuts."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.device import keep_generators
from taktline.errors import PartitionError
from taktline.private import private
from taktline.split.arguments import Args, Kwargs, device_of
from taktline.split.named.changes import Changes
from taktline.split.named.data_dependent import Guess, Sizes
from taktline.split.named.dry_run_context import DryRunContext
from taktline.split.named.forward_summary import Cut, ForwardSummary
from taktline.split.named.hugging_face import INSTALLED
from taktline.split.named.layout import Layout, all_modules
from taktline.split.named.mutable import copied, is_writable, version_of
from taktline.split.named.units import noting_inner_calls

_without_modes = private("torch.utils._python_dispatch._disable_current_modes", "a split by names")


def dry_run(
    layout: Layout, args: Args, kwargs: Kwargs, *, reruns: bool = False, thorough: bool = False
) -> ForwardSummary:
    """What the forward of a model does with these arguments, without data.

    If the forward reads unknown numbers, it runs several times with different guesses;
    ``thorough`` is whether each number gets a guess of its own. ``reruns`` is whether every call of
    a unit runs, even if it is like an earlier one.
    """
    summary, *others = _summaries(layout, args, kwargs, thorough=thorough, reruns=reruns)
    for other in others:
        summary.join(other)
    for error in _find_late_changes(summary, layout, args, kwargs).values():
        raise error
    return summary


def find_refused_cuts(layout: Layout, args: Args, kwargs: Kwargs) -> set[Cut]:
    """The cuts of a layout that are impossible, each even as the only cut."""
    refused: set[Cut] = set()
    try:
        summary, *_ = _summaries(layout, args, kwargs, refused=refused)
    except PartitionError:
        return set(layout.cuts)
    return refused | _find_late_changes(summary, layout, args, kwargs).keys()


def _summaries(
    layout: Layout, args: Args, kwargs: Kwargs, *, thorough: bool = False, **options: Any
) -> list[ForwardSummary]:
    """What runs with different guesses have seen."""
    found: list[ForwardSummary] = []
    failed: list[Exception] = []
    guesses = [Guess(0)]
    for guess in guesses:
        summary = ForwardSummary()
        try:
            _run(summary, layout, args, kwargs, guess=guess, **options)
            found.append(summary)
        except PartitionError:
            raise
        except Exception as error:  # a wrong guess may raise anything
            failed.append(error)
        if summary.is_guessed and guess is guesses[0]:
            guesses += Guess.others(summary.guessed if thorough else ())
    if not found:
        raise failed[0]
    return found


def _run(
    summary: ForwardSummary, layout: Layout, args: Args, kwargs: Kwargs, **options: Any
) -> None:
    """Run the forward once; with ``at_end``, the changes that it makes stay."""
    device = device_of((args, kwargs))
    with keep_generators([device]), torch.no_grad():
        context = DryRunContext(summary, layout, device, **options)
        with torch.inference_mode(False):  # which would give them no versions
            args, kwargs = copied((args, kwargs))
        leaves = pytree.tree_leaves((args, kwargs))
        given = {at: leaf for at, leaf in enumerate(leaves) if is_writable(leaf)}
        versions = {at: version_of(leaf) for at, leaf in given.items()}
        context.arguments = set(map(id, leaves))
        changes = Changes(all_modules(layout.empty_model))
        installed = _with_hooks(layout)
        rng = _rng_states(device)
        numbers = context.numbers
        with context, numbers, Sizes(context), noting_inner_calls(context, layout.inner):
            try:
                output = layout.model_class.forward(layout.empty_model, *args, **kwargs)
            except PartitionError:
                raise
            except Exception as error:
                error.add_note(
                    f"taktline.split.by_names ran the forward of {layout.model_class.__name__} "
                    "without data, to see in which order it calls its submodules"
                )
                raise
            finally:
                summary.written = frozenset(
                    at for at, leaf in given.items() if version_of(leaf) != versions[at]
                )
                summary.changed = layout.common_in(changes.changed())
                summary.hooked = frozenset(_with_hooks(layout) - installed)
                summary.is_guessed |= bool(numbers.guessed) or numbers.is_sized
                summary.reads_numbers |= len(numbers) > 0
                summary.draws |= rng != _rng_states(device)
                random.setstate(rng[0])
                values = changes.values()
                if context.at_end is None:
                    changes.undo()
        for at in sorted(summary.written):
            if unit := context.written_by_units.get(id(given[at])):
                raise PartitionError(
                    f"the forward changes an argument of the model in place, and {unit!r} changes "
                    "it, too; make a new tensor instead"
                )
        context.finish(output, [values.get(name) for name in sorted(summary.changed)])


def _with_hooks(layout: Layout) -> set[str]:
    """The Hugging Face models in a model that have registered hooks with their layers."""
    return {name for name, module in layout.common.items() if vars(module).get(INSTALLED)}


def _rng_states(device: torch.device) -> list[Any]:
    """The states of the random number generators."""
    with _without_modes():
        states = [torch.get_rng_state()]
        states += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [random.getstate(), *(state.numpy().tobytes() for state in states)]


def _find_late_changes(
    summary: ForwardSummary, layout: Layout, args: Args, kwargs: Kwargs
) -> dict[Cut, PartitionError]:
    """The cuts before which a stage reads what the forward changes later, with an error each.

    A stage leaves its forward where the next stage begins. So it must not read, in its next call,
    what the forward changes after that::

        forward of the model:   x * self.count   layer 0   layer 1   self.count += 1
        stage 0:                reads            runs      ▶ leave   never gets here
    """
    modules, changed = layout.common, summary.changed
    if not changed or not layout.cuts:
        return {}

    def run(at_end: Callable[[int], None]) -> None:
        _run(ForwardSummary(), layout, args, kwargs, guess=Guess(0), refused=set(), at_end=at_end)

    state = Changes(modules, changed)
    found: dict[Cut, PartitionError] = {}
    ends: list[Changes] = []
    at_ends: list[dict[str, Any]] = []
    read: dict[str, int] = {}

    def note_end(stage: int) -> None:
        ends.append(Changes(modules, changed))
        at_ends.append(state.fingerprints())

    try:
        with _noting_reads(modules, changed, lambda name: read.setdefault(name, len(ends))):
            run(note_end)
        after = state.fingerprints()
        whole: list[dict[str, Any]] = []
        run(lambda _: whole.append(state.fingerprints()))
        for stage, (end, start) in enumerate(zip(ends, layout.cuts, strict=True)):
            late = {
                name
                for name in changed
                if at_ends[stage].get(name) != after.get(name)
                and read.get(name, len(ends)) <= stage
            }
            if not late:
                continue
            end.undo()
            own: list[dict[str, Any]] = []
            run(lambda _, own=own: own.append(state.fingerprints()))
            for name in sorted(late):
                if own[stage].get(name) != whole[stage].get(name):
                    found[start] = PartitionError(
                        f"stage {stage} reads {name!r}, but the forward changes it after the call "
                        f"of {start!r}, where that stage has ended; change {name!r} before that "
                        "call, or cut the model elsewhere"
                    )
    finally:
        state.undo()
    return found


@contextmanager
def _noting_reads(
    modules: Mapping[str, nn.Module], names: Collection[str], note: Callable[[str], object]
) -> Iterator[None]:
    """Call ``note`` with the name of each attribute or buffer of some names that is read."""
    kinds = {path: type(module) for path, module in modules.items()}
    try:
        for path, module in modules.items():
            prefix = f"{path}." if path else ""
            own = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
            if own:
                module.__class__ = _noting_class(kinds[path], own, note)
        yield
    finally:
        for path, module in modules.items():
            module.__class__ = kinds[path]


def _noting_class(
    kind: type[nn.Module], names: Mapping[str, str], note: Callable[[str], object]
) -> type[nn.Module]:
    def getattribute(self: Any, name: str) -> Any:
        if name in names:
            note(names[name])
        return kind.__getattribute__(self, name)

    texts = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__getattribute__": getattribute, **texts})
