"""The values of a forward beside its output: skip connections, losses, and statistics.

A pipeline opens :class:`SideValues` around each forward of a stage, and again around its backward,
where checkpointed blocks run a second time and must not add their values again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any, Self, TypeVar

import torch

from taktline import pytree
from taktline.checks import check
from taktline.errors import LossError, SkipError

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(slots=True)
class Skip:
    """A value on its way to later stages."""

    value: Any
    stage: int | None
    """The stage that put it."""
    taken: bool = False
    """Whether a stage has got it."""


class SideValues:
    """The side values of one forward of a stage, while it is open as a context."""

    __slots__ = ("_outer", "_replaced", "got", "losses", "observed", "replays", "skips", "stage")

    def __init__(self, stage: int | None, skips: dict[str, Skip]) -> None:
        self.stage = stage  # None outside of a pipeline, where forwards have no beginning and end
        self.skips = skips  # from earlier stages, and from this one
        self.got: set[str] = set()
        self._replaced: set[str] = set()
        self.losses: list[torch.Tensor] = []
        self.observed: list[tuple[Any, Any]] = []  # modules, and their statistics
        self.replays = False  # whether blocks run a second time: then values can only be got

    def __enter__(self) -> Self:
        self._outer = _here.values, _here.losses
        _here.values, _here.losses = self, None
        return self

    def __exit__(self, *_: object) -> None:
        _here.values, _here.losses = self._outer

    @property
    def used(self) -> bool:
        """Whether there are any side values."""
        return bool(self.skips or self.losses or self.observed)

    def put(self, name: str, value: torch.Tensor) -> None:
        """Put a value for this stage and later ones."""
        if self.replays:
            return
        if self.stage is not None and (waiting := self.skips.get(name)):
            if not waiting.taken:
                raise SkipError(
                    f"{name!r} is put by stage {waiting.stage} and again by stage {self.stage}, "
                    "before any stage has got it; use a different name for each value"
                )
            self._replaced.add(name)
        self.skips[name] = Skip(value, self.stage)

    def get(self, name: str) -> torch.Tensor:
        """A value that was put before."""
        skip = self.skips.get(name)
        if skip is None:
            raise SkipError(self._missing(name))
        if self.replays and name in self._replaced:
            raise SkipError(
                f"a checkpointed block of stage {self.stage} gets {name!r} a second time, but the "
                "stage has put another value under that name since; use a different name"
            )
        skip.taken = True
        self.got.add(name)
        return skip.value

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss to what training minimises."""
        if not self.replays and self.stage is not None:  # outside, nothing collects it
            self.losses.append(loss)

    def observe(self, module: Any, statistics: Any) -> None:
        """Note statistics; the module is updated with them once the step has succeeded."""
        if self.stage is None:
            module.update([statistics])  # a forward has the whole batch
        elif not self.replays:
            self.observed.append((module, statistics))

    def finish(self) -> None:
        """Raise, after the last stage, if a value was put and not got."""
        if lost := self._lost():
            raise SkipError(f"no stage gets {lost}; get each of them, or do not put it")

    def _missing(self, name: str) -> str:
        if self.stage is None:
            there = ", ".join(map(repr, self.skips)) or "nothing"
            return f"{name!r} was not put before it is got; so far there is {there}"
        lost = self._lost()
        waiting = f"; no stage has got {lost}" if lost else ""
        return (
            f"stage {self.stage} gets {name!r}, but no stage up to here has put it{waiting}; put "
            "it in this stage or an earlier one, before it is got"
        )

    def _lost(self) -> str:
        lost = [(name, skip.stage) for name, skip in self.skips.items() if not skip.taken]
        return ", ".join(f"{name!r} (put by stage {stage})" for name, stage in lost)


class Replay(SideValues):
    """Of several stages whose blocks run a second time; ``running`` returns those of one."""

    def __init__(self, running: Callable[[], SideValues]) -> None:
        super().__init__(0, {})
        self.replays = True
        self._running = running

    def get(self, name: str) -> torch.Tensor:
        return self._running().get(name)


# One for all threads: on a GPU, autograd runs checkpointed blocks again on its own threads.
_outside = SideValues(None, {})


class _Here(local):
    """What is open on this thread, and the list that collects losses, if there is one."""

    values: SideValues = _outside
    losses: list[torch.Tensor] | None = None


_here = _Here()


def side_values() -> SideValues:
    """Those of the forward that is running."""
    return _here.values


def uncompiled(function: _Function) -> _Function:
    """Let compiled blocks call a function without compiling it, as it has side effects."""
    # The mark that torch.compiler.disable sets; calling that would import the compiler.
    vars(function)["_torchdynamo_disable"] = True
    return function


