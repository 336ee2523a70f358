"""What is in the place of a model's submodules in one of its pieces.

A *stand-in* is in the place of a submodule of another stage: it has no parameters, and gives
ghosts. A *gate* is a submodule of this stage, met on its way in. Both are of the submodule's class,
or rather of a class made from it, so that a forward finds what it expects; the class itself and
the model are left alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from taktline.errors import PartitionError
from taktline.split.named.ghost import current, resolved
from taktline.split.named.twin import Twin

__all__ = ["gate", "made_from", "stand_in"]


class _Gate:
    """Mixed into the class of a submodule of this stage."""

    _begins = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not a hook: a checkpoint that the class puts around itself must see the real arguments.
        guide: Any = current()
        if hasattr(guide, "meet_own"):
            args, kwargs = guide.meet_own(self._begins, type(self).__name__, args, kwargs)
        else:  # on its own, or a second time under a checkpoint
            args, kwargs = resolved((args, kwargs))
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class _Entrance(_Gate):
    """Mixed into the class of the submodule with which a stage begins."""

    _begins = True


class _StandIn:
    """Mixed into the class of a submodule of another stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Whatever the class puts around its call, there is nothing to be checkpointed or the like.
        return nn.Module.__call__(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give ghosts, or end this stage."""
        twin: Twin = vars(self)["_twin"]
        guide: Any = current()
        if not hasattr(guide, "meet_foreign"):
            raise PartitionError(
                f"{twin.name!r} belongs to another stage; it cannot be called on its own here"
            )
        return guide.meet_foreign(twin, vars(self)["training"], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        twin: Twin | None = vars(self).get("_twin")
        if twin is None or name in vars(self)["_parameters"]:
            return nn.Module.__getattr__(self, name)  # pyright: ignore[reportArgumentType]
        return getattr(twin.module, name)


@cache
def made_from(kind: type[nn.Module], mixin: type) -> type[nn.Module]:
    """A class with a mixin before a module's own class, and its name."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin, kind), {"__doc__": kind.__doc__, **names})


def gate(module: nn.Module, *, begins: bool) -> nn.Module:
    """A submodule, met on its way in: the same in all but its class, parameters included.

    ``begins`` is whether the stage begins with it.
    """
    made = object.__new__(made_from(type(module), _Entrance if begins else _Gate))
    made.__dict__ = module.__dict__
    return made


def stand_in(twin: Twin, training: bool) -> nn.Module:
    """What is in the place of a submodule of another stage."""
    made = object.__new__(made_from(type(twin.module), _StandIn))
    nn.Module.__init__(made)
    vars(made)["_twin"] = twin
    vars(made)["training"] = training
    return made
