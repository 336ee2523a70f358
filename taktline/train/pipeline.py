"""``Pipeline``: a model on its ranks, and how it trains."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from taktline.checkpoint import loading, pretrained, saving
from taktline.checkpoint.loading import Loaded
from taktline.checkpoint.saving import Training
from taktline.checks import check
from taktline.errors import UseError
from taktline.plan import Plan, write
from taktline.runtime import Trace
from taktline.runtime.schedule import ArgsSpec, KwargsSpec, LossFn, MergeSpec, Schedule
from taktline.train import parameters, steps
from taktline.train.adapters import adapted, save_adapters
from taktline.train.batches import SharedLoader
from taktline.train.build import Built, Model, Prepare, ScheduleChoice, build, checked, replan
from taktline.train.elastic import Elastic, Recovery, require_elastic, require_repeatable
from taktline.train.memory import Memory, memory_of
from taktline.train.parameters import INSTEAD, Scaler, gathered_state, load_state, own_state
from taktline.train.preemption import PREEMPTED, Preemption
from taktline.train.recompute import Checkpoint
from taktline.train.stage_table import Boundaries
from taktline.train.steps import Metrics, Outputs, generate, progress
from taktline.train.verify import Verification, verify
from taktline.transport.base import Turn

T = TypeVar("T")


class Pipeline:
    """A model, cut into stages, on its ranks; it trains like the plain model.

    Started by torchrun, each process is a rank. Without a launcher all ``ranks``
    run in this process.

    It trains the model's own parameters in place, and moves them to ``device``. It changes nothing
    else of the model. Each process trains only its own stages.

    Args:
        model: the model; or its stages, cut already: a :class:`Pipe`, :class:`Pieces`, a list of
            modules, or a dict with the stages of this process by their numbers.
        example: arguments of one micro-batch, by which the model is cut and measured: a tuple, a
            dict of keyword arguments, or a tuple of both.
        schedule: a name, a :class:`Plan`, a CSV or JSON file with one, or a Schedule class; or
            ``"auto"``, which measures steps of the example on the ranks, and chooses the plan, the
            cuts and, without ``microbatches``, their number: then the example is a whole batch.
        example_target: the target of the example, so that "auto" and :meth:`replan` measure the
            real loss.
        memory: what a rank may use, in bytes or as "16GiB", or a list with one for each. The plan
            is chosen for it, by default for 90% of a GPU; that of a name or file is made to fit, by
            the sizes for the ``example``, with OFFLOAD and RECOMPUTE: see :meth:`memory`.
        microbatches: the number of micro-batches; a batch with fewer rows has one for each row.
        loss_fn: returns the loss of an output and a target. Without one, the loss is the one
            that the model returns: a number, ``output.loss``, or the only number in a tuple.
        ranks: the number of ranks of the pipeline; or a list with what each rank has, such as
            ``[{"memory": "16GiB"}, {"memory": "24GiB", "speed": 1.4}]``, by which it is cut.
        stages_per_rank: for schedules that leave it open.
        cuts: names of submodules at which new stages begin.
        measure: cuts the model by the times of its layers for the ``example``, which the first rank
            measures on its device. By default their operations are counted.
        mesh: a device mesh with a dimension "pp", and one that begins with "dp" for replicas.
        data_parallel: ``"ddp"`` or ``"fsdp"``: the wrapper of each stage.
        prepare: called with each stage of this process and its number, before it is wrapped;
            returns the module to use. For tensor parallelism, for example.
        checkpoint: runs blocks again in the backward instead of keeping their activations, after
            ``prepare``: ``"blocks"``, all members of lists and sequences of modules, or a function
            of a submodule's name and the submodule, which returns True for those to run again.
        compile: compiles each stage, after ``prepare``, by :func:`taktline.compile_stages`.
        stream_weights: keeps frozen weights in the host's memory; those of a stage are on the
            device while it computes, and arrive while the stage before does. For models that do
            not fit, with several stages on each rank: ``schedule="looped_bfs"``.
        device: where to compute.
        state_dict: values for a model on the meta device, of which each process takes its own;
            without it, they are made as the model's constructor does.
        seed: draws dropout from (seed, step, stage, micro-batch), the same under every schedule and
            on any number of ranks.
        dynamic_shapes: for stages whose outputs' shapes depend on values.
        cuda_graphs: captures steps as CUDA graphs, and replays them; a step that cannot be captured
            runs without, with a warning that says why.
        check_finite: raises if an output of a stage or a loss is not finite; waits for a GPU.
        args_chunk_spec: how positional arguments are cut; by default as a batch differs from the
            example.
        kwargs_chunk_spec: how keyword arguments are cut.
        output_merge_spec: how outputs are joined.
        target_chunk_spec: how the target is cut; its rows then need not match those of the batch.
        on_preempt: called with this pipeline on every rank after SIGTERM has reached any of them,
            once an optimizer has used all gradients; then all end with :attr:`PREEMPTED`.
        timeout: seconds after which a wait for another rank raises an error on all ranks; by
            default that of the process group.
        elastic: keeps the whole model on every rank, for :meth:`elastic`.

    >>> import taktline as tl
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> pipe = tl.Pipeline(
    ...     [model[:2], model[2:]],
    ...     schedule="1f1b",
    ...     microbatches=4,
    ...     loss_fn=nn.functional.mse_loss,
    ...     ranks=2,
    ... )
    >>> loss = pipe.step(torch.ones(8, 4), target=torch.zeros(8, 2))
    >>> plain = nn.functional.mse_loss(model(torch.ones(8, 4)), torch.zeros(8, 2))
    >>> torch.allclose(loss, plain)
    True
    """

    PREEMPTED: ClassVar[int] = PREEMPTED
    """The exit code of every rank after ``on_preempt``."""

    # torch.distributed.checkpoint takes a pipeline for a module without children, whose parameters
    # and buffers have the model's names, dots included.
    _names = parameters.AnyName()
    _non_persistent_buffers_set: frozenset[str] = frozenset()
    children = named_children = parameters.no_children

    def __init__(
        self,
        model: Model,
        *,
        example: Any = None,
        schedule: ScheduleChoice = "1f1b",
        example_target: Any = None,
        memory: float | str | Sequence[float | str] | None = None,
        microbatches: int | None = None,
        loss_fn: LossFn | None = None,
        ranks: int | Sequence[Mapping[str, Any]] | None = None,
        stages_per_rank: int | None = None,
        cuts: Sequence[str] | None = None,
        measure: bool = False,
        mesh: DeviceMesh | None = None,
        data_parallel: Literal["ddp", "fsdp"] | None = None,
        prepare: Prepare | None = None,
        checkpoint: Checkpoint | None = None,
        compile: bool = False,
        stream_weights: bool = False,
        device: torch.device | str | None = None,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        seed: int | None = None,
        dynamic_shapes: bool = False,
        cuda_graphs: bool = False,
        check_finite: bool = False,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        target_chunk_spec: Any = None,
        on_preempt: Callable[[Pipeline], object] | None = None,
        timeout: float | timedelta | None = None,
        elastic: bool = False,
    ) -> None:
        given = checked(locals())  # all arguments, as nothing else is set yet
        given.loss_fn = loss_fn or steps.loss_in_output
        self._loss_fn, self._turn = loss_fn, Turn("this pipeline")
        self._metrics = Metrics()
        self._preemption = on_preempt and Preemption(on_preempt)
        self._given = copy.copy(given) if given.elastic else None
        self._elastic: Elastic | None = None
        self._live: Built | None = build(given)
        if self._preemption is not None:
            self._preemption.listen(self._live)

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
        return cls(model, **({} if files is None else {"state_dict": files}), **options)

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: Outputs = False,
        scaler: torch.amp.GradScaler | None = None,
        losses: list[torch.Tensor] | None = None,
        aux_losses: list[torch.Tensor] | None = None,
        **options: Any,
    ) -> Any:
        """Run a batch forward and backward: returns its mean loss, the same on every rank.

        Gradients are added to ``.grad``, as ``backward()`` does, so do not call that on the loss.
        Every rank may pass the whole batch. On a GPU this returns before the loss is computed.

        Args:
            args: the model's arguments.
            target: passed to ``loss_fn`` with the output; leave it out without ``loss_fn``.
            return_outputs: True returns ``(loss, outputs)`` on every rank, ``"last"`` on that of
                the last stage only.
            scaler: multiplies the loss for the backward; made by :meth:`scaler`.
            losses: a list to fill with the loss of each micro-batch.
            aux_losses: a list to fill with the losses that :func:`taktline.add_loss` has added.
            options: ``loss_weights``, ``loss_kwargs``, ``arg_mbs``, ``kwarg_mbs`` and
                ``target_mbs`` as in :meth:`Schedule.step`; all others are keyword arguments of
                the model.
        """
        if self._preemption is not None:
            self._preemption.end_if_agreed(self)
        if self._loss_fn is None:
            target, options = steps.with_own_loss(target, options)
        options["grad_scale"] = (
            1.0 if scaler is None else parameters.scale(self._built.ranks, scaler)
        )
        lists, batch = {"losses": losses, "aux_losses": aux_losses}, (args, target, options)

        def run() -> tuple[Any, torch.Tensor | None]:
            with self._turn:
                return steps.run(self._built, "step", batch, return_outputs, **lists)

        if self._elastic is not None:
            require_repeatable(self._loss_fn, batch, scaler)
        output, loss = self._surviving(run, steps=True)
        self._metrics.note((*args, *options.values()), loss)
        if self._preemption is not None:
            self._preemption.hear(self._built)
        return (loss, output) if return_outputs else loss

    def eval(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: Outputs | None = None,
        losses: list[torch.Tensor] | None = None,
        aux_losses: list[torch.Tensor] | None = None,
        **options: Any,
    ) -> Any:
        """Run a batch forward only, with the modules in evaluation mode.

        Returns the mean loss if there is a target, and otherwise the outputs; with
        ``return_outputs``, both. If the model computes its own loss, pass ``labels``, or
        ``return_outputs=False``. Without arguments it only puts the modules into that mode.
        """
        if not args and not options and target is None and return_outputs is None:
            return self.train(False)
        if self._preemption is not None:
            self._preemption.end_if_agreed(self)
        own = options.get("labels") is not None or return_outputs is False
        if self._loss_fn is None and own:
            target, options = steps.with_own_loss(target, options)
        compared = target is not None or options.get("target_mbs") is not None
        wanted = not compared if return_outputs is None else return_outputs
        lists, batch = {"losses": losses, "aux_losses": aux_losses}, (args, target, options)

        def run() -> tuple[Any, torch.Tensor | None]:
            with self._turn, steps.in_mode(*self.stages.values(), training=False):
                return steps.run(self._built, "eval", batch, wanted, **lists)

        output, loss = self._surviving(run)
        if self._preemption is not None:
            self._preemption.hear(self._built)
            self._preemption.end_if_agreed(self)
        if not wanted:
            return loss
        return output if loss is None else (loss, output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a batch, as :meth:`eval` returns them; to train, call :meth:`step`."""
        modules = self._built.model.modules.values()
        if torch.is_grad_enabled() and any(module.training for module in modules):
            raise UseError(
                "the outputs of a pipeline have no gradients: call step(x, target=y), which runs "
                "forward and backward; or eval(x), or this under torch.no_grad(), for outputs"
            )
        return self.eval(*args, **kwargs)

    def verify(
        self,
        model: nn.Module,
        *args: Any,
        target: Any = None,
        tolerance: float | None = None,
        **options: Any,
    ) -> Verification:
        """Compare one step with the plain model: returns the first tensor that differs, if any.

        A copy of the plain model gets the pipeline's values and runs the whole batch at once. The
        outputs of modules, the loss and the gradients are compared, without dropout. Gradients,
        buffers and random numbers stay as they are. Every rank calls it with the same batch, and
        needs memory for the whole model.

        Args:
            model: the plain model, in any state; of a list of stages ``nn.Sequential(*stages)``.
            args: as in :meth:`step`, and so are ``target`` and ``options``.
            tolerance: the largest difference that counts as rounding, relative to a tensor's
                largest value; by default 1e-4 for float32.

        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        >>> pipe = Pipeline(model, cuts=["2"], microbatches=2, ranks=2, loss_fn=torch.dist)
        >>> x, y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.zeros(8, 4)
        >>> print(pipe.verify(model, x, target=y))  # doctest: +ELLIPSIS
        stage 1, loss: the loss differs by ...; the mean of loss_fn over micro-batches is not ...
        """
        if self._loss_fn is None:
            target, options = steps.with_own_loss(target, options)
        with self._turn:
            return verify(self._built, model, (args, target, options), tolerance)

    def generate(
        self,
        ids: torch.Tensor,
        *,
        max_new_tokens: int,
        attention_mask: torch.Tensor | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> torch.Tensor:
        """Continue texts by the likeliest token each time: returns all texts on every rank.

        For causal language models, which return logits [rows, length, words]. The stages compute
        the whole texts again for each token.

        Args:
            ids: texts, [rows, length].
            max_new_tokens: how many tokens to add at most.
            attention_mask: 0 for padding on the left of shorter texts, else 1.
            eos_token_id: tokens that end a text; by default those of the model.
            pad_token_id: the token that fills up an ended text; by default the model's.
        """
        options = (max_new_tokens, attention_mask, eos_token_id, pad_token_id)
        with self._turn, steps.in_mode(*self.stages.values(), training=False):
            return generate(self._built, ids, *options)

    def loader(self, batches: Iterable[Any] | None) -> SharedLoader:
        """The batches of a DataLoader, or any other iterable, for all ranks.

        The first rank of each replica reads, and sends every batch to the others. All ranks call
        this and iterate together; ranks that do not read may pass None.
        """
        return SharedLoader(batches, self)

    def progress(self, batches: Iterable[T], *, every: int = 10) -> Iterator[T]:
        """Yields the batches, while the first rank prints how training goes; every rank iterates.

        Args:
            batches: a list, a ``DataLoader``, or :meth:`loader` of one.
            every: the numbers are read after so many steps. Where ranks are processes, one of
                these steps is traced to measure the bubble.
        """
        check("every", every, int, least=1)
        alone = self._built.ranks.in_one_process
        return progress(self, batches, every, measured=not alone and self._elastic is None)

    def metrics(self) -> dict[str, float]:
        """Numbers for a log, those that are known: ``step``, ``loss``, ``step_ms``, ``rows_per_s``
        and ``tokens_per_s`` (of all replicas, over the last 20 steps), ``bubble`` (of the latest
        step in :meth:`trace` or :meth:`progress`, if ranks are processes), ``peak_memory`` (bytes
        of this process).
        """
        return self._metrics.read(self._built.schedule.steps, self.replicas, self.device)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Trace the steps inside of the block, on every rank; see :meth:`Schedule.trace`."""
        with self._built.schedule.trace() as trace:
            trace.work = self._built.table.work
            yield trace
        if trace.timelines and not self._built.ranks.in_one_process:
            self._metrics.bubble = trace.timelines[0].bubble()

    def memory(self, optimizer: torch.optim.Optimizer | None = None) -> Memory:
        """What each rank holds, and what the stages keep for their backwards; print it.

        All ranks call it, best after a step, when the target of the loss is known. The state is
        that of an optimizer like the given one, by default AdamW.
        """
        with self._turn, self._built.everywhere("memory()"):
            return memory_of(self._built, optimizer)

    def replan(self) -> str:
        """Measure steps of the example, and go on with the best plan for the stages as they are.

        Stages, parameters and gradients, and so the optimizer, stay as they are; so do the cuts
        and the number of micro-batches. Every rank calls it between steps. Returns why the plan
        was chosen, which ``print(pipe)`` shows from then on.
        """
        self._refuse_in_elastic("replan()")
        with self._turn:
            self._replace(replan(self._built))
        return self._built.choice

    def write_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plan, and where the model was cut: ``schedule=path`` runs it without a search.

        The first rank writes; the name ends in .json.
        """
        if self.is_first:
            write(self.plan, path, cuts=self._built.starts)

    def scaler(self, **options: Any) -> Scaler:
        """A ``torch.amp.GradScaler`` with the same decision on all ranks; takes its options."""
        return Scaler(self._built.ranks, **options)

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients of the model, the same on every rank."""
        return self._surviving(lambda: parameters.norm(self._built, norm_type))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients like ``torch.nn.utils.clip_grad_norm_``; returns it."""
        limits = max_norm, norm_type, error_if_nonfinite
        return self._surviving(lambda: parameters.clip(self._built, *limits))

    def accumulate(self) -> AbstractContextManager[None]:
        """Average gradients over replicas once for all steps in ``with pipe.accumulate():``.

        Without it, several steps add up their gradients just as well, but each averages them.
        """
        self._refuse_in_elastic("accumulate()")
        return self._built.schedule.accumulate()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process, as ``optimizer.zero_grad()`` does."""
        for parameter in self.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self, *, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process, with their names in the model.

        A weight with several names has the one that the model lists first. Where ranks are
        processes, each that uses a tied weight has it.
        """
        return self._built.named_parameters()

    def modules(self) -> Iterator[nn.Module]:
        """The modules of this process."""
        for _, module in self.named_modules():
            yield module

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of this process, with their names in the model."""
        return parameters.modules_of(self._built.model)

    def named_buffers(self, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """The persistent buffers of this process, with their names in the model."""
        held = dict(self._built.model.saved())
        yield from ((name, x) for name, x in held.items() if not isinstance(x, nn.Parameter))

    def train(self, mode: bool = True) -> Self:
        """Put the modules into training mode, or with False into that of evaluation."""
        check("mode", mode, bool)
        for module in self.stages.values():
            module.train(mode)
        return self

    def state_dict(self, *, gathered: bool = False) -> dict[str, torch.Tensor]:
        """The model's state under its own names.

        Args:
            gathered: by default each process returns its own tensors; if True, the first rank
                returns all of them, on the CPU, and the others nothing. All processes call it.
        """
        model = self._built.model
        if check("gathered", gathered, bool):

            def run() -> dict[str, torch.Tensor]:
                with self._built.everywhere("state_dict(gathered=True)"):
                    return gathered_state(self._built.model, self._built.ranks)

            return self._surviving(run)
        return own_state(model, with_rest=0 in self._built.ranks.own)

    def load_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        *,
        strict: bool = True,
        assign: Literal[False] = False,
    ) -> None:
        """Load a state of the whole model, or the part of it for this process."""
        self._refuse_in_elastic("load_state_dict()")
        load_state(self._built.model, state_dict, strict=strict)

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
            async_save: copy everything now, and write it in the background; the next save waits for
                it, and raises its error.
        """
        training = Training(optimizer, scheduler, scaler, data, extra)

        def run() -> Path:
            with self._turn:
                if self._preemption is not None:
                    self._preemption.place(self._built, training)
                options = {"keep": keep, "async_save": async_save}
                return saving.save(self._built.model, folder, training, **options)

        return self._surviving(run)

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

        If anything does not fit, every rank raises the same :class:`CheckpointError`, and
        neither weights nor optimizers change. Returns ``path``, ``step`` and ``extra``.

        Args:
            folder: a save, or a folder of saves, of which the latest one that is whole is taken.
            optimizer: as in :meth:`save`, and so are the others; one that is not passed stays.

        >>> import tempfile
        >>> pipe = Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> pipe.load(pipe.save(tempfile.mkdtemp(), extra={"epoch": 3})).extra
        {'epoch': 3}
        """
        self._refuse_in_elastic("load()")
        training = Training(optimizer, scheduler, scaler, data)
        with self._turn:
            loaded = loading.load(self._built.model, folder, training)
            if self._preemption is not None:
                self._preemption.use(data)
            return loaded

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9
    ) -> None:
        """Write the model so that ``from_pretrained`` of transformers reads it.

        Every rank calls it, and writes files with its own part. Of a model of peft the first rank
        writes the adapters, for ``PeftModel.from_pretrained``.
        """
        with self._turn:
            if (whole := adapted(self._built)) is not None:
                return save_adapters(self._built, whole, folder)
            pretrained.save_pretrained(self._built.model, folder, max_shard_bytes)

    @contextmanager
    def elastic(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int = 1,
        folder: str | os.PathLike[str] | None = None,
        on_recovery: Callable[[Recovery], object] | None = None,
    ) -> Iterator[Self]:
        """Train on after a lost rank, with the others: for a loop inside of ``with``.

        Each rank's state is copied to another rank. When a rank is lost, the others take over its
        stages, go back to the last state that is whole, repeat the calls since then, and return to
        the loop. Every rank passes the whole batch to :meth:`step`. See docs/elastic.md.

        Args:
            optimizer: what changes the parameters, or a list of several.
            every: after how many updates a state is copied.
            folder: of saves; the latest is loaded if a rank is lost together with its copy.
            on_recovery: called with a :class:`Recovery` when the pipeline goes on.
        """
        listed = Training(optimizer, None, None, None).optimizers
        place = None if folder is None else check("folder", folder, Path)
        require_elastic(self, listed)
        if not self._built.ranks.in_one_process:
            self._elastic = Elastic(self, self._given, listed, every, place, on_recovery)
        try:
            yield self
        finally:
            if self._elastic is not None:
                self._elastic.close()
                self._elastic = None

    def _refuse_in_elastic(self, call: str) -> None:
        if self._elastic is not None:
            raise UseError(
                f"{call} cannot be repeated after a loss; call it outside of the block of elastic()"
            )

    def _surviving(self, run: Callable[[], T], *, steps: bool = False) -> T:
        """The result of a call that all ranks make, after a loss on those that are left."""
        if self._elastic is None:
            return run()
        return self._elastic.call(run, steps=steps)

    def _replace(self, built: Built) -> None:
        """Run on other ranks from now on."""
        built.model.loaders = self._built.model.loaders
        self._live = built
        if self._preemption is not None:
            self._preemption.listen(built)

    def reconnect(self) -> None:
        """Make new connections between the same ranks; every rank calls it.

        For errors whose ``recoverable`` says "reconnect". Call ``zero_grad()`` before the next
        step. Raises a :class:`MismatchError` if the latest step has ended on some ranks only.
        """
        for transport in self._built.ranks.distributed:
            transport.reconnect()
        self._built.schedule._runner.restart(self._built.schedule.steps)

    def close(self) -> None:
        """Free all but the model: connections to other ranks, and process groups made for them.

        A closed pipeline cannot be used; tensors that it has sharded cannot, either. Every rank
        closes its own, and waits for no other. ``with Pipeline(…) as pipe:`` closes it at the end.
        """
        with self._turn:
            if self._live is not None:
                if self._preemption is not None:
                    self._preemption.close()
                captures = self._live.schedule._runner.captures
                if captures is not None:  # nccl would wait for graphs with its operations
                    captures.forget()
                ranks, self._live = self._live.ranks, None
                ranks.close()

    @property
    def plan(self) -> Plan:
        """The plan: what each rank does, in order."""
        return self._built.plan

    @property
    def boundaries(self) -> Boundaries:
        """The tensors that each stage sends to the next one for the example; print it."""
        return self._built.table.boundaries

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The stages of this process, by their number, as they are run."""
        return {stage.stage_index: stage.submod for stage in self._built.schedule._stages}

    @property
    def schedules(self) -> dict[int, Schedule]:
        """The schedule of each rank of this process; if all ranks are here, one runs them all."""
        return dict.fromkeys(self._built.ranks.own, self._built.schedule)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._built.ranks.device

    @property
    def is_first(self) -> bool:
        """Whether this process is the one to print, and to save a gathered state."""
        return 0 in self._built.ranks.own and self._built.ranks.is_first

    @property
    def replica(self) -> int:
        """The number of this replica of the pipeline, from 0 up."""
        return self._built.ranks.replica

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline there are, each on data of its own."""
        return self._built.ranks.replicas

    @property
    def _built(self) -> Built:
        if self._live is None:
            raise UseError("this pipeline was closed; make a new one")
        return self._live

    def _fqn_modifiers(self) -> dict[str, str]:
        """The attribute in which torch looks up the rest of a name, by the name's first part."""
        model = self._built.model
        names = (*model.names, *(name for name, _ in model.saved()))
        return {name.partition(".")[0]: "_names" for name in names}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise UseError(
            "a pipeline belongs to its process, so it cannot be copied or pickled; save "
            "pipe.state_dict(gathered=True), make another pipeline, and load it there"
        )

    def __getattr__(self, name: str) -> NoReturn:
        advice = f"; {INSTEAD[name]}" if name in INSTEAD else ""
        text = f"a {type(self).__name__} has no {name!r}{advice}"
        raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        return "Pipeline(closed)" if self._live is None else f"Pipeline({self._live.summary()})"

    def __str__(self) -> str:
        return repr(self) if self._live is None else f"{self!r}\n{self._live}"

    def _repr_html_(self) -> str:
        drawing = None if self._live is None else self._live.table.predicted()._repr_svg_()
        return f"<pre>{escape(str(self))}</pre>{drawing or ''}"
