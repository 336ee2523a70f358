"""Saves and loads a pipeline: as a dict, as checkpoints, and in the format of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch.optim import Optimizer

from taktline.checkpoint import loading, pretrained, saving
from taktline.checkpoint.loading import Loaded
from taktline.checkpoint.saving import Training
from taktline.checks import require_flag, require_instance
from taktline.runtime.watchdog import guarded
from taktline.train import state
from taktline.train.live import Live
from taktline.train.plainly import plainly

__all__ = ["Saved"]


class Saved(Live):
    """The methods of a pipeline that save and load."""

    @plainly
    def state_dict(self, *, gathered: bool = False) -> dict[str, torch.Tensor]:
        """The model's state under its own names.

        Args:
            gathered: by default each process has what it holds; if True, the first rank has all
                of it, on the CPU, and the others nothing. All processes call it.
        """
        parts = self._built.parts
        if require_flag("gathered", gathered):
            with guarded(self._ranks.transport, "state_dict(gathered=True)") as what:
                self._built.schedule._runner.arrive(what)
                return state.gathered(parts, self._ranks)
        return state.own(parts, with_rest=0 in self._ranks.own)

    @plainly
    def load_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        *,
        strict: bool = True,
        assign: Literal[False] = False,
    ) -> None:
        """Load a state of the whole model, or what this process needs of it."""
        require_instance("state_dict", state_dict, Mapping, "a mapping from names to tensors")
        require_flag("strict", strict)
        state.load(self._built.parts, state_dict, strict=strict)

    @plainly
    def save(
        self,
        folder: str | os.PathLike[str],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        extra: Any = None,
        keep: int | None = None,
        async_save: bool = False,
    ) -> Path:
        """Save the model and its training into a folder of saves; returns the path of it.

        Every rank calls it, and writes its own part. The save appears whole or not at all. It has
        the step counter and the random number generators, too, and :meth:`load` takes it into any
        other layout.

        Args:
            folder: where saves are; this one gets a number, and the step in its name.
            optimizer: what trains the model, or a list of several.
            scheduler: what sets learning rates, or a list of several.
            scaler: a GradScaler.
            data: what knows which batch comes next; saved on every rank that passes it.
            extra: anything else: numbers, texts, tensors, and lists or dicts of these.
            keep: how many saves to keep; by default all.
            async_save: copy and write everything in the background. The next ``optimizer.step()``
                waits for the copy, the next save and the end of the program for all of it; what
                goes wrong, the next save raises.

        >>> import tempfile
        >>> import taktline as tl
        >>> from torch import nn
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> optimizer = torch.optim.AdamW(pipe.parameters())
        >>> pipe.save(tempfile.mkdtemp(), optimizer, extra={"epoch": 3}).name
        '000001-step-0'
        """
        training = Training.of(optimizer, scheduler, scaler, data, extra)
        with self._turn:
            held = state.holding(self._built)
            return saving.save(held, folder, training, keep=keep, async_save=async_save)

    @plainly
    def load(
        self,
        folder: str | os.PathLike[str],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
    ) -> Loaded:
        """Load what :meth:`save` has written, in whatever layout; every rank calls it.

        Each reads what it needs. If anything does not fit, every rank raises the same
        :class:`CheckpointError`, and nothing is changed. Returns ``path``, ``step`` and ``extra``.

        Args:
            folder: a save, or a folder of saves, of which the latest one that is whole is taken.
            optimizer: as in :meth:`save`, and so are the others; what is not passed stays.

        >>> import tempfile
        >>> import taktline as tl
        >>> from torch import nn
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> pipe.load(pipe.save(tempfile.mkdtemp(), extra={"epoch": 3})).extra
        {'epoch': 3}
        """
        training = Training.of(optimizer, scheduler, scaler, data)
        with self._turn:
            return loading.load(state.holding(self._built), folder, training)

    @plainly
    def save_pretrained(
        self, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9
    ) -> None:
        """Write the model so that ``from_pretrained`` of transformers reads it.

        Every rank calls it, and writes files with its own part; the first one writes the index,
        and the config if the model has one.
        """
        with self._turn:
            pretrained.save_pretrained(state.holding(self._built), folder, max_shard_bytes)

    @classmethod
    def from_pretrained(cls, source: Any, **options: Any) -> Self:
        """A pipeline of a model of transformers, of which each process reads its own part.

        Args:
            source: a folder with a config and safetensors files; or a config, for a model with new
                values.
            options: what :class:`Pipeline` takes beside the model.
        """
        model, files = pretrained.build(source)
        pipeline: Any = cls
        return pipeline(model, **({} if files is None else {"state_dict": files}), **options)
