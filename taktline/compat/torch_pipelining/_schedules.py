"""torch's schedules, whose steps run on Taktline's runtime; those with names are its plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, cached_property
from inspect import signature
from typing import Any

import torch

from taktline.compat.torch_pipelining import schedules as torchs
from taktline.compat.torch_pipelining._calls import Calls, Order, lowered, placement_of
from taktline.compat.torch_pipelining._metadata import HAS_META, StageMetadata, like, preparing
from taktline.compat.torch_pipelining._steps import Native, StepCall, run
from taktline.errors import BatchError, CallOrderError, StageUseError
from taktline.plan import Plan, build, validate
from taktline.runtime import get_schedule_class as find_native
from taktline.runtime.runnable_plan import Limits

_TAKES = len(signature(torchs.PipelineScheduleSingle._initialize_stage).parameters) - 1
"""How many arguments stages are initialised with: 2.12 added a target, 2.13 loss_kwargs."""


class _PipelineSchedule(torchs._PipelineSchedule):
    """The base of all schedules."""

    dynamic_shapes: bool = False
    """Set it if the outputs of stages have shapes that depend on values."""
    _native: Native | None = None
    """The schedule of Taktline that runs it."""
    _way: int | None = None
    """How all ranks have agreed to run it; None before the first step."""
    _on_ours: bool | None = None
    """Whether the latest step ran on Taktline's own stages."""
    _sizes: list[Any] | None = None
    """Sizes of the first micro-batch of the latest step that went call by call."""
    _limits = Limits()
    """What a rank may hold at a time."""
    _finalize_gradients = True
    """Whether the running step reduces the gradients of sharded stages."""
    _prepared_for: bool | None = None
    """Whether stages were prepared for a backward; None if they were not."""

    # Only some schedules of torch have these.
    backward_counter = cached_property(lambda self: Counter())
    fwd_recv_ops = cached_property(lambda self: {})
    bwd_recv_ops = cached_property(lambda self: {})
    unsharded_stages = cached_property(lambda self: set())

    @property
    def _local_stages(self) -> list[Any]:
        """The stages of this rank."""
        several = vars(self).get("_stages")
        return [self._stage] if several is None else several

    _is_idle: Any = False
    """Whether its order has nothing to do for this rank."""

    @property
    def _running_stages(self) -> list[Any]:
        """The stages of this rank, if it has anything to do."""
        return [] if self._is_idle else self._local_stages

    @property
    def _grad_factor(self) -> int:
        """The divisor of gradients."""
        return self._n_microbatches if self.scale_grads else 1

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward and, if there is a ``loss_fn``, backward.

        ``arg_mbs``, ``kwarg_mbs`` and ``target_mbs`` are lists of ready micro-batches, in the place
        of ``args``, ``kwargs`` and ``target``. Without ``finalize_gradients``, gradients of stages
        in ``fully_shard`` wait for a step that reduces them.
        """
        whole, parts = (args, kwargs, target), (arg_mbs, kwarg_mbs, target_mbs)
        self._finalize_gradients = bool(finalize_gradients)
        return run(self, StepCall(whole, parts, losses, return_outputs, loss_kwargs))

    @like(torchs._PipelineSchedule.eval)
    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch forward only, without gradients; with a target, the losses too."""
        with torch.no_grad():
            return super().eval(*args, **kwargs)

    def _maybe_compute_loss(self, stage, output, target_mbs, mb_index, loss_kwargs=None):
        """Note the loss of a micro-batch, in its place, if this is the last stage."""
        if not stage.is_last or self._loss_fn is None:
            return
        if target_mbs is None:
            if self._has_backward:
                raise BatchError(
                    f"stage {stage.stage_index}, micro-batch {mb_index}: loss_fn needs a target; "
                    "pass target=… to step() on the rank of the last stage"
                )
            return
        known = self._internal_losses
        known += [None] * (mb_index + 1 - len(known))
        more = () if loss_kwargs is None else (loss_kwargs,)
        known[mb_index] = self._compute_loss(output, target_mbs[mb_index], *more)

    def _compute_loss(self, output: Any, target: Any, loss_kwargs: Any = None) -> Any:
        return self._loss_fn(output, target, **(loss_kwargs or {}))  # before 2.13 without them

    def _assert_unsharded(self, stage: Any) -> None:
        """Gather the parameters of a sharded stage, if nothing has."""
        if self._is_sharded(stage) and stage.stage_index not in self.unsharded_stages:
            stage.grad_sync.unshard()
            self.unsharded_stages.add(stage.stage_index)

    def _is_sharded(self, stage: Any) -> bool:
        # A mock has every attribute.
        return getattr(getattr(stage, "grad_sync", None), "shards", None) is True

    def _postpones(self, stage: Any) -> bool:
        """Whether the gradients of a stage wait for a later step that reduces them."""
        return not self._finalize_gradients and self._is_sharded(stage)

    @contextmanager
    def _initializing(self) -> Iterator[None]:
        """Let stages find their metadata."""
        if not HAS_META and self._prepared_for not in (None, self._has_backward):
            # Before 2.12, metadata of eval() has no gradients, and would stay.
            self._note_shapes(known=False)
        self._prepared_for = self._has_backward
        with preparing(self._local_stages):
            yield

    def _note_shapes(self, *, known: bool) -> None:
        """Note whether stages know their metadata, or must find it again."""
        for name in [name for name in vars(self) if name.endswith("ward_initialized")]:
            setattr(self, name, known and (self._has_backward or "forward" in name))
        for stage in () if known else self._local_stages:
            if isinstance(stage, StageMetadata):
                stage.forget_metadata()

    def _has_own_step(self) -> bool:
        """Whether a user has overridden ``_step_microbatches``."""
        written = type(self)._step_microbatches is not PipelineScheduleMulti._step_microbatches
        return written or "_step_microbatches" in vars(self)

    def _order_to_run(self) -> Order:
        """All actions of each rank."""
        order = self._order_as_data()
        return lowered(order, self, self._n_microbatches)

    def _plan_maker(self) -> Any:
        """A function that makes the plan of this order for a number of ranks, if there is one."""
        return None


