"""Runs of stages without data; what one keeps for its backward, and needs for a moment."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from taktline import pytree
from taktline.device import keep_generators
from taktline.private import private
from taktline.side_values import SideValues, Skip
from taktline.split.steps import all_tensors
from taktline.train.weights import is_quantised

_log = logging.getLogger("taktline")
_Mode = private("torch.utils._python_dispatch.TorchDispatchMode", "estimates of memory")

_FakeMode = private("torch._subclasses.fake_tensor.FakeTensorMode", "a prediction without data")

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]
"""From the output of the last stage, and the target."""


@contextmanager
def without_data(modules: Sequence[nn.Module], values: Any) -> Iterator[tuple[list[Any], Any]]:
    """Copies of modules, and of nested values, whose tensors have no data.

    Inside, operations find only shapes, types and devices. Of a module nothing is changed.
    """
    tensors = [tensor for m in modules for tensor in (*m.parameters(), *m.buffers())]
    here = next((tensor.device for tensor in tensors), torch.device("cpu"))
    here = torch.device("cpu") if here.type == "meta" else here
    mode, held = _FakeMode(allow_non_fake_inputs=True), dict[int, Any]()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=here, requires_grad=tensor.requires_grad)
        if is_quantised(tensor):  # its operations are those on the weight that it stands for
            made: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device=here)
            made.quant_state = getattr(tensor, "quant_state", None)
            held[id(made.quant_state)] = made.quant_state  # not copied
            return made
        return mode.from_tensor(tensor)

    def faked(part: torch.Tensor) -> torch.Tensor:
        return fake(part if part.is_meta else part.to(here))

    eagerly = torch.compiler.set_stance("force_eager")
    with eagerly, keep_generators([here]), torch.enable_grad(), mode:
        held |= {id(tensor): fake(tensor) for tensor in tensors}
        given = pytree.tree_map_only(torch.Tensor, faked, values)
        # A forward may change what it finds: buffers, and attributes of modules.
        yield copy.deepcopy(list(modules), held), given


class Given(NamedTuple):
    """What a stage gets for one micro-batch, as tensors without data."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    skips: dict[str, Skip]


class Live(_Mode):
    """The bytes of tensors that are made inside of it: those alive, and the most that ever were.

    >>> with Live([]) as live:
    ...     for _ in range(3):
    ...         _ = torch.ones(2) + torch.ones(2)
    >>> live.most
    24
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: None for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in all_tensors(result):
            self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


class Saved:
    """The bytes of all storages that are saved for a backward inside of ``hooks``, once each."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = {_memory(tensor) for tensor in weights}
        self.sizes: dict[int, int] = {}
        self.hooks = saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        if _memory(tensor) not in self._weights:
            self.sizes[_memory(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.sizes.values())


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Moment(NamedTuple):
    """What one stage needs for one micro-batch, in bytes."""

    keeps: int
    """What the forward keeps for its backward."""
    needs: int
    """What its forward or backward needs beside this, at most, for a moment."""


def measure_alone(
    module: nn.Module, stage: int, given: Given | None, loss: Loss | None, target: Any = None
) -> Moment | None:
    """A forward and a backward of one stage; with a loss, of the last one.

    None if they read data, or what it gets is not known: it is an estimate only.
    """
    if given is None:
        return None
    try:
        values = tuple(given), target
        with without_data([module], values) as ([made], (parts, target)):
            faked = Given(*parts)
            _train(made, stage, faked, loss, target)
            # What a first backward makes beside its work does not count: gradients.
            return _train(made, stage, faked, loss, target)
    except Exception as error:  # whatever a model raises
        _log.info("no estimate of stage %d: %s: %s", stage, type(error).__name__, error)
        return None


def _train(module: nn.Module, stage: int, given: Given, loss: Loss | None, target: Any) -> Moment:
    def leaf(part: torch.Tensor) -> torch.Tensor:
        return part.detach().requires_grad_(part.requires_grad)

    args, skips = pytree.tree_map_only(torch.Tensor, leaf, given.args), dict[str, Skip]()
    for name, skip in given.skips.items():
        value = pytree.tree_map_only(torch.Tensor, leaf, skip.value)
        skips[name] = Skip(value, skip.stage)
    weights = [*module.parameters(), *module.buffers()]
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    known = [*weights, *gradients, *all_tensors((args, given.kwargs, target, given.skips))]
    inside = torch.autograd.set_multithreading_enabled(False)
    before = {_memory(tensor) for tensor in known}
    saved = Saved(weights)
    with Live(known) as live, saved.hooks, inside:
        with SideValues(stage, skips) as side:
            output = module(*args, **given.kwargs)
        sent = [skip.value for skip in side.skips.values()]
        roots = [x for x in all_tensors((output, sent)) if x.requires_grad and x.grad_fn]
        if loss is not None:
            roots = [loss(output, target)]
        roots += [x for x in side.losses if x.requires_grad]
        # A stage keeps no output that it has sent, or that its loss has used.
        edges = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
        gradients = [torch.empty_like(root) for root in roots]
        del output, sent, roots, side
        torch.autograd.backward(edges, gradients)
    own = sum(size for memory, size in saved.sizes.items() if memory not in before)
    return Moment(saved.total, max(0, live.most - own))
