"""The demo, part by part, on one rank or on all of them."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import torch

from taktline.cli.demo.gpt import GPT, Text, loss_fn
from taktline.cli.demo.screen import Screen
from taktline.plan import Costs, Timeline, find, simulate
from taktline.train import Pipeline

__all__ = ["Tour"]

_SAMPLES = 4
"""In a micro-batch."""
_TRACED = 10
"""Every so many steps the bubble is measured."""
_COMPARED = 10
"""So many steps are run without a pipeline, too."""
_MEASURED = 5
"""So many steps of each schedule are measured."""
_RATE = 2e-3
_ROUNDING = 1e-3


class Tour:
    """Trains, compares and draws."""

    def __init__(
        self,
        ranks: int,
        schedule: str,
        microbatches: int,
        steps: int,
        output: Path,
        *,
        silent: bool,
    ) -> None:
        self._ranks = ranks
        self._schedule = find(schedule).name
        self._microbatches = microbatches
        self._steps = steps
        self._output = output
        self._size = _SAMPLES * microbatches
        self._text = Text()
        self._screen = Screen(silent=silent)
        self._silent = silent

    def run(self) -> None:
        """All parts, one after the other."""
        self._screen.title("1. A model, cut into stages")
        pipe = self._pipeline(self._schedule)
        letters, files = len(self._text.letters), self._text.files
        self._screen.say(
            f"{pipe}\n\nIts text: the {files} files of this package, {letters:,} letters."
        )
        self._screen.title(f"2. It trains, {self._steps} steps")
        losses = self._train(pipe)
        self._screen.title("3. The same without a pipeline")
        self._compare(losses)
        self._screen.title("4. Three schedules, measured")
        timelines = self._measure()
        self._say_goodbye(timelines)

    def _pipeline(self, schedule: str) -> Pipeline:
        """The model at its beginning, with two layers for each rank: enough for any schedule."""
        return Pipeline(
            GPT(2 * self._ranks),
            example=(self._text.batch(0, _SAMPLES)[0],),
            schedule=schedule,
            microbatches=self._microbatches,
            loss_fn=loss_fn,
            ranks=self._ranks,
            device="cpu",
        )

    def _train(self, pipe: Pipeline) -> list[float]:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=_RATE)
        losses: list[float] = []
        bubble: float | None = None
        began = time.perf_counter()
        with self._screen.progress(self._steps) as meter:
            for step in range(self._steps):
                passages, following = self._text.batch(step, self._size)
                if step % _TRACED == 1:
                    with pipe.trace() as trace:
                        loss = pipe.step(passages, target=following)
                    bubble = trace.timeline.bubble()
                else:
                    loss = pipe.step(passages, target=following)
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                speed = (step + 1) * passages.numel() / (time.perf_counter() - began)
                meter(step, losses[-1], speed, bubble)
        return losses

    def _compare(self, losses: list[float]) -> None:
        """Run the first steps as plain training, on the first rank; the others wait for it."""
        if self._silent:
            return
        model = GPT(2 * self._ranks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
        rows: list[list[str]] = []
        largest = 0.0
        for step, loss in enumerate(losses[:_COMPARED]):
            passages, following = self._text.batch(step, self._size)
            plain = loss_fn(model(passages), following)
            plain.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            difference = abs(plain.item() - loss)
            largest = max(largest, difference)
            rows.append([str(step + 1), f"{loss:.6f}", f"{plain.item():.6f}", f"{difference:.0e}"])
        self._screen.table(["step", "pipeline", "plain", "difference"], rows)
        verdict = "equal, but for rounding" if largest < _ROUNDING else "NOT EQUAL"
        self._screen.say(f"The losses are {verdict}.")

    def _measure(self) -> list[Timeline]:
        """Each schedule: what was measured beside what its costs predict."""
        rows: list[list[str]] = []
        drawn: list[Timeline] = []
        for schedule in dict.fromkeys([self._schedule, "gpipe", "1f1b", "zbv"]):
            if len(rows) == 3:
                break
            pipe = self._pipeline(schedule)
            for step in range(2):  # learns the shapes
                self._step(pipe, step)
            with pipe.trace() as trace:
                for step in range(_MEASURED):
                    self._step(pipe, step)
            timelines = sorted(trace.timelines, key=lambda timeline: timeline.makespan)
            middle = timelines[_MEASURED // 2]
            predicted = simulate(pipe.plan, Costs.from_timeline(*timelines))
            drawn.append(middle)
            bubble = statistics.median(timeline.bubble() for timeline in timelines)
            rows.append(
                [
                    schedule,
                    str(pipe.plan.stages),
                    f"{middle.makespan:.0f}",
                    f"{predicted.makespan:.0f}",
                    f"{bubble:.1%}",
                    f"{predicted.bubble():.1%}",
                ]
            )
        headings = ["schedule", "stages", "step/ms", "predicted", "bubble", "predicted"]
        self._screen.table(headings, rows)
        self._screen.say("Predicted is what the simulator makes of the costs that were measured.")
        if "WORLD_SIZE" not in os.environ:
            self._screen.say("Local ranks take turns, so they wait longer than processes would.")
        return drawn

    def _step(self, pipe: Pipeline, step: int) -> None:
        passages, following = self._text.batch(step, self._size)
        pipe.step(passages, target=following)
        for parameter in pipe.parameters():
            parameter.grad = None

    def _say_goodbye(self, timelines: list[Timeline]) -> None:
        if not self._silent:
            first, *others = timelines
            self._output.write_text(first.to_html(*others), encoding="utf-8")
        self._screen.title("What next")
        self._screen.say(f"The measured steps, to zoom and hover: {self._output.resolve()}")
        self._screen.say("Another schedule:  taktline demo --ranks 4 --schedule zbv --local")
        self._screen.say("Your own model:    examples/gpt.py, and docs/pipeline.md")
        self._screen.say("All commands:      taktline --help")
