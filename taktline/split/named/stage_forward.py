"""Runs one stage of a model that was cut by names.

The first call with arguments of some shapes runs the model's forward with placeholders
(``first_run``). Later calls with these shapes repeat its prefix (``repeated_run``), or, for a
plain forward, call the stage's own units alone (``direct_calls``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.arguments import Args, Call, Kwargs, device_of
from taktline.split.named.changes import Changes
from taktline.split.named.dry_run import dry_run
from taktline.split.named.first_run import FirstRun, OtherTypes
from taktline.split.named.forward_summary import ForwardSummary
from taktline.split.named.hugging_face import require_not_collected, without_cache
from taktline.split.named.known_calls import CallCache, KnownCall, autocast_dtype, cache_key
from taktline.split.named.layout import BY_HAND, Layout, all_modules
from taktline.split.named.mutable import with_copies
from taktline.split.named.placeholder import Absent
from taktline.split.named.repeated_run import Differs, RepeatedRun
from taktline.split.named.stage_run import StageInput
from taktline.split.named.units import inner_modules, is_own_unit, noting_inner_calls
from taktline.stage.names import unwrapped


def crossings_of(stage_module: nn.Module) -> list[str]:
    """Names of the tensors that a stage hands to the next one besides the model's arguments.

    None for other modules, or before any call.
    """
    forward: StageForward | None = vars(stage_module).get("_stage_forward")
    if forward is None or forward.layout.summary is None or forward._is_last:
        return []
    boundary = forward.layout.summary.boundaries[forward.stage]
    return [
        *([f"{forward.layout.cuts[forward.stage]} (an argument)"] * len(boundary.arguments)),
        *map(str, boundary.extras),
        *(["numbers that the forward reads"] if boundary.numbers else []),
    ]


def has_dynamic_shapes(stage_module: nn.Module) -> bool:
    """Whether the shapes of tensors between stages depend on data, as far as a call has shown."""
    forward: StageForward | None = vars(stage_module).get("_stage_forward")
    summary = None if forward is None else forward.layout.summary
    return summary is not None and summary.is_sized


@dataclass(eq=False, slots=True)
class StageForward:
    """One stage of a model, and what it has learned of calls."""

    layout: Layout
    stage: int
    _known: CallCache[KnownCall] = field(default_factory=CallCache)
    _types: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    """The types that other stages return, where they differ from those of placeholders."""
    _changes: Changes | None = None
    """What the forward itself changes."""
    _changed: frozenset[str] = frozenset()
    """The names of what the forward itself changes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StageForward:
        return StageForward(self.layout, self.stage)  # all it has learned is of these modules

    def run(
        self, stage_module: nn.Module, forward: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> Any:
        """Run the forward of this stage; returns what the next one needs, or the model's output."""
        values, received = self._received(args, kwargs)
        device = values[0].device if values else device_of(received)
        modes = torch._C._len_torch_dispatch_stack()
        key = (
            cache_key(values),
            cache_key(received),
            stage_module.training,
            torch.is_grad_enabled(),
            autocast_dtype(device),
            device,
            self.layout.retyped,
            modes,
        )
        # Taken out while it runs: a prefix serves one call at a time.
        known = self._known.pop(key, None)
        if known is None:
            if not modes:
                self.layout.follow(stage_module)
            known = self._learn(received, device, is_measured=modes > 0)
            # In a mode, tensors may have no data, or operations may be counted.
            known.is_repeatable &= not modes
        if not modes and not known.summary.changed <= self._changed:
            self._separate(stage_module, known.summary.changed)
        changes = self._changes
        if modes:  # a run without data must not change the model
            changes = Changes(all_modules(stage_module))
        elif changes is not None:
            changes.keep()
        copies: Sequence[torch.Tensor] = ()
        if known.writes is not False and any(value.requires_grad for value in values):
            values, copies = with_copies(values)
        given = StageInput(values, received, device, known)
        try:
            output = self._run(given, stage_module, forward)
        finally:
            self._known.keep(key, known)
            if modes and changes is not None:
                changes.undo()
        if changes is not None and not modes:
            changes.write_through()
        if copies:
            known.writes = any(copy._version for copy in copies)
        return output

    def _run(self, given: StageInput, stage_module: nn.Module, forward: Callable[..., Any]) -> Any:
        """Do the same as in an earlier call, if that is possible."""
        known = given.known
        if known.direct_calls is not None:
            if known.direct_calls.guards.hold():
                output = known.direct_calls.run(given.values)
                return output[0] if self._is_last else known.handed_on(output, given.received)
            known.direct_calls = None
        if known.prefix is not None:
            try:
                return RepeatedRun(self.layout, self.stage, given).run(forward)
            except Differs:
                if self._changes is not None:
                    self._changes.undo()
        return self._run_first(given, stage_module, forward)

    def _run_first(
        self, given: StageInput, stage_module: nn.Module, forward: Callable[..., Any]
    ) -> Any:
        """Run the forward with placeholders, and record what later calls can repeat."""
        known = given.known
        units = {name: stage_module.get_submodule(name) for name in self.layout.probes}
        # A wrapper around a unit may call anything inside of it.
        own = {name: module for name, module in units.items() if is_own_unit(module)}
        # Hooks on compiled modules would be compiled, too.
        is_compiled = any(
            module._compiled_call_impl or unwrapped(module) is not module
            for module in units.values()
        )
        inner = {} if is_compiled else self.layout.inner | inner_modules(own)
        changes = Changes(all_modules(stage_module))
        tries = 0
        while True:  # with the known types, with those of placeholders, with any
            tries += 1
            run = FirstRun(self.layout, self.stage, given, types=self._types, last=tries == 3)
            try:
                with noting_inner_calls(run, inner) if inner else nullcontext():
                    output = run.run(forward)
                break
            except OtherTypes as other:
                self._types = other.types
                changes.undo()
        known.prefix = run.prefix
        known.is_repeatable = known.prefix is not None
        if not known.is_checked:
            known.is_checked = True
            changed = self.layout.common_in(changes.changed())
            self._require_like_model(known.summary, run.order, changed, set(inner.values()))
            if run.recorder is not None:
                returned = [output] if self._is_last else output[0]
                known.direct_calls = run.recorder.direct_calls(returned, self.layout, stage_module)
        return output

    @property
    def _is_last(self) -> bool:
        return self.stage == self.layout.stages - 1

    def _received(self, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], Call]:
        """The values from the stage before, and the arguments of the model."""
        if self.stage == 0:
            return (), (args, without_cache(self.layout.arguments[len(args) :], kwargs))
        if len(args) != 3 or not isinstance(args[0], tuple):
            raise PartitionError(
                f"stage {self.stage} takes what stage {self.stage - 1} returns, not the arguments "
                "of the model: those go to stage 0"
            )
        # Keywords of a rank reach all its stages; the model's came from the stage before.
        return args[0], (args[1], args[2])

    def _learn(self, received: Call, device: torch.device, *, is_measured: bool) -> KnownCall:
        """Find out by a dry run what crosses in such a call.

        ``is_measured`` is whether the call runs in a mode, most likely with the example.
        """
        known, layout = KnownCall.of(received, device), self.layout
        call = known.arguments(received)
        require_not_collected(layout.empty_model, call[1])
        summary = layout.summary
        if summary is None or not (is_measured and layout.example_key == cache_key(call)):
            summary = dry_run(layout, *call, thorough=True)
            layout.summary = layout.summary or summary
        self._require_at_home(summary)
        if self.stage == 0 and not self._is_last:
            known.absent = self._find_absent(call, summary)
        known.follow(summary, self.stage)
        return known

    def _separate(self, stage_module: nn.Module, changed: frozenset[str]) -> None:
        """Give this stage its own copy of what each stage changes."""
        if not self._is_last:
            self.layout.separate(stage_module, changed - self._changed)
            Changes(self.layout.common_of(stage_module), changed - self._changed).separate()
        self._changed |= changed
        self._changes = Changes(self.layout.common_of(stage_module), self._changed)

    def _require_like_model(
        self,
        summary: ForwardSummary,
        order: Sequence[str],
        changed: frozenset[str],
        inner: Container[str],
    ) -> None:
        """Raise if a stage differs from the whole model up to its end.

        ``inner`` are the modules inside of units whose calls are in ``order``.
        """
        is_complete = self._is_last and not summary.is_guessed
        missing = summary.changed - changed if is_complete else set()
        for name in sorted(missing | (changed - summary.changed)):
            raise PartitionError(
                f"stage {self.stage} does not change {name!r} as the whole model does; {BY_HAND}"
            )
        if summary.is_guessed or summary.draws:
            return  # the calls depend on data
        expects = [
            name
            for name, stage in summary.order
            if stage <= self.stage and (name in self.layout.probes or name in inner)
        ]
        if list(order) == expects:
            return
        pairs = zip_longest(order, expects)
        found, expected = next(pair for pair in pairs if pair[0] != pair[1])
        raise PartitionError(
            f"the forward of stage {self.stage} calls {found or 'nothing'!r} where that of the "
            f"whole model calls {expected or 'nothing'!r}, so something would be left out; "
            f"{BY_HAND}"
        )

    def _find_absent(self, call: Call, summary: ForwardSummary) -> dict[int, Absent]:
        """The arguments whose data no later stage needs: dry runs without it show that."""
        if summary.is_guessed:
            return {}  # which would take many dry runs
        found: dict[int, Absent] = {}
        leaves, spec = pytree.tree_flatten(call)
        for place, leaf in enumerate(leaves):
            # Integers are small, and branches of other micro-batches may depend on them.
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                continue
            absent = Absent(tuple(leaf.shape), leaf.dtype)
            without = [*leaves]
            without[place] = absent.as_placeholder(leaf.device)
            try:
                other = dry_run(self.layout, *pytree.tree_unflatten(without, spec))
            except Exception:
                continue  # the forward reads the data
            if other.boundaries == summary.boundaries:
                found[place] = absent
        return found

    def _require_at_home(self, summary: ForwardSummary) -> None:
        """Raise if a stage uses a unit or a parameter of another stage."""
        for name in {**summary.calls, **summary.uses}:
            homes = self.layout.homes[name]
            away = {*summary.calls.get(name, ()), *summary.uses.get(name, ())} - homes
            if away:
                does = "uses the parameter" if name in self.layout.direct else "calls"
                raise PartitionError(
                    f"the forward {does} {name!r} in stage {min(away)}, but it is in stage "
                    f"{min(homes)}; {self.layout.advice}"
                )
