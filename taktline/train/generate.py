"""Greedy generation with a causal language model on a pipeline.

Each token is one evaluation, in which the micro-batches follow each other through the stages. For
models of transformers in one stage, keys and values are kept for each micro-batch. Others compute
the whole text again for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from taktline.checks import refuse, require_flag, require_instance, require_whole
from taktline.errors import ArgumentError, TaktlineError, UseError
from taktline.runtime.fingerprint import digest_of
from taktline.runtime.microbatch import describe
from taktline.split.recorded_stage import model_of
from taktline.stage.names import unwrapped
from taktline.text import by_rank
from taktline.train.broadcast import broadcast_output
from taktline.train.build import Built
from taktline.train.kv_cache import Keeper, cache_of, padding_of
from taktline.train.ranks import REPLICA
from taktline.train.steps import forward_order
from taktline.transport import Transport

_TAKE_IN_PADDING = ("recurrent_gemma", "rwkv")
"""Models of transformers whose state takes in padding, whatever the mask says."""


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of :meth:`taktline.Pipeline.generate`."""

    ids: torch.Tensor
    max_new_tokens: int
    attention_mask: torch.Tensor | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    use_cache: bool

    def check(self) -> None:
        """Raise if an argument is not valid."""
        require_instance("ids", self.ids, torch.Tensor)
        if self.ids.ndim != 2 or self.ids.is_floating_point() or not self.ids.numel():
            refuse("ids", "a tensor [rows, length] of token ids", self.ids)
        require_whole("max_new_tokens", self.max_new_tokens, least=1)
        require_flag("use_cache", self.use_cache)
        mask = self.attention_mask
        if mask is None:
            return
        require_instance("attention_mask", mask, torch.Tensor)
        if mask.shape != self.ids.shape or not bool((mask[:, -1] != 0).all()):
            raise ArgumentError(
                f"attention_mask must be {list(self.ids.shape)} as ids, with 0 for padding on the "
                f"left of a text, not {list(mask.shape)}; new tokens come after their right end"
            )

    def digest(self) -> int:
        """A number that is the same on all ranks with the same arguments."""
        tensors = [self.ids, *([] if self.attention_mask is None else [self.attention_mask])]
        numbers = [str(tensor.tolist()) for tensor in tensors]
        options = (self.max_new_tokens, self.eos_token_id, self.pad_token_id, self.use_cache)
        return digest_of([*numbers, str(options)])


def generate(built: Built, request: Request) -> torch.Tensor:
    """The texts with the new tokens, on every rank; all ranks call it."""
    model = _model(built)
    new_cache = _agreed(built, request, model)
    rows, length = request.ids.shape
    ends, padding = _ends(model, request)
    # With room for all new tokens, all calls have one shape; causal models ignore later tokens.
    room, mask = (0, request.max_new_tokens), request.attention_mask
    ids = pad(request.ids.to(built.ranks.device), room, value=padding)
    mask = None if mask is None else pad(mask.to(ids), room, value=1)
    done = torch.zeros(rows, 1, dtype=torch.bool, device=ids.device)
    next_token, stop = _NextToken(), length + request.max_new_tokens
    with _generating(built, rows, new_cache, next_token) as keepers:
        for end in range(length, stop):
            if new_cache is None:
                next_token.place = end - 1
                output = built.schedule.eval(ids, **padding_of(mask, model, ids.shape[1]))
            else:
                new = end if end == length else 1
                for keeper in keepers:
                    keeper.expect(end, new, None if mask is None else mask[:, :end])
                output = built.schedule.eval(ids[:, end - new : end])
            token = broadcast_output(output, built.ranks, built.plan.placement.rank_of[-1]).to(ids)
            token = token.masked_fill(done, padding)
            ids[:, end : end + 1] = token
            done |= torch.isin(token, ends.to(token))
            if bool(done.all()):
                stop = min(stop, end + 1)
            # All replicas evaluate together, until the last of their texts has ended.
            if not built.ranks.in_any_pipeline(end + 1 < stop, "generate()"):
                break
    return ids[:, :stop].to(request.ids.device)


