"""What the doctor has found out, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from taktline.text import counted

__all__ = ["Finding", "MeasuredLink", "Report", "Run", "Verdict", "of_ranks"]


class Verdict(StrEnum):
    """How a check went."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found, and what to do about it."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """From one rank to another: seconds for a small message, bytes a second for large ones."""

    sender: int
    receiver: int
    latency: float
    bandwidth: float
    intact: bool = True
    """Whether what arrived is what was sent."""


@dataclass(frozen=True, slots=True)
class Run:
    """A tiny pipeline under one schedule."""

    schedule: str
    stages_per_rank: int
    seconds: float | None = None
    """For one step."""
    wrong: str = ""
    """Where it differs from the plain model."""
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether it ran, with the right gradients."""
        return not self.error and not self.wrong


@dataclass(slots=True)
class Report:
    """All findings; the same on every rank, as far as they could talk."""

    way: str
    """The backend, or ``local``."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """What each rank says of itself."""
    findings: list[Finding] = field(default_factory=list)
    links: list[MeasuredLink] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether nothing failed; warnings are no failures."""
        return all(finding.verdict != Verdict.FAILED for finding in self.findings)

    def count(self, verdict: Verdict) -> int:
        """How many findings have a verdict."""
        return sum(finding.verdict == verdict for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {"well": self.well, **asdict(self)}


def of_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, not too many of them.

    >>> of_ranks([2]), of_ranks([0, 1, 3]), of_ranks(range(12))
    ('rank 2', 'ranks 0, 1, 3', '12 ranks (0, 1, 2, 3, …)')
    """
    if len(ranks) > 8:
        return f"{counted(len(ranks), 'rank')} ({', '.join(map(str, ranks[:4]))}, …)"
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
