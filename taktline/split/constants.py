"""Arguments that are no tensors: a trace holds for the value that it was made with."""

from __future__ import annotations

from taktline.errors import PartitionError

__all__ = ["check_constant"]


def check_constant(value: object, name: str, traced: object) -> None:
    """Called by a piece: raise if an argument is not what it was in the trace."""
    if value != traced:
        raise PartitionError(
            f"{name} is {value!r}, but the pipeline was traced with {traced!r}, which is part of "
            "it now; call pipeline() with the new value, or make it a tensor"
        )
