"""The command: each target in a process of its own, so many inputs, and a table of what came."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from random import Random

from rich.console import Console
from rich.table import Table

from tests.fuzz.run import Outcome, load, names, run_and_tell

SHOWN = 5
"""As many failures of a target as are printed."""


def main() -> int:
    """Try the inputs; 1 if any of them went wrong."""
    options = _parse()
    if options.input is not None:
        (name,) = options.target
        print(f"{name}: {load(name).draw(Random(options.input))!r:.2000}")
        load(name).try_(load(name).draw(Random(options.input)))
        return 0
    table = Table(title="Fuzz")
    table.add_column("target")
    for column in ("inputs", "refused", "failures", "MiB more", "seconds"):
        table.add_column(column, justify="right")
    wrong = False
    for name in options.target or names():
        began = time.monotonic()
        outcome = _in_a_process(name, range(options.seed, options.seed + options.inputs))
        for seed, text in outcome.failures[:SHOWN]:
            command = f"python -m tests.fuzz --target {name} --input {seed}"
            print(f"{name}, input {seed}\n{text}\n  again: {command}\n", flush=True)
        wrong |= outcome.wrong
        numbers = (outcome.inputs, outcome.refused, len(outcome.failures))
        colour = "bold red" if outcome.wrong else "green"
        table.add_row(
            name,
            f"{numbers[0]:,}",
            f"{numbers[1]:,}",
            f"[{colour}]{numbers[2]:,}[/]",
            f"{outcome.growth:.0f}",
            f"{time.monotonic() - began:.0f}",
        )
    Console().print(table)
    return int(wrong)


def _in_a_process(name: str, seeds: range) -> Outcome:
    """Run a target elsewhere: what crashes or hangs for good there is a failure here."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=run_and_tell, args=(name, seeds, there), daemon=True)
    process.start()
    there.close()
    outcome = Outcome()
    try:
        while True:
            outcome = here.recv()
    except EOFError:
        process.join()
    if process.exitcode:
        seed = seeds[min(outcome.inputs, len(seeds) - 1)]
        text = f"the process ended with {process.exitcode}, at this input or soon after it"
        outcome.failures.append((seed, text))
    return outcome


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random inputs for every entrance."
    )
    add = parser.add_argument
    add("--inputs", type=int, default=100_000, help="for each target (100,000)")
    add("--seed", type=int, default=0, help="that of the first input (0)")
    add("--target", action="append", choices=names(), help="only this one; may be repeated")
    add("--input", type=int, help="run one input alone, by its seed")
    options = parser.parse_args()
    if options.input is not None and len(options.target or ()) != 1:
        parser.error("--input needs one --target")
    return options


if __name__ == "__main__":
    sys.exit(main())
