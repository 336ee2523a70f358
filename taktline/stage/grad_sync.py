"""Gradients of replicated stages: DDP, FSDP2 and ``replicate`` communicate when the plan says.

::

    sync_of(module) ──▶ None       nothing is wrapped
                    ──▶ DDPSync    DistributedDataParallel
                    ──▶ FSDPSync   ``fully_shard``, or the ``replicate`` made from it
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from taktline.errors import MismatchError, TorchVersionError
from taktline.private import lacking

_FSDP = "FSDP in a pipeline"
_OFF = {"reduce_grads": False, "reshard_after_backward": False, "post_forward_mesh_info": None}
"""The settings of a group that does not communicate by itself."""

_MANUAL = "manual_backward_finalization"
"""The switch of a root, since torch 2.15, that lets its user end a backward."""
_OF_STATES = ("_lazy_init", "_state_ctx", "_comm_ctx", "_root_post_backward_final_callback")
_OF_GROUPS = (*_OFF, "mesh_info", "fsdp_params", "post_backward", "_post_forward_indices")

_STREAMS = (
    *("all_gather_copy_in_stream", "all_gather_stream"),
    *("reduce_scatter_stream", "all_reduce_stream"),
)
"""Those of a root, on which it communicates."""

_WITH_DDP = "torch.distributed._composable.replicate"
_REFUSED = {
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): (
        "FullyShardedDataParallel gathers and reduces by itself, at the wrong time for a "
        "pipeline; use fully_shard instead"
    ),
    (_WITH_DDP, "DDP"): (
        f"the replicate of {_WITH_DDP} makes its DDP in the first forward, too late for a "
        "pipeline; wrap the stage in DistributedDataParallel instead"
    ),
}


def sync_of(module: nn.Module) -> GradSync | None:
    """The wrapper that averages the gradients of a module; None for a plain module."""
    parts = list(module.modules())
    for (where, name), reason in _REFUSED.items():
        if any(isinstance(part, _loaded(where, name)) for part in parts):
            raise MismatchError(reason)
    replicated = [part for part in parts if isinstance(part, DistributedDataParallel)]
    sharding = _loaded("torch.distributed.fsdp", "FSDPModule")
    sharded = any(isinstance(part, sharding) for part in parts)
    if replicated and sharded:
        raise MismatchError(
            "it contains both DDP and fully_shard; wrap a stage with one of them (a mesh of two "
            "dimensions makes fully_shard replicate, too)"
        )
    return DDPSync(replicated) if replicated else FSDPSync(module) if sharded else None


def _loaded(module: str, name: str) -> Any:
    """A class, if its module was imported; before, no object can be an instance."""
    return getattr(sys.modules.get(module), name, ())


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
        """The groups that average gradients, each once; several for a mesh of more dimensions."""

    @abstractmethod
    def refusal(self) -> str | None:
        """Why this wrapper cannot be part of a stage; None if it can."""

    @abstractmethod
    def begin(self) -> None:
        """Before a step: stop the wrapper from gathering and reducing by itself."""

    @abstractmethod
    def end(self) -> None:
        """After a step, also a failed one: restore the wrapper."""

    @abstractmethod
    def _reduce(self) -> None:
        """Average the gradients now."""

    # What only wrappers that shard have to do.

    def unshard(self) -> None:  # noqa: B027
        """UNSHARD: start to gather the parameters; the first forward or backward waits for it."""

    def reshard(self) -> None:  # noqa: B027
        """RESHARD: release the gathered parameters; their gradients stay."""

    def wait(self) -> None:  # noqa: B027
        """Wait for the reductions that were started."""

    def weights_done(self) -> None:  # noqa: B027
        """After W: handle gradients that were added without the wrapper's hooks."""

    # For a step that is captured, and replayed without Python.

    @property
    def holds_back(self) -> bool:
        """Whether gradients are, or were, not reduced in their step: the next one adds to them."""
        return self.accumulating or self._put_off

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around all actions of a step that is captured."""
        yield
        self.finish()

    def finish(self) -> None:
        """After all actions of a step: wait for reductions, and release what is gathered."""
        self.wait()
        self.reshard()

    def replayed(self) -> None:  # noqa: B027
        """After a replay, in which REDUCE_GRAD has run."""

    # On a rank that has failed: its replicas need its part.

    def forgo_unshard(self) -> None:
        """UNSHARD that no forward waits for."""
        self.unshard()

    def forgo_reshard(self) -> None:
        """RESHARD."""
        self.reshard()

    def forgo_reduce(self) -> None:
        """REDUCE_GRAD."""
        self.reduce()

    def reduce(self) -> None:
        """REDUCE_GRAD: average the gradients, unless they are still accumulating."""
        self._put_off = self.accumulating
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

    def forget(self) -> None:
        """After a failed step: drop gradients that are not reduced yet."""
        self._put_off = False

    def trainable(self, module: nn.Module) -> list[nn.Parameter]:
        """The trainable parameters in the graph of a forward."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]


