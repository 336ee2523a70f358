"""Whether an order of actions can run, and how it is shown to who wrote it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from taktline.compat.torch_pipelining._action import B, F, I, W, _Action, _ComputationType
from taktline.compat.torch_pipelining._passes import parts
from taktline.errors import InvalidOrderError

__all__ = ["_format_pipeline_order", "_validate_schedule"]

Order = Mapping[int, Sequence[_Action | None]]

# What must have run before, and how messages call the two.
_NEEDS: dict[_ComputationType, tuple[str, _ComputationType, str]] = {
    B: ("Full Backward", F, "Forward"),
    I: ("Backward Input", F, "Forward"),
    W: ("Backward Weight", I, "Backward Input"),
}


def _format_pipeline_order(
    pipeline_order: dict[int, list[_Action | None]], error_step_number: int | None = None
) -> str:
    """A table with a column for each rank, in which one step may be marked.

    >>> order = {0: [_Action(0, F, 0), _Action(0, B, 0)], 1: [None, _Action(1, F, 0)]}
    >>> print(_format_pipeline_order(order, error_step_number=1))
            Rank 0 Rank 1
    Step 0: 0F0...
    Step 1: 0B0    1F0    <-- ERROR HERE
    <BLANKLINE>
    """
    ranks = [pipeline_order[rank] for rank in sorted(pipeline_order)]
    steps = max(len(actions) for actions in ranks)
    digits = len(str(steps - 1))
    titles = [f"Rank {rank:<{digits}}" for rank in range(len(ranks))]
    cells = [["" if action is None else str(action) for action in actions] for actions in ranks]
    rows = list(zip_longest(*cells, fillvalue=""))
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [" " * len(f"Step {0:0{digits}}: ") + _row(titles, widths)]
    for step, row in enumerate(rows):
        mark = " <-- ERROR HERE" if step == error_step_number else ""
        lines.append(f"Step {step:0{digits}}: {_row(row, widths)}{mark}")
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))


def _validate_schedule(
    actions: dict[int, list[_Action | None]],
    pp_group_size: int,
    num_stages: int,
    num_microbatches: int,
) -> dict[int, int]:
    """Which rank each stage lies on, once it is known that all its micro-batches run there.

    >>> _validate_schedule({0: [_Action(0, F, 0), _Action(0, B, 0)]}, 1, 1, 1)
    {0: 0}
    >>> _validate_schedule({0: [_Action(0, F, 0)]}, 1, 1, 1)
    Traceback (most recent call last):
    taktline.errors.InvalidOrderError: Invalid backward microbatches for stage 0: expected 1 ...
    """
    if len(actions) != pp_group_size:
        raise InvalidOrderError(
            f"Schedule has incorrect number of ranks - expected {pp_group_size}, "
            f"actual {len(actions)}"
        )
    for rank in range(pp_group_size):
        if rank not in actions:
            raise InvalidOrderError(f"Schedule is missing actions for rank {rank}")
    check = _Check(actions, num_stages)
    for rank, row in actions.items():
        for step, action in enumerate(row):
            for part in () if action is None else parts(action):
                check.run(rank, step, part)
    for stage in range(num_stages):
        check.require_all(stage, num_microbatches)
    return check.rank_of


class _Check:
    """What has run so far, and where."""

    def __init__(self, order: Order, num_stages: int) -> None:
        self.rank_of: dict[int, int] = {}
        self._order = order
        self._num_stages = num_stages
        self._done: defaultdict[tuple[int, _ComputationType], set[int | None]] = defaultdict(set)

    def run(self, rank: int, step: int, action: _Action) -> None:
        """Note an action, unless what it needs is missing."""
        stage, kind, microbatch, _ = action
        if stage >= self._num_stages:
            raise InvalidOrderError(
                f"Rank {rank}, step {step}: there is no stage {stage} among {self._num_stages}"
            )
        if kind in _NEEDS:
            name, needed, needed_name = _NEEDS[kind]
            if microbatch not in self._done[stage, needed]:
                table = _format_pipeline_order(dict(self._order), error_step_number=step)  # pyright: ignore[reportArgumentType]
                raise InvalidOrderError(
                    f"Rank {rank}, step {step}: Running {name} for stage {stage}, microbatch "
                    f"{microbatch} without first running {needed_name}\n\n"
                    f"Full pipeline schedule:\n{table}"
                )
        self._done[stage, kind].add(microbatch)
        known = self.rank_of.setdefault(stage, rank)
        if known != rank:
            raise InvalidOrderError(
                f"Rank {rank}, step {step}: Stage {stage} is assigned to both rank {rank} and "
                f"rank {known}"
            )

    def require_all(self, stage: int, microbatches: int) -> None:
        """Raise unless all micro-batches of a stage have run forward and backward."""
        forward, full, inputs, weights = (len(self._done[stage, kind]) for kind in (F, B, I, W))
        where = f"microbatches for stage {stage}"
        if forward != microbatches:
            raise InvalidOrderError(f"Got {forward} {F} {where}, expected {microbatches}")
        counts = f"I={inputs}, W={weights}"
        # The gaps are torch's: whoever looks for its text finds it.
        if inputs != weights:
            raise InvalidOrderError(
                f"Invalid backward {where}: I and W must have equal counts,             "
                f"but got {counts}"
            )
        if full + inputs != microbatches:
            raise InvalidOrderError(
                f"Invalid backward {where}: expected {microbatches} total backwards,             "
                f"but got B={full}, {counts}"
            )
