"""Faults of every kind, in every phase of a step: nothing hangs, and every rank names the cause.

``python -m tests.faults`` runs the table, ``python -m tests.faults --case NAME`` one case alone.
"""
