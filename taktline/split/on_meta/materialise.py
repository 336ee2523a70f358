"""Values for a piece of a model that was built on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from taktline.checks import refuse, require_instance
from taktline.device import require_device
from taktline.errors import ArgumentError, StateError
from taktline.split.on_meta.log import Log, find_log
from taktline.split.on_meta.replay import replay
from taktline.split.traced.module import StageModule
from taktline.stage.ties import declared
from taktline.text import counted

__all__ = ["materialise"]

M = TypeVar("M", bound=nn.Module)


def materialise(
    piece: M, device: torch.device | str, *, state_dict: Mapping[str, torch.Tensor] | None = None
) -> M:
    """Give a piece on the meta device its values, and nothing to the rest of the model.

    Args:
        piece: a module; its parameters get their values, and stay the objects that an optimizer may
            have; its buffers and tensors in attributes are replaced in place.
        device: where they go.
        state_dict: their values, by the names that they have in the piece; a tied weight may be
            there under any of its names. It is asked for these names alone, so it may read them
            from a file. Without it, values are made as the model's constructor does, which must
            have run in :func:`deferred`: they are those of a model that is built as usual, on the
            CPU, from the same seed. Buffers that are not in it are made so too.

    A tensor that several pieces have in common stays one, if all of them are materialised in one
    process. The global generator is left as it is.

    >>> from taktline.split import deferred, materialise
    >>> with deferred():
    ...     model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> first = materialise(
    ...     model[0], "cpu", state_dict={"weight": torch.eye(2), "bias": torch.ones(2)}
    ... )
    >>> first(torch.ones(1, 2))
    tensor([[2., 2.]], grad_fn=<AddmmBackward0>)
    >>> materialise(model[1], "cpu").running_var
    tensor([1., 1.])
    """
    require_instance("piece", piece, nn.Module, "an nn.Module")
    device = require_device(device)
    if state_dict is not None and not hasattr(state_dict, "__getitem__"):
        refuse("state_dict", "a mapping from names to tensors", state_dict)
    wants = [] if device.type == "meta" else _wanted(piece)
    for want in wants:
        want.value = _known(want, device)
    if state_dict is not None:
        for want in _open(wants):
            if (value := _looked_up(want, state_dict)) is not None:
                want.value = torch.empty_like(want.tensor, device=device).copy_(value)
        _require_parameters(_open(wants))
    _replay(_open(wants), device)
    _initialise(piece, _open(wants), device)
    _require_all(_open(wants), state_dict)
    for want in wants:
        want.install()
    for part in piece.modules():
        if isinstance(part, StageModule):
            part.set_device(device)
    try:
        return piece.to(device)
    except AssertionError as error:  # so torch says that it was built without such devices
        raise ArgumentError(f"device {device} cannot be used here: {error}") from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module has a tensor."""

    module: nn.Module
    table: str
    key: str

    def get(self) -> torch.Tensor | None:
        """What is there now."""
        return getattr(self.module, self.table).get(self.key)

    def put(self, tensor: torch.Tensor) -> None:
        """Replace it; past ``__setattr__``, which would ask whether it may."""
        getattr(self.module, self.table)[self.key] = tensor


@dataclass(slots=True, eq=False)
class _Want:
    """A tensor on the meta device: where it is to be replaced, its names, and its value."""

    tensor: torch.Tensor
    value: torch.Tensor | None = None
    places: list[_Place] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def is_parameter(self) -> bool:
        """Whether it must have a value of its own; the others can be computed."""
        return isinstance(self.tensor, nn.Parameter)

    def install(self) -> None:
        """Put its value into its places."""
        value: Any = self.value
        if self.is_parameter and not isinstance(value, nn.Parameter):
            made: Any = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
            made.__class__ = type(self.tensor)
            made.__dict__.update(vars(self.tensor))
            try:
                # So it stays the object that an optimizer may have by now.
                torch.utils.swap_tensors(self.tensor, made)
            except RuntimeError:  # somebody else refers to it, too
                value = made
            else:
                return
        for place in self.places:
            place.put(value)
        first = self.places[0]
        _made[self.tensor] = (weakref.ref(first.module), first.table, first.key)


