"""The table: what goes wrong, when, and what every rank must say of it.

A case follows from its name, ``FAULT-SCHEDULE-RANKS-WRAPPER-PHASE``, the rank that it befalls
included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from random import Random

TIMEOUT = 5.0
"""Of the process group and of the pipeline, in seconds."""

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "zbv": 2}
"""How many stages each has on a rank."""

WRAPPERS = {"none": (2, 4, 6, 8), "ddp": (4, 8), "fsdp": (4, 8), "tp": (4, 8)}
"""On how many ranks; where there is a wrapper, two of them hold each stage, or four of eight."""


@dataclass(frozen=True)
class Phase:
    """Where the fault comes."""

    call: str
    """What every rank calls."""
    at: tuple[str, float] | None = None
    """Which forward (F) or backward (B) of the rank, from its first to its last, as a part of 1, or
    when its stage is prepared (P); None: before the call."""
    lag: float = 0.0
    """How long the rank waits before, so that the others wait for it."""
    late: float = 0.0
    """How much later the others call."""
    aside: bool = False
    """Whether it comes out of another thread, while the rank waits for others."""


PHASES = {
    "construction": Phase("build", ("P", 0.0)),
    "opening": Phase("step", lag=0.3),
    "warmup": Phase("step", ("F", 0.0)),
    "steady": Phase("step", ("F", 0.5)),
    "cooldown": Phase("step", ("B", 1.0)),
    "reduction": Phase("step", ("B", 1.0), lag=0.3),
    "ending": Phase("step", ("B", 1.0), aside=True),
    "between": Phase("step", late=0.5),
    "waiting": Phase("step", late=3.5, aside=True),
    "eval": Phase("eval", ("F", 0.5)),
    "state": Phase("save", lag=0.3),
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong."""

    act: str
    """What the rank does; see worker.py."""
    phases: tuple[str, ...]
    detection: float = 0.0
    """How long it may take until anybody can know; then there are two seconds."""
    answers: bool = True
    """Whether the rank itself lives to say what it knows."""
    goes_on: bool = True
    """Whether the processes can go on together afterwards."""
    store: str = ""
    """What happens to the store before: killed, stopped, or kept by rank 0."""
    holder: str = ""
    """Which stage the rank holds, if not any: the last, or one of those with tied weights."""
    wrappers: tuple[str, ...] = tuple(WRAPPERS)


COMPUTING = ("warmup", "steady", "cooldown", "eval")
WAITING = ("opening", "reduction", "ending", "between", "state")
PLAIN = ("none",)

FAULTS = {
    "kill": Fault("kill", tuple(PHASES), answers=False, goes_on=False),
    "exit": Fault("exit", ("steady", "between"), answers=False, goes_on=False),
    "stop": Fault("stop", ("construction", "steady", "cooldown", *WAITING, "eval"), TIMEOUT),
    "hang": Fault("hang", ("warmup", "steady", "cooldown", "eval"), TIMEOUT),
    "error": Fault("error", COMPUTING),
    "loss": Fault("error", ("steady", "eval"), holder="last", wrappers=("none", "ddp")),
    "tie": Fault("sour", ("cooldown",), holder="tied", wrappers=PLAIN),
    "interrupt": Fault("interrupt", ("steady", "cooldown", "waiting", "ending", "eval")),
    "quit": Fault("quit", ("steady", "eval")),
    "norm": Fault("grad_norm", ("opening",)),
    "state": Fault("save", ("opening",)),
    "eval": Fault("eval", ("opening",)),
    "host": Fault("kill", ("steady", "between"), 0.0, False, False, "rank 0"),
    "hoststop": Fault("stop", ("steady", "between"), TIMEOUT, store="rank 0"),
    "store": Fault("", ("between",), store="killed"),
    "storestop": Fault("", ("between",), store="stopped"),
    "storekill": Fault("kill", ("steady",), 0.0, False, False, "killed"),
    "storehang": Fault("hang", ("steady",), TIMEOUT, store="stopped", wrappers=PLAIN),
}


