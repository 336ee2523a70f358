"""``Pipeline``: a model on its ranks, and its training step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from html import escape
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from taktline.checkpoint import pretrained
from taktline.checks import (
    refuse,
    require_callable,
    require_flag,
    require_instance,
    require_iterable,
    require_number,
    require_whole,
)
from taktline.device import require_device
from taktline.errors import PartitionError, ScheduleError, UseError
from taktline.plan import Kind, Plan
from taktline.runtime import Trace
from taktline.runtime.schedule import ArgsSpec, KwargsSpec, LossFn, MergeSpec, Schedule
from taktline.split.example import arguments_of
from taktline.train.as_module import AsModule
from taktline.train.boundaries import Boundaries
from taktline.train.build import Built, build
from taktline.train.choose_plan import ScheduleChoice
from taktline.train.comparison import Verification
from taktline.train.for_checkpoints import ForCheckpoints
from taktline.train.generate import Request, generate
from taktline.train.gradients import Gradients
from taktline.train.layout import cuts_of
from taktline.train.loader import SharedLoader
from taktline.train.metrics import Metrics
from taktline.train.model_stages import Model
from taktline.train.own_loss import asked, of_output, with_own_loss
from taktline.train.plainly import plainly
from taktline.train.preempt import PREEMPTED, Preemption
from taktline.train.progress import progress
from taktline.train.report import StragglerReport
from taktline.train.saved import Saved
from taktline.train.steps import Outputs, evaluating, run
from taktline.train.verify import verify
from taktline.train.wrap import Prepare
from taktline.transport.turn import Turn

__all__ = ["Pipeline"]

T = TypeVar("T")

_NO_COPY = (
    "it cannot be copied or pickled; save pipe.state_dict(gathered=True), make another "
    "pipeline, and load it there"
)


class Pipeline(AsModule, Gradients, Saved, ForCheckpoints):
    """A model, cut into stages, on its ranks; it trains as the model does.

    Started by torchrun, each process is a rank. Without a launcher all ranks live in this process,
    as many as ``ranks`` says.

    It trains the model's own parameters, in place, moves what it holds to ``device``, and changes
    nothing else of it. Over processes each trains its own stages, and leaves the rest alone.

    Args:
        model: the model; or its stages, cut already: a :class:`Pipe`, :class:`Pieces`, a list of
            modules, or a dict with those of this process by the number of their stage.
        example: arguments of one micro-batch, by which the model is cut and measured: a tuple, a
            dict of keyword arguments, or a tuple of both.
        schedule: a name, a :class:`Plan`, a CSV or JSON file with one, or a Schedule class.
        microbatches: how many parts a batch is cut into; one with fewer rows has a part for each.
        loss_fn: returns the loss of an output and a target. Without one, the loss is the one
            that the model returns: a number, ``output.loss``, or the only number in a tuple.
        ranks: how many ranks the pipeline has.
        stages_per_rank: for schedules that leave it open.
        cuts: names of submodules at which new stages begin; or a layout as Megatron writes it, a
            text such as ``"Et*3|(tt|)*2,L"``.
        mesh: a device mesh with a dimension "pp", and one that begins with "dp" for replicas.
        data_parallel: ``"ddp"`` or ``"fsdp"``: what each stage is wrapped in.
        prepare: called with each stage of this process and its number, once it is on its device
            and before it is wrapped; returns the module to use. For activation checkpointing or
            tensor parallelism.
        compile: compiles each stage, after ``prepare``, by :func:`taktline.compile_stages`.
        device: where to compute.
        state_dict: values for a model that was built on the meta device, of which each process
            takes those of its stages; without it, they are made as the model's constructor does
            (see :func:`taktline.split.deferred`).
        seed: draws dropout from (seed, step, stage, micro-batch): for one cut into stages and
            micro-batches, the same under every schedule and on any number of ranks.
        dynamic_shapes: for stages whose outputs' shapes depend on values.
        cuda_graphs: captures steps as CUDA graphs, once for each kind of batch, and replays them;
            what cannot be captured runs as it is, with a warning that says why.
        args_chunk_spec: how positional arguments are cut; without it and the next, what is not to
            be cut along dimension 0 is guessed by comparing a batch with the example.
        kwargs_chunk_spec: how keyword arguments are cut.
        output_merge_spec: how outputs are joined.
        target_chunk_spec: how the target is cut, if not along dimension 0. Given one, its rows
            need not be those of the batch, or a multiple of them.
        on_preempt: called with this pipeline on every rank, after the step or eval in which SIGTERM
            reached any of them; then all end with the exit code :attr:`PREEMPTED`. Every rank
            passes one, from its main thread.
        report_stragglers: every so many steps, write to the log ("taktline") which ranks are slow
            for their work; that step is traced.
        timeout: after how many seconds a wait for another rank is given up, with an error on all
            ranks; by default that of the process group.

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

    @plainly
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
        cuts: Sequence[str] | str | None = None,
        mesh: DeviceMesh | None = None,
        data_parallel: Literal["ddp", "fsdp"] | None = None,
        prepare: Prepare | None = None,
        compile: bool = False,
        device: torch.device | str | None = None,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        seed: int | None = None,
        dynamic_shapes: bool = False,
        cuda_graphs: bool = False,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        target_chunk_spec: Any = None,
        on_preempt: Callable[[Pipeline], object] | None = None,
        report_stragglers: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        _check_flags(dynamic_shapes=dynamic_shapes, cuda_graphs=cuda_graphs, compile=compile)
        _check(microbatches, stages_per_rank, mesh, seed, report_stragglers, state_dict)
        _check_functions(loss_fn=loss_fn, prepare=prepare, on_preempt=on_preempt)
        self._loss_fn, self._turn, self._metrics = loss_fn, Turn("this pipeline"), Metrics()
        self._report = None if report_stragglers is None else StragglerReport(report_stragglers)
        self._preemption = None if on_preempt is None else Preemption(on_preempt, self)
        running = {
            "loss_fn": loss_fn or of_output,
            "dynamic_shapes": dynamic_shapes,
            "cuda_graphs": cuda_graphs,
            "args_chunk_spec": args_chunk_spec,
            "kwargs_chunk_spec": kwargs_chunk_spec,
            "output_merge_spec": output_merge_spec,
            "target_chunk_spec": target_chunk_spec,
        }
        self._live: Built | None = build(
            model,
            None if example is None else arguments_of(example),
            running,
            schedule=schedule,
            microbatches=microbatches,
            ranks=ranks,
            stages_per_rank=stages_per_rank,
            cuts=_names_of(cuts, model),
            mesh=mesh,
            data_parallel=data_parallel,
            prepare=prepare,
            compiles=compile,
            device=None if device is None else require_device(device),
            seed=seed,
            state_dict=state_dict,
            timeout=_timedelta(timeout),
        )
        self._listen()

    @property
    def plan(self) -> Plan:
        """What each rank does, in order."""
        return self._built.plan

    @property
    def boundaries(self) -> Boundaries:
        """What goes from each stage to the next one for the example; print it."""
        return self._built.table.boundaries

    @property
    def is_first(self) -> bool:
        """Whether this process is the one to print, and to save what was gathered."""
        return 0 in self._ranks.own and self._ranks.is_first

    @property
    def replica(self) -> int:
        """Which of the replicas of the pipeline this one is, from 0 up."""
        return self._ranks.replica

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline there are, each on data of its own."""
        return self._ranks.replicas

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The stages of this process, by their number, as they are run."""
        return {stage.stage_index: stage.submod for stage in self._built.schedule._stages}

    @property
    def schedules(self) -> dict[int, Schedule]:
        """What runs each rank of this process; if all of them are here, one runs them all."""
        return dict.fromkeys(self._ranks.own, self._built.schedule)

    @plainly
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

        Gradients are added to ``.grad``, as ``backward()`` does. Every rank may pass the whole
        batch; those that do not need it leave it alone. On a GPU the loss is there before it was
        computed, as everything is: who reads it waits.

        Args:
            args: the model's arguments.
            target: what ``loss_fn`` compares the output with; nothing without ``loss_fn``.
            return_outputs: True returns ``(loss, outputs)`` on every rank; ``"last"`` sends
                nothing, and returns None for outputs on all ranks but that of the last stage.
            scaler: multiplies the loss for the backward; made by :meth:`scaler`.
            losses: a list to be filled with the loss of each micro-batch.
            aux_losses: a list to be filled with what :func:`taktline.add_loss` has added.
            options: ``loss_weights``, ``loss_kwargs``, ``arg_mbs``, ``kwarg_mbs`` and
                ``target_mbs`` as in :meth:`Schedule.step`; all else are keyword arguments of the
                model.
        """
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
        self._end_if_preempted()
        return (loss, output) if return_outputs else loss

    @plainly
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

        Without any arguments it puts them into that mode, as ``nn.Module.eval()`` does.

        Returns the mean loss if there is a target, and otherwise the outputs; with
        ``return_outputs`` and a target, both. Takes what :meth:`step` takes. For a model that
        computes its own loss, ``labels`` or ``return_outputs=False`` ask for it.
        """
        if not args and not options and target is None and return_outputs is None:
            return self.train(False)
        if self._loss_fn is None and asked(options, return_outputs):
            target, options = with_own_loss(target, options)
        compared = target is not None or options.get("target_mbs") is not None
        wanted = not compared if return_outputs is None else return_outputs
        batch, lists = (args, target, options), (losses, aux_losses)
        with self._turn, evaluating(self.stages.values()):
            output, loss = run(self._built, self._built.schedule.eval, batch, lists, wanted)
        self._end_if_preempted()
        if not wanted:
            return loss
        return output if loss is None else (loss, output)

    @plainly
    def verify(
        self,
        model: nn.Module,
        *args: Any,
        target: Any = None,
        tolerance: float | None = None,
        **options: Any,
    ) -> Verification:
        """Compare one step with the plain model: returns the first tensor that differs, if any.

        The plain model gets the pipeline's values and runs the whole batch at once. Compared are
        the outputs of all modules for each micro-batch, the loss, the gradients that reach these
        outputs, and those of the parameters. Dropout is off; gradients, buffers and random
        numbers are as before afterwards. Every rank calls it with the same batch, and has memory
        for the model and for the activations of the batch.

        Args:
            model: the plain model, in any state; of a list of stages ``nn.Sequential(*stages)``.
            args: what :meth:`step` takes, as are ``target`` and ``options``.
            tolerance: what counts as rounding, relative to a tensor's largest value; by default
                1e-4 for float32.

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

    @plainly
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
        """Go on with texts, by the likeliest token each time: returns all of them on every rank.

        For causal language models: those of transformers, and others that return logits of shape
        [rows, length, words]. Micro-batches follow each other through the stages. Each stage
        keeps the keys and values of its own layers; of models that are not of transformers, or
        have layers of other kinds, the text so far is computed anew for each token.

        Args:
            ids: texts, [rows, length].
            max_new_tokens: how many tokens to add at most.
            attention_mask: 0 for padding on the left of shorter texts, else 1.
            eos_token_id: tokens that end a text; by default those of the model.
            pad_token_id: what an ended text is filled up with; by default the model's.
            use_cache: False computes the text so far anew for each token.

        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
        >>> pipe = Pipeline([model[0], model[1]], microbatches=2, ranks=2)
        >>> pipe.generate(torch.ones(2, 3, dtype=torch.int64), max_new_tokens=5).shape
        torch.Size([2, 8])
        """
        request = Request(
            ids, max_new_tokens, attention_mask, eos_token_id, pad_token_id, use_cache
        )
        with self._turn, evaluating(self.stages.values()):
            return generate(self._built, request)

    def train(self, mode: bool = True) -> Pipeline:
        """Put the modules into training mode, or with False into that of evaluation."""
        require_flag("mode", mode)
        for module in self.stages.values():
            module.train(mode)
        return self

    def loader(self, batches: Iterable[Any] | None) -> SharedLoader:
        """The batches of a DataLoader, or any other iterable, for all ranks.

        The first rank of each replica reads, and hands every batch to the others. All ranks call
        this and iterate together; those that do not read may pass None.

        >>> import taktline as tl
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> [pipe.eval(x).shape for x in pipe.loader([torch.ones(4, 2), torch.ones(6, 2)])]
        [torch.Size([4, 1]), torch.Size([6, 1])]
        """
        return SharedLoader(batches, self._ranks)

    def progress(self, batches: Iterable[T], *, every: int = 10) -> Iterator[T]:
        """The same batches, while the first rank shows how training goes.

        On a terminal that is a bar (with rich), elsewhere a line: loss, tokens or rows a second,
        the bubble, and this process's peak memory. Every rank iterates.

        Args:
            batches: a list, a ``DataLoader``, or :meth:`loader` of one.
            every: after so many steps the numbers are read, and where ranks are processes, one
                step of these is traced to measure the bubble.

        >>> pipe = Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> for x in pipe.progress([torch.ones(4, 2)] * 3, every=5):  # doctest: +ELLIPSIS
        ...     output = pipe.eval(x)
        step    3  peak ...
        """
        require_whole("every", every, least=1)
        apart = not self._ranks.in_one_process
        return progress(self, batches, every, measured=apart)

    def metrics(self) -> dict[str, float]:
        """Numbers for a log: the same names each time, as far as they are known.

        ``step``, ``loss`` (of the latest step), ``step_ms``, ``rows_per_s`` and ``tokens_per_s``
        (of all replicas, over the last 20 steps), ``bubble`` (of the latest step that
        :meth:`progress` has measured), ``peak_memory`` (bytes of this process).

        >>> pipe = Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> sorted(pipe.metrics())
        ['peak_memory', 'step']
        """
        return self._metrics.read(self._built.schedule.steps, self.replicas, self.device)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Note what runs when inside of the block, on every rank; see :meth:`Schedule.trace`."""
        with self._built.schedule.trace() as trace:
            trace.work = self._built.table.work
            yield trace

    @classmethod
    def from_pretrained(cls, source: Any, **options: Any) -> Self:
        """A pipeline of a model of transformers, of which each process reads its own part.

        Args:
            source: a folder with a config and safetensors files; or a config, for a model with new
                values.
            options: what :class:`Pipeline` takes beside the model.
        """
        model, files = pretrained.build(source)
        return cls(model, **({} if files is None else {"state_dict": files}), **options)

    def reconnect(self) -> None:
        """Make new connections between the same ranks; every rank calls it.

        For errors whose ``recoverable`` says "reconnect": a rank was interrupted, or stood still
        for too long, and all processes are still there. Begin with ``zero_grad()`` then. Raises a
        :class:`MismatchError` if the latest step has ended on some of them only.
        """
        for transport in self._ranks.transports:
            transport.reconnect()
        self._built.schedule._runner.restart(self._built.schedule.steps)

    def close(self) -> None:
        """Free all but the model: connections to other ranks, and groups that it has made.

        It cannot be used from then on, and nor can tensors that it has sharded. Every rank closes
        its own, and waits for nobody. ``with Pipeline(…) as pipe:`` closes it at the end; so
        does Python, once nobody uses it or its stages any more.

        >>> stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
        >>> with Pipeline(stages, microbatches=2, ranks=2) as pipe:
        ...     output = pipe.eval(torch.ones(4, 2))
        >>> pipe
        Pipeline(closed)
        """
        with self._turn:
            if self._live is None:
                return
            alone = self._ranks.group is None
            if self._preemption is not None:
                self._preemption.close()
            self._ranks.made.close()
            self._live = None
            if not alone:
                gc.collect()  # wrapped stages and their hooks hold each other, and connections

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """In one process: a pipeline of its own, with copies of the model's modules."""
        if self._ranks.group is not None:
            raise UseError(f"this pipeline runs over several processes, so {_NO_COPY}")
        made = Pipeline.__new__(Pipeline)
        made._loss_fn = self._loss_fn
        made._turn = Turn("this pipeline")
        made._metrics = Metrics()
        asked = self._preemption
        made._preemption = None if asked is None else Preemption(asked.on_preempt, made)
        made._report = None if self._report is None else StragglerReport(self._report.every)
        made._live = self._built.copied(memo)
        made._listen()
        return made

    def __reduce__(self) -> NoReturn:
        raise UseError(f"a pipeline belongs to its process, so {_NO_COPY}")

    def _listen(self) -> None:
        """Let every step ask whether it is the last."""
        if self._preemption is not None:
            self._built.schedule._runner.accord.asks_to_stop = self._preemption.heard

    def _end_if_preempted(self) -> None:
        """End this process if a signal has reached any rank; all of them are here."""
        preemption, ranks = self._preemption, self._ranks
        if preemption is None or preemption.ending:
            return
        if ranks.in_any_pipeline(self._built.schedule._runner.accord.preempted, "whether to end"):
            preemption.end(self, lambda: ranks.on_any_rank(True, "the end of on_preempt"))

    def __repr__(self) -> str:
        if self._live is None:
            return "Pipeline(closed)"
        return (
            f"Pipeline({self.plan.name} on {self._ranks}: {self.plan.stages} stages, "
            f"{self.plan.microbatches} micro-batches, {self.device})"
        )

    def _repr_html_(self) -> str:
        drawing = None if self._live is None else self._live.table.predicted()._repr_svg_()
        return f"<pre>{escape(str(self))}</pre>{drawing or ''}"

    def __str__(self) -> str:
        if self._live is None:
            return repr(self)
        live = self._live
        parts = (repr(self), live.table, live.cutting, live.schedule._runner.captured)
        return "\n".join(filter(None, map(str, parts)))


