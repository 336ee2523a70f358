"""Goes on after a lost rank: with the others, from copies of the state, with the same batches.

::

    step 7             a copy of the state before it is sent while it runs
    optimizer.step()
    step 8             a rank is lost
                       the others agree who is left, and connect anew
                       build the pipeline for so many ranks, and load the state before step 7
                       repeat step 7 and optimizer.step()
    step 8             begins again, and returns to the program

What changes the state after a copy is noted with its arguments, to be repeated: training steps,
clipping, and the steps of optimizers with the options that they had. So the ranks may be at
different calls when one is lost: each comes back to the call in which it has noticed that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint import loading, saving
from taktline.checkpoint.saving import RandomNumbers, Training
from taktline.checks import check, check_callable
from taktline.errors import LostRankError, MismatchError, StallError, TaktlineError, UseError
from taktline.runtime.watchdog import guarded
from taktline.text import counted, size_text
from taktline.train.build import Built, build
from taktline.train.mirrors import Mirrors, Moment, free_memory
from taktline.train.world import fitted, reform, release
from taktline.transport import Transport
from taktline.transport.control_plane import Plane
from taktline.transport.election import LeftBehindError
from taktline.transport.exchange import share_values

T = TypeVar("T")
_ATTEMPTS = 8
"""How often a recovery is tried, if more ranks are lost during it."""
_MANY = 64
"""How many calls a copy may take to arrive; then the next one waits for it."""

_COPIES = 4
"""Of each state: on its rank and on another one, the last that is whole and one under way."""

_log = logging.getLogger("taktline")


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a pipeline went on after a loss.

    >>> print(Recovery([1], [0, 2], 4, 0.35, None, "rank 1 is lost"))
    rank 1 lost; 2 ranks [0, 2] on from step 4, from the copies of the ranks, after 0.35 s
    """

    lost: list[int]
    """The ranks that are lost, by their numbers at the start of the job; none if all live."""
    ranks: list[int]
    """Those that go on, in the order of their new ranks."""
    step: int
    """The training step that was repeated first."""
    seconds: float
    """From the detection until the interrupted call could begin again."""
    checkpoint: Path | None
    """The checkpoint that was loaded, as a rank was lost together with the one with its copy."""
    reason: str
    """What the interrupted call would have raised."""

    def __str__(self) -> str:
        lost = " and ".join(f"rank {rank}" for rank in self.lost) or "no rank"
        source = "the copies of the ranks" if self.checkpoint is None else str(self.checkpoint)
        return (
            f"{lost} lost; {counted(len(self.ranks), 'rank')} {self.ranks} on from step "
            f"{self.step}, from {source}, after {self.seconds:.2f} s"
        )


@dataclass(slots=True)
class _Entry:
    """A call that may have to be repeated."""

    run: Callable[[], Any]
    random: dict[str, Any] | None = None
    """The random numbers before it, if it is a step."""
    gradients: Literal["none", "zero", "kept"] = "kept"
    """What it finds."""
    options: tuple[Optimizer, list[dict[str, Any]]] | None = None
    """Those of an optimizer, if it is a step of it."""


