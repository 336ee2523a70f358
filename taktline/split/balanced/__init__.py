"""Cuts into stages of equal costs."""
