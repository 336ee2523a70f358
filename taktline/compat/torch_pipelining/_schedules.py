"""The bases of torch's schedules, whose steps run on Taktline's runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from typing import Any

import torch

from taktline.compat.torch_pipelining import schedules as torchs
from taktline.compat.torch_pipelining._calls import (
    HAS_LIMITS,
    LIMITS,
    Calls,
    Order,
    lowered,
    placement_of,
)
from taktline.compat.torch_pipelining._metadata import HAS_META, Telling, like, preparing
from taktline.compat.torch_pipelining._steps import Native, StepCall, run
from taktline.errors import BatchError, CallOrderError, ScheduleError
from taktline.plan import Kind, Plan, validate
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
    _compared_with: tuple[Any, ...] = ()
    """The first target of a user's own step, and its loss_kwargs."""
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

    @contextmanager
    def _initializing(self, args: Sequence[Any], kwargs: Any) -> Iterator[Sequence[Any]]:
        """Let stages find their metadata; yields the arguments to call them with."""
        if not HAS_META and self._prepared_for not in (None, self._has_backward):
            # Before 2.12, metadata of eval() has no gradients, and would stay.
            self._note_shapes(known=False)
        self._prepared_for = self._has_backward
        # Steps that were written for older torch do not pass the target.
        left_out = len(args) == 2 and not kwargs
        with preparing(self._local_stages):
            yield (*args, *self._compared_with)[:_TAKES] if left_out else args

    def _note_shapes(self, *, known: bool) -> None:
        """Note whether stages know their metadata, or must find it again."""
        for name in [name for name in vars(self) if name.endswith("ward_initialized")]:
            setattr(self, name, known and (self._has_backward or "forward" in name))
        for stage in () if known else self._local_stages:
            if isinstance(stage, Telling):
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
        with self._initializing(args, kwargs) as given:
            super()._initialize_stage(*given, **kwargs)

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
        with self._initializing(args, kwargs) as given:
            super()._initialize_stages(*given, **kwargs)

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        limits = {name: kwargs[name] for name in LIMITS[:3] if name in kwargs}
        self._limits = Limits(**limits)
        if not HAS_LIMITS:
            kwargs = {name: value for name, value in kwargs.items() if name not in LIMITS}
        super().__init__(*args, **kwargs)

    @like(torchs._PipelineScheduleRuntime._prepare_schedule_with_comms)
    def _prepare_schedule_with_comms(self, actions: Any, format: Any = "compute_only") -> None:
        self._limits.ahead(self.pp_group_size)
        super()._prepare_schedule_with_comms(actions, format)
        if not HAS_LIMITS and self._limits != Limits():
            self._keep_limits(actions, format)
        if format == "compute_only":
            # Taktline places the messages itself, unless a user changes the order with messages.
            self._planned = self._rows(self.pipeline_order_with_comms), self._maker_for(actions)

    def _keep_limits(self, actions: Order, format: str) -> None:
        """Do what torch does since 2.15, or raise."""
        if format == "compute_only" and not getattr(self, "_defer_pp_recv", False):
            self.pipeline_order_with_comms = lowered(actions, self, self._n_microbatches)
        most, rows = self._limits.max_outstanding_sends, self._rows(self.pipeline_order_with_comms)
        if most is None:
            return
        plan = Plan.from_actions([[str(action) for action in row] for row in rows])
        if validate(plan) or (not most and plan.has(Kind.SEND_F, Kind.SEND_B)):
            raise ScheduleError(
                f"Cannot satisfy max_outstanding_sends={most}: a send would wait for one whose "
                "receive comes later; increase the limit or change the schedule"
            )

    def _simulate(self) -> Any:
        """Simulate the order: the action of each rank at each time, if all take equally long."""
        instant = (torchs.UNSHARD, torchs.RESHARD, torchs.REDUCE_GRAD)
        order = {
            rank: [a for a in row if a is not None and a.computation_type not in instant]
            for rank, row in self._order_to_run().items()
        }
        return torchs._simulate_comms_compute(order, self._rank_of, self._num_stages)

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
    waits = {getattr(torchs, kind) for kind in ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")}
    sends = {torchs.SEND_F, torchs.RECV_F, torchs.SEND_B, torchs.RECV_B}

    def without(kinds: set[Any]) -> Plan:
        kept = [[str(a) for a in row if a and a.computation_type not in kinds] for row in rows]
        return Plan.from_actions(kept, name=name)

    def make(ranks: int) -> Plan:
        plan = without(waits)
        # Messages in an order that could deadlock are placed anew.
        return without(waits | sends) if validate(plan) else plan

    return make
