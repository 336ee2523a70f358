"""Skip connections: a forward puts a value, and a later one gets it, in any stage.

::

    class Down(nn.Module):                    class Up(nn.Module):
        def forward(self, x):                     def forward(self, x):
            x = self.block(x)                         x = torch.cat([x, skip.get("level 1")], 1)
            skip.put("level 1", x)                    return self.block(x)
            return self.shrink(x)

>>> from taktline import skip
>>> skip.put("level 0", torch.zeros(2))
>>> skip.get("level 0")
tensor([0., 0.])

A value travels with the activations from stage to stage, up to the last one that gets it. The
gradients of all its uses are added up. Outside of a pipeline a value is kept until another one is
put under its name.
"""

from __future__ import annotations

import torch

from taktline.checks import refuse
from taktline.errors import SkipError
from taktline.side_values import current_aside, uncompiled


@uncompiled
def put(name: str, value: torch.Tensor) -> None:
    """Put a value under a name, for this stage and later ones.

    >>> put("level 1", torch.ones(2))
    >>> get("level 1")
    tensor([1., 1.])
    """
    if not isinstance(name, str):
        refuse("the name of a skip", "a text", name, SkipError)
    if not isinstance(value, torch.Tensor):
        raise SkipError(f"skip.put({name!r}, …) takes a tensor, not {type(value).__name__}")
    current_aside().put(name, value)


@uncompiled
def get(name: str) -> torch.Tensor:
    """The value that was put under a name; any number of stages may get it.

    >>> put("positions", torch.arange(3))
    >>> get("positions")
    tensor([0, 1, 2])
    """
    if not isinstance(name, str):
        refuse("the name of a skip", "a text", name, SkipError)
    return current_aside().get(name)
