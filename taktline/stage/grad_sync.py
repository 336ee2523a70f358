"""Gradients of replicated stages: DDP, FSDP2 and ``replicate`` communicate when the plan says.

::

    sync_of(module) ──▶ None       nothing is wrapped
                    ──▶ DDPSync    DistributedDataParallel, or the older ``replicate`` made from it
                    ──▶ FSDPSync   ``fully_shard``, or the newer ``replicate`` made from it
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from taktline.errors import MismatchError, TorchVersionError
from taktline.private import lacking
from taktline.stage.ddp import DDPSync, GradSync

__all__ = ["DDPSync", "FSDPSync", "GradSync", "sync_of"]

_FSDP = "FSDP in a pipeline"
_OFF = {"reduce_grads": False, "reshard_after_backward": False, "post_forward_mesh_info": None}
"""The settings of a group that does not communicate by itself."""

_MANUAL = "manual_backward_finalization"
"""The switch of a root, since torch 2.15, that lets its user end a backward."""
_OF_STATES = ("_lazy_init", "_state_ctx", "_comm_ctx", "_root_post_backward_final_callback")
_OF_GROUPS = (*_OFF, "mesh_info", "fsdp_params", "post_backward", "_post_forward_indices")


def sync_of(module: nn.Module) -> GradSync | None:
    """The wrapper that averages the gradients of a module; None for a plain module."""

    def inside(*classes: Any) -> list[nn.Module]:
        return [each for each in module.modules() if isinstance(each, classes)]

    older = _loaded("torch.distributed._composable.replicate", "DDP")
    replicated = inside(DistributedDataParallel, older)
    sharded = inside(_loaded("torch.distributed.fsdp", "FSDPModule"))
    if inside(_loaded("torch.distributed.fsdp", "FullyShardedDataParallel")):
        raise MismatchError(
            "FullyShardedDataParallel gathers and reduces by itself, at the wrong time for a "
            "pipeline; use fully_shard instead"
        )
    if replicated and sharded:
        raise MismatchError(
            "it contains both DDP and fully_shard; wrap a stage with one of them (a mesh of two "
            "dimensions makes fully_shard replicate, too)"
        )
    if replicated:
        return DDPSync(replicated)
    if sharded:
        return FSDPSync(module)
    return None


def _loaded(module: str, name: str) -> Any:
    """A class, if its module was imported; before, no object can be an instance."""
    return getattr(sys.modules.get(module), name, ())


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
        self._settings: list[dict[str, Any]] = []
        """The settings of each group outside of a step."""
        self._by_hand: list[bool | None] = []
        """For each root, whether its user ends a backward by hand; None before torch 2.15."""
        self._reduced = False

    @property
    def groups(self) -> list[ProcessGroup]:
        """The groups that shard, then those that replicate, each once."""
        kinds = ("shard_process_group", "replicate_process_group")
        found = [getattr(g.mesh_info, kind, None) for kind in kinds for g in self._groups]
        return list(dict.fromkeys(group for group in found if group is not None))

    def refusal(self) -> str | None:
        """The error of FSDP's own set-up, which otherwise runs in the first forward."""
        for owners, names in ((self._roots, _OF_STATES), (self._groups, _OF_GROUPS)):
            for owner in owners:
                if reason := lacking(owner, *names, feature=_FSDP):
                    return reason
        try:
            for root in self._roots:
                root._lazy_init()
        except (AssertionError, RuntimeError, ValueError) as error:
            return f"its FSDP cannot begin: {error}"
        return None

    def begin(self) -> None:
        """Stop FSDP from gathering, releasing and reducing by itself."""
        self._settings = [{name: getattr(g, name) for name in _OFF} for g in self._groups]
        self._by_hand = [getattr(root._state_ctx, _MANUAL, None) for root in self._roots]
        for group in self._groups:
            _set(group, _OFF)
        # Parameters gathered by a forward outside of the pipeline may be outdated.
        self.reshard()

    def end(self) -> None:
        """Wait for reductions, release what a plan has left gathered, and restore the settings."""
        self.wait()
        self.reshard()
        for root, by_hand in zip(self._roots, self._by_hand, strict=False):
            # FSDP uses it to prefetch, and clears it only in a backward.
            root._comm_ctx.post_forward_order.clear()
            if by_hand is not None:
                _set(root._state_ctx, {_MANUAL: by_hand, f"{_MANUAL}_active": None})
        for group, settings in zip(self._groups, self._settings, strict=False):
            group._post_forward_indices.clear()
            _set(group, settings)
        self._settings = []

    def wait(self) -> None:
        """Wait for the reductions that were started."""
        if self._reduced:
            self._reduced = False
            for root in self._roots:
                _finish(root)

    def unshard(self) -> None:
        """Start to gather; the first forward or backward waits for it."""
        for unit in self._units:
            unit.unshard(async_op=True)

    def reshard(self) -> None:
        """Release the whole parameters; their gradients stay."""
        for unit in self._units:
            unit.reshard()

    def forgo_unshard(self) -> None:
        """Gather and wait: no forward will."""
        for unit in self._units:
            unit.unshard()

    def forgo_reshard(self) -> None:
        """Wait for the gather, and release."""
        self.forgo_unshard()
        self.reshard()

    def forgo_reduce(self) -> None:
        """Reduce zeros where gradients are missing, since the replicas send all."""
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
        """The whole parameters: the graph has these."""
        for unit in self._units:
            unit.unshard()
        return super().trainable(module)

    def weights_done(self) -> None:
        """Add the gradients of W to those in the type of the reduction."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                if parameter.reduce_dtype is not None and _keeps_sums(parameter):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def forget(self) -> None:
        """Drop gradients that are not reduced, and reset the state that a failure has left."""
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


def _set(target: Any, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(target, name, value)


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
