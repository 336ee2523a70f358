"""``Pipeline``: a model on its ranks, and its training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from taktline.checks import known_keywords, require_number
from taktline.device import require_usable_device
from taktline.errors import ScheduleError
from taktline.plan import Kind
from taktline.runtime.schedule import ArgsSpec, KwargsSpec, LossFn, MergeSpec, Schedule
from taktline.split.arguments import arguments_of
from taktline.train.arguments import as_timedelta, check, names_of
from taktline.train.as_module import AsModule
from taktline.train.build import Prepare, build
from taktline.train.choose_plan import ScheduleChoice
from taktline.train.comparison import Verification
from taktline.train.generate import Request, generate
from taktline.train.gradients import Gradients
from taktline.train.loader import SharedLoader
from taktline.train.model_stages import Model
from taktline.train.monitoring import Monitoring
from taktline.train.preemption import PREEMPTED
from taktline.train.save_load import SaveLoad
from taktline.train.steps import Outputs, in_mode, loss_in_output, note_loss, run, with_own_loss
from taktline.train.verify import verify


class Pipeline(AsModule, Gradients, SaveLoad, Monitoring):
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
        schedule: a name, a :class:`Plan`, a CSV or JSON file with one, or a Schedule class.
        microbatches: the number of micro-batches; a batch with fewer rows has one for each row.
        loss_fn: returns the loss of an output and a target. Without one, the loss is the one
            that the model returns: a number, ``output.loss``, or the only number in a tuple.
        ranks: the number of ranks of the pipeline.
        stages_per_rank: for schedules that leave it open.
        cuts: names of submodules at which new stages begin.
        measure: cuts the model by the times of its layers, forward and backward, for the
            ``example``; the first rank measures them on its device. By default their operations are
            counted.
        mesh: a device mesh with a dimension "pp", and one that begins with "dp" for replicas.
        data_parallel: ``"ddp"`` or ``"fsdp"``: the wrapper of each stage.
        prepare: called with each stage of this process and its number, once it is on its device
            and before it is wrapped; returns the module to use. For activation checkpointing or
            tensor parallelism. The printed table shows the stages as they were before it.
        compile: compiles each stage, after ``prepare``, by :func:`taktline.compile_stages`.
        device: where to compute.
        state_dict: values for a model that was built on the meta device, of which each process
            takes those of its stages; without it, they are made as the model's constructor does
            (see :func:`taktline.split.deferred`).
        seed: draws dropout from (seed, step, stage, micro-batch): for one cut into stages and
            micro-batches, the same under every schedule and on any number of ranks; what
            ``loss_fn`` draws depends on (seed, step, micro-batch).
        dynamic_shapes: for stages whose outputs' shapes depend on values.
        cuda_graphs: captures steps as CUDA graphs, once for each kind of batch, and replays them; a
            step that cannot be captured runs without, with a warning that says why.
        run_ahead: lets a rank begin its next step while other ranks still compute this one, so that
            the bubble of ``zb_h2`` and ``zbv`` is that of the ranks' own spans. An error of another
            rank then comes in a later call. Every rank passes the whole batch.
        check_finite: raises if an output of a stage or a loss is not finite, and names the first
            stage and micro-batch; waits for a GPU in each stage.
        args_chunk_spec: how positional arguments are cut; without this and ``kwargs_chunk_spec``,
            the batch dimension of each argument is found by comparing a batch with the example.
        kwargs_chunk_spec: how keyword arguments are cut.
        output_merge_spec: how outputs are joined.
        target_chunk_spec: how the target is cut; its rows then need not match those of the batch.
        on_preempt: called with this pipeline on every rank after SIGTERM has reached any of them,
            in the first step or eval after an optimizer has used all gradients; then all end
            with the exit code :attr:`PREEMPTED`. Every rank passes one, from its main thread.
        report_stragglers: every so many steps, trace a step and write to the log ("taktline") which
            ranks are slow for their work.
        timeout: seconds after which a wait for another rank raises an error on all ranks; by
            default that of the process group.

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

    @known_keywords
    def __init__(
        self,
        model: Model,
        *,
        example: Any = None,
        schedule: ScheduleChoice = "1f1b",
        microbatches: int | None = None,
        loss_fn: LossFn | None = None,
        ranks: int | None = None,
        stages_per_rank: int | None = None,
        cuts: Sequence[str] | None = None,
        measure: bool = False,
        mesh: DeviceMesh | None = None,
        data_parallel: Literal["ddp", "fsdp"] | None = None,
        prepare: Prepare | None = None,
        compile: bool = False,
        device: torch.device | str | None = None,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        seed: int | None = None,
        dynamic_shapes: bool = False,
        cuda_graphs: bool = False,
        run_ahead: bool = False,
        check_finite: bool = False,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        target_chunk_spec: Any = None,
        on_preempt: Callable[[Pipeline], object] | None = None,
        report_stragglers: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        check(locals())  # all arguments, as nothing else is set yet
        self._begin(loss_fn, on_preempt, report_stragglers)
        options = {
            "loss_fn": loss_fn or loss_in_output,
            "dynamic_shapes": dynamic_shapes,
            "cuda_graphs": cuda_graphs,
            "run_ahead": run_ahead,
            "check_finite": check_finite,
            "args_chunk_spec": args_chunk_spec,
            "kwargs_chunk_spec": kwargs_chunk_spec,
            "output_merge_spec": output_merge_spec,
            "target_chunk_spec": target_chunk_spec,
        }
        self._live = build(
            model,
            None if example is None else arguments_of(example),
            options,
            schedule=schedule,
            microbatches=microbatches,
            ranks=ranks,
            stages_per_rank=stages_per_rank,
            cuts=names_of(cuts),
            measures=measure,
            mesh=mesh,
            data_parallel=data_parallel,
            prepare=prepare,
            compiles=compile,
            device=None if device is None else require_usable_device(device),
            seed=seed,
            state_dict=state_dict,
            timeout=as_timedelta(timeout),
        )
        self._listen()

    @property
    def schedules(self) -> dict[int, Schedule]:
        """The schedule of each rank of this process; if all ranks are here, one runs them all."""
        return dict.fromkeys(self._ranks.own, self._built.schedule)

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

        Every row counts the same, also where micro-batches differ in size.

        Gradients are added to ``.grad``, as ``backward()`` does, so do not call that on the loss.
        Every rank may pass the whole
        batch; ranks that do not need it ignore it. On a GPU this returns before the loss is
        computed; reading the loss waits.

        Args:
            args: the model's arguments.
            target: passed to ``loss_fn`` with the output; leave it out without ``loss_fn``.
            return_outputs: True returns ``(loss, outputs)`` on every rank; ``"last"`` sends
                nothing, and returns None for outputs on all ranks but that of the last stage.
            scaler: multiplies the loss for the backward; made by :meth:`scaler`.
            losses: a list to fill with the loss of each micro-batch.
            aux_losses: a list to fill with the losses that :func:`taktline.add_loss` has added.
            options: ``loss_weights``, ``loss_kwargs``, ``arg_mbs``, ``kwarg_mbs`` and
                ``target_mbs`` as in :meth:`Schedule.step`; all others are keyword arguments of
                the model.
        """
        self._end_if_preempted()
        if not self.plan.has(Kind.B, Kind.I):
            raise ScheduleError(f"{self.plan.name} has no backward; call eval(…)")
        if self._loss_fn is None:
            target, options = with_own_loss(target, options)
        scale = 1.0 if scaler is None else self._scale(scaler)
        lists = losses, aux_losses
        options |= {"grad_scale": scale}
        report = nullcontext() if self._report is None else self._report.step(self._built)
        with self._turn, report:
            step = self._built.schedule.step
            output, loss = run(self._built, step, (args, target, options), lists, return_outputs)
        self._metrics.note((*args, *options.values()), loss)
        note_loss(loss)
        self._hear()
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

        Without arguments it only puts them into that mode, as ``nn.Module.eval()`` does.

        Returns the mean loss if there is a target, and otherwise the outputs; with
        ``return_outputs`` and a target, both. Takes the arguments of :meth:`step`. If the model
        computes its own loss, pass ``labels`` or ``return_outputs=False`` to get it.
        """
        if not args and not options and target is None and return_outputs is None:
            return self.train(False)
        self._end_if_preempted()
        own = options.get("labels") is not None or return_outputs is False
        if self._loss_fn is None and own:
            target, options = with_own_loss(target, options)
        compared = target is not None or options.get("target_mbs") is not None
        wanted = not compared if return_outputs is None else return_outputs
        batch, lists = (args, target, options), (losses, aux_losses)
        with self._turn, in_mode(*self.stages.values(), training=False):
            output, loss = run(self._built, self._built.schedule.eval, batch, lists, wanted)
        self._hear()
        self._end_if_preempted()
        if not wanted:
            return loss
        return output if loss is None else (loss, output)

    def verify(
        self,
        model: nn.Module,
        *args: Any,
        target: Any = None,
        tolerance: float | None = None,
        **options: Any,
    ) -> Verification:
        """Compare one step with the plain model: returns the first tensor that differs, if any.

        A copy of the plain model gets the pipeline's values and runs the whole batch at once. This
        compares the outputs of all modules for each micro-batch, the loss, the gradients that
        reach these outputs, and those of the parameters. Dropout is off. Gradients, buffers and
        random numbers stay as they are. Every rank calls it with the same batch, and needs memory
        for the model and for the activations of the batch.

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
            target, options = with_own_loss(target, options)
        if tolerance is not None:
            require_number("tolerance", tolerance, least=0)
        with self._turn:
            return verify(self._built, model, (args, target, options), tolerance)

    @known_keywords
    def generate(
        self,
        ids: torch.Tensor,
        *,
        max_new_tokens: int,
        attention_mask: torch.Tensor | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
    ) -> torch.Tensor:
        """Continue texts by the likeliest token each time: returns all texts on every rank.

        For causal language models: those of transformers, and others that return logits of shape
        [rows, length, words]. Micro-batches follow each other through the stages. Each stage
        keeps the keys and values of its own layers. Models that are not of transformers, or have
        layers of other kinds, compute the whole text again for each token.

        Args:
            ids: texts, [rows, length].
            max_new_tokens: how many tokens to add at most.
            attention_mask: 0 for padding on the left of shorter texts, else 1.
            eos_token_id: tokens that end a text; by default those of the model.
            pad_token_id: the token that fills up an ended text; by default the model's.
            use_cache: False computes the whole text again for each token.

        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
        >>> pipe = Pipeline([model[0], model[1]], microbatches=2, ranks=2)
        >>> pipe.generate(torch.ones(2, 3, dtype=torch.int64), max_new_tokens=5).shape
        torch.Size([2, 8])
        """
        request = Request(
            ids, max_new_tokens, attention_mask, eos_token_id, pad_token_id, use_cache
        )
        with self._turn, in_mode(*self.stages.values(), training=False):
            return generate(self._built, request)

    def loader(self, batches: Iterable[Any] | None) -> SharedLoader:
        """The batches of a DataLoader, or any other iterable, for all ranks.

        The first rank of each replica reads, and sends every batch to the others. All ranks call
        this and iterate together; ranks that do not read may pass None.

        >>> import taktline as tl
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> [pipe.eval(x).shape for x in pipe.loader([torch.ones(4, 2), torch.ones(6, 2)])]
        [torch.Size([4, 1]), torch.Size([6, 1])]
        """
        return SharedLoader(batches, self._ranks)
