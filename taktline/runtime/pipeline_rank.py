"""This rank of a pipeline: its plan and connections, and the first contact with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from taktline.errors import MismatchError
from taktline.plan import Plan
from taktline.runtime import updates
from taktline.runtime.agreement import Agreement, ScheduleNumber
from taktline.runtime.bind import Bound, channels_of
from taktline.runtime.capture import Captures
from taktline.runtime.fingerprint import DataCheck
from taktline.runtime.handshake import Handshake, examples, misfit
from taktline.runtime.outcome import LossRelay
from taktline.runtime.ports import Signatures
from taktline.runtime.random_numbers import Drawing, RankRandom
from taktline.runtime.replicas import Replicas
from taktline.runtime.run_ahead import RunAhead
from taktline.runtime.runnable_plan import Limits, Runnable
from taktline.runtime.same_model import difference, digest, whole_model
from taktline.runtime.step_data import Feed
from taktline.runtime.ties import Ties
from taktline.stage import PipelineStage
from taktline.stage.blueprint import Blueprint
from taktline.text import by_rank, counted
from taktline.transport import Channel, Transport, transport_of
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import share_texts
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
        self.run_ahead = RunAhead()
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
        return Agreement(self.transport, self.replicas, self._feed, self._forget)

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
        if self.run_ahead.wanted and isinstance(self.transport, Distributed):
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
        self.run_ahead.forget()
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
        mine = Handshake(
            self._name,
            self._microbatches,
            self.runnable.plan.stages,
            [stage.stage_index for stage in self._stages],
            [rank // len(self.ranks) for rank in rank_of],
            self.runnable.plan.digest(),
            self._loss_fn is not None,
            self._dynamic_shapes,
            self.run_ahead.wanted,
            self.replicas.shards,
            self.replicas.reduces,
            self.replicas.entangled,
            examples({stage.stage_index: stage.expected_input for stage in self._stages}),
            examples({stage.stage_index: stage.expected_output for stage in self._stages}),
            self._ties.uses,
            digest(self._blueprint),
            self._identity.proposed(),
        )
        texts = share_texts(self.transport, mine.to_text(), "the first step")
        all_ranks = [Handshake.from_text(text) for text in texts]
        models = [rank.model for rank in all_ranks]
        if reason := misfit(all_ranks) or difference(
            self.transport, self._blueprint, models, rank_of=all_ranks[0].rank_of
        ):
            raise MismatchError(reason)
        # The same plan on every rank, though only some of them may hold wrapped stages.
        self._reduces = any(rank.reduces for rank in all_ranks)
        self.runnable = self.runnable.with_wrapped(
            shards=any(rank.shards for rank in all_ranks), reduces=self._reduces
        )
        if len({rank.entangled for rank in all_ranks}) > 1:
            self.replicas.pipeline = self.transport
        self._entangled = any(rank.entangled for rank in all_ranks)
        if isinstance(self.transport, Distributed):
            self.transport.plane.entangled |= self._entangled
            if self.run_ahead.wanted:
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
        self._identity.adopt(all_ranks[0].number)


def _on_host(device: torch.device) -> bool:
    """Whether results on a device can be read without a wait."""
    return device.type == "cpu"
