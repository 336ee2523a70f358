"""``python -m tests.elastic`` draws jobs, lets ranks be lost, and compares with a plain loop.

``--seed 17 --jobs 1`` runs one of them again.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from random import Random
from statistics import median

import torch

from tests.elastic.job import Outcome, run
from tests.elastic.worker import EPOCH, PHASES, Job, Strike, plain

TIMEOUT = 20.0
"""Of a rank that is stopped; a busy machine must not look like one."""


def draw(seed: int) -> Job:
    """Some losses, one after the other, any of which can be survived."""
    rng = Random(seed)
    ranks = rng.randint(2, 8)
    whole, evals, every = rng.random() < 0.7, rng.random() < 0.3, rng.choice([1, 1, 2, 3])
    step, left, strikes = 1, list(range(ranks)), list[Strike]()
    for _ in range(rng.randint(1, min(3, ranks - 1))):
        step += rng.randint(1, 2)
        how = rng.choices(["kill", "stop", "cut"], [6, 1, 2])[0]
        phase = rng.choice([p for p in PHASES if p != "build" and (p != "copy" or every == 1)])
        number = rng.randrange(4) if phase in ("forward", "backward", "loss") else 0
        if phase == "forward" and evals:
            number += 4 * 8 // ranks  # of the first evaluation
        victim = rng.choice(left)
        if phase == "loss":
            victim = max(left)  # which has the last stage
        if how == "cut":
            phase = rng.choice(["forward", "between", "clip", "update"])
        strikes.append(Strike(how, victim, step, phase, number if phase in PHASES[:3] else 0))
        if how == "cut":
            continue
        place = left.index(victim)
        near = {left[place - 1], left[(place + 1) % len(left)]}
        left.remove(victim)
        others = [rank for rank in left if rank not in near]
        if others and rng.random() < 0.25:  # while the others recover
            strikes.append(Strike("kill", rng.choice(others), step, "build", side=(victim,)))
            left.remove(strikes[-1].rank)
    job = Job(ranks, step + 3, tuple(strikes), whole, layers=8 if whole else ranks)
    if loads := rng.random() < 0.3:
        job = replace(job, steps=-(-job.steps // EPOCH) * EPOCH)
    return replace(job, every=every, evals=evals, loads=loads, timeout=TIMEOUT)


def judge(job: Job, outcome: Outcome) -> list[str]:
    """What is wrong."""
    dead = {each.rank for each in job.strikes if each.how != "cut" and each.rank in outcome.struck}
    left = [rank for rank in range(job.ranks) if rank not in dead]
    expected, wrong = plain(job), [f"rank {rank} hangs" for rank in outcome.silent]
    for rank in left:
        told = outcome.told.get(rank)
        if told is None or told.error:
            wrong.append(f"rank {rank}: {told.error if told else 'is gone'}")
            continue
        if told.ranks != len(left):
            wrong.append(f"rank {rank} is one of {told.ranks}, not {len(left)}")
        for name in ("losses", "norms", "evals"):
            pairs = torch.tensor([getattr(told, name), getattr(expected, name)])
            if len(told.losses) != job.steps or not torch.allclose(*pairs, rtol=1e-10):
                wrong.append(f"rank {rank}: {name} differ")
        for name, value in told.state.items():
            if not torch.allclose(value, expected.state[name], rtol=1e-8, atol=1e-12):
                wrong.append(f"rank {rank}: {name} differs")
    sure = any(each.how != "cut" and each.phase != "copy" for each in job.strikes)
    if sure and not outcome.struck:  # a copy is not begun while another one is on its way
        wrong.append("nothing was struck")
    return wrong


def draw_timelines() -> None:
    """A step on four ranks, and one on the three that are left."""
    told = run(Job(4, 8, (Strike("kill", 2, 4, "backward"),), layers=12, traces=(3, 7))).told[0]
    print("\n".join([told.drawings[0], str(told.recoveries[0]), "", *told.drawings[1:]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--drawing", action="store_true", help="a step before a loss, and after")
    given = parser.parse_args()
    if given.drawing:
        return draw_timelines()
    logging.getLogger("taktline").setLevel(logging.CRITICAL)
    failed, seconds, losses = 0, list[float](), 0
    for seed in range(given.seed, given.seed + given.jobs):
        job = draw(seed)
        outcome = run(job)
        wrong = judge(job, outcome)
        failed += bool(wrong)
        losses += len(job.strikes)
        own = [max(t.seconds) for t in outcome.told.values() if t.seconds]
        seconds += own[:1]
        struck = ", ".join(f"{s.how} {s.rank} {s.phase} {s.step}" for s in job.strikes)
        print(
            f"seed {seed:3}  {job.ranks} ranks  {struck}  {max(own, default=0):.2f} s", flush=True
        )
        for text in wrong:
            print(f"    {text}", flush=True)
    print(
        f"{given.jobs - failed} of {given.jobs} jobs survived, with {losses} losses; the next "
        f"step was committed {median(seconds):.2f} s after the detection, at most "
        f"{max(seconds):.2f} s"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
