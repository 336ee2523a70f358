"""Methods of ``nn.Module`` on a pipeline; where one cannot work, its error says what to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NoReturn, Self

import torch
from torch import nn

from taktline.checks import require_flag
from taktline.errors import UseError
from taktline.stage.names import named_modules
from taktline.train.base import PipelineBase

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


class AsModule(PipelineBase, ABC):
    """The methods of a pipeline that an ``nn.Module`` has."""

    @abstractmethod
    def eval(self, *args: Any, **options: Any) -> Any:
        """See :meth:`taktline.Pipeline.eval`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a batch, as :meth:`eval` returns them; to train, call :meth:`step`.

        >>> import taktline as tl
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> with torch.no_grad():
        ...     pipe(torch.ones(4, 2)).shape
        torch.Size([4, 1])
        """
        modules = self._built.model.modules.values()
        if torch.is_grad_enabled() and any(module.training for module in modules):
            raise UseError(
                "the outputs of a pipeline have no gradients: call step(x, target=y), which runs "
                "forward and backward; or eval(x), or this under torch.no_grad(), for outputs"
            )
        return self.eval(*args, **kwargs)

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The stages of this process, by their number, as they are run."""
        return {stage.stage_index: stage.submod for stage in self._built.schedule._stages}

    def train(self, mode: bool = True) -> Self:
        """Put the modules into training mode, or with False into that of evaluation."""
        require_flag("mode", mode)
        for module in self.stages.values():
            module.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process, as ``optimizer.zero_grad()`` does."""
        for _, _, parameter in self._built.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of this process, with their names in the model."""
        model, seen = self._built.model, set[int]()
        for stage in sorted(model.modules):
            for name, module in named_modules(model.modules[stage]).items():
                if id(module) not in seen:
                    seen.add(id(module))
                    yield model.name(stage, name).removesuffix("."), module

    def modules(self) -> Iterator[nn.Module]:
        """The modules of this process."""
        for _, module in self.named_modules():
            yield module

    def to(self, *where: Any, **options: Any) -> Self:
        """Returns the pipeline if it is on that device; raises if not, as it cannot move."""
        here = self._built.ranks.device
        for value in (*where, *options.values()):
            if isinstance(value, torch.dtype | torch.Tensor):
                raise UseError(f"a pipeline keeps its type: {_BEFORE}")
            if isinstance(value, str | int | torch.device) and not isinstance(value, bool):
                device = torch.device(value)
                if (device.type, device.index or 0) != (here.type, here.index or 0):
                    raise UseError(
                        f"a pipeline stays where it was made, on {here}: make it with "
                        f'Pipeline(…, device="{device}")'
                    )
        return self

    def __getattr__(self, name: str) -> NoReturn:
        advice = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(
            f"a {type(self).__name__} has no {name!r}{advice}", name=name, obj=self
        )