def _agreed(built: Built, request: Request, model: nn.Module | None) -> Callable[[], Any] | None:
    """A function that makes a cache, if all ranks have one; raises if arguments differ."""
    error, digest, new_cache = None, 0, None
    try:
        request.check()
        _require_causal(model)
        _require_ignores_padding(model, request.attention_mask)
        digest = request.digest()
        is_whole = built.plan.stages == 1  # a stage of several has no forward that takes a cache
        new_cache = cache_of(model) if request.use_cache and is_whole else None
    except TaktlineError as raised:
        error = raised

    def numbers(noun: str) -> list[int]:
        # Replicas have texts of their own, but go on together until the last one has ended.
        return [
            0 if error else min(request.max_new_tokens, 2**62),
            0 if noun == REPLICA else digest,
        ]

    if found := built.ranks.agreed(error, "generate()", numbers, _difference):
        raise found
    caches = built.ranks.transport.exchange([int(new_cache is not None)], "generate()")
    return new_cache if all(cached for (cached,) in caches) else None


def _difference(noun: str, _: Transport, rows: list[list[int]]) -> str | None:
    """Why ranks cannot generate together."""
    lengths, digests = ([row[place] for row in rows] for place in range(2))
    if len(set(lengths)) > 1:
        listed = "; ".join(f"{new} on {noun} {place}" for place, new in enumerate(lengths))
        return f"generate() has different max_new_tokens: {listed}; pass the same on every {noun}"
    if len(set(digests)) > 1:
        kinds = [digests.index(digest) for digest in digests]
        return (
            "generate() was called with other texts or options on some ranks (those that agree "
            f"have the same number: {by_rank(kinds)}); pass the same on every rank"
        )
    return None


def _model(built: Built) -> nn.Module | None:
    """A module of this process that is a model of transformers, if there is one."""
    stages = [unwrapped(stage.submod) for stage in built.schedule._stages]
    whole = (model_of(stage) for stage in stages)
    modules = [m for m in whole if m is not None] or [m for s in stages for m in s.modules()]
    return next((m for m in modules if callable(getattr(m, "can_generate", None))), None)


def _require_causal(model: Any) -> None:
    """Raise if a model of transformers does not generate texts from left to right."""
    if model is not None and (model.config.is_encoder_decoder or not model.can_generate()):
        raise UseError(
            f"{type(model).__name__} is not a causal language model, so it cannot generate texts"
        )


def _require_ignores_padding(model: Any, mask: torch.Tensor | None) -> None:
    """Raise if padding would change the generated text."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in _TAKE_IN_PADDING and mask is not None and not bool(mask.all()):
        raise UseError(
            f"{type(model).__name__} includes padding in its state, also without a pipeline, "
            "so that padding changes the text; generate texts of one length at a time"
        )


def _ends(model: Any, request: Request) -> tuple[torch.Tensor, int]:
    """The tokens that end a text, and the token that fills it up."""
    config = getattr(model, "generation_config", None)
    ends, padding = request.eos_token_id, request.pad_token_id
    ends = getattr(config, "eos_token_id", None) if ends is None else ends
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    padding = getattr(config, "pad_token_id", None) if padding is None else padding
    if padding is None:
        padding = ends[0] if ends else 0
    return torch.tensor(ends), padding


@contextmanager
def _generating(
    built: Built, rows: int, new_cache: Callable[[], Any] | None, next_token: _NextToken
) -> Iterator[list[Keeper]]:
    """Let stages keep keys and values, and the last one return only the next tokens."""
    schedule, keepers = built.schedule, []
    before = schedule._cutter_for, schedule._output_merge_spec
    cutter = replace(schedule._cutter, args_spec=None, kwargs_spec=None)
    schedule._cutter_for, schedule._output_merge_spec = lambda batch: cutter, None
    program = schedule._runner.runnable.program(cutter.parts(rows), trains=False)
    with ExitStack() as hooks:
        for stage in schedule._stages:
            module = stage.submod
            if new_cache is not None:
                order = forward_order(program, stage.stage_index)
                keepers.append(Keeper({part: new_cache() for part in order}))
                for hook in keepers[-1].hook(module):
                    hooks.callback(hook.remove)
            if stage.is_last:
                hooks.callback(module.register_forward_hook(next_token.token).remove)
        try:
            yield keepers
        finally:
            schedule._cutter_for, schedule._output_merge_spec = before


@dataclass(slots=True)
class _NextToken:
    """A hook on the last stage that returns only the token after a place."""

    place: int = -1

    def token(self, module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        """The likeliest tokens, [rows, 1]."""
        logits = getattr(output, "logits", output)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
            raise UseError(
                "generate() is for causal language models, which return logits [rows, length, "
                f"words], or have them in output.logits, not {describe(output)}"
            )
        return logits[:, self.place].argmax(-1, keepdim=True)
