"""What a stage notes about each of its inputs: where it comes from, and the room for it."""

from __future__ import annotations

from typing import Any

import torch

from taktline.compat.torch_pipelining._utils import _TensorMeta

__all__ = ["_RecvInfo", "_RootArgPlaceholder", "_normalize_model_output_as_tuple"]


class _RecvInfo:
    """One input of one micro-batch.

    Args:
        input_name: what it is called.
        source: the stage that sends it; None if none does.
        buffer: where it is received; made when it is needed if ``tensor_meta`` is known.
        tensor_meta: its shape and type.
        is_root_arg: whether it is an argument of the whole model.

    >>> _RecvInfo("x", 1, torch.zeros(2))
    _RecvInfo(input=x, source=1, shape=torch.Size([2]), meta=None)
    """

    def __init__(
        self,
        input_name: str,
        source: int | None,
        buffer: torch.Tensor | None,
        tensor_meta: Any = None,
        *,
        is_root_arg: bool = False,
    ) -> None:
        self.input_name = input_name
        self.source = source
        self.buffer = buffer
        self.tensor_meta = tensor_meta
        self.is_root_arg = is_root_arg

    def room(self, device: torch.device) -> torch.Tensor | None:
        """The buffer, made if there is none yet; None for what is not received."""
        if self.buffer is None and isinstance(self.tensor_meta, _TensorMeta):
            meta = self.tensor_meta
            self.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        return self.buffer

    def take(self) -> torch.Tensor | None:
        """What has arrived. A buffer that can be made anew is let go, so that memory follows."""
        buffer = self.buffer
        if self.tensor_meta is not None:
            self.buffer = None
        return buffer

    def __repr__(self) -> str:
        if self.is_root_arg:
            return f"_RecvInfo(input={self.input_name}, root_arg=True)"
        shape = None if self.buffer is None else self.buffer.shape
        meta = None if self.tensor_meta is None else type(self.tensor_meta).__name__
        return f"_RecvInfo(input={self.input_name}, source={self.source}, {shape=}, {meta=!s})"


class _RootArgPlaceholder:
    """Stands for an argument of the whole model: its shape and type, without its values.

    >>> _RootArgPlaceholder(torch.zeros(2, 3)).meta.shape
    torch.Size([2, 3])
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.meta = tensor.to("meta")


def _normalize_model_output_as_tuple(output: Any) -> tuple[Any, ...]:
    """What a module gives, as the several values that the next stage takes.

    >>> _normalize_model_output_as_tuple([1, 2]), _normalize_model_output_as_tuple(1)
    ((1, 2), (1,))
    """
    if isinstance(output, list):
        return tuple(output)
    return output if isinstance(output, tuple) else (output,)
