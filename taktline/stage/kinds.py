"""Compiled modules: equal ones share what torch has compiled.

::

    h.0 ─┐                               ┌─ (8, 128) ─▶ a function of its own
    h.1 ─┼─▶ a kind: classes and shapes ─┼─ (4, 128) ─▶ another one
    h.2 ─┘                               └─ others   ─▶ one more, whose sizes may become dynamic

torch keeps what it compiles with the code of a function, gives up there after ``recompile_limit``
times, and lets a size that has changed there become dynamic. So each kind of module has functions
of its own. The module is an argument: torch compares its parameters by type and shape.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import chain, count, groupby, pairwise
from types import FunctionType
from typing import Any

import torch
from torch import nn

from taktline.errors import SplitError
from taktline.private import private
from taktline.text import counted

_log = logging.getLogger("taktline")

_SIZES = 2
"""For how many sizes a kind is compiled with the sizes as constants."""
_TOGETHER = 4
"""The most equal modules that are compiled as one."""
_UNLIKE = 3
"""How many modules of a kind compile for themselves before others get functions of their own."""


class _Running(threading.local):
    """In this thread: the name of the compiled module that runs, and whether it may compile."""

    name, may_compile = "a compiled module", True


running = _Running()


class _Shared(dict[Any, Callable[..., Any]]):
    """The functions that equal modules share, by the sizes of their arguments."""

    def __init__(self, name: str, options: dict[str, Any], *, several: bool) -> None:
        self._name, self._options, self._several = name, options, several
        self.compiling = defaultdict[Any, set[int]](set)
        """The modules for which a function was compiled."""

    def __missing__(self, sizes: Any) -> Callable[..., Any]:
        if sizes is not None and len(self) >= _SIZES:
            return self[None]
        # A new name: torch remembers changed sizes by the name and line of the code.
        name = f"{self._name}_{next(_numbers)}"
        code = (_call if self._several else _call_one).__code__.replace(co_name=name)
        made = FunctionType(code, globals(), name)
        self[sizes] = torch.compile(made, **self._options)
        return self[sizes]


_latest: dict[Hashable, _Shared] = {}
"""What the next module of a kind gets, in this process."""
_numbers = count()


def _call(units: Sequence[nn.Module], x: Any, *args: Any, **kwargs: Any) -> Any:
    for unit in units:
        x = unit._call_impl(x, *args, **kwargs)
    return x


def _call_one(units: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    return units[0]._call_impl(*args, **kwargs)


class CompiledCall:
    """The call of a module, by ``torch.compile`` with these options; ``name`` is for warnings.

    Or of several modules one after the other, which get the same arguments but for the first one.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.GELU())
    >>> for layer in layers:
    ...     layer._compiled_call_impl = CompiledCall(layer, "a layer", backend="eager")
    >>> summary([layers])
    'compiled: 3 modules of 2 kinds'
    """

    __slots__ = ("_options", "_shared", "eager", "kind", "name", "units")

    def __init__(self, units: nn.Module | Sequence[nn.Module], name: str, **options: Any) -> None:
        self.units = (units,) if isinstance(units, nn.Module) else tuple(units)
        self.name, self._options = name, options
        self._shared: _Shared | None = None
        self.eager = ""
        """Why torch runs a part of it eagerly."""
        self.kind = (*map(_kind_of, self.units), str(options))

    def along(self, units: Sequence[nn.Module], name: str) -> CompiledCall:
        """A call of several modules, compiled in the same way."""
        return CompiledCall(units, name, **self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; torch compiles what it does not know."""
        shared = self._shared or self._join()
        function = shared[tuple([x.shape for x in args if isinstance(x, torch.Tensor)])]
        if _attempts() != _seen["attempts"]:  # of others
            _reasons()
        outer, running.name = running.name, self.name
        try:
            return function(self.units, *args, **kwargs)
        finally:
            running.name = outer
            if _attempts() != _seen["attempts"]:
                shared.compiling[function].add(id(self))
                self._look(_reasons())

    def _join(self) -> _Shared:
        """Share with equal modules, unless those have shown to differ: by numbers in attributes."""
        found = _latest.get(self.kind)
        if found is None or any(len(units) >= _UNLIKE for units in found.compiling.values()):
            name = "_".join(dict.fromkeys(type(unit).__name__ for unit in self.units))
            found = _latest[self.kind] = _Shared(name, self._options, several=len(self.units) > 1)
        self._shared = found
        return found

    def _look(self, reasons: list[str]) -> None:
        """Warn of reasons to run a part eagerly, but for FSDP's hooks, around what is compiled."""
        first, *others = self.units
        if reasons and not self.eager and not hasattr(first, "_get_fsdp_state"):
            text = reasons[0].partition("Hint:")[0].partition("Developer debug")[0]
            self.eager = " ".join(text.split())
            if not others:  # else they are called one by one from now on, which shows the one
                what = "%s (%s) runs eagerly in part, as torch.compile says: %s"
                _log.warning(what, self.name, type(first).__name__, self.eager)


