"""Cuts by what layers cost."""
