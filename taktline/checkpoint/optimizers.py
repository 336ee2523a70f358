"""The state of an optimizer by the names of its parameters, instead of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint.manifest import Checkpoint, Entry, packed, unpacked
from taktline.errors import CheckpointError
from taktline.sharding import is_sharded
from taktline.text import counted

_NOT_OPTIONS = ("params", "param_names")
_NO_TENSORS: dict[str, torch.Tensor] = {}
"""The tensors inside of options and other values, which are never saved."""


def _kind(optimizer: Optimizer) -> str:
    """The package and the name of its class: modules move about in packages."""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__qualname__}"


def _named(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[str, nn.Parameter]]:
    """All parameters with their names in the model, in the order of their numbers in a state."""
    named: list[tuple[str, nn.Parameter]] = []
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not in "
                "this model; make it with pipe.parameters() or pipe.named_parameters()"
            )
        named.append((names[id(parameter)], parameter))
    return named


def describe(
    optimizer: Optimizer, names: Mapping[int, str], prefix: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """An optimizer as JSON; its tensors go into ``tensors``, with ``prefix`` in their names.

    >>> model, tensors = nn.Linear(2, 1, bias=False), {}
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(2)).backward()
    >>> optimizer.step()
    >>> found = describe(optimizer, {id(model.weight): "weight"}, "optimizer/0", tensors)
    >>> found["class"], found["groups"][0]["names"], tensors
    ('torch.SGD', ['weight'], {'optimizer/0/weight/momentum_buffer': tensor([[1., 1.]])})
    """
    named, plain = _named(optimizer, names), optimizer.state_dict()
    state: dict[str, dict[str, Any]] = {}
    for number, values in plain["state"].items():
        if number not in range(len(named)) or not isinstance(values, Mapping):
            raise CheckpointError(
                f"{_kind(optimizer)} has state that belongs to no parameter ({number!r}), which "
                "cannot be saved by name"
            )
        name, parameter = named[number]
        rest = state.setdefault(name, {})
        for key, value in values.items():
            what = f"{prefix}/{name}/{key}"
            if isinstance(value, torch.Tensor):
                _require_shared(value, parameter, what)
                tensors[what] = value
            else:
                rest[str(key)] = _packed(value, what)
    groups = [
        {
            "names": [named[number][0] for number in group["params"]],
            "options": {
                key: _packed(value, f"{prefix}.{key}")
                for key, value in group.items()
                if key not in _NOT_OPTIONS
            },
        }
        for group in plain["param_groups"]
    ]
    return {"class": _kind(optimizer), "groups": groups, "state": state}


def _packed(value: Any, what: str) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    found = packed(value, what, tensors)
    if tensors:
        raise CheckpointError(f"{what} has tensors inside of it, which cannot be saved by name")
    return found


def _require_shared(value: torch.Tensor, parameter: nn.Parameter, what: str) -> None:
    """Raise if a tensor belongs to this rank's shard, and its place in the whole is unknown."""
    if is_sharded(parameter) and not is_sharded(value) and value.numel() > 1:
        raise CheckpointError(
            f"{what} is a plain tensor of shape {list(value.shape)} beside a parameter in shards, "
            "so it is unknown which part of the whole it is; use an optimizer whose state is "
            "sharded as its parameters are"
        )


