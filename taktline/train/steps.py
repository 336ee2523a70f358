"""Runs steps, evaluations and greedy generation on the ranks of this process, and measures them."""

from __future__ import annotations

import inspect
import resource
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar
from zlib import crc32

import torch
from torch import nn
from torch.nn.functional import pad

from taktline import pytree
from taktline.checks import check, check_one_of, refuse
from taktline.errors import (
    ArgumentError,
    BatchError,
    LossError,
    MismatchError,
    ScheduleError,
    UseError,
)
from taktline.runtime.microbatch import describe
from taktline.runtime.schedule import Schedule
from taktline.split.recorded_stage import model_of
from taktline.stage.names import unwrapped
from taktline.text import size_text
from taktline.train.batches import broadcast_output, length_of, on_device
from taktline.train.build import Built

T = TypeVar("T")

_OPTIONS = frozenset(inspect.signature(Schedule.step).parameters)
"""Keywords of a step that are not passed to the model."""

Outputs: TypeAlias = bool | Literal["last"]
"""Whether to return outputs: on every rank, on none, or on that of the last stage."""


def run(
    built: Built,
    verb: Literal["step", "eval"],
    batch: tuple[tuple[Any, ...], Any, dict[str, Any]],
    return_outputs: Outputs,
    **lists: list[torch.Tensor] | None,
) -> tuple[Any, torch.Tensor | None]:
    """Run a step or an eval; returns its output, and its loss, which is the same on all ranks.

    ``lists`` are the ``losses`` and ``aux_losses`` to fill.
    """
    if not isinstance(return_outputs, bool):
        check_one_of("return_outputs", return_outputs, (True, False, "last"), BatchError)
    if verb == "step" and not built.trains:
        raise ScheduleError(f"{built.plan.name} has no backward; call eval(…)")
    if built.ranks.device.type != "cpu":
        batch = on_device(batch, built.ranks.device)
    args, target, options = batch
    if built.keywords and options.get("kwarg_mbs") is None:
        options = built.keywords | options
    output = getattr(built.schedule, verb)(
        *args,
        target=target,
        share_losses=True,
        return_outputs=bool(return_outputs),
        **lists,
        **options,
    )
    if built.target is None and target is not None:
        built.target = _first_of(target, built.plan.microbatches)
    ranks, loss = built.ranks, built.schedule.loss
    if return_outputs is True:
        output = broadcast_output(output, ranks, built.plan.placement.rank_of[-1])
    if loss is not None and ranks.replicas > 1:
        loss = ranks.mean_of_replicas(loss)
    return output, loss


