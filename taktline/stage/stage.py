"""One stage: a module, and the values that its backward needs of each micro-batch in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from taktline import meta
from taktline.checks import check, check_list, refuse
from taktline.device import require_device
from taktline.errors import MismatchError, SplitError
from taktline.meta import Sharding, Signature, as_arguments, flatten, is_sharded
from taktline.plan.plan import MOST_STAGES
from taktline.stage.grad_sync import GradSync, sync_of
from taktline.stage.names import Tie, declared
from taktline.stage.offload import Activations, copies_on
from taktline.stage.split_backward import Root, Splitter, accumulate
from taktline.stage.streaming import Streamed

Changing: TypeAlias = dict[tuple[bool, ...], list[tuple[nn.Module, str]]]
"""Buffers, as a module and a name, by whether the modules with buffers are in training mode."""


class PipelineStage:
    """One stage of a model, to be run by a schedule.

    Args:
        submodule: the module, on ``device``.
        stage_index: the number of the stage, from 0.
        num_stages: the number of stages of the model.
        device: where it computes.
        input_args: one micro-batch's arguments as an example. Not needed: shapes are learned in
            the first step. If given, arriving values are checked against it (dimension 0, the
            size of the micro-batch, may differ).
        output_args: the same for the output.
        output_grads: not needed: gradients have the shapes of the outputs.
        input_grads: not needed, likewise.
        group: the ranks of the pipeline; all ranks by default.
        dw_builder: returns the function that computes the weights' gradients (W) of a micro-batch.
        get_mesh: returns this rank's mesh for an arriving DTensor, by the names of the mesh's
            dimensions (and None). Not needed if parameters of the stage are on the mesh.
        ties: the weights that this stage shares with others. Not needed for stages that
            ``pipeline`` and ``taktline.split`` make.

    >>> stage = PipelineStage(nn.Linear(4, 4), 0, 2, torch.device("cpu"))
    >>> stage
    PipelineStage(0 of 2, Linear, 20 parameters, cpu)
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        input_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        group: ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: meta.GetMesh | None = None,
        *,
        ties: Sequence[Tie] = (),
    ) -> None:
        if isinstance(output_grads, ProcessGroup):
            raise MismatchError(
                f"stage {stage_index}: its seventh argument is a process group, as in torch before "
                "2.13; pass it by its name: group="
            )
        check("submodule", submodule, nn.Module, "an nn.Module")
        self.num_stages = count = check("num_stages", num_stages, int, least=1, most=MOST_STAGES)
        self.stage_index = check("stage_index", stage_index, int, least=0, most=count - 1)
        check("group", group, (ProcessGroup, NoneType), "a process group")
        for name, function in (("dw_builder", dw_builder), ("get_mesh", get_mesh)):
            if function is not None and not callable(function):
                refuse(name, "a function", function)
        self.submod = submodule
        self.device = require_device(device)
        self.group = group
        self.dw_builder = dw_builder
        self.get_mesh = get_mesh
        self._ties = tuple(check_list("ties", ties, Tie))
        self.expected_input = _signature(input_args)
        self.expected_output = _signature(output_args)
        self._trainable: list[nn.Parameter] | None = None
        self._looked_at: nn.Module | None = None
        self._sync: GradSync | None = None
        self._splitter = Splitter(f"stage {stage_index}")
        self._meshes: dict[str, DeviceMesh] = {}
        self._in_flight: dict[int, tuple[Sequence[torch.Tensor], Sequence[Root]]] = {}
        self.away: dict[int, Activations] = {}
        """What the forwards of offloaded micro-batches have saved, from F to B or I."""
        self.copied = self.most_on_host = 0
        """The most bytes that were copied to the host of one micro-batch, and that were there."""
        self.streamed: Streamed | None = None
        """Its frozen weights, if they are on the host between uses."""
        self.changing: Changing = {}
        """The buffers that a forward changes, which a recomputed one must not change twice."""
        self._weights_due: dict[int, Callable[[], object]] = {}

    @property
    def is_first(self) -> bool:
        """Whether it takes the arguments of the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns the output of the model."""
        return self.stage_index == self.num_stages - 1

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The weights that it shares with other stages."""
        return self._ties or declared(self.submod)

    @property
    def grad_sync(self) -> GradSync | None:
        """The wrapper that averages its gradients over replicas; None if there is none."""
        if self._looked_at is not self.submod:
            self._sync = sync_of(self.submod)
            self._looked_at = self.submod
        return self._sync

    @property
    def may_join(self) -> bool:
        """Whether one full backward may replace I and W: nothing overrides or observes them."""
        return is_usual(self) and self.grad_sync is None

    def begin(self) -> tuple[bool, ...]:
        """Find the trainable parameters; returns the flags on which the output may depend."""
        parameters = parameters_of(self.submod)
        # The parameters of a wrapped stage are known only after it is gathered.
        self._trainable = (
            [p for p in parameters if p.requires_grad] if self.grad_sync is None else None
        )
        return (self.submod.training, *(p.requires_grad for p in parameters))

    def keep(
        self,
        microbatch: int,
        inputs: Sequence[torch.Tensor],
        roots: Sequence[torch.Tensor],
    ) -> None:
        """Keep the beginning (roots) and the ends (inputs) of the backward.

        Of roots only their places in the graph: an output that was sent is not needed any more.
        """
        self._in_flight[microbatch] = (inputs, [_place_of(root) for root in roots])
        for root in roots:
            if is_sharded(root):  # its gradient comes back without a mesh
                self._meshes[Sharding.of(root).mesh_text] = root.device_mesh

    def backward(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """B: add up all gradients; returns those of the inputs."""
        inputs, roots = self._in_flight.pop(microbatch)
        roots, gradients = _reached(roots, gradients)
        if roots:
            accumulate(roots, gradients)
        if self.dw_builder is not None:
            self._weights_function()()
        return [meta.gradient_of(tensor) for tensor in inputs]

    def backward_input(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """I: returns the gradients of the inputs; those of the weights follow in W."""
        inputs, roots = self._in_flight.pop(microbatch)
        roots, gradients = _reached(roots, gradients)
        if self.dw_builder is not None:
            # The module itself puts off the gradients of its weights.
            if roots:
                accumulate(roots, gradients)
            self._weights_due[microbatch] = self._weights_function()
        elif roots:
            if self._trainable is None and self._sync is not None:
                self._trainable = self._sync.trainable(self.submod)
            pending = self._splitter.run_input(roots, gradients, inputs, self._trainable or ())
            if pending is not None:
                self._weights_due[microbatch] = pending.run
        return [meta.gradient_of(tensor) for tensor in inputs]

    def backward_weight(self, microbatch: int) -> None:
        """W: add up the gradients that I has left out."""
        due = self._weights_due.pop(microbatch, None)
        if due is not None:
            due()
            if self._sync is not None:
                self._sync.weights_done()

    def noting(self, microbatch: int) -> AbstractContextManager[object]:
        """A block for a forward: notes what it saves, to be offloaded."""
        found = self.away[microbatch] = Activations(copies_on(self.device))
        return found.noting()

    def leave(self, microbatch: int) -> Activations:
        """Begin to copy to the host what the forward of a micro-batch has saved."""
        found = self.away[microbatch]
        found.leave(self._in_flight[microbatch][0])
        self.copied = max(self.copied, found.nbytes)
        self.most_on_host = max(self.most_on_host, sum(x.nbytes for x in self.away.values()))
        return found

    def arrive(self, microbatch: int) -> None:
        """Wait until what a forward has saved is back, if it was away."""
        if (found := self.away.pop(microbatch, None)) is not None:
            found.arrive()

    def mesh_for(self, sharding: Sharding) -> DeviceMesh:
        """This rank's mesh for an arriving DTensor."""
        key = sharding.mesh_text
        if key not in self._meshes:
            self._meshes[key] = meta.find_mesh(sharding, self.submod, self.get_mesh)
        return self._meshes[key]

    def _weights_function(self) -> Callable[..., None]:
        """The function that adds the weights' gradients of the latest backward."""
        function = None if self.dw_builder is None else self.dw_builder()
        if not callable(function):
            raise SplitError(
                f"dw_builder of stage {self.stage_index} must return a function that computes the "
                f"gradients of the weights, not {function!r}"
            )
        return function

    def clear(self) -> None:
        """Forget every micro-batch in flight."""
        self._in_flight.clear()
        self._weights_due.clear()
        while self.away:
            self.away.popitem()[1].forget()
        if self.streamed is not None:
            self.streamed.release()
        if self._sync is not None:
            self._sync.forget()

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.submod.parameters())
        return (
            f"PipelineStage({self.stage_index} of {self.num_stages}, "
            f"{type(self.submod).__name__}, {count:,} parameters, {self.device})"
        )


