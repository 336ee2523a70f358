"""Runs a target on many inputs and judges what comes of each."""

from __future__ import annotations

import faulthandler
import pkgutil
import resource
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from random import Random
from typing import Any, Protocol, cast

from taktline.errors import TaktlineError
from tests.fuzz import targets
from tests.limits import TooLong, at_most

BATCH = 2500
"""After as many inputs a process says how it goes."""
SECONDS = 20
"""What one input may take; most take a millisecond."""
GROWTH = 200
"""MiB that a run may grow by after its first tenth, in which caches fill."""


class Target(Protocol):
    """See :mod:`tests.fuzz`."""

    def draw(self, random: Random) -> Any: ...
    def try_(self, input: Any) -> None: ...


@dataclass
class Outcome:
    """What came of a run."""

    inputs: int = 0
    refused: int = 0
    """Inputs that ended in an error of ours."""
    failures: list[tuple[int, str]] = field(default_factory=list)
    """The seed of an input and what went wrong: another error, or a hang."""
    growth: float = 0.0
    """MiB, beyond what the first tenth took."""

    @property
    def wrong(self) -> bool:
        return bool(self.failures) or self.growth > GROWTH


def names() -> list[str]:
    """All targets."""
    return sorted(module.name for module in pkgutil.iter_modules(targets.__path__))


def load(name: str) -> Target:
    """The target of a name."""
    return cast(Target, import_module(f"tests.fuzz.targets.{name}"))


def run(target: Target, seeds: range, *, seconds: float = SECONDS) -> Iterator[Outcome]:
    """Try an input for each seed; what is known so far, after each of them."""
    outcome, settled = Outcome(), _memory()
    for number, seed in enumerate(seeds):
        input = target.draw(Random(seed))
        outcome.inputs += 1
        try:
            with at_most(seconds), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                target.try_(input)
        except TaktlineError:
            outcome.refused += 1
        except (Exception, TooLong):
            outcome.failures.append((seed, traceback.format_exc(limit=-8)))
        if number == len(seeds) // 10:
            settled = _memory()
        outcome.growth = max(0.0, _memory() - settled)
        yield outcome


def run_and_tell(name: str, seeds: range, there: Connection) -> None:
    """Run a target in a process of its own, and send what is known now and then."""
    for outcome in run(load(name), seeds):
        # For what hangs where Python cannot raise: ends the process unless it is set anew in time.
        faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
        if outcome.inputs % BATCH == 0 or outcome.inputs == len(seeds):
            there.send(outcome)


def _memory() -> float:
    """What this process has now, in MiB; elsewhere than on Linux, the most that it has had."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
