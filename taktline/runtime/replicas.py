"""The replicas of a rank's stages: their wrappers, and agreement on failures among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from taktline.errors import MismatchError, TaktlineError, text_of
from taktline.meta import is_sharded
from taktline.stage import PipelineStage
from taktline.stage.grad_sync import GradSync
from taktline.transport import Transport, transport_of
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import retold, share_error
from taktline.transport.local import LocalTransport


class Replicas:
    """The wrapped stages of this rank, and the ranks that hold their replicas."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._stages = list(stages)
        self._syncs: list[GradSync] = []
        self.partners: list[tuple[str, Transport]] = []
        """The ranks that take part in the work of this rank, each group with its noun.

        The last one may be the pipeline, if only some of its ranks have others.
        """
        self.reduces = False
        """Whether a stage of this rank averages its gradients."""
        self._checked = False
        self._accumulating = False

    @property
    def shards(self) -> bool:
        """Whether a stage of this rank is gathered before it computes."""
        return any(sync.shards for sync in self._syncs)

    def check(self, transport: Transport) -> None:
        """Before the first step: find the wrapped stages; raise if one cannot work here."""
        if self._checked:
            return
        wrapped = [(stage, _grad_sync(stage, transport)) for stage in self._stages]
        found = [(stage, sync) for stage, sync in wrapped if sync is not None]
        groups = {group: "replica" for _, sync in found for group in sync.groups}
        if isinstance(transport, Distributed):
            for stage in self._stages:
                groups |= dict.fromkeys(_work_groups(stage), "tensor-parallel rank")
        # Set before the checks: the replicas wait for this rank, and must hear of an error.
        self.partners = [
            (noun, transport_of(group, stage.device))
            for stage in self._stages[:1]
            for group, noun in groups.items()
            if group.size() > 1 and len(_shared(stage, group)) == 1
        ]
        for stage, sync in found:
            _check(stage, sync)
        self._syncs = [sync for _, sync in found]
        self.reduces = bool(found)
        self.accumulate(self._accumulating)
        self._checked = True

    def agree(self, error: TaktlineError | None, what: str) -> TaktlineError | None:
        """The error of any replica, so that none waits for one that has failed.

        ``what`` is the call that this rank is in; different calls are an error, too.
        """
        for noun, others in self.partners:
            is_named = text_of(error).startswith(("replica ", "tensor-parallel")) if error else True
            if error is not None and noun != "rank" and not is_named:
                error = retold(error, f"{noun} {others.rank}: {text_of(error)}")
            try:
                failed = any(flag for (flag,) in others.exchange([int(error is not None)], what))
                error = share_error(others, error) if failed else None
            except MismatchError as elsewhere:  # they are in different calls
                where = " on rank " if noun == "rank" else f" in {noun} "
                error = retold(elsewhere, text_of(elsewhere).replace(" on rank ", where))
        return error

    def computes_together(self, stage: int) -> bool:
        """Whether other ranks compute a stage together with this one."""
        return any(bool(_work_groups(each)) for each in self._stages if each.stage_index == stage)

    @contextmanager
    def step(self, *, finalizes: bool = True) -> Iterator[None]:
        """Inside, the wrappers do not communicate by themselves.

        Unless it ``finalizes``, gradients of sharded stages stay as they are until one does.
        """
        begun: list[GradSync] = []
        try:
            for sync in self._syncs:
                sync.accumulating = self._accumulating or (sync.shards and not finalizes)
                begun.append(sync)
                sync.begin()
            yield
        finally:
            for sync in begun:
                sync.end()

    def accumulate(self, accumulating: bool) -> None:
        """Put reductions off from now on, or do not any more."""
        self._accumulating = accumulating
        for sync in self._syncs:
            sync.accumulating = accumulating

    def catch_up(self) -> None:
        """Do the reductions that were put off; all replicas take part."""
        for sync in self._syncs:
            sync.catch_up()

    def forget(self) -> None:
        """Forget the reductions that were put off."""
        for sync in self._syncs:
            sync.forget()


def _grad_sync(stage: PipelineStage, transport: Transport) -> GradSync | None:
    """The wrapper of a stage; raises if it cannot work on this transport."""
    try:
        sync = stage.grad_sync
    except MismatchError as error:
        raise MismatchError(f"stage {stage.stage_index}: {error}") from None
    if sync is not None and isinstance(transport, LocalTransport):
        raise MismatchError(
            f"stage {stage.stage_index} is wrapped in {sync.name}, which needs a process per rank, "
            "but local ranks share one; leave the wrapper out here, or start processes with "
            "torchrun"
        )
    return sync


def _check(stage: PipelineStage, sync: GradSync) -> None:
    """Raise if the wrapper of a stage does not fit into its pipeline."""
    for group in sync.groups:
        if len(shared := _shared(stage, group)) > 1:
            raise MismatchError(
                f"stage {stage.stage_index}: its {sync.name} averages gradients over the ranks "
                f"{dist.get_process_group_ranks(group)}, but of these {shared} are one pipeline "
                "and hold other stages; pass the data-parallel dimension of the mesh to the "
                "wrapper, and the pipeline's group= to the stage"
            )
    if refusal := sync.refusal():
        raise MismatchError(f"stage {stage.stage_index}: {refusal}")


def _work_groups(stage: PipelineStage) -> list[dist.ProcessGroup]:
    """The groups that compute a stage together, as in tensor parallelism."""
    averages = set() if stage.grad_sync is None else set(stage.grad_sync.groups)
    meshes = {p.device_mesh for p in stage.submod.parameters() if is_sharded(p)}
    groups = {group: None for mesh in meshes for group in mesh.get_all_groups()}
    return [group for group in groups if group.size() > 1 and group not in averages]


def _shared(stage: PipelineStage, group: dist.ProcessGroup) -> list[int]:
    """The ranks of a wrapper's group that belong to the pipeline of a stage."""
    pipeline = dist.get_process_group_ranks(stage.group)
    return sorted(set(pipeline).intersection(dist.get_process_group_ranks(group)))
