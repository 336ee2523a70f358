"""The part of a pipeline that is like an ``nn.Module``: parameters, gradients and state."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from taktline.checkpoint.model_state import ModelState, first_of_each, writers
from taktline.checks import check, refuse
from taktline.errors import LossError, MismatchError
from taktline.meta import is_sharded
from taktline.private import private
from taktline.stage.names import named_modules
from taktline.text import first_of
from taktline.train.batches import broadcast
from taktline.train.build import Built
from taktline.train.ranks import Ranks
from taktline.transport.exchange import share_floats, share_values

_MADE = 'pass the device when you make it: Pipeline(…, device="cuda")'
_BEFORE = "convert the model before you make the pipeline of it"
INSTEAD = {
    "forward": "call step(…) to train, and eval(…) for outputs",
    "backward": "step(…) runs forward and backward",
    **dict.fromkeys(("to", "cuda", "cpu"), _MADE),
    **dict.fromkeys(("half", "float", "double", "bfloat16"), _BEFORE),
    "buffers": "pipe.state_dict() has them",
}
"""What to use for an attribute that a module has and a pipeline does not."""


class AnyName:
    """Has every attribute: ``torch.distributed.checkpoint`` looks up the parts of a name."""

    def __getattr__(self, name: str) -> AnyName:
        return self

    def _fqn_modifiers(self) -> dict[str, str]:
        return {}


def no_children(pipe: object) -> Iterator[Any]:
    """Yields nothing: a pipeline has the model's names, and no children of its own."""
    return iter(())


def modules_of(model: ModelState) -> Iterator[tuple[str, nn.Module]]:
    """The modules of all stages here, each once, with their names in the model."""
    seen = set[int]()
    for stage in sorted(model.modules):
        for name, module in named_modules(model.modules[stage]).items():
            if id(module) not in seen:
                seen.add(id(module))
                yield model.name(stage, name).removesuffix("."), module


class Scaler(torch.amp.GradScaler):
    """A GradScaler for all ranks: if one finds an infinite gradient, all skip the step.

    >>> Scaler(Ranks(1, device=torch.device("cpu")), init_scale=4.0).get_scale()
    4.0
    """

    def __init__(self, ranks: Ranks, **options: Any) -> None:
        super().__init__(ranks.device.type, **options)
        self._ranks = ranks

    # Here torch looks for infinite gradients, for every optimizer.
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        here = any(bool(flag) for flag in found.values())
        anywhere = float(self._ranks.on_any_rank(here, "a GradScaler's step"))
        # Also on a rank without gradients: it must skip the step, too.
        devices = (*found, found_inf.device)
        return {device: torch.full_like(found_inf, anywhere, device=device) for device in devices}


def scale(ranks: Ranks, scaler: torch.amp.GradScaler) -> float:
    """The factor by which a scaler multiplies the loss; raises if ranks could disagree on steps."""
    check("scaler", scaler, torch.amp.GradScaler)
    if not isinstance(scaler, Scaler) and not ranks.in_one_process:
        raise MismatchError(
            "this scaler checks only the gradients of its own process, so that ranks may "
            "disagree on a step; create it with pipe.scaler(…), which takes the same options"
        )
    return float(scaler.scale(torch.ones((), device=ranks.device)))


