"""The state of an optimizer by the names of its parameters, instead of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint.manifest import Entry, Manifest
from taktline.checkpoint.plain import pack, unpack
from taktline.errors import CheckpointError
from taktline.sharding import is_sharded

__all__ = ["OptimizerState", "describe"]

_NOT_OPTIONS = ("params", "param_names")


def _kind(optimizer: Optimizer) -> str:
    """The package and the name of its class: modules move about in packages."""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__qualname__}"


def _parameters(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def describe(
    optimizer: Optimizer, names: Mapping[int, str], prefix: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """An optimizer as JSON; its tensors go into ``tensors``, under names that begin so.

    >>> model, tensors = nn.Linear(2, 1, bias=False), {}
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(2)).backward()
    >>> optimizer.step()
    >>> told = describe(optimizer, {id(model.weight): "weight"}, "optimizer/0", tensors)
    >>> told["class"], told["groups"][0]["names"], tensors
    ('torch.SGD', ['weight'], {'optimizer/0/weight/momentum_buffer': tensor([[1., 1.]])})
    """
    plain = optimizer.state_dict()
    flat = [parameter for group in _parameters(optimizer) for parameter in group]
    numbers = [number for group in plain["param_groups"] for number in group["params"]]
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for number, parameter in zip(numbers, flat, strict=True):
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not in "
                "this pipeline; make it with pipe.parameters() or pipe.named_parameters()"
            )
        named[number] = names[id(parameter)], parameter
    state: dict[str, dict[str, Any]] = {}
    for number, values in plain["state"].items():
        if number not in named or not isinstance(values, Mapping):
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
    packed = pack(value, what, tensors)
    if tensors:
        raise CheckpointError(f"{what} has tensors inside of it, which cannot be saved by name")
    return packed


def _require_shared(value: torch.Tensor, parameter: nn.Parameter, what: str) -> None:
    """Raise if a tensor belongs to this rank's shard alone, and nobody could tell where it does."""
    if is_sharded(parameter) and not is_sharded(value) and value.numel() > 1:
        raise CheckpointError(
            f"{what} is a plain tensor of shape {list(value.shape)} beside a parameter in shards, "
            "so it is unknown which part of the whole it is; use an optimizer whose state is "
            "sharded as its parameters are"
        )


class _Value(NamedTuple):
    """A tensor in the state of a parameter, and where it is in the checkpoint."""

    parameter: torch.Tensor
    key: str
    name: str
    entry: Entry


