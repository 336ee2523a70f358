"""Methods of a pipeline that save and load it: state dicts, checkpoints, files of transformers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint import loading, pretrained, saving
from taktline.checkpoint.loading import Loaded
from taktline.checkpoint.saving import Training
from taktline.checks import known_keywords, require_flag, require_instance
from taktline.runtime.watchdog import guarded
from taktline.train.base import PipelineBase
from taktline.train.preemption import AnotherStep
from taktline.train.state_dict import gathered_state, load_state, own_state

_log = logging.getLogger("taktline")


class _AnyName:
    """Has every attribute: ``torch.distributed.checkpoint`` looks up the parts of a name."""

    def __getattr__(self, name: str) -> _AnyName:
        return self

    def _fqn_modifiers(self) -> dict[str, str]:
        return {}


class SaveLoad(PipelineBase):
    """The methods of a pipeline that save and load.

    ``torch.distributed.checkpoint`` takes it for a module without children, whose parameters and
    buffers have the model's names, dots included.
    """

    _names = _AnyName()
    _non_persistent_buffers_set: frozenset[str] = frozenset()

    @known_keywords
    def state_dict(self, *, gathered: bool = False) -> dict[str, torch.Tensor]:
        """The model's state under its own names.

        Args:
            gathered: by default each process returns its own tensors; if True, the first rank
                returns all of them, on the CPU, and the others nothing. All processes call it.
        """
        model = self._built.model
        if require_flag("gathered", gathered):
            with guarded(self._ranks.transport, "state_dict(gathered=True)") as what:
                self._built.schedule._runner.arrive(what)
                return gathered_state(model, self._ranks)
        return own_state(model, with_rest=0 in self._ranks.own)

    @known_keywords
    def load_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        *,
        strict: bool = True,
        assign: Literal[False] = False,
    ) -> None:
        """Load a state of the whole model, or the part of it for this process."""
        require_instance("state_dict", state_dict, Mapping, "a mapping from names to tensors")
        require_flag("strict", strict)
        load_state(self._built.model, state_dict, strict=strict)

    @known_keywords
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
        """Save the model and its training into a folder of saves; returns the path of the save.

        Every rank calls it, and writes its own part. The save appears whole or not at all. It has
        the step counter and the random number generators, too. :meth:`load` loads it into any
        layout.

        Args:
            folder: where saves are; this one gets a number, and the step in its name.
            optimizer: what trains the model, or a list of several.
            scheduler: a learning rate scheduler, or a list of several.
            scaler: a GradScaler.
            data: an object that knows which batch comes next; saved on every rank that passes it.
            extra: anything else: numbers, texts, tensors, and lists or dicts of these.
            keep: how many saves to keep; by default all.
            async_save: copy everything now, and write it in the background. The next save and the
                end of the program wait for it. The next save raises its error, if there was one.

        >>> import tempfile
        >>> import taktline as tl
        >>> from torch import nn
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> optimizer = torch.optim.AdamW(pipe.parameters())
        >>> pipe.save(tempfile.mkdtemp(), optimizer, extra={"epoch": 3}).name
        '000001-step-0'
        """
        training = Training(optimizer, scheduler, scaler, data, extra)
        with self._turn:
            self._place(training)
            return saving.save(self._held(), folder, training, keep=keep, async_save=async_save)

    @known_keywords
    def load(
        self,
        folder: str | os.PathLike[str],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
    ) -> Loaded:
        """Load a save of any layout; every rank calls it, and reads its own part.

        If anything does not fit, every rank raises the same :class:`CheckpointError`, and nothing
        is changed. Returns ``path``, ``step`` and ``extra``.

        Args:
            folder: a save, or a folder of saves, of which the latest one that is whole is taken.
            optimizer: as in :meth:`save`, and so are the others; one that is not passed stays.

        >>> import tempfile
        >>> import taktline as tl
        >>> from torch import nn
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> pipe.load(pipe.save(tempfile.mkdtemp(), extra={"epoch": 3})).extra
        {'epoch': 3}
        """
        training = Training(optimizer, scheduler, scaler, data)
        with self._turn:
            loaded = loading.load(self._held(), folder, training)
            self._data = self._data if data is None else data
            return loaded

    def _place(self, training: Training) -> None:
        """In ``on_preempt``, save the position from before the batch of the step that waits."""
        data, preemption = training.data, self._preemption
        self._data = self._data if data is None else data
        if preemption is None or not preemption.ending or preemption.position is None:
            return
        unknown = data is not None and data is not preemption.position.data
        if self._ranks.on_any_rank(unknown and not preemption.waited, "save()"):
            raise AnotherStep
        training.noted["random"] = preemption.position.random
        if unknown:
            _log.warning(
                "the save in on_preempt has another object as data=… than saves before it, whose "
                "position may be a batch too far; pass the same object to every save and load"
            )
        elif data is not None:
            training.noted["data"] = preemption.position.state

    @known_keywords
    def save_pretrained(
        self, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9
    ) -> None:
        """Write the model so that ``from_pretrained`` of transformers reads it.

        Every rank calls it, and writes files with its own part; the first one writes the index,
        and the config if the model has one. Names are those that transformers writes, also where
        they are not the model's own, as for experts.
        """
        with self._turn:
            pretrained.save_pretrained(self._held(), folder, max_shard_bytes)

    @classmethod
    def from_pretrained(cls, source: Any, **options: Any) -> Self:
        """A pipeline of a model of transformers, of which each process reads its own part.

        Args:
            source: a folder with a config and safetensors files; or a config, for a model with new
                values.
            options: what :class:`Pipeline` takes beside the model. Without ``example`` and
                ``cuts``, a model for texts or images is cut by an example of its own.
        """
        model, files = pretrained.build(source)
        pipeline: Any = cls
        return pipeline(model, **({} if files is None else {"state_dict": files}), **options)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """None: names are those of the model, wherever its modules are."""
        return iter(())

    def children(self) -> Iterator[nn.Module]:
        """None."""
        return iter(())

    def named_buffers(self, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """The persistent buffers of this process, with their names in the model."""
        for name, value in {held.name: held.tensor for held in self._held().held}.items():
            if not isinstance(value, nn.Parameter):
                yield name, value

    def _fqn_modifiers(self) -> dict[str, str]:
        """The attribute in which torch looks up the rest of a name, by the name's first part."""
        names = (*self._built.model.names, *(each.name for each in self._held().held))
        return {name.partition(".")[0]: "_names" for name in names}
