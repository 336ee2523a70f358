"""Greedy generation with a causal language model on a pipeline.

Each token is one evaluation of the whole texts, in which the micro-batches follow each other
through the stages. No keys and values are kept: no stage has those of all layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn.functional import pad

from taktline.checks import check, refuse
from taktline.errors import ArgumentError, MismatchError, UseError
from taktline.runtime.microbatch import describe
from taktline.split.recorded_stage import model_of
from taktline.stage.names import unwrapped
from taktline.train.batches import broadcast_output
from taktline.train.build import Built


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
