"""Random plans, shapes, values and faults over gloo and local ranks: nothing may hang or be wrong.

``python -m tests.torture --seconds 120`` draws cases until the time is over. Each has a name such
as ``gloo-17``, from which all of it follows: ``--case gloo-17`` runs that one alone.
"""