@dataclass(frozen=True)
class Case:
    """A fault, and what it comes into."""

    fault: str
    schedule: str
    ranks: int
    wrapper: str
    phase: str

    @classmethod
    def of(cls, name: str) -> Case:
        """The case of a name such as ``kill-1f1b-6-none-steady``."""
        try:
            fault, schedule, ranks, wrapper, phase = name.split("-")
            case = cls(fault, schedule, int(ranks), wrapper, phase)
            known = (fault in FAULTS, schedule in SCHEDULES, phase in PHASES, wrapper in WRAPPERS)
            if all(known) and case.ranks in WRAPPERS[wrapper]:
                return case
        except ValueError:
            pass
        raise ValueError(f"a case is called kill-1f1b-6-none-steady or the like, not {name!r}")

    @property
    def name(self) -> str:
        return "-".join(map(str, (self.fault, self.schedule, self.ranks, self.wrapper, self.phase)))

    @property
    def what(self) -> Fault:
        return FAULTS[self.fault]

    @property
    def when(self) -> Phase:
        return PHASES[self.phase]

    @property
    def setup(self) -> tuple[str, int, str]:
        """What the processes are started for."""
        return self.schedule, self.ranks, self.wrapper

    @property
    def beside(self) -> int:
        """How many ranks hold each stage."""
        return {"none": 1, "tp": 2}.get(self.wrapper, self.ranks // 2 if self.ranks > 4 else 2)

    @property
    def depth(self) -> int:
        """How many ranks a pipeline has."""
        return self.ranks // self.beside

    @property
    def stages(self) -> int:
        return self.depth * SCHEDULES[self.schedule]

    @property
    def microbatches(self) -> int:
        return 2 * self.depth

    @cached_property
    def victim(self) -> int:
        """The rank that it befalls."""
        if self.what.store == "rank 0":
            return 0
        ranks = range(self.ranks)
        if self.what.holder:
            # Stage 0 is on the first rank of a pipeline; in a V, the last one is there, too. A tie
            # is struck late, when the last of several stages has done all of its backwards.
            last = 0 if self.schedule == "zbv" else self.depth - 1
            tied = (0,) if SCHEDULES[self.schedule] > 1 else (0, last)
            held = (last,) if self.what.holder == "last" else tied
            ranks = [rank for rank in ranks if rank // self.beside in held]
        elif self.when.aside and self.when.at:
            ranks = range(self.beside, self.ranks)  # those of the first stage end last
        return Random(self.name).choice(ranks)

    def __str__(self) -> str:
        return f"{self.name} (rank {self.victim})"


def table() -> Iterator[Case]:
    """Each fault in each phase on each number of ranks in each wrapper, schedules by turns."""
    turns = cycle(SCHEDULES)
    for name, fault in FAULTS.items():
        for wrapper in fault.wrappers:
            for ranks in WRAPPERS[wrapper]:
                for phase in fault.phases:
                    if phase == "reduction" and wrapper not in ("ddp", "fsdp"):
                        continue
                    schedule = next(turns)
                    if not _fits(fault, schedule):
                        schedule = next(turns)
                    yield Case(name, schedule, ranks, wrapper, phase)


SAMPLE = (
    "kill-1f1b-2-none-opening",
    "kill-zbv-6-none-steady",
    "kill-gpipe-6-none-between",
    "kill-1f1b-4-ddp-reduction",
    "kill-1f1b-4-fsdp-steady",
    "stop-1f1b-6-none-steady",
    "error-interleaved_1f1b-6-none-cooldown",
    "error-1f1b-4-tp-steady",
    "interrupt-1f1b-2-none-waiting",
    "interrupt-1f1b-6-none-steady",
    "quit-1f1b-2-none-steady",
    "norm-gpipe-6-none-opening",
    "norm-1f1b-4-tp-opening",
    "tie-1f1b-2-none-cooldown",
    "store-1f1b-2-none-between",
    "storekill-1f1b-6-none-steady",
)


def sample() -> list[Case]:
    """A few that are quick."""
    return [Case.of(name) for name in SAMPLE]


def draw(rng: Random, setup: tuple[str, int, str] | None = None) -> Case:
    """Any fault; of those that can befall running processes, if there are some."""
    schedule, ranks, wrapper = setup or _draw_setup(rng)
    fits = [name for name, fault in FAULTS.items() if wrapper in fault.wrappers]
    fault = rng.choice([name for name in fits if _fits(FAULTS[name], schedule)])
    phases = [phase for phase in FAULTS[fault].phases if phase != "construction"]
    return Case(fault, schedule, ranks, wrapper, rng.choice(phases))


def _fits(fault: Fault, schedule: str) -> bool:
    """Whether a schedule has what goes wrong: in a V one rank has both ends of a tie."""
    return fault.holder != "tied" or schedule != "zbv"


def _draw_setup(rng: Random) -> tuple[str, int, str]:
    wrapper = rng.choice(list(WRAPPERS))
    return rng.choice(list(SCHEDULES)), rng.choice(WRAPPERS[wrapper]), wrapper
