"""Schedules: the base of all, one from any plan, and those by the names of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch

from taktline.checks import check, check_callable, check_list, refuse
from taktline.errors import MismatchError, ScheduleError
from taktline.plan import Kind, Plan, build, find, read
from taktline.runtime.capture.captures import Captures
from taktline.runtime.microbatch import Batch, Call, Cutter, LossWeights
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
            self._runner.captures = Captures(
                self._stages, self._runner.device, dynamic_shapes=dynamic_shapes
            )

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


class ScheduleFromPlan(Schedule):
    """A schedule from any plan, or from a file that holds one (CSV or JSON).

    Micro-batches are weighted by rows; a batch with fewer rows than micro-batches runs the first
    of these.

    >>> import torch
    >>> import taktline as tl
    >>> stage = tl.PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    >>> plan = tl.Plan.from_actions([["0F0", "0B0", "0F1", "0B1"]])
    >>> schedule = ScheduleFromPlan([stage], plan, torch.nn.functional.mse_loss)
    >>> schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4)).shape
    torch.Size([4, 4])
    """

    _by_rows = True

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        plan: Plan | str | os.PathLike[str],
        loss_fn: LossFn | None = None,
        *,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        scale_grads: bool = True,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        if not isinstance(plan, (Plan, str, os.PathLike)):
            refuse("plan", "a Plan, or the path of a file with one", plan)
        chosen = plan if isinstance(plan, Plan) else read(plan)

        def make_plan(ranks: int) -> Plan:
            if chosen.ranks != ranks:
                raise MismatchError(
                    f"plan {chosen.name!r} is for {chosen.ranks} ranks, not {ranks}; build it for "
                    f"{ranks}, or start {chosen.ranks}"
                )
            return chosen

        trains = chosen.has(Kind.B, Kind.I)
        specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        given = chosen.microbatches, loss_fn if trains else None, *specs, scale_grads
        name = f"plan {chosen.name!r}"
        super().__init__(stages, *given, name=name, make_plan=make_plan, **options)


_CLASSES: dict[str, Any] = {}
"""The class of each plan that has one."""


class _Named(Schedule):
    """A schedule whose plan has a name: that in ``class ScheduleX(…, plan="x")``."""

    _plan_name: ClassVar[str]

    def __init_subclass__(cls, plan: str = "") -> None:
        if plan:
            cls._plan_name, _CLASSES[plan] = plan, cls

    def _begin(self, stages: list[PipelineStage], count: int, *given: Any, **options: Any) -> None:
        options |= {"name": type(self).__name__, "make_plan": self._make_plan}
        super().__init__(stages, count, *given, **options)

    def _make_plan(self, ranks: int) -> Plan:
        return self._plan(self._stages[0].num_stages, self._n_microbatches, ranks)

    @classmethod
    def _plan(cls, num_stages: int, microbatches: int, ranks: int) -> Plan:
        """The plan for a number of ranks."""
        per_rank, rest = divmod(num_stages, ranks)
        if rest or not per_rank:
            raise MismatchError(
                f"{cls.__name__}: {num_stages} stages do not divide evenly among {ranks} ranks; "
                f"cut the model into a multiple of {ranks}"
            )
        name, each = cls._plan_name, per_rank
        return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=each)


class _Single(_Named):
    """A schedule with one stage per rank."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        scale_grads: bool = True,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        check("stage", stage, PipelineStage)
        specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        self._begin([stage], n_microbatches, loss_fn, *specs, scale_grads, **options)


