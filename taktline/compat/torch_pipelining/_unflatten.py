"""Calls of submodules, found again in a flat graph."""
