"""Stages as torch's internals know them: with caches by micro-batch, and messages of their own."""