class OptimizerState:
    """The state of an optimizer in a checkpoint; raises if it does not fit, and changes nothing."""

    def __init__(
        self, optimizer: Optimizer, index: int, checkpoint: Checkpoint, names: Mapping[int, str]
    ) -> None:
        """``names`` are those of parameters in the checkpoint, by their ids."""
        path, count = checkpoint.path, len(checkpoint.optimizers)
        if index >= count:
            raise CheckpointError(
                f"{path} has the state of {counted(count, 'optimizer')}, so there is none for "
                f"optimizer {index}; leave it out, or load another save"
            )
        saved = checkpoint.optimizers[index]
        if saved["class"] != _kind(optimizer):
            raise CheckpointError(
                f"{path} has the state of {saved['class']}, and this optimizer is "
                f"{_kind(optimizer)}; use the one that was saved, or load without it"
            )
        self._optimizer, self._path = optimizer, path
        named = _named(optimizer, names)
        self._options = self._options_of(names, saved["groups"])
        self._state: dict[int, dict[str, Any]] = {}
        self.targets: list[tuple[str, torch.Tensor]] = []
        """Tensors as those that ``apply()`` returns, to check them."""
        self._places: list[tuple[str, int, str]] = []
        """Their names in the checkpoint, the numbers of their parameters, and their keys."""
        prefix = f"optimizer/{index}/"
        keys: dict[str, list[str]] = {}
        for name in checkpoint.tensors:
            if name.startswith(prefix):
                owner, _, key = name.removeprefix(prefix).rpartition("/")
                keys.setdefault(owner, []).append(key)
        for number, (name, parameter) in enumerate(named):
            state = unpacked(saved["state"].get(name, {}), _NO_TENSORS.__getitem__)
            for key in keys.get(name, []):
                full = f"{prefix}{name}/{key}"
                state[key] = self._room(parameter, key, full, checkpoint.tensors[full])
                self.targets.append((full, state[key]))
                self._places.append((full, number, key))
            if state:
                self._state[number] = state

    def _options_of(self, names: Mapping[int, str], groups: Any) -> list[dict[str, Any]]:
        """The options of each group: those that all of its parameters had."""
        group_of = {name: number for number, group in enumerate(groups) for name in group["names"]}
        options: list[dict[str, Any]] = []
        for now in self._optimizer.param_groups:
            found: dict[int, str] = {}
            for name in (names[id(parameter)] for parameter in now["params"]):
                if name not in group_of:
                    raise CheckpointError(
                        f"{self._path} has no state of the optimizer for {name}; pass the "
                        "optimizer the parameters that it was saved with"
                    )
                found.setdefault(group_of[name], name)
            if len(found) > 1:
                first, second = list(found.values())[:2]
                raise CheckpointError(
                    f"{first} and {second} are in one group of this optimizer, and were in two "
                    f"with other options in {self._path}; use the groups that were saved"
                )
            group = groups[next(iter(found))]["options"] if found else {}
            options.append(unpacked(group, _NO_TENSORS.__getitem__))
        return options

    def _room(self, parameter: nn.Parameter, key: str, name: str, entry: Entry) -> torch.Tensor:
        """The tensor to load into: the optimizer's own, if type and shape fit, or a new one."""
        known = self._optimizer.state.get(parameter, {}).get(key)
        like = entry.dtype, entry.shape
        if isinstance(known, torch.Tensor) and (known.dtype, tuple(known.shape)) == like:
            return known
        if entry.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
        if is_sharded(parameter) and entry.shape:
            raise CheckpointError(
                f"{name} has the shape {list(entry.shape)} in {self._path}, and cannot be "
                "put in shards as the parameter is"
            )
        return torch.empty(entry.shape, dtype=entry.dtype)

    def kept(self) -> Callable[[], None]:
        """A function that gives the optimizer the state back that it has now."""
        own = self._optimizer.__dict__
        return partial(own.update, dict(own))  # a load replaces state and groups

    def apply(self) -> list[tuple[str, torch.Tensor]]:
        """Load the state; returns its tensors, which are to be filled, with their names."""
        optimizer, groups = self._optimizer, self._optimizer.state_dict()["param_groups"]
        for group, options in zip(groups, self._options, strict=True):
            for key, value in options.items():
                before = group.get(key)
                on_device = isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor)
                group[key] = value.to(before.device) if on_device else value
        optimizer.load_state_dict({"state": self._state, "param_groups": groups})
        # Torch copies the tensors, and casts them to the type of the parameter.
        flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        filled: list[tuple[str, torch.Tensor]] = []
        for name, number, key in self._places:
            now, room = optimizer.state[flat[number]], self._state[number][key]
            now[key] = room.to(now[key].device)
            filled.append((name, now[key]))
        return filled
