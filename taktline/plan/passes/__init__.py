"""From a compute plan to one that can run: pure passes Plan → Plan, one a file."""

from __future__ import annotations

from taktline.checks import require_flag, require_instance
from taktline.plan.passes.add_comm import add_comm
from taktline.plan.passes.add_reduce import add_reduce
from taktline.plan.passes.add_shard import add_shard
from taktline.plan.passes.merge_backward import merge_backward
from taktline.plan.passes.restrict import restrict
from taktline.plan.plan import Plan

__all__ = ["add_comm", "add_reduce", "add_shard", "lower", "merge_backward", "restrict"]


def lower(
    plan: Plan, *, merge: bool = False, keep_ready: int | None = None, reduce: bool = False
) -> Plan:
    """A plan that is ready to run: what it leaves implicit is spelled out, in this order.

    Args:
        plan: the plan; it stays as it is.
        merge: join each I that is directly followed by its W into one B.
        keep_ready: gather and release sharded parameters, so many stages ahead (None: not sharded).
        reduce: reduce each stage's gradients over the data-parallel ranks once they are complete.

    Last, every SEND and RECV is added.

    >>> from taktline.plan import build
    >>> " ".join(map(str, lower(build("gpipe", ranks=2, microbatches=1))[1]))
    '1RECV_F0 1F0 1B0 1SEND_B0'
    """
    require_instance("plan", plan, Plan)
    if require_flag("merge", merge):
        plan = merge_backward(plan)
    if keep_ready is not None:
        plan = add_shard(plan, keep_ready)
    if require_flag("reduce", reduce):
        plan = add_reduce(plan)
    return add_comm(plan)
