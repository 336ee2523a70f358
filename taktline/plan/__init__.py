"""Plans: schedules as data, validated, lowered and simulated. Nothing in here imports torch."""

from taktline.plan import schedules as schedules  # which registers them
from taktline.plan.action import Action, Kind, Overlap, parse
from taktline.plan.bound import Bound
from taktline.plan.build import build
from taktline.plan.costs import Costs
from taktline.plan.fit import fit_memory
from taktline.plan.io import read, read_costs, read_timeline, write, write_timeline
from taktline.plan.links import Link, Links
from taktline.plan.memory import memory_curve, peak_memory
from taktline.plan.optimise import bound, optimise
from taktline.plan.partition import Partition, balance
from taktline.plan.passes import add_comm, add_reduce, add_shard, lower, merge_backward, restrict
from taktline.plan.plan import Level, Placement, Plan
from taktline.plan.registry import NamedSchedule, each_rank, find, names, register
from taktline.plan.registry import unregister as unregister
from taktline.plan.rows import Rows
from taktline.plan.rules import Violation
from taktline.plan.timeline import Span, Straggler, Timeline, simulate
from taktline.plan.timeline import stragglers as stragglers
from taktline.plan.validate import require_valid, validate

__all__ = [
    "Action",
    "Bound",
    "Costs",
    "Kind",
    "Level",
    "Link",
    "Links",
    "NamedSchedule",
    "Overlap",
    "Partition",
    "Placement",
    "Plan",
    "Rows",
    "Span",
    "Straggler",
    "Timeline",
    "Violation",
    "add_comm",
    "add_reduce",
    "add_shard",
    "balance",
    "bound",
    "build",
    "each_rank",
    "find",
    "fit_memory",
    "lower",
    "memory_curve",
    "merge_backward",
    "names",
    "optimise",
    "parse",
    "peak_memory",
    "read",
    "read_costs",
    "read_timeline",
    "register",
    "require_valid",
    "restrict",
    "simulate",
    "stragglers",
    "unregister",
    "validate",
    "write",
    "write_timeline",
]
