"""Units: the modules of a stage in the place of a model's submodules.

An *own unit* is a submodule of this stage, and reports its calls to the run of the stage. A
*foreign unit* replaces a submodule of another stage: without parameters, it returns placeholders.
A *copied unit* is a submodule without data, in the model of a dry run. The class of each is derived
from the submodule's, so that a forward finds what it expects; that class and the model stay
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import getattr_static
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from taktline.errors import PartitionError
from taktline.side_values import uncompiled
from taktline.split.named.placeholder import here, resolved
from taktline.split.named.shape_probe import ShapeProbe


class _OwnUnit:
    """Mixed into the class of a submodule of this stage."""

    unit = ""
    """The name of the submodule in the model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not a hook: a checkpoint that the class puts around its call must see the real arguments.
        context: Any = here.context
        if context is not None and context.bare:
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if context is None or not context.runs_model:
            # The user calls the unit, or a checkpoint runs it again in the backward.
            args, kwargs = resolved((args, kwargs))
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if context.is_foreign(self):
            return context.call_early(self, args, kwargs)
        args, kwargs = context.before_own(self, args, kwargs)
        output = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        context.note_own(self, args, kwargs, output)
        return output


class _CopiedUnit:
    """Mixed into the class of a submodule without data."""

    _probe: ShapeProbe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context: Any = here.context
        if context is not None and context.runs_model:
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
        has_hooks = self._forward_hooks or self._forward_pre_hooks
        if context is not None and context.runs_model and not has_hooks:
            return context.call_foreign(self._probe, self.training, args, kwargs)
        # Not the call of the class, which may checkpoint: there is nothing to compute.
        return nn.Module.__call__(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return placeholders, or end this stage."""
        context: Any = here.context
        if context is None or not context.runs_model:
            raise PartitionError(
                f"{self._probe.name!r} belongs to another stage; it cannot be called on its own "
                "here"
            )
        return context.call_foreign(self._probe, self.training, args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile nothing."""

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register a hook, and note that the unit has one."""
        self._probe.hooked.append(self._probe.name)
        return nn.Module.register_forward_hook(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register a hook, and note that the unit has one."""
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

    # A running forward finds the submodules that the model has; others, those that the stage has.

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return nn.Module.named_children(self._as_seen())

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return nn.Module.named_modules(self._as_seen(), *args, **kwargs)

    def _as_seen(self) -> Any:
        return self if here.context is None else self._probe.module


def _method_of_probe(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self._probe.module, name)(*args)

    return method


ROWS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules that hold others by place or name."""
_LOOKS = ("__contains__", "__getitem__", "__iter__", "__len__", "items", "keys", "values")
_ForeignRow = type(
    "_ForeignRow", (_ForeignUnit,), {name: _method_of_probe(name) for name in _LOOKS}
)
"""Mixed into the class of a list of modules of another stage: a forward may loop over it."""


@cache
def derived_class(kind: type[nn.Module], mixin: type, **attributes: Any) -> type:
    """A class with a mixin before a module's own class, and the name of that."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin, kind), {"__doc__": kind.__doc__, **names, **attributes})


def own_unit(module: nn.Module, unit: str) -> nn.Module:
    """A submodule that reports its calls: it shares everything with the module but its class."""
    made = object.__new__(derived_class(type(module), _OwnUnit, unit=unit))
    made.__dict__ = module.__dict__
    return made


def is_own_unit(module: nn.Module) -> bool:
    """Whether a submodule is an own unit, and nothing is wrapped around it."""
    return isinstance(module, _OwnUnit)


def copied_unit(probe: ShapeProbe) -> nn.Module:
    """The module of a probe, which reports its calls to a dry run."""
    if not isinstance(probe.module, _CopiedUnit):
        probe.module.__class__ = derived_class(type(probe.module), _CopiedUnit)
        vars(probe.module)["_probe"] = probe
    return probe.module


def call_of(module: nn.Module) -> tuple[type, Callable[..., Any]]:
    """The class of a submodule, and its call without the report of an own unit."""
    kind = type(module)
    if isinstance(module, _OwnUnit) and kind.__call__ is _OwnUnit.__call__:
        return kind, super(_OwnUnit, module).__call__.__func__  # pyright: ignore[reportAttributeAccessIssue]
    return kind, kind.__call__


@cache
def _foreign_class(kind: type[nn.Module]) -> type:
    """The class of foreign units.

    Its class attributes come from the probe: a default must not hide what the module has set.
    """
    made = derived_class(kind, _ForeignRow if issubclass(kind, ROWS) else _ForeignUnit)
    for name in {name for part in kind.__mro__ for name in vars(part)} - set(dir(nn.Module)):
        if not hasattr(getattr_static(kind, name), "__get__"):
            setattr(made, name, _attribute_of_probe(name))
    return made


def _attribute_of_probe(name: str) -> property:
    return property(
        lambda self: getattr(self._probe.module, name),
        lambda self, value: setattr(self._probe.module, name, value),
    )


def foreign_unit(probe: ShapeProbe, kind: type[nn.Module], training: bool) -> nn.Module:
    """The replacement of a submodule of another stage."""
    made = object.__new__(_foreign_class(kind))
    nn.Module.__init__(made)
    vars(made)["_probe"] = probe
    vars(made)["training"] = training
    return made


def inner_modules(units: Mapping[str, nn.Module]) -> dict[int, str]:
    """The names of all modules inside of units, by their ids."""
    return {
        id(module): f"{unit}.{name}"
        for unit, whole in units.items()
        for name, module in nn.Module.named_modules(whole)
        if name
    }


@contextmanager
def noting_inner_calls(context: Any, names: Mapping[int, str]) -> Iterator[None]:
    """Report to a context each call of an inner module that its unit has not made.

    ``names`` are the inner modules by their ids.
    """

    def note(module: nn.Module, args: Any) -> None:
        if here.context is context and not context.is_inside and id(module) in names:
            context.note_inner(names[id(module)])

    hook = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()