class OptimizerState:
    """What a checkpoint has for an optimizer; raises if it does not fit, and changes nothing."""

    def __init__(
        self,
        optimizer: Optimizer,
        index: int,
        manifest: Manifest,
        names: Mapping[int, str],
        stored_name: Callable[[str], str],
    ) -> None:
        if index >= len(manifest.optimizers):
            raise CheckpointError(
                f"{manifest.path} has the state of {len(manifest.optimizers)} optimizers, so there "
                f"is none for optimizer {index}; leave it out, or load another save"
            )
        told = manifest.optimizers[index]
        if told["class"] != _kind(optimizer):
            raise CheckpointError(
                f"{manifest.path} has the state of {told['class']}, and this optimizer is "
                f"{_kind(optimizer)}; make the one that was saved, or load without it"
            )
        self._optimizer, self._told = optimizer, told
        self._names = {key: stored_name(name) for key, name in names.items()}
        self._group_of = {
            name: number for number, group in enumerate(told["groups"]) for name in group["names"]
        }
        self._options = [self._group(group, manifest) for group in _parameters(optimizer)]
        self._values = list(self._found(f"optimizer/{index}/", manifest))

    def _group(self, group: list[nn.Parameter], manifest: Manifest) -> dict[str, Any]:
        """The options of a group: those that all of its parameters had."""
        found: dict[int, str] = {}
        for parameter in group:
            name = self._names.get(id(parameter))
            if name is None:
                raise CheckpointError(
                    "the optimizer has a parameter that is not in this model; make it with the "
                    "model's own parameters"
                )
            if name not in self._group_of:
                raise CheckpointError(
                    f"{manifest.path} has no state of the optimizer for {name}; give the optimizer "
                    "the parameters that it had when it was saved"
                )
            found.setdefault(self._group_of[name], name)
        if len(found) > 1:
            first, second = list(found.values())[:2]
            raise CheckpointError(
                f"{first} and {second} are in one group of this optimizer, and were in two with "
                f"other options in {manifest.path}; make the groups that were saved"
            )
        return self._told["groups"][next(iter(found))]["options"] if found else {}

    def _found(self, prefix: str, manifest: Manifest) -> Iterator[_Value]:
        keys: dict[str, list[str]] = {}
        for name in manifest.tensors:
            if name.startswith(prefix):
                owner, _, key = name.removeprefix(prefix).rpartition("/")
                keys.setdefault(owner, []).append(key)
        for parameter in (each for group in _parameters(self._optimizer) for each in group):
            name = self._names[id(parameter)]
            for key in keys.get(name, []):
                entry = manifest.tensors[f"{prefix}{name}/{key}"]
                alike = entry.shape == tuple(parameter.shape)
                if is_sharded(parameter) and not alike and entry.shape:
                    raise CheckpointError(
                        f"{key} of {name} has the shape {list(entry.shape)} in {manifest.path}, "
                        "and cannot be put in shards as the parameter is"
                    )
                yield _Value(parameter, key, f"{prefix}{name}/{key}", entry)

    def wanted(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is needed of the checkpoint: names, and tensors with the same layout."""
        for value in self._values:
            alike = value.entry.shape == tuple(value.parameter.shape)
            yield value.name, value.parameter if alike else torch.empty(value.entry.shape)

    def apply(self, fill: Callable[[str, torch.Tensor], None]) -> None:
        """Load it; ``fill`` gives a tensor its values from the checkpoint."""
        optimizer = self._optimizer
        state: dict[int, dict[str, Any]] = {}
        flat = [parameter for group in _parameters(optimizer) for parameter in group]
        numbers = {id(parameter): number for number, parameter in enumerate(flat)}
        for value in self._values:
            tensor = self._room(value)
            fill(value.name, tensor)
            state.setdefault(numbers[id(value.parameter)], {})[value.key] = tensor
        for parameter in flat:
            rest = self._told["state"].get(self._names[id(parameter)])
            if rest:
                plain = {key: unpack(each, _no_tensor) for key, each in rest.items()}
                state.setdefault(numbers[id(parameter)], {}).update(plain)
        now = optimizer.state_dict()["param_groups"]
        groups = [
            group
            | {key: _beside(unpack(each, _no_tensor), group.get(key)) for key, each in told.items()}
            for group, told in zip(now, self._options, strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        # Torch gives a state the type of its parameter, which may have less room for it.
        for value in self._values:
            loaded = optimizer.state[value.parameter].get(value.key)
            kept = state[numbers[id(value.parameter)]][value.key]
            if isinstance(loaded, torch.Tensor) and loaded.dtype != kept.dtype:
                optimizer.state[value.parameter][value.key] = kept.to(loaded.device)

    def _room(self, value: _Value) -> torch.Tensor:
        """Where a tensor goes: what the optimizer has there, if it is like it, or a new one."""
        known = self._optimizer.state.get(value.parameter, {}).get(value.key)
        dtype, shape = value.entry.dtype, value.entry.shape
        if isinstance(known, torch.Tensor) and (known.dtype, tuple(known.shape)) == (dtype, shape):
            return known
        if shape == tuple(value.parameter.shape):
            return torch.empty_like(value.parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"an option of an optimizer is a tensor of several elements: {name}")


def _beside(value: Any, before: Any) -> Any:
    """An option on the device where it is now."""
    if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(before.device)
    return value
