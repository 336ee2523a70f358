"""What a pipeline has as an ``nn.Module`` has it; where it cannot, an error says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from taktline.checkpoint.model_state import ModelState
from taktline.errors import UseError
from taktline.stage.names import named_modules

_BEFORE = "convert the model before you make the pipeline of it"
_INSTEAD = {
    "forward": "call step(…) to train, and eval(…) for outputs",
    "backward": "step(…) runs forward and backward",
    "cuda": 'pass the device when you make it: Pipeline(…, device="cuda")',
    "cpu": 'pass the device when you make it: Pipeline(…, device="cpu")',
    **dict.fromkeys(("half", "float", "double", "bfloat16", "type"), _BEFORE),
    "apply": "use pipe.modules()",
    "requires_grad_": "use pipe.parameters()",
    "buffers": "pipe.state_dict() has them",
    "compile": "pass it when you make it: Pipeline(…, compile=True)",
}


class AnyName:
    """Has every attribute: ``torch.distributed.checkpoint`` looks up the parts of a name."""

    def __getattr__(self, name: str) -> AnyName:
        return self

    def _fqn_modifiers(self) -> dict[str, str]:
        return {}


def advice(name: str) -> str:
    """What to do instead, if a module has such an attribute and a pipeline has not."""
    return f"; {_INSTEAD[name]}" if name in _INSTEAD else ""


def require_no_gradients(model: ModelState) -> None:
    """Raise if a plain model would now return outputs with gradients."""
    if torch.is_grad_enabled() and any(module.training for module in model.modules.values()):
        raise UseError(
            "the outputs of a pipeline have no gradients: call step(x, target=y), which runs "
            "forward and backward; or eval(x), or this under torch.no_grad(), for outputs"
        )


def zero_grad(parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
    """Drop gradients, or set those that are there to zero."""
    for parameter in parameters:
        if set_to_none or parameter.grad is None:
            parameter.grad = None
        else:
            parameter.grad.detach_().zero_()


def modules_of(model: ModelState) -> Iterator[tuple[str, nn.Module]]:
    """The modules of all stages here, each once, with their names in the model."""
    seen = set[int]()
    for stage in sorted(model.modules):
        for name, module in named_modules(model.modules[stage]).items():
            if id(module) not in seen:
                seen.add(id(module))
                yield model.name(stage, name).removesuffix("."), module


def require_here(here: torch.device, where: Iterable[Any]) -> None:
    """Raise if arguments of ``to()`` ask for another device than this, or for a type."""
    for value in where:
        if isinstance(value, torch.dtype | torch.Tensor):
            raise UseError(f"a pipeline keeps its type: {_BEFORE}")
        if isinstance(value, str | int | torch.device) and not isinstance(value, bool):
            device = torch.device(value)
            if (device.type, device.index or 0) != (here.type, here.index or 0):
                raise UseError(
                    f"a pipeline stays where it was made, on {here}: make it with "
                    f'Pipeline(…, device="{device}")'
                )
