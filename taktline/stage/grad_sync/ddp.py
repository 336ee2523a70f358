"""DistributedDataParallel: gradients are averaged once, where the plan says, without its reducer.

The reducer expects one backward for each forward, and hears of gradients by hooks of the engine. In
a pipeline several forwards are in flight, and W adds gradients without the engine. So the average
is computed here: in buckets of the same size, over the same group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taktline.private import lacking
from taktline.stage.grad_sync.base import GradSync

_FEATURE = "DDP in a pipeline"


class DDPSync(GradSync):
    """Stages in, or with parts in, DistributedDataParallel or the ``replicate`` made from it."""

    name = "DDP"

    def __init__(self, wrapped: Sequence[nn.Module]) -> None:
        super().__init__()
        self._wrappers = [_Wrapper.of(module) for module in wrapped]
        self._wanted: list[_Wrapper] = []
        """Those that are reduced in the running step."""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Each group once."""
        return list(dict.fromkeys(wrapper.group for wrapper in self._wrappers))

    def refusal(self) -> str | None:
        """Why a DDP cannot be averaged here; None if it can."""
        for wrapper in self._wrappers:
            if reason := lacking(wrapper.ddp, "_comm_hooks", "_sync_buffers", feature=_FEATURE):
                return reason
            if found := _hindrance(wrapper.ddp):
                return f"its DDP has {found}"
        return None

    def begin(self) -> None:
        """Stop the reducers; a DDP under no_sync() stays as it is."""
        self._wanted = [wrapper for wrapper in self._wrappers if wrapper.syncs]
        for wrapper in self._wanted:
            wrapper.syncs = False
        for wrapper in self._wrappers:
            # DDP does this in its first forward, which a failing rank may not reach.
            if wrapper.ddp.will_sync_module_buffers():
                wrapper.ddp._sync_buffers()
                wrapper.ddp.require_forward_param_sync = False

    def end(self) -> None:
        """Restart the reducers."""
        for wrapper in self._wanted:
            wrapper.syncs = True
        self._wanted = []

    def unshard(self) -> None:
        """Nothing: every replica has all parameters."""

    def reshard(self) -> None:
        """Nothing."""

    def weights_done(self) -> None:
        """Nothing: gradients are where they are reduced."""

    def _reduce(self) -> None:
        pending = [bucket for wrapper in self._wanted for bucket in _buckets(wrapper)]
        for bucket in pending:
            bucket.post()
        for bucket in pending:
            bucket.finish()
        for wrapper in self._wanted:
            # As in DDP, the first forward after a reduction broadcasts buffers.
            wrapper.ddp.require_forward_param_sync = True


@dataclass(slots=True)
class _Wrapper:
    """One DDP, and the switch of its reducer."""

    ddp: DistributedDataParallel
    state: Any = None
    """The state of ``replicate``, which sets the switch of its DDP before each forward."""

    @classmethod
    def of(cls, module: nn.Module) -> _Wrapper:
        if isinstance(module, DistributedDataParallel):
            return cls(module)
        state = sys.modules["torch.distributed._composable.replicate"].replicate.state(module)
        if state._init_args or state._init_kwargs:
            # It makes its DDP at the first forward; here it is needed before that.
            state.lazy_init()
        return cls(state._ddp, state)

    @property
    def group(self) -> dist.ProcessGroup:
        """The replicas."""
        group: Any = self.ddp.process_group
        return group

    @property
    def syncs(self) -> bool:
        """Whether the reducer runs in a backward."""
        if self.state is not None:
            return not self.state._no_sync
        return self.ddp.require_backward_grad_sync

    @syncs.setter
    def syncs(self, value: bool) -> None:
        if self.state is not None:
            self.state._no_sync = not value
        self.ddp.require_backward_grad_sync = value


class _Bucket:
    """Parameters whose gradients are averaged together.

    Behind the gradients there is one number for each parameter: whether a replica has used it. A
    gradient that no replica has stays None; one that is missing here counts as zero.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        self._group = group
        self._flat = torch.empty(0)
        self._work: dist.Work | None = None

    def post(self) -> None:
        """Start the sum."""
        first = self._parameters[0]
        used = [float(p.grad is not None) for p in self._parameters]
        parts = [
            p.new_zeros(p.numel()) if p.grad is None else p.grad.detach().reshape(-1)
            for p in self._parameters
        ]
        flags = torch.tensor(used, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            self._flat = torch.cat([*parts, flags]).mul_(1 / self._group.size())
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for the sum, and write the averages to the gradients."""
        if self._work is not None:
            self._work.wait()
        sizes = [p.numel() for p in self._parameters]
        *averages, flags = self._flat.detach().split([*sizes, len(sizes)])
        with torch.no_grad():
            for index, (parameter, average) in enumerate(
                zip(self._parameters, averages, strict=True)
            ):
                if parameter.grad is not None:
                    parameter.grad.copy_(average.view_as(parameter.grad))
                elif flags[index] > 0:
                    parameter.grad = average.view_as(parameter).clone()


def _buckets(wrapper: _Wrapper) -> list[_Bucket]:
    """The parameters that DDP reduces, in buckets of its size, each of one type and device."""
    ddp = wrapper.ddp
    ignored: set[str] = ddp.parameters_to_ignore  # pyright: ignore[reportAssignmentType]
    named = ddp.module.named_parameters()
    reduced = [p for name, p in named if p.requires_grad and name not in ignored]
    filling: dict[object, list[nn.Parameter]] = {}
    sizes: Counter[object] = Counter()
    full: list[list[nn.Parameter]] = []
    for parameter in reduced:
        kind = parameter.dtype, parameter.device
        filling.setdefault(kind, []).append(parameter)
        sizes[kind] += parameter.nbytes
        if sizes[kind] >= ddp.bucket_bytes_cap:
            full.append(filling.pop(kind))
            del sizes[kind]
    return [_Bucket(bucket, wrapper.group) for bucket in (*full, *filling.values())]


def _hindrance(ddp: Any) -> str | None:
    """The feature of a DDP that does not work in a stage, and why; None if it has none."""
    too_early = "which reduces by itself, at the wrong time"
    embeddings = [m for m in ddp.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    if ddp._comm_hooks:
        return f"a communication hook, {too_early}; leave it out"
    if ddp.static_graph:
        return (
            "static_graph=True, so that it reduces by itself after the first backward, which is "
            "the wrong time; leave it out: it saves nothing here"
        )
    if getattr(ddp, "_use_python_reducer", False):
        return f"the Python reducer, {too_early}; choose another torch._dynamo.config.optimize_ddp"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return (
            "delay_all_reduce_named_params; leave it out: here all gradients are reduced together"
        )
    if ddp.mixed_precision:
        return (
            "mixed precision of its own, which needs its own backward; use fully_shard or autocast"
        )
    if any(module.sparse for module in embeddings):
        return "sparse gradients, which cannot be put into buckets; leave out sparse=True"
    return None
