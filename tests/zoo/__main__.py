"""The command: trains every architecture on pipelines, and writes what became of them."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

import torch

from tests.workers import Workers, WorkersFailed
from tests.zoo import zoo
from tests.zoo.architecture import Architecture
from tests.zoo.page import PAGE, Verdict, shortened, write
from tests.zoo.trial import PLACES, Found, Place, Way, compare, over_processes, plain, train


def main() -> int:
    """Run them; 1 if any is wrong, rather than refused."""
    options = _parse()
    warnings.simplefilter("ignore")
    for name in ("torch", "transformers"):  # a trace that fails prints its graph
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    chosen = [a for a in zoo() if options.only.lower() in a.name.lower()]
    pool = None if options.local else Workers()
    verdicts: list[Verdict] = []
    try:
        for architecture in chosen:
            verdicts.append(judge(architecture, pool))
            _tell(verdicts[-1])
    finally:
        if pool is not None:
            pool.stop()
    if not options.only:
        PAGE.write_text(write(verdicts, gloo=not options.local))
    works = [verdict for verdict in verdicts if verdict.way is not None]
    print(
        f"{len(works)} of {len(verdicts)}, {sum(v.whole for v in works)} in all numbers of stages"
    )
    return int(any(verdict.story.startswith("wrong") for verdict in verdicts))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="those with this in their name")
    parser.add_argument("--local", action="store_true", help="in one process alone")
    return parser.parse_args()


def judge(architecture: Architecture, pool: Workers | None) -> Verdict:
    """What becomes of an architecture, by name or else traced."""
    best = Verdict(architecture, None)
    expected = plain(architecture)
    ways: tuple[Way, ...] = ("by name", "traced")
    for way in ways:
        failures: dict[Place, str] = {}
        for place in PLACES:
            if story := _failure(architecture, place, way, expected, pool):
                failures[place] = story
                if place is PLACES[0]:  # in two stages: more of them would fail likewise
                    failures = dict.fromkeys(PLACES, story)
                    break
        wrong = next((story for story in failures.values() if story.startswith("wrong")), "")
        passed = [place.stages for place in PLACES if place not in failures]
        story = wrong or next(iter(failures.values()), "")
        if way == "by name":
            best = Verdict(architecture, way if passed else None, max(passed, default=0), story)
        elif max(passed, default=0) > best.stages:
            best = Verdict(architecture, way, max(passed), story)
        if wrong or best.whole:
            break
    return best


def _failure(
    architecture: Architecture, place: Place, way: Way, expected: Found, pool: Workers | None
) -> str:
    """What goes wrong with an architecture in a place."""
    try:
        compare(train(architecture, place, way), expected)
        if pool is not None:
            pool.run(over_processes, architecture.name, place, way, ranks=place.ranks)
    except AssertionError as error:
        return f"wrong: {error}"
    except WorkersFailed as failed:
        error = next(iter(failed.errors.values()))
        kind = "wrong over gloo" if isinstance(error, AssertionError) else "over gloo"
        return f"{kind}: {shortened(f'{type(error).__name__}: {error}')}"
    except Exception as error:  # whatever a model raises is what the page tells
        return shortened(f"{type(error).__name__}: {error}") or type(error).__name__
    return ""


def _tell(verdict: Verdict) -> None:
    how = f"{verdict.way}, up to {verdict.stages}" if verdict.way else "no"
    print(f"{verdict.architecture.name:44} {how:18} {verdict.story}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
