"""Random inputs for every entrance: whatever comes in, what comes out is an error of ours or none.

A target is a module in ``tests/fuzz/targets`` with a line of docstring and two functions:

    draw(random) -> input      an input from a ``random.Random``: the same for the same seed
    try_(input) -> None        what a user would do with it

Nothing else is to be done for a new one: ``python -m tests.fuzz`` and the tests find it by itself.
"""