def _first_of(target: Any, microbatches: int) -> Any:
    """The target of the first micro-batch, without its data."""

    def first(part: torch.Tensor) -> torch.Tensor:
        rows = part if not part.ndim else part[: -(-len(part) // microbatches)]
        return rows.detach().to("meta")

    return pytree.tree_map_only(torch.Tensor, first, target)


_OWN = "the model's own loss"
"""Stands in the place of a target."""
_NEEDED = (
    "step() trains, so it needs a loss: Pipeline(…, loss_fn=…) for an output and a target, or a "
    "model that returns one itself, as those of transformers do with labels=…"
)


def with_own_loss(target: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The target and the options of a call to a pipeline without ``loss_fn``.

    A function for ``loss_weights`` is called with the labels of a micro-batch.
    """
    if target is not None or options.get("target_mbs") is not None:
        return target, options
    weights = options.get("loss_weights")
    if not callable(weights):
        return (_OWN, None), options
    options = {**options, "loss_weights": lambda own: weights(own[1])}
    return (_OWN, options.get("labels")), options


def loss_in_output(output: Any, target: Any) -> torch.Tensor:
    """The loss in the output of a model: itself, its ``loss``, or the only number in a tuple.

    >>> float(loss_in_output((torch.zeros(3, 4), torch.tensor(2.0)), (_OWN, None)))
    2.0
    """
    if not (isinstance(target, tuple) and target and isinstance(target[0], str)):
        raise LossError(f"there is a target, but no loss_fn; {_NEEDED}")
    if isinstance(output, tuple | list):
        found = list(output)
    elif isinstance(output, Mapping):
        found = [output.get("loss")]
    else:
        found = [getattr(output, "loss", output)]
    numbers = [x for x in found if isinstance(x, torch.Tensor) and x.numel() == 1]
    if len(numbers) != 1:
        several = "several numbers" if numbers else "no loss"
        raise LossError(f"the model returns {several} in its {type(output).__name__}; {_NEEDED}")
    return numbers[0]


def of_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a step that are passed to the model."""
    return {name: value for name, value in options.items() if name not in _OPTIONS}


@contextmanager
def in_mode(*modules: nn.Module, training: bool) -> Iterator[None]:
    """Put modules into training or evaluation mode, and restore their modes at the end."""
    before = {part: part.training for module in modules for part in module.modules()}
    try:
        for module in modules:
            module.train(training)
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


# Generation. Each token is one evaluation of the whole texts, in which the micro-batches follow
# each other through the stages. No keys and values are kept: no stage has those of all layers.


def generate(
    built: Built,
    ids: torch.Tensor,
    max_new_tokens: int,
    mask: torch.Tensor | None,
    ends: int | Sequence[int] | None,
    padding: int | None,
) -> torch.Tensor:
    """See :meth:`taktline.Pipeline.generate`; all ranks take part."""
    model = _model(built)

    def said() -> list[int]:
        _check(model, ids, max_new_tokens, mask)
        values = (ids.tolist(), None if mask is None else mask.tolist(), ends, padding)
        return [max_new_tokens, built.ranks.replica, crc32(str(values).encode())]

    rows = built.ranks.processes.everywhere(said, "read the arguments", "generate()")
    # Replicas have texts of their own, but go on together until the last one has ended.
    if len({row[0] for row in rows}) > 1 or len(set(map(tuple, rows))) > built.ranks.replicas:
        raise MismatchError(
            "generate() was called with other texts or options on some ranks; pass the same on "
            "every rank of a pipeline, and the same max_new_tokens to all replicas"
        )
    last, padding = _ends(model, ends, padding)
    # With room for all new tokens, all calls have one shape; causal models ignore later tokens.
    room, length = (0, max_new_tokens), ids.shape[1]
    texts = pad(ids.to(built.ranks.device), room, value=padding)
    masks = {} if mask is None else _masks(pad(mask.to(texts), room, value=1), model)
    done = torch.zeros(len(texts), 1, dtype=torch.bool, device=texts.device)
    stop = length + max_new_tokens
    for end in range(length, stop):
        with _next_tokens(built, end - 1):
            output = built.schedule.eval(texts, **masks)
        token = broadcast_output(output, built.ranks, built.plan.placement.rank_of[-1]).to(texts)
        token = token.masked_fill(done, padding)
        texts[:, end : end + 1] = token
        done |= torch.isin(token, last.to(token))
        if bool(done.all()):
            stop = min(stop, end + 1)
        # All replicas evaluate together, until the last of their texts has ended.
        if not built.ranks.in_any_pipeline(end + 1 < stop, "generate()"):
            break
    return texts[:, :stop].to(ids.device)


def _check(model: Any, ids: Any, max_new_tokens: Any, mask: Any) -> None:
    """Raise if an argument is not valid, or the model cannot generate."""
    check("ids", ids, torch.Tensor)
    if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        refuse("ids", "a tensor [rows, length] of token ids", ids)
    check("max_new_tokens", max_new_tokens, int, least=1)
    if model is not None and (model.config.is_encoder_decoder or not model.can_generate()):
        raise UseError(
            f"{type(model).__name__} is not a causal language model, so it cannot generate texts"
        )
    if mask is None:
        return
    check("attention_mask", mask, torch.Tensor)
    if mask.shape != ids.shape or not bool((mask[:, -1] != 0).all()):
        raise ArgumentError(
            f"attention_mask must be {list(ids.shape)} as ids, with 0 for padding on the left "
            f"of a text, not {list(mask.shape)}; new tokens come after their right end"
        )


def _ends(
    model: Any, ends: int | Sequence[int] | None, padding: int | None
) -> tuple[torch.Tensor, int]:
    """The tokens that end a text, and the token that fills it up; by default the model's."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None) if ends is None else ends
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    padding = getattr(config, "pad_token_id", None) if padding is None else padding
    if padding is None:
        padding = ends[0] if ends else 0
    return torch.tensor(ends), padding


def _model(built: Built) -> nn.Module | None:
    """A module of this process that is a model of transformers, if there is one."""
    stages = [unwrapped(module) for module in built.model.modules.values()]
    whole = (model_of(stage) for stage in stages)
    modules = [m for m in whole if m is not None] or [m for s in stages for m in s.modules()]
    return next((m for m in modules if callable(getattr(m, "can_generate", None))), None)


def _masks(mask: torch.Tensor, model: nn.Module | None) -> dict[str, Any]:
    """The arguments for padded texts."""
    found = {"attention_mask": mask}
    # A stage has the arguments of its model.
    forwards = [vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind)]
    if any("position_ids" in inspect.signature(forward).parameters for forward in forwards):
        found["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return found


@contextmanager
def _next_tokens(built: Built, place: int) -> Iterator[None]:
    """Inside, the last stage returns only the likeliest tokens after a place, [rows, 1]."""

    def token(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        logits = getattr(output, "logits", output)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
            raise UseError(
                "generate() is for causal language models, which return logits [rows, length, "
                f"words], or have them in output.logits, not {describe(output)}"
            )
        return logits[:, place].argmax(-1, keepdim=True)

    runner = built.schedule._runner
    before = runner.cutter_for, runner.merge_spec
    cutter = replace(runner.cutter, args_spec=None, kwargs_spec=None)  # texts are cut by rows
    runner.cutter_for, runner.merge_spec = lambda batch: cutter, None
    last = [stage.submod for stage in built.schedule._stages if stage.is_last]
    hooks = [module.register_forward_hook(token) for module in last]
    try:
        yield
    finally:
        runner.cutter_for, runner.merge_spec = before
        for hook in hooks:
            hook.remove()


# Numbers of how training goes.


class Metrics:
    """The metrics of the latest steps."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=21)
        """When each step ended, with its rows and its tokens; 20 steps lie between so many."""
        self.loss: torch.Tensor | None = None
        self.bubble: float | None = None
        """Of the latest step that was traced."""

    def note(self, args: tuple[Any, ...], loss: torch.Tensor | None) -> None:
        """Note a step that has ended."""
        first = next((value for value in args if isinstance(value, torch.Tensor)), None)
        rows = tokens = 0
        if first is not None and first.dim():
            rows = first.shape[0]
            tokens = first.numel() if first.dim() > 1 and not first.is_floating_point() else 0
        self._ends.append((time.perf_counter(), rows, tokens))
        self.loss = loss

    def read(self, steps: int, replicas: int, device: torch.device) -> dict[str, float]:
        """The metrics that are known by now; waits for the loss."""
        found: dict[str, float] = {"step": steps, "peak_memory": _peak(device)}
        if self.loss is not None:
            found["loss"] = self.loss.item()
        if self.bubble is not None:
            found["bubble"] = self.bubble
        if len(self._ends) > 1:
            (begin, *_), *later = self._ends
            seconds = max(later[-1][0] - begin, 1e-9)
            found["step_ms"] = 1e3 * seconds / len(later)
            for place, name in ((1, "rows_per_s"), (2, "tokens_per_s")):
                if total := sum(end[place] for end in later):
                    found[name] = replicas * total / seconds
        return found


def _peak(device: torch.device) -> int:
    """The peak memory in bytes: of tensors on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def progress(pipe: Any, batches: Iterable[T], every: int, *, measured: bool) -> Iterator[T]:
    """Yields the batches; the first rank prints a line every few steps."""
    total = length_of(batches)
    for done, batch in enumerate(batches, start=1):
        # The second one: in the first, ranks still exchange shapes.
        tracing = pipe.trace() if measured and done % every == 2 % every else nullcontext()
        with tracing:
            yield batch
        # Not each time: reading the loss waits for the GPU.
        if pipe.is_first and (done % every == 0 or done == total):
            print(f"step {done:4}  {line(pipe.metrics())}", flush=True)


def line(numbers: Mapping[str, float]) -> str:
    """The metrics as one line of text.

    >>> line({"loss": 2.5, "tokens_per_s": 1234.5, "bubble": 0.25, "peak_memory": 3 << 20})
    'loss 2.500  1,234 tokens/s  bubble 25%  peak 3.0 MiB'
    """
    speed = "tokens" if "tokens_per_s" in numbers else "rows"
    texts = {"loss": "loss {:.3f}", f"{speed}_per_s": f"{{:,.0f}} {speed}/s"}
    texts["bubble"] = "bubble {:.0%}"
    found = [text.format(numbers[name]) for name, text in texts.items() if name in numbers]
    return "  ".join([*found, f"peak {size_text(numbers['peak_memory'])}"])
