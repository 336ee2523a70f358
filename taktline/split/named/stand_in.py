"""What is in the place of a model's submodules in one of its pieces.

A *stand-in* is in the place of a submodule of another stage: it has no parameters, and gives
placeholders. A *gate* is a submodule of this stage, met on its way in. An *image* is the copy of a
submodule without data, as a walk meets it. All are of the submodule's class, or rather of a class
made from it, so that a forward finds what it expects; the class itself and the model are left
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import nn

from taktline.errors import PartitionError
from taktline.side_values import uncompiled
from taktline.split.named.placeholder import here, resolved
from taktline.split.named.twin import Twin

__all__ = ["ROWS", "call_of", "gate", "image", "is_gate", "made_from", "stand_in"]

ROWS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""What holds submodules by their places or names."""


class _Gate:
    """Mixed into the class of a submodule of this stage."""

    unit = ""
    """Its name in the model."""
    begins: int | None = None
    """The call of it with which the stage begins."""
    ends: int | None = None
    """The call of it with which the next stage begins."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not a hook: a checkpoint that the class puts around itself must see the real arguments.
        guide: Any = here.scene
        if guide is not None and guide.bare:
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if guide is None or not hasattr(
            guide, "meet_own"
        ):  # on its own, or a second time under a checkpoint
            args, kwargs = resolved((args, kwargs))
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if guide.is_foreign(self):
            return guide.meet_early(self, args, kwargs)
        args, kwargs = guide.meet_own(self, args, kwargs)
        output = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        guide.note_own(self, args, kwargs, output)
        return output


class _Image:
    """Mixed into the class of the copy of a submodule without data."""

    _twin: Twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        guide: Any = here.scene
        if hasattr(guide, "meet_foreign"):
            return guide.meet_foreign(self._twin, self._twin.training, args, kwargs)
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class _StandIn:
    """Mixed into the class of a submodule of another stage."""

    _twin: Twin
    training: bool
    _forward_hooks: dict[int, Any]
    _forward_pre_hooks: dict[int, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        guide: Any = here.scene
        is_watched = self._forward_hooks or self._forward_pre_hooks
        if guide is not None and guide.repeats and not is_watched:
            return guide.meet_again(self._twin, self.training, args, kwargs)
        # Whatever the class puts around its call, there is nothing to be checkpointed or the like.
        return nn.Module.__call__(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give placeholders, or end this stage."""
        twin: Twin = vars(self)["_twin"]
        guide: Any = here.scene
        if not hasattr(guide, "meet_foreign"):
            raise PartitionError(
                f"{twin.name!r} belongs to another stage; it cannot be called on its own here"
            )
        return guide.meet_foreign(twin, vars(self)["training"], args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile nothing."""

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register a hook, and say so: calls that are like others do without the stand-in."""
        self._twin.hooked.append(self._twin.name)
        return nn.Module.register_forward_hook(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register a hook, and say so."""
        self._twin.hooked.append(self._twin.name)
        return nn.Module.register_forward_pre_hook(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        twin: Twin | None = vars(self).get("_twin")
        if twin is None or name in vars(self)["_parameters"]:
            return nn.Module.__getattr__(self, name)  # pyright: ignore[reportArgumentType]
        return getattr(twin.module, name)

    # It computes nothing, so torch.compile need not look into it.
    uncompiled(__call__)
    uncompiled(forward)

    # A forward that looks into a submodule finds what the model has; others, what this stage has.

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """What a forward finds in it."""
        return nn.Module.named_children(self._looked_into())

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """What a forward finds in it."""
        return nn.Module.named_modules(self._looked_into(), *args, **kwargs)

    def _looked_into(self) -> Any:
        return self if here.scene is None else self._twin.module


def _through_twin(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self._twin.module, name)(*args)

    return method


_LOOKS = ("__contains__", "__getitem__", "__iter__", "__len__", "items", "keys", "values")
_StandInRow = type("_StandInRow", (_StandIn,), {name: _through_twin(name) for name in _LOOKS})
"""Mixed into the class of a row of another stage: a forward may go through it one by one."""


@cache
def made_from(kind: type[nn.Module], mixin: type, **attributes: Any) -> type:
    """A class with a mixin before a module's own class, and its name."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin, kind), {"__doc__": kind.__doc__, **names, **attributes})


def gate(
    module: nn.Module, unit: str, *, begins: int | None = None, ends: int | None = None
) -> nn.Module:
    """A submodule, met on its way in: the same in all but its class, parameters included.

    ``begins`` and ``ends`` are the calls of it with which the stage, and the next one, begin.
    """
    made = object.__new__(made_from(type(module), _Gate, unit=unit, begins=begins, ends=ends))
    made.__dict__ = module.__dict__
    return made


def is_gate(module: nn.Module) -> bool:
    """Whether a submodule is met on its way in, with nothing around it."""
    return isinstance(module, _Gate)


def image(twin: Twin) -> nn.Module:
    """The copy of a submodule, to be met by a walk."""
    if not isinstance(twin.module, _Image):
        twin.module.__class__ = made_from(type(twin.module), _Image)
        vars(twin.module)["_twin"] = twin
    return twin.module


def call_of(module: nn.Module) -> tuple[type, Callable[..., Any]]:
    """The class of a submodule, and what a call of it does, without the gate."""
    kind = type(module)
    if isinstance(module, _Gate) and kind.__call__ is _Gate.__call__:
        return kind, super(_Gate, module).__call__.__func__  # pyright: ignore[reportAttributeAccessIssue]
    return kind, kind.__call__


def stand_in(twin: Twin, kind: type[nn.Module], training: bool) -> nn.Module:
    """What is in the place of a submodule of another stage."""
    mixin = _StandInRow if issubclass(kind, ROWS) else _StandIn
    made = object.__new__(made_from(kind, mixin))
    nn.Module.__init__(made)
    vars(made)["_twin"] = twin
    vars(made)["training"] = training
    return made
