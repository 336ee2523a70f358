"""The layout of a model that is cut by names: which stage has which submodule.

::

    model                 container: an ancestor of a cut; each stage has a copy
    ├── embed_tokens      unit: lies in one stage; foreign units replace it elsewhere
    ├── layers            container
    │   ├── 0             unit
    │   └── 1             unit; a cut begins a stage here
    ├── rotary_emb        free: has no state, so every stage has it
    └── norm              unit
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.named.changes import copy_attributes
from taktline.split.named.containers import containers_of, copied, is_unit, joined, with_own_tables
from taktline.split.named.forward_summary import Cut, ForwardSummary
from taktline.split.named.hugging_face import disable_cache, install_router_hooks
from taktline.split.named.placeholder import ANYWHERE, Placeholder
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.units import copied_unit, foreign_unit, inner_modules, own_unit
from taktline.stage.names import unwrapped

BY_HAND = "cut the model by hand, or with taktline.pipeline, which traces it"


def all_modules(model: nn.Module) -> dict[str, nn.Module]:
    """All modules of a model by name, also those inside of units."""
    return dict(nn.Module.named_modules(model, remove_duplicate=False))


@dataclass(eq=False)
class Layout:
    """What the stages of a model have in common.

    Args:
        model_class: the class of the model.
        cuts: the calls of units with which stages begin, from the second stage on.
    """

    model_class: type[nn.Module]
    cuts: tuple[Cut, ...]
    containers: frozenset[str] = frozenset()
    probes: dict[str, ShapeProbe] = field(default_factory=dict)
    """One for each unit, in the order of the units in the model."""
    direct: dict[str, Placeholder] = field(default_factory=dict)
    """Placeholders for the parameters of containers."""
    homes: dict[str, frozenset[int]] = field(default_factory=dict)
    """The stages that have each unit, and each parameter of a container."""
    hooked: list[str] = field(default_factory=list)
    """The foreign units that have got hooks."""
    retyped: int = 0
    """How often the types of parameters have changed."""
    summary: ForwardSummary | None = None
    """What the first dry run has seen."""
    example_key: Any = None
    """The cache key of the arguments of that dry run."""
    empty_model: nn.Module = field(init=False)
    """The model without data."""

    @classmethod
    def of(cls, model: nn.Module, cuts: Sequence[Cut]) -> Layout:
        """The layout of a model, without homes, which a dry run has to find."""
        install_router_hooks(model)
        made = cls(type(model), tuple(cuts), containers=containers_of(model, cuts))
        free = _buffers_without_data(model)
        units = {cut.unit for cut in cuts}
        skips: dict[str, Any] = {}

        def child(name: str, module: nn.Module) -> nn.Module:
            if name not in units and not is_unit(module):
                return copy.deepcopy(module, free)
            inside = unwrapped(module)  # without data there is nothing to compile
            probe = copy.deepcopy(inside, _placeholders(name, inside))
            made.probes[name] = ShapeProbe(name, probe, module.training, skips, made.hooked)
            return copied_unit(made.probes[name])

        def parameter(name: str, parameter: nn.Parameter) -> Placeholder:
            made.direct[name] = Placeholder.of(parameter, name, ANYWHERE, owner=name)
            return made.direct[name]

        made.empty_model = made._copy(model, child, parameter)
        for container in made.containers_in(made.empty_model).values():
            container._buffers = copy.deepcopy(container._buffers, free)
        return made

    def with_cuts(self, cuts: Sequence[Cut]) -> Layout:
        """The same layout with other cuts through the same containers."""
        made = copy.copy(self)
        made.cuts = tuple(cuts)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    @property
    def advice(self) -> str:
        """What the user can do if a stage lacks something."""
        if self.example_key is None:
            return "call by_names with example=, the arguments of the model"
        return BY_HAND

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments of the model's forward."""
        return tuple(signature(self.model_class.forward).parameters)[1:]

    @cached_property
    def inner(self) -> dict[int, str]:
        """The names of the modules inside of the units without data, by their ids."""
        return inner_modules({name: probe.module for name, probe in self.probes.items()})

    @cached_property
    def common(self) -> dict[str, nn.Module]:
        """The modules without data that every stage runs."""
        return self.common_of(self.empty_model)

    def containers_in(self, model: nn.Module) -> dict[str, nn.Module]:
        """The containers of a model or a stage by name."""
        return {name: model.get_submodule(name) for name in sorted(self.containers)}

    def common_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules of a stage that every stage runs: containers, and submodules in no unit."""
        found: dict[str, nn.Module] = {}
        for name, container in self.containers_in(model).items():
            found[name] = container
            for key, child in container._modules.items():
                path = joined(name, key)
                if child is not None and self._is_free(path):
                    inner = nn.Module.named_modules(child)
                    found |= {joined(path, part): module for part, module in inner}
        return found

    def _is_free(self, path: str) -> bool:
        """Whether a child of a container has no state, so that every stage has it."""
        return path not in self.probes and path not in self.containers

    def common_in(self, changed: Collection[str]) -> frozenset[str]:
        """Those of the names of attributes that belong to no unit."""
        return frozenset(name for name in changed if name.rpartition(".")[0] in self.common)

    def follow(self, stage_module: nn.Module) -> None:
        """Let the model without data have the modes and attributes of a stage."""
        common = self.common_of(stage_module)
        for name, module in self.common.items():
            copy_attributes(module, common[name])
        for name, probe in self.probes.items():
            probe.training = stage_module.get_submodule(name).training

    def separate(self, stage_module: nn.Module, changed: Collection[str]) -> None:
        """Give a stage its own copies of the shared submodules whose attributes are changed."""
        for name, container in self.containers_in(stage_module).items():
            for key, child in container._modules.items():
                path = joined(name, key)
                is_changed = any(each.startswith(f"{path}.") for each in changed)
                if child and self._is_free(path) and is_changed:
                    container._modules[key] = with_own_tables(child)

    def start(self, stage: int) -> Cut | None:
        """The call with which a stage begins; None for the first stage, and after the last."""
        return self.cuts[stage - 1] if 0 < stage < self.stages else None

    def is_shared(self, unit: str) -> bool:
        """Whether several stages have a unit."""
        return len(self.homes[unit]) > 1

    def stage_modules(self, model: nn.Module, stage: int) -> nn.Module:
        """A copy of the model with the units of one stage."""

        def child(name: str, module: nn.Module) -> nn.Module:
            if name not in self.probes:
                return module
            if stage in self.homes[name]:
                return own_unit(module, name)
            return foreign_unit(self.probes[name], type(unwrapped(module)), module.training)

        def parameter(name: str, parameter: nn.Parameter) -> nn.Parameter | Placeholder:
            return parameter if stage in self.homes[name] else self.direct[name]

        made = self._copy(model, child, parameter)
        for hooks in (made._forward_hooks, made._forward_pre_hooks):
            for key, hook in hooks.items():
                hooks[key] = _observing(hook, self.model_class.__name__)
        return made

    def _copy(
        self,
        model: nn.Module,
        child: Callable[[str, nn.Module], nn.Module],
        parameter: Callable[[str, nn.Parameter], nn.Parameter | Placeholder],
    ) -> nn.Module:
        """A copy of the model's containers, with replaced units and parameters."""
        made = copied(model, "", self.containers, child, parameter)
        self._rebind(model, made)
        if "use_cache" not in self.arguments:
            for name, container in self.containers_in(made).items():
                if name:
                    disable_cache(container)
        return made

    def _rebind(self, model: nn.Module, made: nn.Module) -> None:
        """Bind methods that containers keep as attributes to the copies of the containers."""
        paths = {id(part): path for path, part in model.named_modules()}
        for name, container in self.containers_in(made).items():
            attributes = vars(container)
            for key, value in attributes.items():
                path = paths.get(id(value.__self__)) if isinstance(value, MethodType) else None
                if path in self.containers:
                    attributes[key] = MethodType(value.__func__, made.get_submodule(path))
                elif path is not None:
                    raise PartitionError(
                        f"the attribute {joined(name, key)!r} is a method of {path!r}, which would "
                        "also run in stages without it; call it as a method of the submodule"
                    )

    def retype(
        self, stage_module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Change the types of placeholders as ``change`` changes those of a stage's parameters."""
        types: dict[torch.dtype, torch.dtype] = {}

        def follow(table: dict[str, Any]) -> bool:
            """Change the placeholders in a table; returns whether any has another type now."""
            changed = False
            for key, placeholder in table.items():
                if isinstance(placeholder, Placeholder):
                    before = placeholder.dtype
                    if before not in types:
                        types[before] = change(torch.empty(0, dtype=before, device="cpu")).dtype
                    if types[before] is not before:
                        table[key], changed = placeholder.typed(types[before]), True
            return changed

        for probe in self.probes.values():
            for module in probe.module.modules():
                for table in (module._parameters, module._buffers):
                    if follow(table):
                        probe.forget()
        follow(self.direct)
        for model in (self.empty_model, stage_module):
            for container in self.containers_in(model).values():
                follow(vars(container))
        self.retyped += 1


def _placeholders(unit: str, module: nn.Module) -> dict[int, Any]:
    """A memo for ``deepcopy`` of a unit: placeholders for its tensors."""
    memo: dict[int, Any] = {}
    computed = [
        (key, value)
        for part in module.modules()
        for key, value in vars(part).items()
        # Such as the weight that a hook of weight normalization computes.
        if type(value) is torch.Tensor and value.grad_fn is not None
    ]
    for name, tensor in (*module.named_parameters(), *module.named_buffers(), *computed):
        memo[id(tensor)] = Placeholder.of(tensor, joined(unit, name), ANYWHERE, owner=unit)
    return memo


def _buffers_without_data(model: nn.Module) -> dict[int, Any]:
    """A memo for ``deepcopy`` of free submodules: placeholders for buffers on the meta device."""
    return {
        id(buffer): Placeholder.of(buffer, name, ANYWHERE)
        for name, buffer in model.named_buffers()
        if buffer.is_meta
    }


def _observing(hook: Callable[..., Any], name: str) -> Callable[..., None]:
    """A hook of the model itself that may only look at its arguments: every stage has it."""

    def call(*args: Any) -> None:
        if hook(*args) is not None:
            raise PartitionError(
                f"a hook of {name} itself changes the arguments or output, which in a stage belong "
                "to other stages; use a hook of a submodule"
            )

    return call