class _Multi(_Named):
    """A schedule with several stages per rank.

    ``max_active_stages`` is how many stages of this rank in ``fully_shard`` are gathered at a time,
    and ``unshard_lookahead`` how many of them in advance: "full" for all, "auto" for two on the
    first rank and one more on each, or a number for each rank. ``max_outstanding_sends`` is how
    many messages may be under way before the next one waits; a first step, in which shapes are
    learned, has no limit.

    ``backward_requires_autograd``, ``defer_pp_recv`` and ``defer_reduce_grad_wait`` are accepted
    for scripts that pass them, and change nothing: a plan's receives are posted where they overlap
    and hold up no send, and reductions are waited for at the end of a step.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: Literal["full", "auto"] | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        limits = Limits(max_active_stages, unshard_lookahead, max_outstanding_sends)
        self._begin(stages, n_microbatches, loss_fn, *specs, scale_grads, limits=limits, **options)


class ScheduleGPipe(_Single, plan="gpipe"):
    """All forwards, then all backwards.

    >>> print(build("gpipe", ranks=2, microbatches=2))
    gpipe: 2 ranks × 1 stage, 2 micro-batches
    rank 0 │ 0F0 0F1             0B0──── 0B1────
    rank 1 │     1F0 1F1 1B0──── 1B1────
    """


class Schedule1F1B(_Single, plan="1f1b"):
    """One forward, one backward in turn: at most as many micro-batches in flight as ranks.

    >>> print(build("1f1b", ranks=2, microbatches=2))
    1f1b: 2 ranks × 1 stage, 2 micro-batches
    rank 0 │ 0F0 0F1         0B0────     0B1────
    rank 1 │     1F0 1B0──── 1F1 1B1────
    """


class ScheduleInterleaved1F1B(_Multi, plan="interleaved_1f1b"):
    """1F1B over several stages per rank: a smaller bubble for more messages.

    >>> print(build("interleaved_1f1b", ranks=2, microbatches=2))
    interleaved_1f1b: 2 ranks × 2 stages, 2 micro-batches
    rank 0 │ 0F0 0F1 2F0 2F1         2B0────     2B1──── 0B0──── 0B1────
    rank 1 │     1F0 1F1 3F0 3B0──── 3F1 3B1──── 1B0──── 1B1────
    """


class ScheduleLoopedBFS(_Multi, plan="looped_bfs"):
    """GPipe over several stages per rank: each stage runs all micro-batches before the next one.

    >>> print(build("looped_bfs", ranks=2, microbatches=2))
    looped_bfs: 2 ranks × 2 stages, 2 micro-batches
    rank 0 │ 0F0 0F1 2F0 2F1             2B1──── 2B0──── 0B1──── 0B0────
    rank 1 │     1F0 1F1 3F0 3F1 3B1──── 3B0──── 1B1──── 1B0────
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        output_merge_spec: MergeSpec | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: Literal["full", "auto"] | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        limits = Limits(max_active_stages, unshard_lookahead, max_outstanding_sends)
        given = loss_fn, None, None, output_merge_spec, scale_grads
        self._begin(stages, n_microbatches, *given, limits=limits, **options)


class ScheduleInterleavedZeroBubble(_Multi, plan="interleaved_zero_bubble"):
    """Interleaved 1F1B whose weight gradients (W) fill the bubble.

    >>> print(build("interleaved_zero_bubble", ranks=2, microbatches=2))
    interleaved_zero_bubble: 2 ranks × 2 stages, 2 micro-batches
    rank 0 │ 0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1 │     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """


class ScheduleZBVZeroBubble(_Multi, plan="zbv"):
    """Two stages per rank in the shape of a V; weight gradients fill the bubble.

    >>> print(build("zbv", ranks=2, microbatches=2))
    zbv: 2 ranks × 2 stages, 2 micro-batches
    rank 0 │ 0F0 0F1     3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0     0I1 0W1
    rank 1 │     1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1
    """


class ScheduleDualPipeV(_Multi, plan="dualpipev"):
    """Two stages per rank in the shape of a V; forwards run together with backwards.

    >>> print(build("dualpipev", ranks=2, microbatches=2))
    dualpipev: 2 ranks × 2 stages, 2 micro-batches
    rank 0 │ 0F0 0F1     3F0 3I0 3W0 3F1 3B1──── 0B0────         0B1────
    rank 1 │     1F0 2F0 1F1 2F1 2B0──── 1B0──── 2B1──── 1B1────
    """


def get_schedule_class(schedule_name: str) -> type[_Single | _Multi]:
    """The class of a schedule by any of its usual names, in any letter case.

    >>> get_schedule_class("Interleaved1F1B").__name__
    'ScheduleInterleaved1F1B'
    """
    name = find(schedule_name).name
    if name not in _CLASSES:
        raise ScheduleError(
            f"{name} has no class of its own; use ScheduleFromPlan with build({name!r}, …). There "
            f"are classes for: {', '.join(_CLASSES)}"
        )
    return _CLASSES[name]
