"""Compiled stages whose backward is split: gradients of inputs, and of weights."""

from __future__ import annotations

from taktline.stage.compiled.compile_stages import compile_stages

__all__ = ["compile_stages"]