# Where the tensors on the meta device have gone, so that a tie stays one object.
_made: Any = WeakTensorKeyDictionary()


def _known(want: _Want, device: torch.device) -> torch.Tensor | None:
    """The tensor that another piece has in place of the same one."""
    reference, table, key = _made.get(want.tensor) or (None, "", "")
    module = reference() if reference else None
    value = None if module is None else _Place(module, table, key).get()
    here = torch.empty(0, device=device).device
    return value if value is not None and value.device == here else None


def _wanted(piece: nn.Module) -> list[_Want]:
    """All tensors of a piece that are on the meta device, each once."""
    wants: dict[int, _Want] = {}
    for prefix, module in piece.named_modules(remove_duplicate=False):
        for table in ("_parameters", "_buffers", "__dict__"):
            for key, value in getattr(module, table).items():
                # Not what stands for a tensor of another stage.
                plain = isinstance(value, nn.Parameter) or type(value) is torch.Tensor
                if plain and value.is_meta:
                    want = wants.setdefault(id(value), _Want(value))
                    want.places.append(_Place(module, table, key))
                    want.names.append(f"{prefix}.{key}" if prefix else key)
    for want in wants.values():
        for tie in declared(piece):
            names = [name for _, name in tie.uses]
            if set(names) & set(want.names):
                want.names += [name for name in names if name not in want.names]
    return list(wants.values())


def _open(wants: Iterable[_Want]) -> list[_Want]:
    """Those that have no value yet."""
    return [want for want in wants if want.value is None]


def _looked_up(want: _Want, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The value of a tensor in a state dict, under any of its names."""
    name = next((name for name in want.names if name in state_dict), None)
    if name is None:
        return None
    value, shape = state_dict[name], want.tensor.shape
    if value.shape != shape:
        raise StateError(
            f"{name} has the shape {list(value.shape)} in the state dict, but {list(shape)} in "
            "the model; build the model as it was when the state dict was written",
            names=[name],
        )
    return value


def _require_parameters(wants: list[_Want]) -> None:
    """Raise if parameters were not in the state dict."""
    names = [want.names[0] for want in wants if want.is_parameter]
    if names:
        raise StateError(
            f"the state dict lacks {counted(len(names), 'parameter')} of this piece: "
            f"{', '.join(names)}; it must have the model's own names",
            names=names,
        )


def _require_all(wants: list[_Want], state_dict: Mapping[str, torch.Tensor] | None) -> None:
    """Raise if there is no way to a value."""
    names = [want.names[0] for want in wants]
    if names:
        source = "is not told" if state_dict is None else "is neither in the state dict nor told"
        raise StateError(
            f"how these tensors are made {source}: {', '.join(names)}; build the model in "
            "taktline.split.deferred(), and change nothing of it behind that",
            names=names,
        )


def _replay(wants: list[_Want], device: torch.device) -> None:
    """Make what is in a log."""
    by_log: dict[Log, list[_Want]] = {}
    for want in wants:
        log = find_log(want.tensor)
        if log is not None:
            by_log.setdefault(log, []).append(want)
    for log, told in by_log.items():
        made = replay(log, [want.tensor for want in told])
        for want in reversed(told):
            # One at a time, so that no piece is on two devices at once.
            want.value = made.pop().to(device)


def _initialise(piece: nn.Module, wants: list[_Want], device: torch.device) -> None:
    """Make buffers as models of transformers do, which know how to for each of their modules."""
    hosts = [part for part in piece.modules() if hasattr(part, "_init_weights")]
    for want in wants:
        place = want.places[0]
        around = [host for host in hosts if any(part is place.module for part in host.modules())]
        if want.is_parameter or not around:
            continue
        empty = torch.empty_like(want.tensor, device=device)
        version = empty._version
        place.put(empty)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            around[-1]._init_weights(place.module)  # pyright: ignore[reportCallIssue]
        value = place.get()
        place.put(want.tensor)
        if value is not empty or empty._version > version:
            want.value = value