class PipelineScheduleSingle(_PipelineSchedule, torchs.PipelineScheduleSingle):
    """A schedule with one stage per rank; subclasses define the order."""

    @like(torchs.PipelineScheduleSingle._initialize_stage)
    def _initialize_stage(self, *args: Any, **kwargs: Any) -> None:
        with self._initializing():
            super()._initialize_stage(*args, **kwargs)

    def _prepare(self, *given: Any) -> None:
        self._initialize_stage(*given[:_TAKES])

    def _rank_of(self, stage: int) -> int:
        return stage

    @property
    def rank(self) -> int:
        """The rank in the pipeline, which other schedules have as an attribute."""
        return self._stage.stage_index


class PipelineScheduleMulti(_PipelineSchedule, torchs.PipelineScheduleMulti):
    """A schedule that runs what ``pipeline_order`` says: for each rank, its computations in order.

    A None in it is a rank that waits; it is ignored, as ranks wait only for messages.
    """

    _planned: tuple[Any, Any] = (None, None)
    """The rows of the order that was planned last, and the function that makes its plan."""

    @like(torchs.ScheduleGPipe._step_microbatches)
    def _step_microbatches(
        self, args=None, kwargs=None, targets=None, losses=None, outputs=True, loss_kwargs=None
    ) -> None:
        """Run the order of this rank, action by action."""
        args, kwargs = self._check_inputs(args, kwargs, targets, losses)
        context = torchs._PipelineContext(self, args, kwargs, targets, losses)
        calls = Calls(self, context, outputs, loss_kwargs)
        calls.prepare()
        for instruction in calls.instructions():
            instruction.run()
        calls.settle_all()
        calls.finish()

    @like(torchs.PipelineScheduleMulti._initialize_stages)
    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        with self._initializing():
            super()._initialize_stages(*args, **kwargs)

    def _prepare(self, *given: Any) -> None:
        # If only an order was set, it says where the stages are.
        self._place_stages(self._order_as_data())
        self._initialize_stages(*given[:_TAKES])

    def _place_stages(self, order: Order) -> None:
        """Note the rank of each stage in an order."""
        self.stage_index_to_group_rank |= placement_of(order)
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    @property
    def _is_idle(self) -> bool:
        return not any(self._order_as_data().get(self.rank, ()))

    def _get_pipeline_order(self) -> Order | None:
        """The computations of each rank."""
        return self.pipeline_order

    def _rank_of(self, stage: int) -> int:
        return self.stage_index_to_group_rank[stage]

    def _order_as_data(self) -> Order:
        """The order that a user sets or changes: with or without messages."""
        return self.pipeline_order

    def _plan_maker(self) -> Any:
        order = self._order_as_data()
        if self._planned[0] != self._rows(order):
            self._planned = self._rows(order), self._maker_for(order)
        return self._planned[1]

    def _maker_for(self, order: Order) -> Any:
        """A function that makes the plan of an order."""
        return _maker_of(self._rows(order), type(self).__name__)

    def _rows(self, order: Order) -> list[list[Any]]:
        return [[*order.get(rank, ())] for rank in range(self.pp_group_size)]


class _PipelineScheduleRuntime(PipelineScheduleMulti, torchs._PipelineScheduleRuntime):
    """A schedule that runs what ``pipeline_order_with_comms`` says: computations and messages."""

    @property
    def _limits(self) -> Limits:
        """What a rank may hold at a time; torch takes such limits since 2.15."""
        names = (field.name for field in fields(Limits))
        given = {name: getattr(self, f"_{name}", None) for name in names}
        return Limits(**{name: value for name, value in given.items() if value is not None})

    @like(torchs._PipelineScheduleRuntime._prepare_schedule_with_comms)
    def _prepare_schedule_with_comms(self, actions: Any, format: Any = "compute_only") -> None:
        super()._prepare_schedule_with_comms(actions, format)
        if format == "compute_only":
            # Taktline places the messages itself, unless a user changes the order with messages.
            self._planned = self._rows(self.pipeline_order_with_comms), self._maker_for(actions)

    def _order_as_data(self) -> Order:
        order = getattr(self, "pipeline_order_with_comms", None)
        if order is None:
            raise CallOrderError(
                "Must call _prepare_schedule_with_comms() before calling _step_microbatches()"
            )
        return order

    _order_to_run = _order_as_data


