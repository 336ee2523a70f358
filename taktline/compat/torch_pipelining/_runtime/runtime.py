"""Schedules whose order says when messages are sent, and whose actions can be replaced."""

from __future__ import annotations

from typing import Any

from taktline.compat.torch_pipelining._action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    _ComputationType,
)
from taktline.compat.torch_pipelining._lowering import _defer_recv_ops, _simulate_comms_compute
from taktline.compat.torch_pipelining._runtime.context import _CustomFunctionProtocol
from taktline.compat.torch_pipelining._runtime.multi import (
    Actions,
    Format,
    PipelineScheduleMulti,
    lowered,
    read_csv,
    write_csv,
)
from taktline.compat.torch_pipelining._runtime.orders import Order
from taktline.errors import CallOrderError, InvalidOrderError, ScheduleError, StageUseError

__all__ = ["_PipelineScheduleRuntime"]

_REPLACEABLE = (
    FORWARD,
    FULL_BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    OVERLAP_F_B,
    UNSHARD,
    RESHARD,
    REDUCE_GRAD,
)


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule that runs what ``pipeline_order_with_comms`` says: computations and messages.

    ``defer_pp_recv`` puts each receive right before what needs it.
    """

    pipeline_order_with_comms: Order

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._defer_pp_recv: bool = kwargs.pop("defer_pp_recv", False)
        super().__init__(*args, **kwargs)
        self._comp_type_to_function_map: dict[_ComputationType, _CustomFunctionProtocol] = {}

    def register_custom_function(
        self, computation_type: _ComputationType, custom_function: _CustomFunctionProtocol
    ) -> None:
        """Let a function do what actions of a kind say; it gets the action and a context."""
        if computation_type not in _REPLACEABLE:
            names = ", ".join(kind.name for kind in _REPLACEABLE[:-1])
            raise ScheduleError(
                f"Invalid computation type {computation_type}. Only {names} and REDUCE_GRAD are "
                "supported."
            )
        self._comp_type_to_function_map[computation_type] = custom_function

    def _prepare_schedule_with_comms(self, actions: Order, format: Format = "compute_only") -> None:
        """Take an order to run, as it is or with messages added to it."""
        self._validate_and_set_stage_mapping(actions)
        if format == "compute_comms":
            for row in actions.values():
                if None in row:
                    raise InvalidOrderError(
                        "Expected action to be not None, got <class 'NoneType'>"
                    )
            self.pipeline_order_with_comms = {rank: [*row] for rank, row in actions.items()}
        elif format == "compute_only":
            _check_computes(actions)
            count = self._n_microbatches
            order: Any = lowered(actions, self._rank_of, self._num_stages, count)
            if self._defer_pp_recv:
                order = _defer_recv_ops(order, self._rank_of)
            self.pipeline_order_with_comms = order
        else:
            raise StageUseError(
                f"{format=} is not implemented; there are 'compute_only' and 'compute_comms'"
            )

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:
        """Read the order from a file: computations, or computations and messages."""
        if format == "compute_only":
            super()._load_csv(filename)
            self._prepare_schedule_with_comms(self.pipeline_order)
        else:
            known = format == "compute_comms"
            self._prepare_schedule_with_comms(read_csv(filename) if known else {}, format)

    def _dump_csv(self, filename: str, format: Format = "compute_comms") -> None:
        """Write the order to a file, with messages or without."""
        if format == "compute_only":
            write_csv(filename, self.pipeline_order)
        else:
            write_csv(filename, self._order_to_run())

    def _simulate(self) -> Any:
        """Play the order through: what each rank does at a time, if each action takes as long."""
        instant = (UNSHARD, RESHARD, REDUCE_GRAD)
        order: Order = {
            rank: [a for a in row if a is not None and a.computation_type not in instant]
            for rank, row in self._order_to_run().items()
        }
        return _simulate_comms_compute(order, self._rank_of, self._num_stages)

    def _placing(self) -> Actions:
        return self._order_to_run()

    def _order_to_run(self) -> Actions:
        order = getattr(self, "pipeline_order_with_comms", None)
        if order is None:
            raise CallOrderError(
                "Must call _prepare_schedule_with_comms() before calling _step_microbatches()"
            )
        return order


def _check_computes(actions: Actions) -> None:
    for rank, row in actions.items():
        for position, action in enumerate(row):
            if action is not None and action.computation_type in (SEND_F, RECV_F, SEND_B, RECV_B):
                raise ScheduleError(
                    f"Expected compute-only schedule but found communication action '{action}' at "
                    f"rank {rank}, position {position}. Communication actions (e.g. SEND_F, "
                    "RECV_F, etc.) should not be present when format='compute_only'."
                )