class DDPSync(GradSync):
    """Stages in, or with parts in, DistributedDataParallel.

    Its reducer expects one backward for each forward, and hears of gradients by hooks of the
    engine. In a pipeline several forwards are in flight, and W adds gradients without the engine.
    So the average is computed here, over the same group.
    """

    name = "DDP"

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        super().__init__()
        self._wrapped: Sequence[Any] = wrapped
        self._stopped: list[Any] = []
        """Those that are reduced in the running step."""

    @property
    def groups(self) -> list[ProcessGroup]:
        return list(dict.fromkeys(ddp.process_group for ddp in self._wrapped))

    def refusal(self) -> str | None:
        for ddp in self._wrapped:
            needed = ("_comm_hooks", "_sync_buffers")
            if reason := lacking(ddp, *needed, feature="DDP in a pipeline"):
                return reason
            if found := _hindrance(ddp):
                return f"its DDP has {found}"
        return None

    def begin(self) -> None:
        # A DDP under no_sync() stays as it is.
        self._stopped = [ddp for ddp in self._wrapped if ddp.require_backward_grad_sync]
        for ddp in self._stopped:
            ddp.require_backward_grad_sync = False
        for ddp in self._wrapped:
            # DDP does this in its first forward, which a failing rank may not reach.
            if ddp.will_sync_module_buffers():
                ddp._sync_buffers()
                ddp.require_forward_param_sync = False

    def end(self) -> None:
        for ddp in self._stopped:
            ddp.require_backward_grad_sync = True
        self._stopped = []

    def _reduce(self) -> None:
        pending = [
            (bucket, *_post(bucket, ddp.process_group))
            for ddp in self._stopped
            for bucket in _buckets(ddp)
        ]
        for bucket, flat, work in pending:
            _finish_bucket(bucket, flat, work)
        self.replayed()

    @property
    def holds_back(self) -> bool:
        return super().holds_back or len(self._stopped) < len(self._wrapped)

    @contextmanager
    def captured(self) -> Iterator[None]:
        # Autograd adds to a leaf on the stream on which the leaf was first used, and DDP has used
        # its parameters when it was made: a stream outside of the capture. So others take their
        # places, with the same memory.
        inside = [m._parameters for ddp in self._wrapped for m in ddp.module.modules()]
        before = [{**parameters} for parameters in inside]
        stand_ins = dict[nn.Parameter, nn.Parameter]()
        for parameters in inside:
            for name, p in parameters.items():
                if p is not None and p not in stand_ins:
                    stand_ins[p] = nn.Parameter(p.detach(), p.requires_grad)
                parameters[name] = None if p is None else stand_ins[p]
        try:
            with super().captured():
                yield
        finally:
            for parameters, those in zip(inside, before, strict=True):
                parameters.update(those)

    def replayed(self) -> None:
        for ddp in self._stopped:
            # As in DDP, the first forward after a reduction broadcasts buffers.
            ddp.require_forward_param_sync = True


