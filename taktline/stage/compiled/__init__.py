"""Compiled stages whose backward comes in two halves: gradients of inputs, and of weights."""

from __future__ import annotations

from taktline.stage.compiled.compile_stages import compile_stages

__all__ = ["compile_stages"]