def _maker_of(rows: Sequence[Sequence[Any]], name: str) -> Any:
    """A function that makes a plan of a user's order."""
    sends = {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}

    def without(kinds: set[str]) -> Plan:
        own = [[a for a in row if a and a.computation_type.value not in kinds] for row in rows]
        kept = [[str(a) for a in r if "WAIT" not in a.computation_type.value] for r in own]
        return Plan.from_actions(kept, name=name)

    def make(ranks: int) -> Plan:
        plan = without(set())
        # Messages in an order that could deadlock are placed anew.
        return without(sends) if validate(plan) else plan

    return make


def _order_of(name: str, ranks: int, microbatches: int, stages: int) -> dict[int, list[Any]]:
    """The computations of each rank in the plan of a name, with so many stages on each."""
    plan = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
    return {rank: [torchs._Action.from_str(str(a)) for a in plan[rank]] for rank in range(ranks)}


@cache
def _named_maker(name: str, num_stages: int, microbatches: int) -> Any:
    """A function that makes the plan of a name; the same function each time."""
    return lambda ranks: find_native(name)._plan(num_stages, microbatches, ranks)


class _Single(PipelineScheduleSingle):
    """A named schedule with one stage per rank."""

    _plan_name: str
    """The plan of Taktline with the same order."""
    _step_microbatches = PipelineScheduleMulti._step_microbatches

    def _get_pipeline_order(self) -> Order | None:
        order, count = self._order_as_data(), self._n_microbatches
        return {rank: torchs._add_reduce_grad(row, count) for rank, row in order.items()}

    def _order_as_data(self) -> dict[int, list[Any]]:
        return _order_of(self._plan_name, self._num_stages, self._n_microbatches, 1)

    def _plan_maker(self) -> Any:
        return _named_maker(self._plan_name, self._num_stages, self._n_microbatches)


class ScheduleGPipe(_Single):
    """All forwards, then all backwards."""

    _plan_name = "gpipe"


class _ScheduleForwardOnly(_Single):
    """All forwards, and nothing else."""

    _plan_name = "gpipe"

    def _get_pipeline_order(self) -> None:
        return None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch forward."""
        if any(kwargs.get(name) is not None for name in ("target", "target_mbs", "losses")):
            raise StageUseError("Forward-only schedule does not support loss computation")
        return super().step(*args, **kwargs)


class Schedule1F1B(_Single):
    """One forward, one backward in turn: at most as many micro-batches in flight as ranks."""

    _plan_name = "1f1b"


class _Multi(_PipelineScheduleRuntime):
    """A named schedule with several stages per rank; torch makes its order."""

    _plan_name: str
    _own_order: Order | None = None
    _is_idle: Any = False

    def _prepare_schedule_with_comms(self, actions: Any, format: Any = "compute_only") -> None:
        if self._own_order is None:  # at the end of torch's constructor
            self._own_order = actions
            self._place_stages(actions)
        super()._prepare_schedule_with_comms(actions, format)

    def _maker_for(self, order: Any) -> Any:
        if order is self._own_order:
            return _named_maker(self._plan_name, self._num_stages, self._n_microbatches)
        return super()._maker_for(order)


class _InRounds(_Multi):
    """A schedule whose micro-batches go through each stage in rounds."""

    def __init_subclass__(cls) -> None:
        cls.__signature__ = signature(cls.__bases__[1])  # pyright: ignore

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except ValueError:
            rounds = getattr(self, "number_of_rounds", None)
            if rounds is None or not self._n_microbatches % rounds:
                raise
            # The last round is not full: torch has no order for that, but there is a plan.
            sizes = (self.pp_group_size, self._n_microbatches, self.n_local_stages)
            self.pipeline_order = _order_of(self._plan_name, *sizes)
            self._prepare_schedule_with_comms(self.pipeline_order)


class ScheduleLoopedBFS(_Multi, torchs.ScheduleLoopedBFS):
    """GPipe over several stages per rank: each stage runs all micro-batches before the next one."""

    _plan_name = "looped_bfs"


class ScheduleInterleaved1F1B(_InRounds, torchs.ScheduleInterleaved1F1B):
    """1F1B over several stages per rank: a smaller bubble for more messages."""

    _plan_name = "interleaved_1f1b"


class ScheduleInterleavedZeroBubble(_InRounds, torchs.ScheduleInterleavedZeroBubble):
    """Interleaved 1F1B whose weight gradients fill what would be the bubble."""

    _plan_name = "interleaved_zero_bubble"


class ScheduleZBVZeroBubble(_Multi, torchs.ScheduleZBVZeroBubble):
    """Two stages per rank in the shape of a V; weight gradients fill the bubble."""

    _plan_name = "zbv"


class ScheduleDualPipeV(_Multi, torchs.ScheduleDualPipeV):
    """Two stages per rank in the shape of a V; forwards run together with backwards."""

    _plan_name = "dualpipev"
