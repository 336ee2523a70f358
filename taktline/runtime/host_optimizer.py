"""An optimizer whose state is in the host's memory, and which steps there.

::

    before a step    weights and gradients are copied to twins on the host
    step             torch's own, on the CPU, with the twins in place of the parameters
    after it         the weights are copied back

The optimizer keeps its class, its groups and the keys of its state, so that schedulers, saves and
scalers work as before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checks import check
from taktline.errors import UseError
from taktline.meta import is_sharded
from taktline.stage.offload import copies_on

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
_hosts: WeakKeyDictionary[Optimizer, _Host] = WeakKeyDictionary()


def offload_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Keep an optimizer's state in the host's memory, and let it step there; returns it.

    A step copies gradients and weights to the host, and weights back. Where torch has a fused
    kernel for the CPU (``Adam``, ``AdamW``, ``SGD``, ``Adagrad``), that is used, unless the
    optimizer was made with ``fused=False`` or ``foreach=True``. It uses torch's threads:
    ``torch.set_num_threads``, or OMP_NUM_THREADS, which torchrun sets to 1.

    >>> model = nn.Linear(2, 2)
    >>> optimizer = offload_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    >>> model(torch.ones(2)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model.weight])
    ['exp_avg', 'exp_avg_sq', 'step']
    """
    check("optimizer", optimizer, Optimizer, "an optimizer of torch")
    if optimizer not in _hosts:
        sharded = [p for group in optimizer.param_groups for p in group["params"] if is_sharded(p)]
        if sharded:
            raise UseError(
                "offload_optimizer() is for whole parameters, and those of this optimizer are "
                "sharded; pass offload_policy=CPUOffloadPolicy() to fully_shard instead"
            )
        _hosts[optimizer] = _Host(optimizer)
    return optimizer


def device_of_state(optimizer: Optimizer, parameter: torch.Tensor) -> torch.device:
    """Where an optimizer has the state of a parameter."""
    return torch.device("cpu") if optimizer in _hosts else parameter.device


class _Host:
    """The twins of an optimizer's parameters."""

    def __init__(self, optimizer: Any) -> None:
        self._twins: dict[Any, nn.Parameter] = {}
        for group in optimizer.param_groups:
            with_fused = group.get("fused", False) is None and not group.get("foreach")
            group.update({"fused": True} if with_fused else {})
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                state.update({k: v.cpu() for k, v in state.items() if isinstance(v, torch.Tensor)})
        # Not by hooks: after a failure those that follow are not called.
        step, load = optimizer.step, optimizer.load_state_dict

        @wraps(step)
        def step_here(self: Any, closure: None = None) -> None:
            if closure is not None:
                raise UseError(
                    "an offloaded optimizer steps without a closure: call pipe.step(), then "
                    "optimizer.step()"
                )
            host._step(self, step)

        @wraps(load)
        def load_here(self: Any, state_dict: Any) -> None:
            with host._instead(self, [p for p in _parameters(self) if p.requires_grad]):
                load(state_dict)

        host = self
        optimizer.step = MethodType(step_here, optimizer)
        optimizer.load_state_dict = MethodType(load_here, optimizer)

    def _step(self, optimizer: Any, step: Callable[[], None]) -> None:
        out: defaultdict[torch.device, list[Any]] = defaultdict(list)
        back: defaultdict[torch.device, list[Any]] = defaultdict(list)
        trained = [each for each in _parameters(optimizer) if each.grad is not None]
        for parameter in trained:
            twin, gradient = self._twin(parameter), parameter.grad
            if twin.grad is None or twin.grad.stride() != gradient.stride():
                twin.grad = torch.empty_like(gradient, device="cpu", pin_memory=gradient.is_cuda)
            out[parameter.device] += [(twin, parameter), (twin.grad, gradient)]
            back[parameter.device].append((parameter, twin))
        _copy(out, inward=False)
        with self._instead(optimizer, trained):
            step()
        _copy(back, inward=True)

    def _twin(self, parameter: Any) -> nn.Parameter:
        if parameter not in self._twins:
            options: Any = {"device": "cpu", "pin_memory": parameter.is_cuda}
            self._twins[parameter] = nn.Parameter(torch.empty_like(parameter, **options))
        return self._twins[parameter]

    @contextmanager
    def _instead(self, optimizer: Any, parameters: Iterable[Any]) -> Iterator[None]:
        """Inside, twins are in the places of parameters: in new groups, and in the state."""
        twins = {parameter: self._twin(parameter) for parameter in parameters}
        groups = optimizer.param_groups
        _replace(optimizer, twins)
        try:
            yield
        finally:
            _replace(optimizer, {twin: parameter for parameter, twin in twins.items()})
            for group, now in zip(groups, optimizer.param_groups, strict=True):
                group.update(now)
            optimizer.param_groups = groups


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _replace(optimizer: Any, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put others in the places of parameters, in new groups and a new state."""
    optimizer.param_groups = [
        group | {"params": [others.get(each, each) for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {others.get(key, key): value for key, value in optimizer.state.items()}
    optimizer.state = defaultdict(dict, state)


@torch.no_grad()
def _copy(pairs: Mapping[torch.device, list[Any]], *, inward: bool) -> None:
    for device, mine in pairs.items():
        copies = copies_on(device)
        end = copies.copy(mine, inward=inward)
        if inward:
            copies.wait(end)
        elif end is not None:
            end.synchronize()
