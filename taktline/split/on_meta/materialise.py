"""Gives values to a stage of a model that was built on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from taktline.checks import known_keywords, refuse, require_instance
from taktline.device import keep_generators, require_device
from taktline.errors import ArgumentError, StateError
from taktline.split.on_meta.operation_log import Log, find_log
from taktline.stage.ties import declared
from taktline.text import counted

M = TypeVar("M", bound=nn.Module)


@known_keywords
def materialise(
    piece: M, device: torch.device | str, *, state_dict: Mapping[str, torch.Tensor] | None = None
) -> M:
    """Set the values of one stage of a model on the meta device.

    Args:
        piece: a module; its parameters stay the same objects, which an optimizer may have; its
            buffers and the tensors in its attributes are replaced.
        device: the device of the values.
        state_dict: the values, by their names in the piece; a tied weight may have any of its
            names. Only these names are looked up, so it may read them from a file. Without it, the
            values are those that the model's constructor makes: the model must be built in
            :func:`deferred`, and they are as if it were built as usual, on the CPU, from the same
            seed. So are buffers that are not in it.

    A tensor that several pieces share stays one, if all of them are materialised in one process.
    The global generator stays as it is.

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
        if hasattr(part, "set_graph_device"):  # a traced stage, whose graph creates tensors
            part.set_graph_device(device)  # pyright: ignore[reportCallIssue]
    try:
        return piece.to(device)
    except AssertionError as error:  # so torch says that it was built without such devices
        raise ArgumentError(f"device {device} cannot be used here: {error}") from error


@dataclass(slots=True, eq=False)
class _Want:
    """A tensor on the meta device, its places and names, and its value."""

    tensor: torch.Tensor
    value: torch.Tensor | None = None
    places: list[tuple[nn.Module, dict[str, Any], str]] = field(default_factory=list)
    """Modules, a table of each, and the key in it."""
    names: list[str] = field(default_factory=list)

    @property
    def is_parameter(self) -> bool:
        """Whether the tensor is a parameter."""
        return isinstance(self.tensor, nn.Parameter)

    def install(self) -> None:
        """Put the value into all places."""
        value: Any = self.value
        if self.is_parameter and not isinstance(value, nn.Parameter):
            made: Any = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
            made.__class__ = type(self.tensor)
            made.__dict__.update(vars(self.tensor))
            try:
                # An optimizer may have this very object.
                torch.utils.swap_tensors(self.tensor, made)
            except RuntimeError:  # there are other references to it
                value = made
            else:
                return
        for _, table, key in self.places:
            table[key] = value
        _made[self.tensor] = weakref.ref(value)


_made: Any = WeakTensorKeyDictionary()
"""What has replaced tensors on the meta device, so that a tie stays one object."""


def _known(want: _Want, device: torch.device) -> torch.Tensor | None:
    """The tensor that another piece has got for the same one."""
    reference = _made.get(want.tensor)
    value = None if reference is None else reference()
    here = torch.empty(0, device=device).device
    return value if value is not None and value.device == here else None


def _wanted(piece: nn.Module) -> list[_Want]:
    """The tensors of a piece that are on the meta device, each once."""
    wants: dict[int, _Want] = {}
    for prefix, module in piece.named_modules(remove_duplicate=False):
        tables: Any = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for key, value in table.items():
                # Placeholders belong to other stages.
                plain = isinstance(value, nn.Parameter) or type(value) is torch.Tensor
                if plain and value.is_meta:
                    want = wants.setdefault(id(value), _Want(value))
                    want.places.append((module, table, key))
                    want.names.append(f"{prefix}.{key}" if prefix else key)
    for want in wants.values():
        for tie in declared(piece):
            names = [name for _, name in tie.uses]
            if set(names) & set(want.names):
                want.names += [name for name in names if name not in want.names]
    return list(wants.values())


def _open(wants: Iterable[_Want]) -> list[_Want]:
    """The tensors that have no value yet."""
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
    """Raise if the state dict lacks parameters."""
    names = [want.names[0] for want in wants if want.is_parameter]
    if names:
        raise StateError(
            f"the state dict lacks {counted(len(names), 'parameter')} of this piece: "
            f"{', '.join(names)}; it must have the model's own names",
            names=names,
        )


def _require_all(wants: list[_Want], state_dict: Mapping[str, torch.Tensor] | None) -> None:
    """Raise if tensors have no value."""
    names = [want.names[0] for want in wants]
    if names:
        lacking = "" if state_dict is None else ", and they are not in the state dict"
        raise StateError(
            f"the values of these tensors are unknown{lacking}: {', '.join(names)}; build the "
            "model in taktline.split.deferred(), and do not replace its tensors afterwards",
            names=names,
        )


def _replay(wants: list[_Want], device: torch.device) -> None:
    """Make the values of tensors that are in a log."""
    by_log: dict[Log, list[_Want]] = {}
    for want in wants:
        log = find_log(want.tensor)
        if log is not None:
            by_log.setdefault(log, []).append(want)
    for log, logged in by_log.items():
        made = log.replay([want.tensor for want in logged])
        for want in reversed(logged):
            # One at a time, so that few are on two devices at once.
            want.value = made.pop().to(device)


def _initialise(piece: nn.Module, wants: list[_Want], device: torch.device) -> None:
    """Make buffers with ``_init_weights``, which Hugging Face models have."""
    hosts = [part for part in piece.modules() if hasattr(part, "_init_weights")]
    for want in wants:
        module, table, key = want.places[0]
        around = [host for host in hosts if any(part is module for part in host.modules())]
        if want.is_parameter or not around:
            continue
        empty = torch.empty_like(want.tensor, device=device)
        version = empty._version
        table[key] = empty
        with torch.no_grad(), keep_generators([device]):
            around[-1]._init_weights(module)  # pyright: ignore[reportCallIssue]
        value, table[key] = table[key], want.tensor
        if value is not empty or empty._version > version:
            want.value = value
