"""What ``taktline demo`` does: trains a small GPT on the source of this package, and compares."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

import taktline
from taktline.cli.options import print_table
from taktline.plan import Costs, Kind, Plan, Timeline, peak_memory, simulate
from taktline.train import Pipeline

_CONTEXT = 64
_WIDTH = 96
_HEADS = 4
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


class GPT(nn.Module):
    """Predicts the next byte of a text; its head is its embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(256, _WIDTH)
        self.places = nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, _HEADS, 4 * _WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 256, bias=False)
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.letters.weight

    def forward(self, text: Tensor) -> Tensor:
        """How likely each byte is to come next, at each place."""
        x = self.letters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        causal = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        for block in self.blocks:
            x = block(x, causal, is_causal=True)
        return self.head(self.norm(x))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of the next letters."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Text:
    """The package's own source code, and random passages of it."""

    def __init__(self) -> None:
        files = sorted(Path(taktline.__file__).parent.rglob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)
        self.files = len(files)
        self.letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Passages, and each of them one letter further on; the same ones for a step each time."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.letters) - _CONTEXT, (size,), generator=generator)
        passages = torch.stack([self.letters[start : start + _CONTEXT + 1] for start in starts])
        return passages[:, :-1], passages[:, 1:]


@dataclass
class Tour:
    """The demo on one rank, or on all ranks if they are local."""

    ranks: int
    schedule: str
    microbatches: int
    steps: int
    output: Path
    local: bool
    command: str
    """How the user calls taktline."""

    def __post_init__(self) -> None:
        self._text = Text()
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
        print_table(rows, ["step"])
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
            MeasuredSchedule(pipe.plan, ran, separate=not self.local)
            for pipe, ran in zip(pipes, measured, strict=True)
        ]
        if not self._silent:
            print_table([schedule.row() for schedule in schedules], ["schedule"])
        self._say(conclusion(schedules))
        return [schedule.middle for schedule in schedules]

    def _say_goodbye(self, timelines: list[Timeline]) -> None:
        if not self._silent:
            first, *others = timelines
            self.output.write_text(first.to_html(*others), encoding="utf-8")
        self._title("What next")
        self._say(f"These steps, to zoom and hover:  {self.output.resolve()}")
        self._say(f"Another schedule:  {self.command} demo --ranks 4 --schedule zbv --local")
        self._say(f"All of them:       {self.command} compare")
        self._say("Your own model, in Python:")
        self._say(_YOUR_OWN)


@dataclass(frozen=True)
class MeasuredSchedule:
    """A schedule, with a measured step of each round."""

    plan: Plan
    measured: Sequence[Timeline]
    separate: bool
    """Whether the ranks ran at the same time. If they took turns, in one thread, the step is
    predicted from how long each action took."""

    @cached_property
    def rounds(self) -> list[Timeline]:
        """The steps, as measured or as predicted."""
        if self.separate:
            return list(self.measured)
        return [simulate(self.plan, durations(timeline)) for timeline in self.measured]

    @cached_property
    def middle(self) -> Timeline:
        """The step that takes the median of the times; the one that is drawn."""
        return sorted(self.rounds, key=lambda step: step.makespan)[len(self.rounds) // 2]

    @property
    def noise(self) -> float:
        """How far half of the rounds are from the median, at most."""
        return statistics.median(abs(s.makespan - self.middle.makespan) for s in self.rounds)

    @property
    def in_flight(self) -> float:
        """The most micro-batches whose activations a rank keeps at once."""
        return float(peak_memory(self.plan).max())

    def row(self) -> dict[str, str]:
        """Its line in the table."""
        predicted = simulate(self.plan, Costs.from_timeline(*self.measured)).makespan
        return {
            "schedule": self.plan.name,
            "stages": str(self.plan.stages),
            "step/ms": f"{self.middle.makespan:.0f}",
            "±": f"{self.noise:.0f}",
            "predicted": f"{predicted:.0f}" if self.separate else "–",
            "bubble": f"{self.middle.bubble():.1%}",
            "memory": f"{self.in_flight:g}",
        }


def durations(timeline: Timeline) -> Costs:
    """The costs of a step without any waiting or messages: as if each rank went on at once."""
    rows = timeline.plan.rows
    took = np.where(rows.kind <= Kind.W, timeline.end - timeline.start, 0.0)
    end = np.cumsum(took)
    return Costs.from_timeline(replace(timeline, start=end - took, end=end, arrival=None))


def conclusion(schedules: Sequence[MeasuredSchedule]) -> str:
    """The choice that the table supports, as far as the noise allows."""
    fastest, second, *_ = sorted(schedules, key=lambda schedule: schedule.middle.makespan)
    close = [
        schedule
        for schedule in schedules
        if schedule.middle.makespan - fastest.middle.makespan <= max(schedule.noise, fastest.noise)
    ]
    lines = [
        "step: the median of rounds in which they took turns; ±: half of them were as near to it; "
        "predicted:\nby the simulator, from the measured costs; bubble: of that step, as on the "
        "page; memory: peak\nactivations on a rank, in micro-batches."
        if fastest.separate
        else "These ranks share a thread, so step and bubble are those that the simulator "
        "predicts for a process\neach, from how long each action took; memory: peak "
        "activations on a rank, in micro-batches."
    ]
    if len(close) == 1:
        gain = 1 - fastest.middle.makespan / second.middle.makespan
        choice = f"{fastest.plan.name} here: {gain:.0%} less time than {second.plan.name}"
    else:
        lean = min(close, key=lambda schedule: (schedule.in_flight, schedule.middle.makespan))
        names = ", ".join(schedule.plan.name for schedule in close)
        lines.append(f"The noise of this machine hides how {names} differ.")
        choice = f"{lean.plan.name} here: none of them keeps fewer micro-batches"
    lines.append(f"So choose {choice}.")
    return "\n".join(lines)