def norm(built: Built, norm_type: float) -> torch.Tensor:
    """The norm of the gradients of all processes.

    The norms of single gradients are combined in the order of the model, as torch does for the
    plain model. Then not even the last bit depends on how the model was cut.
    """
    norm_type = _number_or_infinity("norm_type", norm_type)
    if not norm_type:
        refuse("norm_type", "more than 0", norm_type)
    device = built.ranks.device
    with built.everywhere("grad_norm()"):
        norms = _own_norms(built, norm_type)
        moved = [each.to(device) for each in norms.values()]
        numbers = torch.stack(moved).tolist() if moved else []
        is_double = any(each.dtype == torch.float64 for each in moved)
        mine = [float(is_double), *norms, *numbers]
        rows = share_floats(built.ranks.transport, mine, "grad_norm()", ragged=True)
    found: dict[float, float] = {}
    for _, *row in rows:
        found |= zip(row[: len(row) // 2], row[len(row) // 2 :], strict=True)
    dtype = torch.float64 if any(is_double for is_double, *_ in rows) else torch.float32
    in_order = [found[place] for place in sorted(found)] or [0.0]  # torch refuses none
    numbers = torch.tensor(in_order, dtype=dtype, device="cpu")
    return torch.linalg.vector_norm(numbers, norm_type).to(device)


def _number_or_infinity(name: str, value: Any) -> float:
    infinite = isinstance(value, float) and value == math.inf
    return value if infinite else check(name, value, float, least=0)


def _own_norms(built: Built, norm_type: float) -> dict[int, torch.Tensor]:
    """The norms of gradients here by their places; of shards that are alike, one for all."""
    parameters, norms = built.counted(), dict[int, torch.Tensor]()
    place_of = {parameter: place for place, parameter in parameters.items()}
    for alike in _alike(parameters.values()):
        places = [place_of[parameter] for parameter in alike]
        gradients: list[Any] = [parameter.grad for parameter in alike]
        if not is_sharded(gradients[0]):
            norms |= zip(places, _single_norms(gradients, norm_type), strict=True)
        elif norm_type != math.inf:
            total: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
            norms[places[0]] = total.full_tensor()
        else:  # torch refuses the largest element of an empty shard
            largest = [_single_norms([each.full_tensor()], math.inf)[0] for each in gradients]
            norms[places[0]] = torch.stack(largest).max()
    return norms


_norms_on_gpu = private("torch._foreach_norm", "norms of many gradients at once", None)


def _single_norms(gradients: list[torch.Tensor], norm_type: float) -> Sequence[torch.Tensor]:
    """The norm of each gradient, by the same kernels as in torch's clip_grad_norm_."""
    gradients = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    if norm_type == math.inf:  # torch refuses the largest element of an empty tensor
        gradients = [each if each.numel() else each.new_zeros(1) for each in gradients]
    if gradients[0].is_cuda and _norms_on_gpu is not None:
        return _norms_on_gpu(gradients, norm_type)
    return [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]


def clip(built: Built, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """Scale gradients down, so that their norm is at most ``max_norm``; returns what it was."""
    max_norm = _number_or_infinity("max_norm", max_norm)
    check("error_if_nonfinite", error_if_nonfinite, bool)
    found = norm(built, norm_type)
    if error_if_nonfinite and not math.isfinite(found):
        raise LossError(
            f"the norm of the gradients is {found.item()}, so they cannot be clipped; leave out "
            "this step, or pass error_if_nonfinite=False"
        )
    for alike in _alike(parameter for _, parameter in built.named_parameters()):
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, found)
    return found


def _alike(parameters: Iterable[nn.Parameter]) -> Sequence[list[nn.Parameter]]:
    """Parameters with gradients, grouped by mesh and placements."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            layout = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
            groups.setdefault(layout, []).append(parameter)
    return list(groups.values())


def own_state(model: ModelState, *, with_rest: bool) -> dict[str, torch.Tensor]:
    """The tensors of this process, in the model's order; not copies."""
    held = {name: tensor.detach() for name, tensor in first_of_each(model.held()).items()}
    held |= {name: held[known] for name, known in model.aliases.items() if known in held}
    if with_rest:
        held |= model.rest
    return {name: held[name] for name in (*model.names, *held) if name in held}


def gathered_state(
    model: ModelState,
    ranks: Ranks,
    *,
    everywhere: bool = False,
    only: Container[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The whole state on the CPU of the first rank, or of all; nothing on the others.

    All ranks call it. ``only`` has the names that are wanted.
    """
    first = 0 in ranks.own
    mine = {
        name: value.full_tensor() if is_sharded(value) else value
        for name, value in own_state(model, with_rest=first).items()
        if only is None or name in only
    }
    if not ranks.is_first:
        return {}
    if ranks.group is None:
        return {name: value.to("cpu", copy=True) for name, value in mine.items()}
    call = "state_dict(gathered=True)"
    listed = share_values(ranks.transport, list(mine), [str], call, what="the state")
    state: dict[str, torch.Tensor] = {}
    for name, rank in writers(listed).items():
        sent = mine[name].to(ranks.device) if name in mine else None
        value = broadcast(sent, ranks.group, ranks.device, rank, call)
        if first or everywhere:
            state[name] = value.to("cpu", copy=True)
    return {name: state[name] for name in (*model.names, *state) if name in state}


_ADVICE = "pass strict=False to load what fits"


def load_state(model: ModelState, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    """Load the tensors of this process from a state of the whole model; all of it, or nothing."""
    check("state_dict", state, Mapping, "a mapping from names to tensors")
    check("strict", strict, bool)
    # A weight of several names has each of them; files may have only one.
    first = model.first_names()
    found = {first.get(name, name): value for name, value in state.items()}
    known = {name: found[other] for name, other in first.items() if other in found} | {**state}
    if strict:
        held = own_state(model, with_rest=True)
        if missing := [name for name in held if name not in known]:
            raise MismatchError(f"the state lacks {first_of(missing)}; {_ADVICE}")
        if foreign := [name for name in state if name not in model.names and name not in held]:
            raise MismatchError(f"the model lacks {first_of(foreign)} of the state; {_ADVICE}")
    own = [*model.held(), *model.rest.items()]
    pairs = [(name, tensor, known[name]) for name, tensor in own if name in known]
    for name, tensor, value in pairs:
        check(f"state_dict[{name!r}]", value, torch.Tensor)
        if tensor.shape != value.shape:
            raise MismatchError(
                f"{name} is {list(tensor.shape)} in the model, but {list(value.shape)} in the state"
            )
    with torch.no_grad():
        for _, tensor, value in pairs:
            _copy(tensor, value)


def _copy(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if is_sharded(tensor) and not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        # Every rank has the whole value, so nothing is sent.
        value = distribute_tensor(
            value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
    tensor.copy_(value)