class Elastic:
    """Keeps a pipeline going; made by :meth:`Pipeline.elastic`.

    Args:
        pipe: the pipeline.
        given: the arguments of which it was built.
        optimizers: what changes the parameters.
        every: after how many updates a state is copied.
        folder: where checkpoints are, for the case that too many ranks are lost at once.
        on_recovery: called when the pipeline goes on.
    """

    def __init__(
        self,
        pipe: Any,
        given: Any,
        optimizers: Sequence[Optimizer],
        every: int,
        folder: Path | None,
        on_recovery: Callable[[Recovery], object] | None,
    ) -> None:
        self._pipe, self._given, self._folder = pipe, given, folder
        self._training = Training(optimizers, None, None, None)
        self._every = check("every", every, int, least=1)
        self._on_recovery = on_recovery
        if on_recovery is not None:
            check_callable("on_recovery", on_recovery)
        self._plane = Plane.current()
        self._patience = self._built.ranks.distributed[0].timeout
        self._mirrors = Mirrors(self._training)
        self._log: list[_Entry] = []
        """What has changed the state since the earliest copy."""
        self._dropped = 0
        """How many entries are not in the log any more."""
        self._marks: dict[Moment, int] = {}
        """The number of the first entry after each copy."""
        self._flying: Moment | None = None
        """The copy that is on its way."""
        self._updates = 0
        """How many steps of optimizers there were since the latest copy."""
        self._updated = True
        """Whether there was one since the latest training step."""
        self._repeats = False
        self._groups = self._share_groups()
        self._require_memory()
        self._hooks = [each.register_step_pre_hook(self._note) for each in optimizers]
        self._mirrors.connect(self._built.ranks.transport)

        self._random = RandomNumbers(self._built.model)

    @property
    def _built(self) -> Built:
        return self._pipe._built

    def close(self) -> None:
        """Note nothing more."""
        for hook in self._hooks:
            hook.remove()
        self._mirrors.disconnect()

    # Calls.

    def call(self, run: Callable[[], T], *, steps: bool = False) -> T:
        """The result of a call that all ranks make, if need be on other ranks; or of a step.

        All calls are noted, as some ranks may have ended one that others have to begin again.
        """
        if self._repeats:
            return run()
        entry = _Entry(run)
        if steps:
            entry.random = self._random.state_dict()
            entry.gradients = self._gradients()
            if self._updated and entry.gradients == "kept":
                raise UseError(
                    "an elastic pipeline repeats steps from a copy of the state, which holds no "
                    "gradients: call zero_grad() after optimizer.step()"
                )
        while True:
            try:
                self._copy_if_due(steps)
                result = self._run(entry)
                break
            except (LostRankError, StallError) as error:
                if not steps:
                    entry.gradients = self._gradients()
                self._recover(error)
                self._enter(entry)
                entry.gradients = entry.gradients if steps else "kept"
        self._updated &= not steps
        self._log.append(entry)
        return result

    def _run(self, entry: _Entry) -> Any:
        """Make a call, and see whether copies have arrived meanwhile."""
        transport = self._built.ranks.transport
        if entry.options is not None:
            self._mirrors.settle()
        with guarded(transport, "a call of an elastic pipeline"):
            result = entry.run()
            if self._flying is not None and entry.options is None:
                self._agree_on_copies(transport)
        return result

    def _gradients(self) -> Literal["none", "zero", "kept"]:
        """What gradients are there; "kept": those of the steps since the latest update."""
        trained = [each for each in self._pipe.parameters() if each.requires_grad]
        found = [each.grad for each in trained if each.grad is not None]
        if not found and (trained or self._updated):
            return "none"
        if not self._updated or any(bool(gradient.any()) for gradient in found):
            return "kept"
        return "zero"

    def _copy_if_due(self, steps: bool) -> None:
        """Copy the state before a step, unless gradients wait for an optimizer.

        Also before another call, if there were many, so that not all their batches are kept.
        """
        if self._flying is not None or not self._updated:
            return
        if not steps and len(self._log) % _MANY == _MANY - 1:
            clear = self._gradients() == "none"
            rows = self._built.ranks.transport.exchange([clear], "the gradients of a state")
            if all(flag for (flag,) in rows):
                self._copy()
        elif steps and (self._updates >= self._every or not self._marks):
            self._copy()

    def _copy(self, mark: int | None = None) -> None:
        """Begin to copy the state, after which a number of entries were noted."""
        moment = Moment(self._plane.generation, self._built.schedule.steps)
        self._flying, self._updates = moment, 0
        self._marks[moment] = self._dropped + len(self._log) if mark is None else mark
        self._mirrors.begin(moment, self._built.model, self._plane.numbers)

    def _agree_on_copies(self, transport: Transport) -> None:
        """Agree whether all copies have arrived; then earlier ones are not needed any more."""
        moment = self._flying
        assert moment is not None
        late = self._dropped + len(self._log) - self._marks[moment] > _MANY
        arrived = self._mirrors.arrived(self._patience.total_seconds() if late else 0.0)
        rows = transport.exchange([arrived], "the copies of a state")
        if all(flag for (flag,) in rows):
            self._flying = None
            self._mirrors.keep(moment)
            self._cut_log(moment)
        self._mirrors.settle()

    def _cut_log(self, moment: Moment) -> None:
        """Forget what was before a copy."""
        mark = self._marks[moment]
        del self._log[: mark - self._dropped]
        self._dropped = mark
        self._marks = {each: at for each, at in self._marks.items() if each >= moment}

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note a step of an optimizer."""
        if self._repeats:
            return
        if any(each is not None for each in (*args[1:], kwargs.get("closure"))):
            raise UseError("an elastic pipeline cannot repeat a step of an optimizer by a closure")
        self._updates, self._updated = self._updates + 1, True
        self._log.append(_Entry(optimizer.step, options=(optimizer, _options(optimizer))))

    # Recovery.

    def _recover(self, error: TaktlineError) -> None:
        """Go back to the state before the interrupted call, on the ranks that are left."""
        began, reason, lost = time.monotonic(), str(error), list[int]()
        _log.warning("%s", reason.removesuffix("; restart all ranks"))
        options = [_options(each) for each in self._training.optimizers]
        random = self._random.state_dict()
        self._repeats = True
        try:
            for _ in range(_ATTEMPTS):
                try:
                    step, path = self._go_on(lost)
                    break
                except LeftBehindError:
                    raise
                except (LostRankError, StallError) as again:
                    error = again
            else:
                raise error
        finally:
            self._repeats = False
        for optimizer, each in zip(self._training.optimizers, options, strict=True):
            _set_options(optimizer, each)
        self._random.load_state_dict(random)
        seconds = time.monotonic() - began
        found = Recovery(lost, self._plane.numbers, step, seconds, path, reason)
        _log.warning("%s", found)
        if self._on_recovery is not None:
            self._on_recovery(found)

    def _go_on(self, lost: list[int]) -> tuple[int, Path | None]:
        """One attempt; returns from which step on, and the checkpoint that was loaded."""
        self._mirrors.disconnect()
        lost += reform(self._plane, self._patience)
        self._pipe._replace(build(fitted(self._given, self._built, self._plane.numbers)))
        release(self._given, self._built)
        self._random = RandomNumbers(self._built.model)
        path = self._load(lost)
        step = self._built.schedule.steps
        self._mirrors.connect(self._built.ranks.transport)
        self._copy(self._dropped)
        self._updates = sum(entry.options is not None for entry in self._log)
        for entry in list(self._log):
            self._enter(entry)
            self._run(entry)
        return step, path

    def _load(self, lost: Sequence[int]) -> Path | None:
        """Load the latest state that is whole; returns the checkpoint, if it was in one."""
        found = self._mirrors.find(self._built.ranks.transport)
        if found is None:
            return self._load_checkpoint(lost)
        self._point()
        loading.restore(self._built.model, found, self._training)
        self._cut_log(found.moment)
        return None

    def _load_checkpoint(self, lost: Sequence[int]) -> Path:
        """Load the latest checkpoint, as no copied state is whole; there is nothing to repeat."""
        text = f"the copies of the states of {lost} are lost, too"
        if self._folder is None:
            raise LeftBehindError(
                f"{text}, and elastic() has no folder with checkpoints; restart all ranks"
            )
        self._point()
        loaded = loading.load(self._built.model, self._folder, self._training)
        _log.warning("%s: training goes on from %s, of step %d", text, loaded.path, loaded.step)
        self._dropped, self._log, self._marks = self._dropped + len(self._log), [], {}
        return loaded.path

    def _enter(self, entry: _Entry) -> None:
        """Put back what a call has found beside the state."""
        if entry.random is not None:
            self._random.load_state_dict(entry.random)
        if entry.gradients != "kept":
            for parameter in self._pipe.parameters():
                parameter.grad = None
                if entry.gradients == "zero" and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        if entry.options is not None:
            _set_options(*entry.options)

    # Optimizers.

    def _share_groups(self) -> list[list[set[str]]]:
        """The names in each group of each optimizer, of the whole model; all ranks take part."""
        names = {id(value): name for name, value in self._built.model.saved()}
        mine = [
            [[name_of[id(each)] for each in group["params"]] for group in optimizer.param_groups]
            for optimizer, name_of in (
                (each, {id(value): name for name, value in saving.named(each, names)})
                for each in self._training.optimizers
            )
        ]
        what = "the groups of optimizers"
        rows = share_values(self._built.ranks.transport, mine, [[[str]]], what, what=what)
        if len({tuple(map(len, row)) for row in rows}) > 1:
            raise MismatchError(
                "elastic() needs optimizers with the same groups on every rank, as parameters move "
                "to other ranks; make groups of pipe.named_parameters() by the same names, some of "
                "which may be empty"
            )
        return [
            [set().union(*(row[index][number] for row in rows)) for number in range(len(groups))]
            for index, groups in enumerate(mine)
        ]

    def _require_memory(self) -> None:
        """Raise on all ranks if a host has no room for the copies of its ranks."""
        model = self._built.model.held()
        own = sum(value.nbytes for _, value in model)
        kept = [state for each in self._training.optimizers for state in each.state.values()]
        states = [value for each in kept for value in each.values()]
        if not kept:  # as those of Adam will be
            states = [value for _, value in model if value.requires_grad] * 2
        own += sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        mine = [self._plane.address[0], _COPIES * own, free_memory()]
        what = "the memory for copies"
        rows = share_values(self._built.ranks.transport, mine, (str, int, int), what, what=what)
        for host, _, free in rows:
            need = sum(each for other, each, _ in rows if other == host)
            if 0 < free < need:
                raise UseError(
                    f"elastic() keeps {_COPIES} copies of the state of each rank in host memory: "
                    f"host {host} needs {size_text(need)} for them, and has {size_text(free)}"
                )

    def _point(self) -> None:
        """Let the optimizers have the parameters that this rank has now, without gradients."""
        held: dict[str, nn.Parameter] = {}
        for name, value in self._built.model.saved():
            if isinstance(value, nn.Parameter):
                held.setdefault(name, value)
                value.grad = None
        for optimizer, groups in zip(self._training.optimizers, self._groups, strict=True):
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                mine = [name for name in held if name in names]
                group["params"] = [held[name] for name in mine]
                if "param_names" in group:
                    group["param_names"] = mine
            optimizer.state.clear()


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of all groups of an optimizer."""
    return [
        {key: _kept(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _set_options(optimizer: Optimizer, options: Sequence[dict[str, Any]]) -> None:
    for group, each in zip(optimizer.param_groups, options, strict=True):
        group.update({key: _kept(value) for key, value in each.items()})


# What is refused.


def require_elastic(pipe: Any, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a pipeline cannot go on without a rank."""
    given, ranks = pipe._given, pipe._built.ranks
    if given is None:
        raise UseError("make the pipeline with elastic=True, so that each rank keeps the model")
    if not optimizers:
        raise UseError("pass elastic() the optimizers, whose states are copied, too")
    refused = {
        "a mesh or replicas (mesh, data_parallel)": given.mesh is not None or ranks.replicas > 1,
        "prepare, which would change the model twice": given.prepare is not None,
        "compile=True": given.compile,
        "stream_weights=True": given.stream_weights,
        "stages of this process only (a dict)": given.is_own,
    }
    if found := [what for what, is_there in refused.items() if is_there]:
        raise UseError(
            f"an elastic pipeline cannot be made with {' and '.join(found)}; leave it out"
        )


def require_repeatable(
    loss_fn: Any, batch: tuple[tuple[Any, ...], Any, dict[str, Any]], scaler: Any
) -> None:
    """Raise if a step cannot be repeated on other ranks."""
    args, target, options = batch
    if scaler is not None:
        raise UseError(
            "an elastic pipeline cannot repeat what a GradScaler does; train in bfloat16"
        )
    lacks = not (args or options) or (loss_fn is not None and target is None)
    if lacks and options.get("target_mbs") is None:
        raise UseError(
            "pass every rank of an elastic pipeline the whole batch with its target, as "
            "pipe.loader(…) has it: any rank may have to take over the first or the last stage"
        )
