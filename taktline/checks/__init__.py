"""What comes from outside is checked before it is used: JSON texts here, without torch."""

from __future__ import annotations

from taktline.checks.json_text import loads
from taktline.checks.shape import Either, conform, read

__all__ = ["Either", "conform", "loads", "read"]
