"""This rank of a pipeline: its plan and connections, and the first contact with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from taktline.errors import MismatchError
from taktline.plan import Plan
from taktline.runtime import updates
from taktline.runtime.agreement import INTRODUCTION, Agreement, examples, introduced, misfit
from taktline.runtime.bind import Bound, channels_of
from taktline.runtime.capture import Captures
from taktline.runtime.fingerprint import DataCheck
from taktline.runtime.losses import LossRelay
from taktline.runtime.ports import Signatures
from taktline.runtime.random_numbers import Drawing, RankRandom
from taktline.runtime.replicas import Replicas
from taktline.runtime.run_ahead import Agreed
from taktline.runtime.runnable_plan import Limits, Runnable
from taktline.runtime.same_model import digest, model_difference, whole_model
from taktline.runtime.step_data import Feed
from taktline.runtime.ties import Ties
from taktline.stage import PipelineStage
from taktline.stage.blueprint import Blueprint
from taktline.text import by_rank, counted
from taktline.transport import Channel, Transport, local, transport_of
from taktline.transport.communicators import default_group
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import share_values
from taktline.transport.one_rank import Alone
from taktline.transport.turn import Turn


class PipelineRank:
    """This rank in one schedule: its plan, its connections, and what the other ranks must match."""

    def __init__(
        self,
        name: str,
        make_plan: Callable[[int], Plan],
        stages: Sequence[PipelineStage],
        microbatches: int,
        *,
        loss_fn: Callable[..., torch.Tensor] | None,
        parts: Callable[[int], int],
        seed: int | None,
        dynamic_shapes: bool,
        limits: Limits,
        idle: PipelineStage | None = None,
    ) -> None:
        """``parts`` returns the number of micro-batches for a number of rows.

        A rank without stages has the group and device of the stage ``idle``.
        """
        self._name = name
        self._turn = Turn(name)
        self._make_plan = make_plan
        self._stages = list(stages)
        anywhere = idle or self._stages[0]
        self._group, self.device = anywhere.group, anywhere.device
        self._microbatches = microbatches
        self._loss_fn = loss_fn
        self._parts = parts
        self._seed = seed
        self._dynamic_shapes = dynamic_shapes
        self._limits = limits
        self.replicas = Replicas(self._stages)
        self._ties = Ties(self._stages)
        self._blueprint: Blueprint = ()
        """Of the model that the stages were cut from, if it is known."""
        self._reduces = self._entangled = False
        """Whether a stage of any rank averages its gradients, or shares its work in any way."""
        self._random: RankRandom | None = None
        """The random numbers of all ranks, where they run in this process."""
        self._drawing: Drawing | None = None
        """The same; or finds out whether a single rank draws."""
        self._identity = ScheduleNumber(self._group)
        self._calls = 0
        self._channels: list[Channel] = []
        self._data = DataCheck()
        self._feed = Feed()
        self._captures: Captures | None = None
        self.runs_ahead = False
        """Whether the user allows steps without an exchange."""
        self._repeatable: Agreed | None = None
        """The latest step, if others like it need no exchange."""
        self._known: dict[tuple[int, ...], Signatures | Bound] = {}
        """The latest kinds of steps, by mode and by the inputs of all ranks; equal on all ranks."""
        self.stepped_at = 0
        """When the latest training step has ended; 0 before the first one, and after a load."""
        self.unreduced = False
        """Whether the running ``accumulate()`` has gradients of a step."""

    def awaits_update(self) -> bool:
        """Whether gradients of steps on this rank wait for an optimizer."""
        if self.unreduced or not self.stepped_at:
            return self.unreduced
        parameters = (each for stage in self._stages for each in stage.submod.parameters())
        return updates.wait(parameters, self.stepped_at)

    def run_all_ranks(self, count: int) -> None:
        """Run all ranks of the plan in one thread, where messages are handed over as they are."""
        self._random = self._drawing = RankRandom(count, self.device)
        self.transport = Alone()

    @property
    def ranks(self) -> range:
        """The ranks that run in this process."""
        if self._random is not None:
            return range(self._random.ranks)
        return range(self.transport.rank, self.transport.rank + 1)

    @cached_property
    def transport(self) -> Transport:
        """The connections to the other ranks."""
        return transport_of(self._group, self.device)

    @cached_property
    def agreement(self) -> Agreement:
        """Raises the errors that all ranks raise."""
        return Agreement(self.transport, self.replicas, self._feed)

    @cached_property
    def runnable(self) -> Runnable:
        """The plan, for training and for evaluation."""
        plan = self._make_plan(self.transport.size * len(self.ranks))
        return Runnable(plan, limits=self._limits)

    def connect(self) -> None:
        """Open the channels now, so that the first step does not wait; on every rank, one plan."""
        if isinstance(self.transport, Distributed):
            self._channels = sorted(channels_of(self.runnable.plan))
            self.transport.open(self._channels)

    def restart(self, steps: int) -> None:
        """Continue over new connections after ``steps`` training steps; on every rank."""
        self._forget()
        if self.runs_ahead and isinstance(self.transport, Distributed):
            self.transport.run_ahead()
        self._calls = 0
        self.transport.open(self._channels)
        shared = self.transport.exchange([steps], "reconnect()")
        ended = [number for (number,) in shared]
        if len(set(ended)) > 1:
            error = MismatchError(
                f"the latest step has ended on some ranks only (training steps: {by_rank(ended)}), "
                "so their weights may differ; load a checkpoint on every rank, and set steps of "
                "the schedules"
            )
            error.recoverable = "restart"
            raise error

    def arrive(self, what: str) -> None:
        """Raise unless every rank is in the same call, which may wait in collectives.

        Only where ranks share their work with other pipelines: elsewhere all waits are our own.
        """
        if self._entangled:
            with self.agreement.with_replicas(what):
                self.transport.exchange([], what)

    def _begin_ahead(self, transport: Distributed) -> None:
        """Let ranks post what they did, for steps without an exchange."""
        if self._entangled:
            raise MismatchError(
                "run_ahead works for one pipeline whose stages are each on one rank; here replicas "
                "or tensor-parallel ranks share the work of stages, so leave it out"
            )
        if self._dynamic_shapes:
            raise MismatchError("run_ahead needs shapes that are known; leave out dynamic_shapes")
        transport.run_ahead()

    def _forget(self) -> None:
        """Drop the running step after a failure, and all that may be wrong because of it."""
        self._feed.clear()
        self._known.clear()
        self._repeatable = None
        if self._captures is not None:
            self._captures.forget()
        for stage in self._stages:
            stage.clear()

    def _check(self) -> None:
        """Raise if a stage does not fit: all checks before the first step, ties before each."""
        if not self._identity.number:
            count = self.runnable.plan.stages
            for stage in self._stages:
                if stage.num_stages != count:
                    raise MismatchError(
                        f"stage {stage.stage_index} is one of {stage.num_stages} (num_stages), but "
                        f"the plan has {counted(count, 'stage')}; make them equal"
                    )
            self.replicas.check(self.transport)
            self._blueprint = whole_model(self._stages)
        if not self._identity.number or self._ties.uses:
            self._ties.check()

    def _shake_hands(self) -> None:
        """Before the first step: compare the handshakes of all ranks, and open the channels."""
        rank_of = self.runnable.plan.placement.rank_of
        stages = {stage.stage_index: stage for stage in self._stages}
        mine = {
            "schedule": self._name,
            "microbatches": self._microbatches,
            "num_stages": self.runnable.plan.stages,
            "stages": [stage.stage_index for stage in self._stages],
            "rank_of": [rank // len(self.ranks) for rank in rank_of],
            "plan": self.runnable.plan.digest(),
            "trains": self._loss_fn is not None,
            "dynamic_shapes": self._dynamic_shapes,
            "run_ahead": self.runs_ahead,
            "shards": self.replicas.shards,
            "reduces": self.replicas.reduces,
            "in_company": self.replicas.entangled,
            "takes": examples({index: stage.expected_input for index, stage in stages.items()}),
            "gives": examples({index: stage.expected_output for index, stage in stages.items()}),
            "ties": [asdict(use) for use in self._ties.uses],
            "model": digest(self._blueprint),
        }
        what = "what a rank says of itself, that"
        shared = share_values(self.transport, mine, INTRODUCTION, "the first step", what=what)
        all_ranks = [introduced(plain) for plain in shared]
        models = [rank.model for rank in all_ranks]
        if reason := misfit(all_ranks) or model_difference(self.transport, self._blueprint, models):
            raise MismatchError(reason)
        # The same plan on every rank, though only some of them may hold wrapped stages.
        self._reduces = any(rank.reduces for rank in all_ranks)
        self.runnable = self.runnable.with_wrapped(
            shards=any(rank.shards for rank in all_ranks), reduces=self._reduces
        )
        if len({rank.in_company for rank in all_ranks}) > 1:
            self.replicas.pipeline = self.transport
        self._entangled = any(rank.in_company for rank in all_ranks)
        if isinstance(self.transport, Distributed):
            self.transport.plane.entangled |= self._entangled
            if self.runs_ahead:
                self._begin_ahead(self.transport)
        channels = self._ties.find_holders([rank.ties for rank in all_ranks])
        if self._random is None:
            channels |= set(channels_of(self.runnable.plan))
        self._channels = sorted(channels)
        self.transport.open(self._channels)
        if self.transport.size == 1 and self._drawing is None:
            self._drawing = Drawing(self.device)
        self._ties.begin(self.transport, rank_of)
        if self.transport.size > 1 and not _on_host(self.device):
            self.agreement.relay = LossRelay(self.transport, rank_of, self.device)
        self._identity.adopt()


def _on_host(device: torch.device) -> bool:
    """Whether results on a device can be read without a wait."""
    return device.type == "cpu"


class ScheduleNumber:
    """The number that the ranks agree on for a schedule in its first step.

    Before, a rank knows a schedule only by its place among those that it has made for ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.number = 0
        """0 before the first step."""
        self.maker = local.current()
        if self.maker is None and group is None and dist.is_available() and dist.is_initialized():
            group = default_group()
        ranks = self.maker or group
        self._made = _Made() if ranks is None else _made.setdefault(ranks, _Made())
        self._made.waiting.append(ref(self))

    def waiting(self, transport: Transport) -> tuple[int, int]:
        """How many schedules wait for their first step, and the place of this one among them."""
        here = None if isinstance(transport, Distributed) else transport
        waiting = [each for known in self._made.waiting if (each := known()) is not None]
        # Local ranks whose schedules were all made in one place have no places of their own.
        if self.number or self.maker is not here:
            return 0, 0
        return len(waiting), waiting.index(self)

    def adopt(self) -> None:
        """Take the next number; all ranks are in the first step of this schedule."""
        self._made.numbered += 1
        self.number = self._made.numbered
        self._made.waiting = [each for each in self._made.waiting if each() not in (None, self)]


class _Made:
    """The schedules that this rank has made for the same ranks."""

    def __init__(self) -> None:
        self.waiting: list[ref[ScheduleNumber]] = []
        self.numbered = 0


_made: WeakKeyDictionary[object, _Made] = WeakKeyDictionary()