class skip:
    """Skip connections: a forward puts a value, and a later one gets it, in any stage.

    ::

        class Down(nn.Module):                    class Up(nn.Module):
            def forward(self, x):                     def forward(self, x):
                x = self.block(x)                         x = torch.cat([x, skip.get("level 1")], 1)
                skip.put("level 1", x)                    return self.block(x)
                return self.shrink(x)

    A value travels with the activations from stage to stage, up to the last one that gets it. The
    gradients of all its uses are added up. Outside of a pipeline a value is kept until another one
    is put under its name.

    >>> from taktline import skip
    >>> skip.put("level 0", torch.zeros(2))
    >>> skip.get("level 0")
    tensor([0., 0.])
    """

    @staticmethod
    @uncompiled
    def put(name: str, value: torch.Tensor) -> None:
        """Put a value under a name, for this stage and later ones."""
        check("the name of a skip", name, str, error=SkipError)
        if not isinstance(value, torch.Tensor):
            raise SkipError(f"skip.put({name!r}, …) takes a tensor, not {type(value).__name__}")
        _here.values.put(name, value)

    @staticmethod
    @uncompiled
    def get(name: str) -> torch.Tensor:
        """The value that was put under a name; any number of stages may get it."""
        check("the name of a skip", name, str, error=SkipError)
        return _here.values.get(name)


@uncompiled
def add_loss(loss: torch.Tensor) -> None:
    """Add a loss to the one that training minimises, from inside the forward of any stage.

    Its gradients are scaled by the rows of its micro-batch, and ``step(aux_losses=[])`` returns
    its value. Outside of a pipeline nothing happens, except in :func:`collect_losses`. A thread
    that the forward starts is outside: call this in the forward, with the thread's result.

    >>> import taktline as tl
    >>> class Router(torch.nn.Linear):
    ...     def forward(self, x):
    ...         weights = super().forward(x).softmax(-1)
    ...         tl.add_loss(0.01 * weights.mean(0).square().sum())
    ...         return weights
    >>> with tl.collect_losses() as losses:
    ...     _ = Router(4, 2)(torch.zeros(3, 4))
    >>> len(losses)
    1
    """
    check_loss(loss, "add_loss takes")
    if _here.losses is None:
        _here.values.add(loss)
    else:
        _here.losses.append(loss)


def check_loss(loss: object, demand: str) -> None:
    """Raise unless a loss is one real number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            found = f"a tensor of shape {[*loss.shape]}"
        raise LossError(f"{demand} one number as a tensor, not {found}")
    if loss.is_complex():
        raise LossError(
            f"{demand} a real number, not one of {loss.dtype}: which of two complex losses is less "
            "is not defined; take its abs() or real"
        )


@contextmanager
def collect_losses() -> Iterator[list[torch.Tensor]]:
    """Outside of a pipeline: yields a list that gets every loss that is added.

    >>> import taktline as tl
    >>> with tl.collect_losses() as losses:
    ...     tl.add_loss(torch.tensor(2.0))
    >>> sum(losses)
    tensor(2.)
    """
    outer, losses = _here.losses, list[torch.Tensor]()
    _here.losses = losses
    try:
        yield losses
    finally:
        _here.losses = outer


@dataclass(frozen=True, slots=True)
class Bundle:
    """The value that crosses a boundary if there are skips: a stage's arguments, and the skips."""

    arguments: tuple[Any, ...]
    skips: dict[str, Skip]


def _flattened(bundle: Bundle) -> tuple[list[Any], Any]:
    named = [[name, skip.stage, skip.taken] for name, skip in bundle.skips.items()]
    return [bundle.arguments, *(skip.value for skip in bundle.skips.values())], named


def _unflattened(parts: Iterable[Any], named: Sequence[Sequence[Any]]) -> Bundle:
    arguments, *values = parts
    pairs = zip(values, named, strict=True)
    return Bundle(arguments, {name: Skip(value, *rest) for value, (name, *rest) in pairs})


pytree.register_own(Bundle, _flattened, _unflattened)


def with_skips(
    arguments: Sequence[Any],
    skips: Mapping[str, Skip],
    routes: Mapping[str, int] | None,
    stage: int,
) -> Sequence[Any]:
    """The values that a stage sends: its arguments, and the skips that later stages get.

    ``routes`` has the last stage that gets each skip; None if that is unknown.
    """
    later = {n: skip for n, skip in skips.items() if routes is None or routes.get(n, -1) > stage}
    return (Bundle(tuple(arguments), later),) if later else arguments


def without_skips(arguments: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Skip]]:
    """The arguments and the skips that a stage has received."""
    if len(arguments) == 1 and isinstance(arguments[0], Bundle):
        return arguments[0].arguments, arguments[0].skips
    return arguments, {}
