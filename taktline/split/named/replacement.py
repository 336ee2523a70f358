"""What is in the place of a model's submodules in one of its pieces.

An *own unit* is a submodule of this stage; a call of it is reported to the stage's run. A *foreign
unit* replaces a submodule of another stage: it has no parameters, and returns placeholders. A
*copied unit* is the copy of a submodule without data, in the model that a walk goes through. All
are of the submodule's class, or rather of a class made from it, so that a forward finds what it
expects; the class itself and the model are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from inspect import getattr_static
from typing import Any

from torch import nn

from taktline.errors import PartitionError
from taktline.side_values import uncompiled
from taktline.split.named.placeholder import here, resolved
from taktline.split.named.shape_probe import ShapeProbe

__all__ = ["ROWS", "call_of", "copied_unit", "foreign_unit", "is_own_unit", "made_from", "own_unit"]

ROWS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""What holds submodules by their places or names."""


class _OwnUnit:
    """Mixed into the class of a submodule of this stage."""

    unit = ""
    """Its name in the model."""
    begins: int | None = None
    """The call of it with which the stage begins."""
    ends: int | None = None
    """The call of it with which the next stage begins."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not a hook: a checkpoint that the class puts around itself must see the real arguments.
        context: Any = here.context
        if context is not None and context.bare:
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if context is None or not hasattr(
            context, "before_own"
        ):  # on its own, or a second time under a checkpoint
            args, kwargs = resolved((args, kwargs))
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if context.is_foreign(self):
            return context.call_early(self, args, kwargs)
        args, kwargs = context.before_own(self, args, kwargs)
        output = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        context.note_own(self, args, kwargs, output)
        return output


class _CopiedUnit:
    """Mixed into the class of the copy of a submodule without data."""

    _probe: ShapeProbe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context: Any = here.context
        if hasattr(context, "call_foreign"):
            return context.call_foreign(self._probe, self._probe.training, args, kwargs)
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class _ForeignUnit:
    """Mixed into the class of a submodule of another stage."""

    _probe: ShapeProbe
    training: bool
    _forward_hooks: dict[int, Any]
    _forward_pre_hooks: dict[int, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context: Any = here.context
        is_watched = self._forward_hooks or self._forward_pre_hooks
        if context is not None and context.repeats and not is_watched:
            return context.call_again(self._probe, self.training, args, kwargs)
        # Whatever the class puts around its call, there is nothing to be checkpointed or the like.
        return nn.Module.__call__(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give placeholders, or end this stage."""
        probe: ShapeProbe = vars(self)["_probe"]
        context: Any = here.context
        if not hasattr(context, "call_foreign"):
            raise PartitionError(
                f"{probe.name!r} belongs to another stage; it cannot be called on its own here"
            )
        return context.call_foreign(probe, vars(self)["training"], args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile nothing."""

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register a hook, and say so: calls that are like others do without this."""
        self._probe.hooked.append(self._probe.name)
        return nn.Module.register_forward_hook(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register a hook, and say so."""
        self._probe.hooked.append(self._probe.name)
        return nn.Module.register_forward_pre_hook(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        probe: ShapeProbe | None = vars(self).get("_probe")
        if probe is None or name in vars(self)["_parameters"]:
            return nn.Module.__getattr__(self, name)  # pyright: ignore[reportArgumentType]
        return getattr(probe.module, name)

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
        return self if here.context is None else self._probe.module


def _through_probe(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self._probe.module, name)(*args)

    return method


_LOOKS = ("__contains__", "__getitem__", "__iter__", "__len__", "items", "keys", "values")
_ForeignRow = type("_ForeignRow", (_ForeignUnit,), {name: _through_probe(name) for name in _LOOKS})
"""Mixed into the class of a row of another stage: a forward may go through it one by one."""


@cache
def made_from(kind: type[nn.Module], mixin: type, **attributes: Any) -> type:
    """A class with a mixin before a module's own class, and its name."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin, kind), {"__doc__": kind.__doc__, **names, **attributes})


def own_unit(
    module: nn.Module, unit: str, *, begins: int | None = None, ends: int | None = None
) -> nn.Module:
    """A submodule, met on its way in: the same in all but its class, parameters included.

    ``begins`` and ``ends`` are the calls of it with which the stage, and the next one, begin.
    """
    made = object.__new__(made_from(type(module), _OwnUnit, unit=unit, begins=begins, ends=ends))
    made.__dict__ = module.__dict__
    return made


def is_own_unit(module: nn.Module) -> bool:
    """Whether a submodule is met on its way in, with nothing around it."""
    return isinstance(module, _OwnUnit)


def copied_unit(probe: ShapeProbe) -> nn.Module:
    """The copy of a submodule, to be met by a walk."""
    if not isinstance(probe.module, _CopiedUnit):
        probe.module.__class__ = made_from(type(probe.module), _CopiedUnit)
        vars(probe.module)["_probe"] = probe
    return probe.module


def call_of(module: nn.Module) -> tuple[type, Callable[..., Any]]:
    """The class of a submodule, and what a call of it does, past the report."""
    kind = type(module)
    if isinstance(module, _OwnUnit) and kind.__call__ is _OwnUnit.__call__:
        return kind, super(_OwnUnit, module).__call__.__func__  # pyright: ignore[reportAttributeAccessIssue]
    return kind, kind.__call__


@cache
def _foreign_kind(kind: type[nn.Module]) -> type:
    """The class of what replaces modules of a class.

    A default in the class must not hide what the module has itself.
    """
    mixin = _ForeignRow if issubclass(kind, ROWS) else _ForeignUnit
    made = made_from(kind, mixin)
    for name in {name for part in kind.__mro__ for name in vars(part)} - set(dir(nn.Module)):
        if not hasattr(getattr_static(kind, name), "__get__"):
            setattr(made, name, _of_probe(name))
    return made


def _of_probe(name: str) -> property:
    return property(
        lambda self: getattr(self._probe.module, name),
        lambda self, value: setattr(self._probe.module, name, value),
    )


def foreign_unit(probe: ShapeProbe, kind: type[nn.Module], training: bool) -> nn.Module:
    """What is in the place of a submodule of another stage."""
    made = object.__new__(_foreign_kind(kind))
    nn.Module.__init__(made)
    vars(made)["_probe"] = probe
    vars(made)["training"] = training
    return made