def _buckets(ddp: Any) -> list[list[nn.Parameter]]:
    """The parameters that DDP reduces, those of one type and device together."""
    found: defaultdict[object, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore:
            found[parameter.dtype, parameter.device].append(parameter)
    return list(found.values())


def _post(bucket: Sequence[nn.Parameter], group: ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Start to average the gradients of a bucket.

    Behind the gradients there is one number for each parameter: whether a replica has used it. A
    gradient that no replica has stays None; one that is missing here counts as zero.
    """
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
    parts.append(used := bucket[0].new_ones(len(bucket), requires_grad=False))
    for place, p in enumerate(bucket):
        if p.grad is None:
            used[place] = 0
    with torch.no_grad():
        flat = torch.cat(parts).mul_(1 / group.size())
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
            elif not _is_capturing() and flag > 0:  # a capture has all that any replica has
                parameter.grad = average.view_as(parameter).clone()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _hindrance(ddp: Any) -> str | None:
    """The feature of a DDP that does not work in a stage, and what to do; None if it has none."""
    embeddings = [m for m in ddp.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    delayed = getattr(ddp, "_delay_all_reduce_params", None)
    early = "which reduces by itself, at the wrong time; leave it out"
    features = [
        (ddp._comm_hooks, f"a communication hook, {early}"),
        (ddp.static_graph, f"static_graph=True, {early}"),
        (delayed, f"delay_all_reduce_named_params, {early}"),
        (ddp.mixed_precision, "mixed precision of its own; use fully_shard or autocast"),
        (any(m.sparse for m in embeddings), "sparse gradients; leave out sparse=True"),
    ]
    return next((text for has, text in features if has), None)


class FSDPSync(GradSync):
    """Stages in, or with parts in, ``fully_shard`` or the ``replicate`` made from it.

    While a stage is gathered, its modules hold the whole parameters, always the same objects, whose
    gradients add up. A reduction moves these into the ``.grad`` of the sharded parameters, which
    the optimizer knows. FSDP's own hooks stay: they wait for gathers, cast, and keep gradients in
    the type of the reduction.
    """

    name = "FSDP"
    shards = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        wrapped = _loaded("torch.distributed.fsdp", "FSDPModule")
        if reason := lacking(wrapped, "_get_fsdp_state", feature=_FSDP):
            raise TorchVersionError(reason)
        # By state: modules that are sharded together share one.
        found: list[Any] = [each for each in module.modules() if isinstance(each, wrapped)]
        units = {each._get_fsdp_state(): each for each in found}
        self._units = list(units.values())
        self._roots: list[Any] = [m._get_fsdp_state() for m in _outermost(module, wrapped)]
        # Groups are parameters that FSDP communicates together.
        self._groups: list[Any] = [g for state in units for g in _groups_of(state)]
        # Outside of a step: the settings of each group, and whether the user of each root ends a
        # backward by hand (None before torch 2.15).
        self._settings: list[dict[str, Any]] = []
        self._by_hand: list[bool | None] = []
        self._reduced = False

    @property
    def groups(self) -> list[ProcessGroup]:
        # Those that shard, then those that replicate.
        kinds = ("shard_process_group", "replicate_process_group")
        found = [getattr(g.mesh_info, kind, None) for kind in kinds for g in self._groups]
        return list(dict.fromkeys(group for group in found if group is not None))

    def refusal(self) -> str | None:
        for owners, names in ((self._roots, _OF_STATES), (self._groups, _OF_GROUPS)):
            for owner in owners:
                if reason := lacking(owner, *names, feature=_FSDP):
                    return reason
        try:
            for root in self._roots:
                root._lazy_init()  # which otherwise runs in the first forward
        except (AssertionError, RuntimeError, ValueError) as error:
            return f"its FSDP cannot begin: {error}"
        return None

    def begin(self) -> None:
        self._settings = [{name: getattr(g, name) for name in _OFF} for g in self._groups]
        self._by_hand = [getattr(root._state_ctx, _MANUAL, None) for root in self._roots]
        for group in self._groups:
            vars(group).update(_OFF)
        # Parameters gathered by a forward outside of the pipeline may be outdated.
        self.reshard()

    def end(self) -> None:
        self.finish()  # a plan may leave some gathered
        for root, by_hand in zip(self._roots, self._by_hand, strict=False):
            # FSDP uses it to prefetch, and clears it only in a backward.
            root._comm_ctx.post_forward_order.clear()
            if by_hand is not None:
                vars(root._state_ctx).update({_MANUAL: by_hand, f"{_MANUAL}_active": None})
        for group, settings in zip(self._groups, self._settings, strict=False):
            group._post_forward_indices.clear()
            vars(group).update(settings)
        self._settings = []

    def wait(self) -> None:
        if self._reduced:
            self._reduced = False
            for root in self._roots:
                _finish(root)

    @property
    def holds_back(self) -> bool:
        whole = (getattr(p, "_unsharded_param", None) for g in self._groups for p in g.fsdp_params)
        sums = "unsharded_accumulated_grad"
        return (
            super().holds_back
            or not all(settings["reduce_grads"] for settings in self._settings)
            or any(p is not None and p.grad is not None for p in whole)
            or any(getattr(p, sums, None) is not None for g in self._groups for p in g.fsdp_params)
        )

    @contextmanager
    def captured(self) -> Iterator[None]:
        contexts = {id(root._comm_ctx): root._comm_ctx for root in self._roots}.values()
        streams = [getattr(each, name, None) for each in contexts for name in _STREAMS]
        beside = [each for each in streams if isinstance(each, torch.cuda.Stream)]
        for each in beside:  # a capture has streams that come from its own, and end in it
            each.wait_stream(torch.cuda.current_stream())
        with super().captured():
            yield
        for each in beside:
            torch.cuda.current_stream().wait_stream(each)

    def unshard(self) -> None:
        for unit in self._units:
            unit.unshard(async_op=True)

    def reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def forgo_unshard(self) -> None:
        for unit in self._units:
            unit.unshard()

    def forgo_reshard(self) -> None:
        self.forgo_unshard()  # it waits for the gather
        self.reshard()

    def forgo_reduce(self) -> None:
        # Zeros where gradients are missing, since the replicas send all.
        for group in self._groups:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                has = parameter.unsharded_accumulated_grad is not None
                if whole is not None and whole.requires_grad and whole.grad is None and not has:
                    whole.grad = whole.new_zeros(whole.shape)
        super().forgo_reduce()

    def _reduce(self) -> None:
        for group, settings in zip(self._groups, self._settings, strict=True):
            # Unless the user has put it off with set_requires_gradient_sync(False).
            group.reduce_grads = settings["reduce_grads"]
            group.post_backward()
            group.reduce_grads = False
        self._reduced = True

    def trainable(self, module: nn.Module) -> list[nn.Parameter]:
        for unit in self._units:
            unit.unshard()
        return super().trainable(module)

    def weights_done(self) -> None:
        # Add them to those in the type of the reduction.
        for group in self._groups:
            for parameter in group.fsdp_params:
                if parameter.reduce_dtype is not None and _keeps_sums(parameter):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def forget(self) -> None:
        super().forget()
        for root in self._roots:
            _reset(root)
        for group in self._groups:
            for parameter in group.fsdp_params:
                if _keeps_sums(parameter):
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        self.reshard()


def _keeps_sums(parameter: Any) -> bool:
    """Whether FSDP keeps sums of gradients beside ``.grad``, as it does before torch 2.15."""
    return hasattr(parameter, "accumulate_unsharded_grad_if_needed")


def _outermost(module: nn.Module, kind: type) -> Iterator[Any]:
    """The outermost modules of a kind."""
    if isinstance(module, kind):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, kind)


def _groups_of(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    if reason := lacking(state, "_fsdp_param_group", feature=_FSDP):
        raise TorchVersionError(reason)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _finish(root: Any) -> None:
    """Wait for the reductions of all groups below a root, as FSDP does after a last backward."""
    context = root._state_ctx
    last, context.is_last_backward = context.is_last_backward, True
    if hasattr(context, _MANUAL):
        setattr(context, f"{_MANUAL}_active", False)  # it expects that a backward has set this
    root._root_post_backward_final_callback()
    context.is_last_backward = last


def _reset(root: Any) -> None:
    """Reset a root and all below it, so that a forward can begin."""
    if hasattr(root, "_reset_iter_state"):
        try:
            root._reset_iter_state()
        except RuntimeError:  # it waits for gathers that another rank has left unfinished
            for state in root._state_ctx.all_states:
                for group in _groups_of(state):
                    group._all_gather_result = None
            root._reset_iter_state()
        return
    context = root._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    for state in context.all_states:
        idle = type(state._training_state).IDLE
        state._training_state = idle
        for group in _groups_of(state):
            group._training_state = idle
