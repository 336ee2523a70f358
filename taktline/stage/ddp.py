"""The base of wrappers that average gradients over replicas, and DistributedDataParallel."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from taktline.private import lacking


class GradSync(ABC):
    """Makes a wrapper communicate only where the plan says.

    ::

        begin ─▶ UNSHARD ─▶ F, B, I, W … ─▶ REDUCE_GRAD ─▶ RESHARD ─▶ end
        └ the wrapper does nothing by itself                         └ as it was

    Between ``end`` and the next ``begin`` the wrapper works as it does outside of a pipeline.
    """

    name: ClassVar[str]
    """The wrapper's name in messages."""
    shards: ClassVar[bool] = False
    """Whether UNSHARD and RESHARD do anything."""

    def __init__(self) -> None:
        self.accumulating = False
        """Whether reductions are put off until :meth:`catch_up`."""
        self._put_off = False

    @property
    @abstractmethod
    def groups(self) -> Sequence[ProcessGroup]:
        """The groups that average gradients; several for a mesh of several dimensions."""

    @abstractmethod
    def refusal(self) -> str | None:
        """Why this wrapper cannot be part of a stage; None if it can."""

    @abstractmethod
    def begin(self) -> None:
        """Before a step: stop the wrapper from gathering and reducing by itself."""

    @abstractmethod
    def end(self) -> None:
        """After a step, also a failed one: restore the wrapper."""

    def unshard(self) -> None:  # noqa: B027
        """UNSHARD: start to gather the parameters; nothing if every replica has all of them."""

    def reshard(self) -> None:  # noqa: B027
        """RESHARD: release the gathered parameters; nothing, likewise."""

    def reduce(self) -> None:
        """REDUCE_GRAD: average the gradients, unless they are still accumulating."""
        self._put_off = self.accumulating
        if not self.accumulating:
            self._reduce()

    def wait(self) -> None:  # noqa: B027
        """Wait for the reductions that were started; nothing if a wrapper waits at once."""

    def forgo_unshard(self) -> None:
        """UNSHARD on a rank that has failed: its replicas need its part of the parameters."""
        self.unshard()

    def forgo_reshard(self) -> None:
        """RESHARD on a rank that has failed."""
        self.reshard()

    def forgo_reduce(self) -> None:
        """REDUCE_GRAD on a rank that has failed: its replicas wait for it."""
        if not self.accumulating:
            self._reduce()

    def catch_up(self) -> None:
        """Do the reduction that was put off, if any was."""
        if self._put_off:
            self._put_off = False
            self.begin()
            try:
                self._reduce()
            finally:
                self.end()

    @abstractmethod
    def _reduce(self) -> None:
        """Average the gradients now."""

    def trainable(self, module: nn.Module) -> list[nn.Parameter]:
        """The trainable parameters in the graph of a forward."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def weights_done(self) -> None:  # noqa: B027
        """After W: handle gradients that were added without the wrapper's hooks."""

    def forget(self) -> None:
        """After a failed step: drop gradients that are not reduced yet."""
        self._put_off = False


class DDPSync(GradSync):
    """Stages in, or with parts in, DistributedDataParallel or the ``replicate`` made from it.

    Its reducer expects one backward for each forward, and hears of gradients by hooks of the
    engine. In a pipeline several forwards are in flight, and W adds gradients without the engine.
    So the average is computed here: in buckets of the same size, over the same group.
    """

    name = "DDP"

    def __init__(self, wrapped: Sequence[nn.Module]) -> None:
        super().__init__()
        self._wrappers = [_Wrapper.of(module) for module in wrapped]
        self._wanted: list[_Wrapper] = []
        """Those that are reduced in the running step."""

    @property
    def groups(self) -> list[ProcessGroup]:
        """Each group once."""
        return list(dict.fromkeys(wrapper.group for wrapper in self._wrappers))

    def refusal(self) -> str | None:
        """Why a DDP cannot be averaged here; None if it can."""
        for wrapper in self._wrappers:
            if reason := lacking(
                wrapper.ddp, "_comm_hooks", "_sync_buffers", feature="DDP in a pipeline"
            ):
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

    def _reduce(self) -> None:
        pending = [
            (bucket, *_post(bucket, wrapper.group))
            for wrapper in self._wanted
            for bucket in _buckets(wrapper.ddp)
        ]
        for bucket, flat, work in pending:
            _finish_bucket(bucket, flat, work)
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
    def group(self) -> ProcessGroup:
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


def _buckets(ddp: Any) -> list[list[nn.Parameter]]:
    """The parameters that DDP reduces, in buckets of its size, each of one type and device."""
    ignored: set[str] = ddp.parameters_to_ignore
    full: list[list[nn.Parameter]] = []
    filling: dict[object, list[nn.Parameter]] = {}
    sizes: Counter[object] = Counter()
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            kind = parameter.dtype, parameter.device
            filling.setdefault(kind, []).append(parameter)
            sizes[kind] += parameter.nbytes
            if sizes[kind] >= ddp.bucket_bytes_cap:
                full.append(filling.pop(kind))
                del sizes[kind]
    return [*full, *filling.values()]


def _post(bucket: Sequence[nn.Parameter], group: ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Start to average the gradients of a bucket.

    Behind the gradients there is one number for each parameter: whether a replica has used it. A
    gradient that no replica has stays None; one that is missing here counts as zero.
    """
    used = [float(p.grad is not None) for p in bucket]
    parts = [
        p.new_zeros(p.numel()) if p.grad is None else p.grad.detach().reshape(-1) for p in bucket
    ]
    flags = torch.tensor(used, dtype=bucket[0].dtype, device=bucket[0].device)
    with torch.no_grad():
        flat = torch.cat([*parts, flags]).mul_(1 / group.size())
    return flat, dist.all_reduce(flat, group=group, async_op=True)


def _finish_bucket(bucket: Sequence[nn.Parameter], flat: torch.Tensor, work: Any) -> None:
    """Wait for the average, and write it to the gradients."""
    if work is not None:
        work.wait()
    sizes = [p.numel() for p in bucket]
    *averages, flags = flat.detach().split([*sizes, len(sizes)])
    with torch.no_grad():
        for parameter, average, flag in zip(bucket, averages, flags, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(average.view_as(parameter.grad))
            elif flag > 0:
                parameter.grad = average.view_as(parameter).clone()


def _hindrance(ddp: Any) -> str | None:
    """The feature of a DDP that does not work in a stage, and what to do; None if it has none."""
    embeddings = [m for m in ddp.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    python_reducer = getattr(ddp, "_use_python_reducer", False)
    delayed = getattr(ddp, "_delay_all_reduce_params", None)
    early = "which reduces by itself, at the wrong time"
    other = "choose another torch._dynamo.config.optimize_ddp"
    features = [
        (ddp._comm_hooks, f"a communication hook, {early}; leave it out"),
        (ddp.static_graph, f"static_graph=True, {early}; leave it out"),
        (python_reducer, f"the Python reducer, {early}; {other}"),
        (delayed, "delay_all_reduce_named_params; leave it out: all are reduced together here"),
        (ddp.mixed_precision, "mixed precision of its own; use fully_shard or autocast"),
        (any(m.sparse for m in embeddings), "sparse gradients; leave out sparse=True"),
    ]
    return next((text for has, text in features if has), None)
