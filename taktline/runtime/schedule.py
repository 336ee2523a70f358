"""The base of all schedules: runs a batch forward and backward, or forward only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypedDict

import torch

from taktline.checks import check, check_callable, check_list, known_keywords
from taktline.errors import MismatchError, ScheduleError
from taktline.plan import Plan
from taktline.runtime.feed import Call, LossWeights
from taktline.runtime.microbatch import Batch, Cutter
from taktline.runtime.runnable_plan import Limits
from taktline.runtime.runner import Runner
from taktline.runtime.trace import Trace, TraceRecorder
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
    check_finite: bool
    """Whether an output or a loss that is not finite is an error; waits for a GPU in each stage."""


class Schedule:
    """Runs a plan on this rank's stages."""

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
        limits: Limits = Limits(),  # noqa: B008
        idle: PipelineStage | None = None,
        check_finite: bool = False,
        name: str,
        make_plan: Callable[[int], Plan],
    ) -> None:
        self._stages = check_list("stages", stages, PipelineStage)
        if not self._stages and idle is None:
            raise MismatchError(
                f"{type(self).__name__} needs the stages of this rank, at least one; a rank that "
                "holds none takes no part in the plan"
            )
        n_microbatches = check("n_microbatches", n_microbatches, int, least=1, error=ScheduleError)
        if loss_fn is not None:
            check_callable("loss_fn", loss_fn)
        if args_chunk_spec is not None:
            check("args_chunk_spec", args_chunk_spec, (tuple, list), "a tuple")
        if kwargs_chunk_spec is not None:
            check("kwargs_chunk_spec", kwargs_chunk_spec, dict)
        if seed is not None:
            seed = check("seed", seed, int, least=-(2**63), most=2**64 - 1)
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self.scale_grads = check("scale_grads", scale_grads, bool)
        """Whether gradients are those of the mean of the micro-batches' losses, or of their sum."""
        self.steps = 0
        """Training steps so far; with a seed, dropout depends on it (set it when you resume)."""
        self._runner = self._runner_type(
            name,
            make_plan,
            self._stages,
            Cutter(
                n_microbatches, args_chunk_spec, kwargs_chunk_spec, target_chunk_spec, self._by_rows
            ),
            loss_fn=loss_fn,
            merge_spec=output_merge_spec,
            seed=seed,
            dynamic_shapes=check("dynamic_shapes", dynamic_shapes, bool),
            limits=limits,
            idle=idle,
        )
        self._runner.check_finite = check("check_finite", check_finite, bool)
        if check("cuda_graphs", cuda_graphs, bool):
            if check_finite:
                raise ScheduleError("a CUDA graph cannot check values: leave out check_finite")
            self._runner.capture()

    @property
    def stall_after(self) -> float | None:
        """Seconds without progress after which a step is logged ("taktline"); None: never.

        60 by default, or the value of the environment variable TAKTLINE_STALL_SECONDS.
        """
        return self._runner.stall_after

    @stall_after.setter
    def stall_after(self, seconds: float | None) -> None:
        if seconds is not None:
            seconds = check("stall_after", seconds, float, least=0)
        self._runner.stall_after = seconds

    @property
    def loss(self) -> torch.Tensor | None:
        """The mean loss of the last step or eval, each micro-batch as it counts.

        None unless every rank got the losses: see ``share_losses``.
        """
        return self._runner.loss

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
        trains = self._loss_fn is not None
        batch = Batch(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        wanted = return_outputs, losses, aux_losses, share_losses
        ways = loss_kwargs or {}, loss_weights, self.scale_grads, grad_scale, finalize_gradients
        output = self._runner.run(Call(batch, self.steps, trains, *wanted, *ways))
        self.steps += trains
        return output

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
        wanted = return_outputs, losses, aux_losses, share_losses
        ways = loss_kwargs or {}, loss_weights, self.scale_grads
        return self._runner.run(Call(batch, self.steps, False, *wanted, *ways))

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
        trace, runner.recorder = Trace(), TraceRecorder(runner.device)
        recorder = runner.recorder
        try:
            yield trace
        finally:
            runner.recorder = None
        recorder.fill(trace, runner.transport, runner.ranks)

    def __repr__(self) -> str:
        stages = ", ".join(str(stage.stage_index) for stage in self._stages)
        return f"{type(self).__name__}(stages [{stages}], {self._n_microbatches} micro-batches)"
