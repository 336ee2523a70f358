"""A model by the names of its submodules: which of them each stage has, and copies without data.

::

    model                 container: an ancestor of a cut; each stage has a copy
    ├── embed_tokens      unit: lies in one stage, foreign units replace it elsewhere
    ├── layers            container
    │   ├── 0             unit
    │   └── 1             unit; a cut begins a stage here
    ├── rotary_emb        free: has nothing to train or to save, so every stage has it
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
from taktline.split.named.changes import follow
from taktline.split.named.containers import containers_of, copied, is_unit, joined, separated
from taktline.split.named.course import Cut
from taktline.split.named.of_transformers import forget_caches, hook_routers
from taktline.split.named.placeholder import ANYWHERE, Placeholder
from taktline.split.named.replacement import copied_unit, foreign_unit, own_unit
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.watch import inner_of
from taktline.stage.names import unwrapped

__all__ = ["Layout"]


@dataclass(eq=False)
class Layout:
    """All that the pieces of a model have in common.

    Args:
        kind: the model's class.
        cuts: the calls of units with which stages begin, from the second stage on.
    """

    kind: type[nn.Module]
    cuts: tuple[Cut, ...]
    containers: frozenset[str] = frozenset()
    probes: dict[str, ShapeProbe] = field(default_factory=dict)
    """Of the units, in the order in which the model has them."""
    direct: dict[str, Placeholder] = field(default_factory=dict)
    """The parameters of containers themselves."""
    homes: dict[str, frozenset[int]] = field(default_factory=dict)
    """The stages that have each unit: those that use it."""
    users: dict[str, frozenset[int]] = field(default_factory=dict)
    """The stages that use each parameter of a container."""
    hooked: list[str] = field(default_factory=list)
    """The units whose replacements have got hooks."""
    retyped: int = 0
    """How often something has got another type."""
    course: Any = None
    """What the first walk through the forward has seen, once the cuts are known."""
    example: Any = None
    """What the arguments of that walk look like."""
    empty_model: nn.Module = field(init=False)
    """The model without data."""

    @classmethod
    def of(cls, model: nn.Module, cuts: Sequence[Cut]) -> Layout:
        """The layout of a model; which stage has what is to be found out yet."""
        hook_routers(model)
        made = cls(type(model), tuple(cuts), containers=containers_of(model, cuts))
        free = _without_data(model)
        units = {cut.unit for cut in cuts}
        skips: dict[str, Any] = {}

        def note(name: str, module: nn.Module) -> nn.Module:
            if name not in units and not is_unit(module):
                return copy.deepcopy(module, free)
            inside = unwrapped(module)  # without data there is nothing to compile
            probe = copy.deepcopy(inside, _placeholders(name, inside))
            made.probes[name] = ShapeProbe(name, probe, module.training, skips, made.hooked)
            return copied_unit(made.probes[name])

        def keep(name: str, parameter: nn.Parameter) -> Placeholder:
            made.direct[name] = Placeholder.of(parameter, name, ANYWHERE, parameter=True)
            return made.direct[name]

        made.empty_model = copied(model, "", made.containers, note, keep)
        made._rebind(model, made.empty_model)
        made._forget_caches(made.empty_model)
        for name in made.containers:
            container = made.empty_model.get_submodule(name)
            container._buffers = copy.deepcopy(container._buffers, free)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    @property
    def advice(self) -> str:
        """What to do where a stage misses something."""
        if self.example is None:
            return "call by_names with an example= of what the model is called with"
        return "cut the model by hand, or with taktline.pipeline, which traces it"

    @property
    def stages(self) -> int:
        """How many pieces there are."""
        return len(self.cuts) + 1

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of what the model's forward takes."""
        return tuple(signature(self.kind.forward).parameters)[1:]

    @cached_property
    def inner(self) -> dict[int, str]:
        """The names of what is inside of the copies of units, by their ids."""
        return inner_of({name: probe.module for name, probe in self.probes.items()})

    @cached_property
    def common(self) -> dict[str, nn.Module]:
        """What every stage runs, without data."""
        return self.common_of(self.empty_model)

    def common_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """The same of a piece: containers, and submodules that are no units."""
        found: dict[str, nn.Module] = {}
        for name in sorted(self.containers):
            container = model.get_submodule(name)
            found[name] = container
            for key, child in container._modules.items():
                path = joined(name, key)
                if child is not None and path not in self.probes and path not in self.containers:
                    inner = nn.Module.named_modules(child)
                    found |= {joined(path, part): module for part, module in inner}
        return found

    def all_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """All modules of a piece, what is inside of units included."""
        return dict(nn.Module.named_modules(model, remove_duplicate=False))

    def common_in(self, changed: Collection[str]) -> frozenset[str]:
        """Those of the names of what is changed that are not of units."""
        return frozenset(name for name in changed if name.rpartition(".")[0] in self.common)

    def follow(self, piece: nn.Module) -> None:
        """Be in training or evaluation, and have what a forward may ask for, as a piece does."""
        common = self.common_of(piece)
        for name, module in self.common.items():
            follow(module, common[name])
        for name, probe in self.probes.items():
            probe.training = piece.get_submodule(name).training

    def separate(self, piece: nn.Module, changed: Collection[str]) -> None:
        """Let a piece have submodules of its own in the place of those that stages share.

        ``changed`` are the names of what a forward changes.
        """
        for name in self.containers:
            container = piece.get_submodule(name)
            for key, child in container._modules.items():
                path = joined(name, key)
                is_shared = path not in self.probes and path not in self.containers
                if child and is_shared and any(each.startswith(f"{path}.") for each in changed):
                    container._modules[key] = separated(child)

    def start(self, stage: int) -> Cut | None:
        """The call with which a stage begins; None for the first one, and after the last one."""
        return self.cuts[stage - 1] if 0 < stage < self.stages else None

    def is_shared(self, stage: int) -> bool:
        """Whether a stage begins or ends with one of several calls of a unit."""
        ends = (self.start(stage), self.start(stage + 1))
        return any(cut is not None and len(self.homes[cut.unit]) > 1 for cut in ends)

    def piece(self, model: nn.Module, stage: int) -> nn.Module:
        """The model as one stage has it, without what it does around its forward."""

        def child(name: str, module: nn.Module) -> nn.Module:
            if name not in self.probes:
                return module
            if stage in self.homes[name]:
                begins, ends = (
                    cut.call if cut and cut.unit == name else None
                    for cut in (self.start(stage), self.start(stage + 1))
                )
                return own_unit(module, name, begins=begins, ends=ends)
            return foreign_unit(self.probes[name], type(unwrapped(module)), module.training)

        def parameter(name: str, parameter: nn.Parameter) -> nn.Parameter | Placeholder:
            return parameter if stage in self.users[name] else self.direct[name]

        made = copied(model, "", self.containers, child, parameter)
        self._rebind(model, made)
        self._forget_caches(made)
        for hooks in (made._forward_hooks, made._forward_pre_hooks):
            for key, hook in hooks.items():
                hooks[key] = _observing(hook, self.kind.__name__)
        return made

    def _rebind(self, model: nn.Module, piece: nn.Module) -> None:
        """Let methods that containers keep as attributes be those of a piece."""
        paths = {id(part): path for path, part in model.named_modules()}
        for name in self.containers:
            attributes = vars(piece.get_submodule(name))
            for key, value in attributes.items():
                path = paths.get(id(value.__self__)) if isinstance(value, MethodType) else None
                if path in self.containers:
                    attributes[key] = MethodType(value.__func__, piece.get_submodule(path))
                elif path is not None:
                    raise PartitionError(
                        f"the attribute {joined(name, key)!r} is a method of {path!r}, which would "
                        "run in stages that do not have that; call it as a method of the submodule"
                    )

    def _forget_caches(self, piece: nn.Module) -> None:
        for name in self.containers - {""} if "use_cache" not in self.arguments else ():
            forget_caches(piece.get_submodule(name))

    def retype(self, piece: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow what is done to the parameters of a piece, as far as it changes their types."""
        types: dict[torch.dtype, torch.dtype] = {}

        def follow(table: dict[str, Any]) -> bool:
            """Whether anything in a table has another type now."""
            changed = False
            for key, placeholder in table.items():
                if isinstance(placeholder, Placeholder):
                    if placeholder.dtype not in types:
                        types[placeholder.dtype] = change(
                            torch.empty(0, dtype=placeholder.dtype, device="cpu")
                        ).dtype
                    if types[placeholder.dtype] is not placeholder.dtype:
                        table[key], changed = placeholder.typed(types[placeholder.dtype]), True
            return changed

        for probe in self.probes.values():
            for module in probe.module.modules():
                for table in (module._parameters, module._buffers):
                    if follow(table):
                        probe.forget()
        follow(self.direct)
        self.retyped += 1
        for name, placeholder in self.direct.items():
            path, _, key = name.rpartition(".")
            for model in (self.empty_model, piece):
                container = vars(model.get_submodule(path))
                if key in container:
                    container[key] = placeholder


def _placeholders(unit: str, module: nn.Module) -> dict[int, Any]:
    """For a copy of a unit: placeholders for all that has data."""
    memo: dict[int, Any] = {}
    computed = [
        (key, value)
        for part in module.modules()
        for key, value in vars(part).items()
        # Such as the weight that a hook makes of its direction and its length.
        if type(value) is torch.Tensor and value.grad_fn is not None
    ]
    for name, tensor in (*module.named_parameters(), *module.named_buffers(), *computed):
        memo[id(tensor)] = placeholder = Placeholder.of(tensor, joined(unit, name), ANYWHERE)
        placeholder.owner = unit
    return memo


def _without_data(model: nn.Module) -> dict[int, Any]:
    """For copies of what every stage has: placeholders for what has no data yet."""
    return {
        id(buffer): Placeholder.of(buffer, name, ANYWHERE)
        for name, buffer in model.named_buffers()
        if buffer.is_meta
    }


def _observing(hook: Callable[..., Any], who: str) -> Callable[..., None]:
    """A hook of the model itself, which every stage has: it may look at what it is given."""

    def call(*args: Any) -> None:
        if hook(*args) is not None:
            raise PartitionError(
                f"a hook of {who} itself changes what it is given, which in a stage is what comes "
                "from the one before, or goes to the next; do so in a submodule"
            )

    return call