def is_usual(stage: PipelineStage) -> bool:
    """Whether nothing overrides the backward of a stage."""
    names = ("keep", "backward", "backward_input", "backward_weight")
    own = all(
        getattr(getattr(stage, name), "__func__", None) is vars(PipelineStage)[name]
        for name in names
    )
    return own and stage.dw_builder is None


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """A faster ``module.parameters()``, for every step."""
    found: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [module]
    while waiting:
        inner = waiting.pop()
        if inner is None or id(inner) in seen:
            continue
        seen.add(id(inner))
        for parameter in inner._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
        if inner._modules:
            waiting.extend(reversed(inner._modules.values()))
    return list(found.values())


def _signature(example: Any) -> Signature | None:
    return None if example is None else Signature.of(*flatten(as_arguments(example)))


def _place_of(root: torch.Tensor) -> Root:
    # Before torch 2.13 a node of a custom or compiled function alone does not keep its graph: the
    # edge does.
    return root if root.grad_fn is None else get_gradient_edge(root)


def _reached(
    roots: Sequence[Root], gradients: Sequence[torch.Tensor | None]
) -> tuple[Sequence[Root], Sequence[torch.Tensor]]:
    """Roots and their gradients, without roots that got none."""
    found = [gradient for gradient in gradients if gradient is not None]
    if len(found) == len(gradients) == len(roots):
        return roots, found
    pairs = zip(roots, gradients, strict=True)
    return [root for root, gradient in pairs if gradient is not None], found
