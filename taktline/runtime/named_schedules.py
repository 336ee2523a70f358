"""Schedules by the names of torch, and a schedule from any plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias, Unpack

from taktline.checks import check, refuse
from taktline.errors import MismatchError, ScheduleError
from taktline.plan import Kind, Plan, build, find, read
from taktline.runtime.runnable_plan import Limits
from taktline.runtime.schedule import (
    ArgsSpec,
    KwargsSpec,
    LossFn,
    MergeSpec,
    Schedule,
    ScheduleOptions,
)
from taktline.stage import PipelineStage

_Lookahead: TypeAlias = Literal["full", "auto"] | tuple[int, ...]


_CLASSES: dict[str, Any] = {}
"""The class of each plan that has one."""


class _Named(Schedule):
    """A schedule whose plan has a name: that in ``class ScheduleX(…, plan="x")``."""

    _plan_name: ClassVar[str]

    def __init_subclass__(cls, plan: str = "") -> None:
        if plan:
            cls._plan_name, _CLASSES[plan] = plan, cls

    def _begin(self, stages: list[PipelineStage], count: int, *given: Any, **options: Any) -> None:
        def plan(ranks: int) -> Plan:
            return self._plan(self._stages[0].num_stages, count, ranks)

        name = type(self).__name__
        super().__init__(stages, count, *given, name=name, make_plan=plan, **options)

    @classmethod
    def _plan(cls, num_stages: int, microbatches: int, ranks: int) -> Plan:
        """The plan for a number of ranks."""
        per_rank, rest = divmod(num_stages, ranks)
        if rest or not per_rank:
            raise MismatchError(
                f"{cls.__name__}: {num_stages} stages do not divide evenly among {ranks} ranks; "
                f"cut the model into a multiple of {ranks}"
            )
        sizes = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": per_rank}
        return build(cls._plan_name, **sizes)


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
        unshard_lookahead: _Lookahead = "full",
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
        unshard_lookahead: _Lookahead = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        specs = None, None, output_merge_spec
        limits = Limits(max_active_stages, unshard_lookahead, max_outstanding_sends)
        self._begin(stages, n_microbatches, loss_fn, *specs, scale_grads, limits=limits, **options)


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

        def check(ranks: int) -> Plan:
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
        super().__init__(stages, *given, name=name, make_plan=check, **options)


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
