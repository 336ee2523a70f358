"""The demo, part by part."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from taktline.cli.demo.comparison import MeasuredSchedule, conclusion
from taktline.cli.demo.gpt import GPT, Text, loss_fn
from taktline.cli.launch import called
from taktline.cli.options import rich_table
from taktline.plan import Timeline
from taktline.train import Pipeline

_SAMPLES = 4
"""In a micro-batch."""
_COMPARED = 10
"""So many steps are run without a pipeline, too."""
_ROUNDS = 7
"""In each, a step of every schedule is measured."""
_RATE = 2e-3
_ROUNDING = 1e-3
_YOUR_OWN = """
    import taktline as tl

    pipe = tl.Pipeline(model, example=(x[:4],), microbatches=8, loss_fn=loss_fn, ranks=2)
    loss = pipe.step(x, target=y)"""


@dataclass
class Tour:
    """The demo on one rank, or on all ranks if they are local."""

    ranks: int
    schedule: str
    microbatches: int
    steps: int
    output: Path
    local: bool
    _text: Text = field(default_factory=Text, init=False)

    def __post_init__(self) -> None:
        self._silent = not self.local and os.environ["RANK"] != "0"  # one rank prints
        self._console = Console(quiet=self._silent, highlight=False)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._text.batch(step, _SAMPLES * self.microbatches)

    def run(self) -> None:
        """All parts, one after the other."""
        self._title("1. A model, cut into stages")
        pipe = self._pipeline(self.schedule)
        letters, files = len(self._text.letters), self._text.files
        self._say(f"{pipe}\n\nIts text: the {files} files of this package, {letters:,} letters.")
        self._title(f"2. It trains, {self.steps} steps")
        losses = self._train(pipe)
        self._title("3. The same without a pipeline")
        self._compare(losses)
        self._title("4. Three schedules, side by side")
        timelines = self._measure()
        self._say_goodbye(timelines)

    def _title(self, text: str) -> None:
        self._console.print(f"\n[bold]{text}[/]\n")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _pipeline(self, schedule: str) -> Pipeline:
        """The model at its beginning, with two layers for each rank: enough for any schedule."""
        return Pipeline(
            GPT(2 * self.ranks),
            example=(self._text.batch(0, _SAMPLES)[0],),
            schedule=schedule,
            microbatches=self.microbatches,
            loss_fn=loss_fn,
            ranks=self.ranks,
            device="cpu",
        )

    def _train(self, pipe: Pipeline) -> list[float]:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=_RATE)
        losses: list[float] = []
        batches = [self._batch(step) for step in range(self.steps)]
        for passages, following in pipe.progress(batches, every=max(1, self.steps // 10)):
            loss = pipe.step(passages, target=following)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def _compare(self, losses: list[float]) -> None:
        """Run the first steps as plain training, on the first rank; the others wait for it."""
        if self._silent:
            return
        model = GPT(2 * self.ranks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
        rows: list[dict[str, str]] = []
        largest = 0.0
        for step, loss in enumerate(losses[:_COMPARED]):
            passages, following = self._batch(step)
            plain = loss_fn(model(passages), following)
            plain.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            difference = abs(plain.item() - loss)
            largest = max(largest, difference)
            row = {"step": str(step + 1), "pipeline": f"{loss:.6f}", "plain": f"{plain.item():.6f}"}
            rows.append({**row, "difference": f"{difference:.0e}"})
        self._console.print(rich_table(rows, ["step"]))
        verdict = "equal, but for rounding" if largest < _ROUNDING else "NOT EQUAL"
        self._say(f"The losses are {verdict}.")

    def _measure(self) -> list[Timeline]:
        """Measure three schedules in turn, so that a disturbance hits all of them."""
        names = list(dict.fromkeys([self.schedule, "gpipe", "1f1b", "zbv"]))[:3]
        pipes = [self._pipeline(name) for name in names]
        measured: list[list[Timeline]] = [[] for _ in pipes]
        for round_ in range(_ROUNDS + 1):
            passages, following = self._batch(round_)
            for pipe, timelines in zip(pipes, measured, strict=True):
                with pipe.trace() as trace:
                    pipe.step(passages, target=following)
                for parameter in pipe.parameters():
                    parameter.grad = None
                if round_:  # the first one learns the shapes
                    timelines.append(trace.timeline)
        schedules = [
            MeasuredSchedule(pipe.plan, ran, apart=not self.local)
            for pipe, ran in zip(pipes, measured, strict=True)
        ]
        self._console.print(rich_table([schedule.row() for schedule in schedules], ["schedule"]))
        self._say(conclusion(schedules))
        return [schedule.middle for schedule in schedules]

    def _say_goodbye(self, timelines: list[Timeline]) -> None:
        if not self._silent:
            first, *others = timelines
            self.output.write_text(first.to_html(*others), encoding="utf-8")
        command = called()
        self._title("What next")
        self._say(f"These steps, to zoom and hover:  {self.output.resolve()}")
        self._say(f"Another schedule:  {command} demo --ranks 4 --schedule zbv --local")
        self._say(f"All of them:       {command} compare")
        self._say("Your own model, in Python:")
        self._say(_YOUR_OWN)
