"""Steps as CUDA graphs: a rank's program is captured once for a kind of step, and replayed.

::

    step 1      learns what crosses boundaries    eagerly
    step 2, 3   warm up                           eagerly
    step 4      captured, and replayed
    step 5 …    replayed

A graph works on fixed memory: the batch is copied into buffers, gradients are added up in buffers,
losses and outputs are copied out. A replay runs no Python, so all state that Python would read is
compared before: after a change, the program is captured again. A step is captured whole, or runs
eagerly, and a warning says why: also if its forward keeps state in attributes of modules.
"""