def _kind_of(unit: nn.Module) -> Hashable:
    tensors = chain(unit.named_parameters(), unit.named_buffers())
    shapes = [(name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors]
    return (*((path, type(inner)) for path, inner in unit.named_modules()), *shapes)


class CompiledChain:
    """Compiled modules that are called one after the other, several in one call of the compiler.

    Each such call takes time before its first kernel, and operations of neighbours can become one.
    Of many equal modules a few are compiled together, and shared by the others::

        embed h.0 h.1 h.2             one part
        embed h.0 h.1 … h.7 norm      embed │ h.0 … h.3 │ h.4 … h.7 │ norm
    """

    def __init__(self, units: Sequence[nn.Module], names: Sequence[str], where: str) -> None:
        """The ``units`` have calls that are compiled; ``names`` and ``where`` are for warnings."""
        self.units = units
        self.parts = list[CompiledCall]()
        parts, may_join = list[list[int]](), False
        for kind, found in groupby(range(len(units)), lambda place: _alike(units[place])):
            equal = list(found)
            count = len(equal) if kind is None else -(-len(equal) // _TOGETHER)
            if count == 1 and kind is not None and may_join and len(parts[-1]) < 2 * _TOGETHER:
                parts[-1] += equal
            else:
                cuts = [len(equal) * number // count for number in range(count + 1)]
                parts += [equal[begin:end] for begin, end in pairwise(cuts)]
            may_join = count == 1 and kind is not None
        self._calls: list[Callable[..., Any]] = []
        for part in parts:
            first, name = units[part[0]], f"{where}, {names[part[0]]} to {names[part[-1]]}"
            call = _call_of(first)
            if call is not None and len(part) > 1:
                self.parts.append(call.along([units[place] for place in part], name))
            self._calls.append(first if len(part) == 1 else self.parts[-1])

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the first one with all arguments, others with the result instead of ``x``."""
        for call in self._calls:
            x = call(x, *args, **kwargs)
        if any(part.eager for part in self.parts):
            self.parts, self._calls = [], list(self.units)  # which shows the one that breaks
        return x


def _call_of(unit: nn.Module) -> CompiledCall | None:
    return vars(unit).get("_compiled_call_impl")


def _alike(unit: nn.Module) -> Hashable:
    """The kind of a compiled module; None if it must be called by itself."""
    call = _call_of(unit)
    hooked = unit._forward_hooks or unit._forward_pre_hooks or unit._backward_hooks
    usual = type(unit).__call__ is nn.Module.__call__ and not hooked
    return call.kind if call is not None and usual and not call.eager else None


@cache
def _counters() -> dict[str, Counter[str]]:
    """Torch's table of what it has tried; looked up late, because this loads the compiler."""
    what = "a warning where torch.compile runs a part eagerly"
    return private("torch._dynamo.utils.counters", what, defaultdict(Counter))


def _attempts() -> int:
    return _counters()["frames"]["total"]


_seen = Counter[str]()
"""How often each reason was seen, and how many attempts."""
_parts = Counter[str]()


def _reasons() -> list[str]:
    """Torch's new reasons to run something eagerly."""
    new = _counters()["unimplemented"] + _counters()["graph_break"] - _seen
    _seen.update(new)
    _seen["attempts"] = _attempts()
    return list(new)


def note_part() -> None:
    """Count a part of a backward that is about to be compiled."""
    if not running.may_compile:
        raise SplitError("a part of a compiled backward would be compiled, which is too late here")
    _parts["compiled"] += 1


def compilations() -> int:
    """How often something was compiled in this process, or torch has tried to."""
    return _parts["compiled"] + ("torch._dynamo" in sys.modules and _attempts())


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Inside, an error is raised instead of compiling."""
    loaded = "torch._dynamo" in sys.modules
    running.may_compile = False
    try:
        with torch.compiler.set_stance("fail_on_recompile") if loaded else nullcontext():
            yield
    finally:
        running.may_compile = True


def summary(modules: Iterable[nn.Module]) -> str:
    """What is compiled of these modules, and what is not; empty if nothing is."""
    owners = [vars(inner) for root in modules for inner in root.modules()]
    calls = [own.get(name) for own in owners for name in ("_compiled_call_impl", "forward")]
    found = {call: None for call in calls if isinstance(call, CompiledCall)}
    kinds = counted(len({call.kind for call in found}), "kind")
    chains = [made for own in owners for made in (own.get("_chains") or {}).values()]
    joined = sum(len(part.units) - 1 for made in chains for part in made.parts)
    kinds += f", in {counted(len(found) - joined, 'call')}" * bool(joined)
    partly = [f"\n  {call.name}: eagerly in part, {call.eager}" for call in found if call.eager]
    return "".join([f"compiled: {counted(len(found), 'module')} of {kinds}", *partly] * bool(found))
