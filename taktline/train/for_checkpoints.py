"""What ``torch.distributed.checkpoint`` asks of a module, so that it takes a pipeline for one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from taktline.train.build import Built
from taktline.train.live import Live

__all__ = ["ForCheckpoints"]


class _AnyName:
    """Has whatever is asked for: torch walks along a name that it has from us."""

    def __getattr__(self, name: str) -> _AnyName:
        return self

    def _fqn_modifiers(self) -> dict[str, str]:
        return {}


class ForCheckpoints(Live):
    """A module without children, whose parameters have the model's names, dots and all."""

    _names = _AnyName()
    _non_persistent_buffers_set: frozenset[str] = frozenset()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """None: names are those of the model, wherever its modules are."""
        return iter(())

    def children(self) -> Iterator[nn.Module]:
        """None."""
        return iter(())

    def named_buffers(self, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """The lasting buffers of this process, with their names in the model."""
        for name, value in _held(self._built).items():
            if not isinstance(value, nn.Parameter):
                yield name, value

    def _fqn_modifiers(self) -> dict[str, str]:
        """Where torch goes on from the first part of a name."""
        names = (*self._built.parts.names, *_held(self._built))
        return {name.partition(".")[0]: "_names" for name in names}


def _held(built: Built) -> dict[str, torch.Tensor]:
    first = built.parts.first_names()
    return {first.get(name, name): value for name, value, _ in built.parts.held()}
