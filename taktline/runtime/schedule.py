"""The base of all schedules: runs a batch forward and backward, or forward only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypedDict

import torch

from taktline.batch_norm import update_all
from taktline.checks import (
    known_keywords,
    require_callable,
    require_flag,
    require_instance,
    require_instances,
    require_number,
    require_whole,
)
from taktline.errors import BatchError, MismatchError, ScheduleError
from taktline.plan import Plan
from taktline.runtime.agreement import Record
from taktline.runtime.losses import (
    LateLoss,
    LossWeights,
    Wanted,
    by_rows,
    late_mean,
    mean_of,
    scales,
    warn_if_uneven,
)
from taktline.runtime.microbatch import merge_chunks
from taktline.runtime.runnable_plan import Limits
from taktline.runtime.runner import Runner
from taktline.runtime.step_data import Batch, Cutter, Feed
from taktline.runtime.trace import Trace, TraceRecorder, clock_for
from taktline.stage import PipelineStage

LossFn = Callable[..., torch.Tensor]
ArgsSpec = tuple[Any, ...]
KwargsSpec = dict[str, Any]
MergeSpec = dict[str, Any] | tuple[Any]


class ScheduleOptions(TypedDict, total=False):
    """Options of every schedule."""

    seed: int | None
    """Makes random numbers depend on the seed, step, stage and micro-batch alone."""
    dynamic_shapes: bool
    """Whether every message describes itself: for outputs whose shapes depend on values."""
    target_chunk_spec: Any
    """How the target is cut, if not like the batch."""
    cuda_graphs: bool
    """Whether steps are captured as CUDA graphs, and replayed."""
    run_ahead: bool
    """Whether a rank begins the next step while other ranks still compute this one."""
    check_finite: bool
    """Whether an output or a loss that is not finite is an error; waits for a GPU in each stage."""


class Schedule:
    """Runs a plan on this rank's stages."""

    _compared: Sequence[str] = ("args", "target")
    """The parts of a batch that must be the same on every rank that gets them."""
    _by_rows: ClassVar[bool] = False
    """Whether micro-batches count by their rows, and a batch with fewer rows runs fewer of them.

    Otherwise, as in torch, each counts the same and has at least one row.
    """
    _runner_type: Callable[..., Runner] = Runner

    @known_keywords
    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None,
        args_chunk_spec: ArgsSpec | None,
        kwargs_chunk_spec: KwargsSpec | None,
        output_merge_spec: MergeSpec | None,
        scale_grads: bool,
        *,
        seed: int | None = None,
        dynamic_shapes: bool = False,
        target_chunk_spec: Any = None,
        cuda_graphs: bool = False,
        run_ahead: bool = False,
        limits: Limits = Limits(),  # noqa: B008
        idle: PipelineStage | None = None,
        check_finite: bool = False,
        name: str,
        make_plan: Callable[[int], Plan],
    ) -> None:
        self._stages = require_instances("stages", stages, PipelineStage)
        if not self._stages and idle is None:
            raise MismatchError(
                f"{type(self).__name__} needs the stages of this rank, at least one; a rank that "
                "holds none takes no part in the plan"
            )
        n_microbatches = require_whole(
            "n_microbatches", n_microbatches, least=1, error=ScheduleError
        )
        _require_types(loss_fn, args_chunk_spec, kwargs_chunk_spec)
        if seed is not None:
            seed = require_whole("seed", seed, least=-(2**63), most=2**64 - 1)
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._cutter = Cutter(
            n_microbatches, args_chunk_spec, kwargs_chunk_spec, target_chunk_spec, self._by_rows
        )
        self._output_merge_spec = output_merge_spec
        self.scale_grads = require_flag("scale_grads", scale_grads)
        """Whether gradients are those of the mean of the micro-batches' losses, or of their sum."""
        self._warned = False
        self.steps = 0
        """Training steps so far; with a seed, dropout depends on it (set it when you resume)."""
        self.loss: torch.Tensor | None = None
        """The mean loss of the last step or eval, each micro-batch as it counts.

        None unless every rank got the losses: see ``share_losses``.
        """
        self._usual_loss: torch.Tensor | None = None
        """A loss of the type and on the device of others."""
        self._runner = self._runner_type(
            name,
            make_plan,
            self._stages,
            n_microbatches,
            loss_fn=loss_fn,
            parts=self._cutter.parts,
            seed=seed,
            dynamic_shapes=require_flag("dynamic_shapes", dynamic_shapes),
            limits=limits,
            idle=idle,
        )
        self._runner.check_finite = require_flag("check_finite", check_finite)
        if require_flag("cuda_graphs", cuda_graphs):
            if check_finite:
                raise ScheduleError("a CUDA graph cannot check values: leave out check_finite")
            self._runner.capture()
        self._runner.runs_ahead = require_flag("run_ahead", run_ahead)

    @property
    def stall_after(self) -> float | None:
        """Seconds without progress after which a step is logged ("taktline"); None: never.

        60 by default, or the value of the environment variable TAKTLINE_STALL_SECONDS.
        """
        return self._runner.stall_after

    @stall_after.setter
    def stall_after(self, seconds: float | None) -> None:
        if seconds is not None:
            seconds = require_number("stall_after", seconds, least=0)
        self._runner.stall_after = seconds

    @property
    def plan(self) -> Plan:
        """The actions of each rank, in order."""
        return self._runner.runnable.plan

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        loss_weights: LossWeights | None = None,
        aux_losses: list[torch.Tensor] | None = None,
        share_losses: bool = False,
        grad_scale: float = 1.0,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward and, if there is a ``loss_fn``, backward.

        Gradients are added to ``.grad``, as ``backward()`` does. Returns the outputs of the last
        stage on its rank, None on the others.

        Args:
            args: the model's arguments; used on the rank of the first stage.
            target: the second argument of ``loss_fn``; used on the rank of the last stage.
            losses: a list to fill with the loss of each micro-batch, on that rank.
            return_outputs: whether to keep and return the outputs; costs their memory.
            loss_kwargs: further arguments for ``loss_fn``, the same for each micro-batch.
            loss_weights: the weight of the loss of each micro-batch, such as its number of
                tokens: numbers, or a function of a micro-batch's target. They are divided by
                their sum, unless ``scale_grads`` is off. Without them, the weight is its rows in
                a :class:`ScheduleFromPlan`, and equal in schedules named as in torch.
            aux_losses: a list to be filled with the sum of the losses that
                :func:`taktline.add_loss` added in each micro-batch, on the ranks of these stages.
            share_losses: whether every rank gets the losses of all.
            grad_scale: multiplies every gradient, for a GradScaler.
            arg_mbs: instead of ``args``: the arguments of each micro-batch.
            kwarg_mbs: instead of ``kwargs``, likewise.
            target_mbs: instead of ``target``, likewise.
            finalize_gradients: whether to reduce the gradients of stages in ``fully_shard``. If
                not, they stay as they are, and the next step that does reduces them with its own;
                ``accumulate`` does the same for every kind of stage.
            kwargs: keyword arguments for the stages of this rank.
        """
        batch = Batch(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        wanted = Wanted(losses, aux_losses, share_losses, return_outputs)
        trains = self._loss_fn is not None
        ways = {"grad_scale": grad_scale, "trains": trains}
        ways["finalizes"] = require_flag("finalize_gradients", finalize_gradients) or not trains
        results = self._run(batch, wanted, loss_kwargs, loss_weights, **ways)
        self.steps += trains
        return results

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        loss_weights: LossWeights | None = None,
        aux_losses: list[torch.Tensor] | None = None,
        share_losses: bool = False,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward only, without gradients; with a target, the losses too.

        Takes the arguments of ``step``. It does not change ``module.training``.
        """
        batch = Batch(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        wanted = Wanted(losses, aux_losses, share_losses, return_outputs)
        return self._run(batch, wanted, loss_kwargs, loss_weights, trains=False)

    def accumulate(self) -> AbstractContextManager[None]:
        """Steps inside of ``with schedule.accumulate():`` are reduced together, at its end.

        For stages in DDP, ``fully_shard`` or ``replicate``, whose gradients each step would
        otherwise average over the replicas, and for tied weights, whose gradients it would add up
        over the ranks. If the block raises, nothing is reduced.
        """
        return self._runner.accumulate()

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record when each action runs, in every step and eval inside of the block, on every rank.

        All ranks enter and leave it together. On leaving, each rank has the timelines of all::

            with schedule.trace() as trace:
                schedule.step(x, target=target)
            print(trace.timeline.to_text())
        """
        runner = self._runner
        if runner.recorder is not None:
            raise ScheduleError("this schedule is being traced already; leave that block first")
        trace, runner.recorder = Trace(), TraceRecorder(clock_for(runner.device))
        recorder = runner.recorder
        try:
            yield trace
        finally:
            runner.recorder = None
        recorder.fill(trace, runner.transport, runner.ranks)

    def _run(
        self,
        batch: Batch,
        wanted: Wanted,
        loss_kwargs: dict[str, Any] | None,
        loss_weights: LossWeights | None,
        *,
        grad_scale: float = 1.0,
        trains: bool,
        finalizes: bool = True,
    ) -> Any:
        runner, record, data, error, output = self._runner, Record(), (None, None), None, None
        with runner.call(trains=trains, finalizes=finalizes) as feed:
            try:
                runner.check()
                wanted.check()
                feed.loss_keywords = loss_kwargs or {}
                feed.number, feed.grad_scale = self.steps, grad_scale
                record, data = self._begin(feed, batch, wanted)
            except Exception as raised:
                error = raised
            kind, failure = runner.agree(record, data, error), None
            try:
                self._fit(feed, batch, loss_weights)
            except Exception as raised:
                failure = runner.agreement.failure(raised)
            failure = runner.compute(kind, failure)
            if failure is None:
                try:
                    output = self._merged(feed)
                except Exception as raised:
                    failure = runner.agreement.failure(raised)
            runner.conclude(failure)
        update_all(feed.observed)
        if feed.late is not None and wanted.lists:
            feed.late(feed)
        wanted.fill(feed)
        self.loss = self._mean_loss(feed) if wanted.shares else None
        feed.clear()
        return output

    def _mean_loss(self, feed: Feed) -> torch.Tensor | None:
        """The mean loss of a step; on a rank that does not know it yet, a LateLoss."""
        if feed.late is not None and self._usual_loss is not None and not feed.losses:
            return LateLoss.like(self._usual_loss, partial(late_mean, feed.late))
        self._usual_loss = mean_of(feed.losses, feed.scales)
        return self._usual_loss

    def _begin(self, feed: Feed, batch: Batch, wanted: Wanted) -> tuple[Record, tuple[Any, Any]]:
        """Cut the arguments; returns what the batch says of this call, and the compared data."""
        if feed.trains and not torch.is_grad_enabled():
            raise MismatchError("step() trains, but under torch.no_grad() it cannot; call eval()")
        feed.shares = wanted.shares
        feed.wants_losses = wanted.shares or wanted.losses is not None
        if wanted.outputs and self._has_last():
            feed.outputs = {}
        batch.cutter = self._cutter_for(batch)
        record = self._measured(batch, feed)
        if self._runner.runs_ahead:
            record = record._replace(whole=batch.whole())
        return record, batch.compared(self._compared)

    def _fit(self, feed: Feed, batch: Batch, loss_weights: LossWeights | None) -> None:
        """Cut the target and weigh micro-batches, now that all ranks know the rows of the batch."""
        batch.require_whole(feed.rows)
        if self._compares():
            feed.targets = batch.targets(feed.rows)
        self._weigh(feed, loss_weights)

    def _cutter_for(self, batch: Batch) -> Cutter:
        """How a batch is cut; an error that it raises is raised on every rank."""
        return self._cutter

    def _merged(self, feed: Feed) -> Any:
        if feed.outputs is None:
            return None
        chunks = [feed.outputs[m] for m in range(feed.microbatches)]
        try:
            return merge_chunks(chunks, self._output_merge_spec)
        except BatchError as error:
            raise BatchError(
                f"{error}; pass return_outputs=False if you do not need them"
            ) from error

    def _measured(self, batch: Batch, feed: Feed) -> Record:
        """Cut the arguments; returns the rows of batch and target, and a digest of the inputs."""
        if not any(stage.is_first for stage in self._stages):
            batch = replace(batch, args=(), arg_mbs=None)  # keyword arguments are for all stages
        rows, target = batch.size(), 0
        feed.arguments, feed.keywords = batch.arguments(rows)
        if self._compares():
            if feed.trains and batch.target is None and batch.target_mbs is None:
                raise BatchError(
                    "step() trains, so the rank of the last stage needs target=… for loss_fn; "
                    "call eval() to run forward only"
                )
            size = batch.target_size()
            target = size if batch.cutter.target_spec is None else 0
        return Record(batch=rows, target=target, inputs=batch.digest())

    def _weigh(self, feed: Feed, loss_weights: LossWeights | None) -> None:
        """Set the weight of each micro-batch's loss."""
        feed.scale = 1 / feed.microbatches if self.scale_grads else 1.0
        if self._by_rows and self.scale_grads:
            feed.row_scales = by_rows(feed.rows, feed.microbatches)
        if feed.targets is None:
            return
        if loss_weights is not None:
            feed.scales = scales(loss_weights, feed.targets, normalised=self.scale_grads)
        elif feed.row_scales is not None:
            feed.scales = feed.row_scales
        elif self.scale_grads and not self._warned:
            self._warned = warn_if_uneven(feed.rows, feed.targets)

    def _compares(self) -> bool:
        """Whether losses are computed on this rank."""
        return self._loss_fn is not None and self._has_last()

    def _has_last(self) -> bool:
        return any(stage.is_last for stage in self._stages)

    def __repr__(self) -> str:
        stages = ", ".join(str(stage.stage_index) for stage in self._stages)
        return f"{type(self).__name__}(stages [{stages}], {self._n_microbatches} micro-batches)"


def _require_types(loss_fn: object, args_chunk_spec: object, kwargs_chunk_spec: object) -> None:
    """Check the arguments that may be None."""
    if loss_fn is not None:
        require_callable("loss_fn", loss_fn)
    if args_chunk_spec is not None:
        require_instance("args_chunk_spec", args_chunk_spec, (tuple, list), "a tuple")
    if kwargs_chunk_spec is not None:
        require_instance("kwargs_chunk_spec", kwargs_chunk_spec, dict)
