"""Train every architecture on pipelines, and write what became of them to docs/models.md."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from tests.settled import settle
from tests.workers import Workers, WorkersFailed, WorkersLost
from tests.zoo import costs, zoo
from tests.zoo.architecture import Architecture
from tests.zoo.page import PAGE, Result, read, shortened, write
from tests.zoo.trial import PLACES, Found, Place, compare, over_processes, plain, train

Try = Callable[[Place], None]
"""Trains an architecture in a place; raises if it cannot, or if it does so wrongly."""


def main() -> int:
    """Run them; returns 1 if any is wrong, rather than refused."""
    options = _parse()
    warnings.simplefilter("ignore")
    for name in ("torch", "transformers", "diffusers"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    settle()
    if options.costs:
        return _compare_costs(options.only)
    results = read(PAGE.read_text())
    wheres = [options.where] if options.where else ["local", "gloo"]
    pool, wrong = Workers(group_timeout=300.0), False
    try:
        for architecture in zoo():
            result = results.get(architecture.name, Result())
            missing = [where for where in wheres if getattr(result, where) is None]
            if options.only.lower() not in architecture.name.lower() or _lacks(architecture):
                continue
            for where in missing if options.missing else wheres:
                result = judge(architecture, where, result, pool)
                print(f"{architecture.name:44} {where:6} {result}", flush=True)
            results[architecture.name] = result
            wrong |= "wrong" in result.reason
            PAGE.write_text(write(zoo(), results))
    finally:
        pool.stop()
    return int(wrong)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="those with this in their name")
    parser.add_argument("--where", choices=["local", "gloo"], help="in one process, or in several")
    parser.add_argument(
        "--costs", action="store_true", help="compare what layers are counted to cost with times"
    )
    parser.add_argument("--missing", action="store_true", help="those without a result in the page")
    return parser.parse_args()


def _lacks(architecture: Architecture) -> bool:
    """Whether the library that it is from is not installed here; what is known of it stays."""
    lacks = bool(architecture.needs) and find_spec(architecture.needs) is None
    if lacks:
        print(f"{architecture.name:44} left out: {architecture.needs} is not installed")
    return lacks


def _compare_costs(only: str) -> int:
    """Print how far counted costs are from measured ones."""
    found: list[costs.Compared] = []
    for architecture in zoo():
        if only.lower() in architecture.name.lower() and not _lacks(architecture):
            found.append(costs.compare(architecture))
            print(f"{architecture.name:44} off by a factor of {found[-1].ratio:.1f}", flush=True)
    print(costs.report(found))
    return 0


def judge(architecture: Architecture, where: str, before: Result, pool: Workers) -> Result:
    """What becomes of an architecture, added to what is known of it."""
    expected = plain(architecture)
    attempt = partial(_train if where == "local" else partial(_train_over, pool), architecture)
    best, reason = _most(partial(attempt, expected))
    way = "by name" if best else "no"
    if where == "gloo":
        # What holds in one process, too, is said once.
        same = best == before.local
        reason = before.reason if same else f"over gloo: {reason}"
        way = before.way if before.local is not None else way
    return replace(before, way=way, reason=reason, **{where: best})


def _most(attempt: Try) -> tuple[int, str]:
    """The most stages that an architecture trains in, and what keeps it from more."""
    passed, failures = [0], []
    for place in PLACES:
        failure = _failure(attempt, place)
        if not failure:
            passed.append(place.stages)
            continue
        failures.append(failure)
        if place is PLACES[0]:  # in two stages: more of them would fail likewise
            break
    wrong = [failure for failure in failures if failure.startswith("wrong")]
    return max(passed), (wrong or failures or [""])[0]


def _failure(attempt: Try, place: Place) -> str:
    """What goes wrong in a place."""
    try:
        attempt(place)
    except WorkersFailed as failed:
        return _told(next(iter(failed.errors.values())))
    except WorkersLost as lost:
        return f"wrong: {shortened(str(lost))}"
    except Exception as error:  # whatever a model raises is what the page reports
        return _told(error)
    return ""


def _told(error: BaseException) -> str:
    if isinstance(error, AssertionError):
        return f"wrong: {error}"
    return shortened(f"{type(error).__name__}: {error}") or type(error).__name__


def _train(architecture: Architecture, expected: Found, place: Place) -> None:
    compare(train(architecture, place), expected)


def _train_over(pool: Workers, architecture: Architecture, expected: Found, place: Place) -> None:
    call = (architecture.name, place, expected)
    pool.run(over_processes, *call, ranks=place.ranks, timeout=600.0)


if __name__ == "__main__":
    sys.exit(main())
