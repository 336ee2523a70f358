"""Models without memory for their parameters, which get values stage by stage."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from taktline.checks import check, refuse
from taktline.device import keep_generators, require_usable_device
from taktline.errors import StateError
from taktline.split.recorded_stage import model_of
from taktline.split.without_data import ancestors, replaced
from taktline.stage.names import declared

M = TypeVar("M", bound=nn.Module)
_Names = dict[torch.Tensor, list[str]]


@contextmanager
def deferred() -> Iterator[None]:
    """Build a model without memory for its parameters.

    Each parameter is moved to the meta device as soon as a module has it; buffers have values.
    :func:`materialise` initialises the parameters of a stage.

    >>> with deferred():
    ...     model = nn.Linear(10000, 10000)
    >>> model.weight.device
    device(type='meta')
    """
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or param.is_meta or is_lazy(param) or threading.get_ident() != thread:
            return
        if "taktline_meta" not in vars(param):  # one object for all modules that have it
            empty = _like(torch.empty_like(param, device="meta"), param)
            vars(param)["taktline_meta"] = empty
        self._parameters[name] = vars(param)["taktline_meta"]

    with replaced(nn.Module, register_parameter=on_meta):
        yield


def materialise(
    piece: M, device: torch.device | str, *, state_dict: Mapping[str, torch.Tensor] | None = None
) -> M:
    """Set the values of one stage of a model whose parameters are on the meta device.

    Args:
        piece: a module; its parameters stay the same objects, which an optimizer may have.
        device: the device of the values.
        state_dict: the values, by their names in the piece; a tied weight may have any of its
            names. Only these names are looked up, so it may read them from a file. Without it,
            ``reset_parameters()`` of the modules, and ``_init_weights()`` of a Hugging Face model,
            initialise the parameters.

    Random values depend on the seed of the global generator and the names of modules, not on the
    cut, and are not those of a model built as usual. The generator does not move. A tensor that
    several pieces share stays one in a process.

    >>> with deferred():
    ...     model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> materialise(model[1], "cpu").weight, model[0].bias.device
    (Parameter containing:
    tensor([1., 1.], requires_grad=True), device(type='meta'))
    """
    check("piece", piece, nn.Module, "an nn.Module")
    device = require_usable_device(device)
    if state_dict is not None and not hasattr(state_dict, "__getitem__"):
        refuse("state_dict", "a mapping from names to tensors", state_dict)
    names = {} if device.type == "meta" else _names_on_meta(piece)
    if state_dict is not None:
        values = _from_state(piece, names, state_dict, device)
        _require_all("the state dict lacks", names, values)
        for tensor, value in values.items():
            _install(piece, tensor, names[tensor], value)
    elif names:
        _require_all("the values are unknown of", names, list(piece.parameters()))
        _initialise(piece, names, device)
    return piece.to(device)


def _names_on_meta(piece: nn.Module) -> _Names:
    """The tensors of a piece that are on the meta device, with their names."""
    names: _Names = {}
    for prefix, module in piece.named_modules(remove_duplicate=False):
        for key, value in {**module._parameters, **module._buffers, **vars(module)}.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                names.setdefault(value, []).append(f"{prefix}.{key}" if prefix else key)
    return names


def _require_all(text: str, names: _Names, known: Any) -> None:
    """Raise if tensors are not among those whose values are known."""
    found = set(map(id, known))
    unknown = [own[0] for tensor, own in names.items() if id(tensor) not in found]
    if unknown:
        more = f" and {len(unknown) - 9} more" if len(unknown) > 9 else ""
        raise StateError(
            f"{text} {', '.join(unknown[:9])}{more}; build the model in taktline.split.deferred(), "
            "where buffers have values, and pass a state dict with all parameters, by the model's "
            "names, or give their modules a method reset_parameters()"
        )


def _from_state(
    piece: nn.Module, names: _Names, state: Mapping[str, torch.Tensor], device: torch.device
) -> dict[torch.Tensor, torch.Tensor]:
    """Values from a state dict, as far as it has them."""
    values: dict[torch.Tensor, torch.Tensor] = {}
    ties = [{name for _, name in tie.uses} for tie in declared(piece)]
    for tensor, own in names.items():
        tied = [name for tie in ties if tie & set(own) for name in tie]
        name = next((name for name in [*own, *tied] if name in state), None)
        if name is None:
            continue
        value, shape = state[name], tensor.shape
        if value.shape != shape:
            text = f"{name} has the shape {list(value.shape)} in the state dict, {list(shape)}"
            raise StateError(f"{text} here; build the model as it was saved")
        values[tensor] = torch.empty_like(tensor, device=device).copy_(value)
    return values


@torch.no_grad()
def _initialise(piece: nn.Module, names: _Names, device: torch.device) -> None:
    """Give parameters memory, and call what initialises them, from the innermost modules on."""
    whole, seed = model_of(piece) or piece, torch.initial_seed()
    for tensor, own in names.items():
        _install(piece, tensor, own, _unset(tensor, device))
    made, known = {name for own in names.values() for name in own}, dict(whole.named_modules())
    with keep_generators([device]):
        for name, module in reversed(list(piece.named_modules())):
            inside = {f"{name}.{key}" if name else key for key, _ in module.named_parameters()}
            if not inside or not inside <= made:
                continue
            torch.manual_seed(seed ^ zlib.crc32(name.encode()))
            for method in ("reset_parameters", "_reset_parameters"):
                getattr(module, method, lambda: None)()
            around: list[Any] = [known[n] for n in (*ancestors(name), name) if n in known]
            if inits := [part._init_weights for part in around if hasattr(part, "_init_weights")]:
                inits[-1](module)
    parameters = dict(piece.named_parameters())
    left: _Names = {p: [n] for n, p in parameters.items() if n in made and p.isnan().any()}
    _require_all("nothing initialises", left, ())


def _unset(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fill = torch.nan if tensor.is_floating_point() else 0
    return torch.full_like(tensor, fill, device=device)


def _install(piece: nn.Module, tensor: Any, names: list[str], value: Any) -> None:
    """Give a tensor its value, wherever it is used."""
    if isinstance(tensor, nn.Parameter):
        value = _like(value, tensor)
        with suppress(RuntimeError):  # if something has a weak reference to it, as an LSTM does
            return torch.utils.swap_tensors(tensor, value)
    for prefix, _, key in (name.rpartition(".") for name in names):
        setattr(piece.get_submodule(prefix), key, value)


def _like(value: torch.Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same class, with the same attributes."""
    made: Any = nn.Parameter(value, requires_grad=parameter.requires_grad)
    made.__class__ = type(parameter)
    made.__dict__.update(vars(parameter))
    return made