def _names_of(cuts: Any, model: Any) -> list[str] | None:
    """Where stages begin, from a layout or a list."""
    if isinstance(cuts, str):
        cuts = cuts_of(cuts, require_instance("model", model, nn.Module))
    if cuts is None:
        return None
    return require_iterable("cuts", cuts, "a list of names of submodules", PartitionError)


def _check_functions(**functions: Any) -> None:
    for name, function in functions.items():
        if function is not None:
            require_callable(name, function)


def _timedelta(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    require_number("timeout", timeout, least=0.001)
    return timedelta(seconds=float(timeout))


def _check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        require_flag(name, flag)


def _check(
    microbatches: Any,
    stages_per_rank: Any,
    mesh: Any,
    seed: Any,
    report_stragglers: Any,
    state_dict: Any,
) -> None:
    """Arguments that go a long way before anybody looks at them."""
    counts = {"microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for name, count in counts.items():
        if count is not None:
            require_whole(name, count, least=1, error=ScheduleError)
    if mesh is not None:
        require_instance("mesh", mesh, DeviceMesh)
    if seed is not None:
        require_whole("seed", seed)
    if report_stragglers is not None:
        require_whole("report_stragglers", report_stragglers, least=1)
    if state_dict is not None and not hasattr(state_dict, "__getitem__"):
        refuse("state_dict", "a mapping from names to tensors", state_dict)
