"""Steps as CUDA graphs: a rank's program is captured once for a kind of batch, and replayed.

::

    step 1      learns what crosses boundaries    eagerly
    step 2, 3   warm up                           eagerly
    step 4      captured, and replayed
    step 5 …    replayed

What a graph works on stays where it is: the batch is copied into buffers of its own, gradients are
added up in buffers that stay, losses and outputs are copied out. A replay runs no Python, so all
that Python would look at is looked at before: where something has changed, the program is captured
anew; what cannot be captured runs eagerly, and a warning says why.
"""

from __future__ import annotations

from taktline.runtime.capture.captures import Captures
from taktline.runtime.capture.cuda import CudaGraphs, Graphs

__all__ = ["Captures", "CudaGraphs", "Graphs"]
