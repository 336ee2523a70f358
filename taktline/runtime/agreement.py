"""Agreement among ranks: what each says of its call, the first difference, and shared losses.

Ranks share one record before a step and one at its end. If a rank has an error, all ranks raise it;
otherwise the first field in which records differ is named by a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from taktline import pytree
from taktline.checks import warn
from taktline.errors import BatchError, MismatchError, StageError, TaktlineError, text_of
from taktline.meta import local
from taktline.runtime.microbatch import Batch, Cutter, Feed, LossWeights, bounds
from taktline.runtime.program import Failure
from taktline.runtime.replicas import Replicas
from taktline.text import by_rank, counted
from taktline.transport import Channel, Transport
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import (
    as_floats,
    as_integers,
    retold,
    share_error,
    share_values,
)


class Record(NamedTuple):
    """What one rank says of its call of step() or eval(), as numbers."""

    failed: int = 0
    schedule: int = 0  # by the order of first steps
    call: int = 0  # which step() or eval() of the schedule
    step: int = 0  # training steps so far
    shares: int = 0  # whether every rank gets the losses
    traces: int = 0
    batch: int = 0  # rows; 0 if the rank got no batch
    target: int = 0  # rows, unless the target has a chunk spec of its own
    inputs: int = 0  # a digest of the shapes and types of the arguments
    arguments: int = 0  # a digest of data; 0 if there is none, or it is not compared now
    targets: int = 0
    skips: int = 0  # at the end: whether stages have got skips
    preempted: int = 0  # at the end: whether the rank was asked to stop
    losses: Sequence[int] = ()  # at the end, if they are shared


class Field(NamedTuple):
    """A field of a record that all ranks must have in common, and the words if they do not."""

    name: str
    what: str
    advice: str
    show: Callable[[Any], object] = str
    optional: bool = False
    """Whether 0 stands for nothing, and fits any value."""


def _digest(number: int) -> str:
    return f"digest {number:016x}"[:15]


_ONE_BATCH = (
    "inputs would meet the targets of other samples. Pass every rank of a pipeline the same batch: "
    "draw it from a generator of its own, or read it on one rank and hand it on with "
    "pipe.loader(…)"
)
_COMMON = (
    Field(
        "schedule",
        "the ranks step different schedules, by the order of their first steps (0: a new one)",
        "step the same schedules in the same order on every rank",
    ),
    Field(
        "call",
        "the ranks are in different calls of step() and eval()",
        "a rank has left one out, or made one more. Make the same calls on every rank",
    ),
    Field(
        "step",
        "the ranks disagree on the number of training steps so far",
        "set steps on every rank when you resume",
    ),
    Field(
        "shares",
        "the ranks disagree on the value of share_losses",
        "pass the same on every rank",
        bool,
    ),
    Field(
        "traces",
        "the ranks disagree on the use of trace()",
        "enter and leave it on every rank at the same place",
        bool,
    ),
    Field(
        "batch", "the batch has different sizes", "pass every rank its part of one batch", str, True
    ),
)
_DATA = (
    Field("arguments", "the ranks were given different arguments", _ONE_BATCH, _digest, True),
    Field("targets", "the ranks were given different targets", _ONE_BATCH, _digest, True),
)


def difference(records: Sequence[Record]) -> str | None:
    """Why the ranks with these records are not in one step, in words; None if they are."""
    return _first(_COMMON, records) or _other_rows(records) or _first(_DATA, records)


def _first(table: Sequence[Field], records: Sequence[Record]) -> str | None:
    """The first field of a table that differs among the ranks."""
    for name, what, advice, show, optional in table:
        values = [getattr(record, name) for record in records]
        given = [value for value in values if value or not optional]
        if given and given.count(given[0]) < len(given):
            shown = [show(value) if value or not optional else None for value in values]
            return f"{what}: {by_rank(shown)}; {advice}"
    return None


def _other_rows(records: Sequence[Record]) -> str | None:
    """Why a target does not have the rows of the batch."""
    batch = max(record.batch for record in records)
    for rank, record in enumerate(records):
        # Not always equal: a target may have one entry a token.
        if batch and record.target % batch:
            return (
                f"the batch has {counted(batch, 'row')}, but the target on rank {rank} has "
                f"{record.target}; pass arguments and target of one batch, with as many entries "
                "for each row, or say with target_chunk_spec=… how the target is cut by itself"
            )
    return None


class Agreement:
    """Raises the same error on all ranks of a pipeline and its replicas, and shares losses."""

    def __init__(self, transport: Transport, replicas: Replicas, feed: Feed) -> None:
        self._transport = transport
        self._replicas = replicas
        self._feed = feed
        self.relay: Callable[[Feed], torch.Tensor] | None = None
        """Carries losses to the other ranks where reading them would wait for a GPU."""
        self.asks_to_stop: Callable[[], bool] | None = None
        """Whether this rank shall end after the running step."""
        self.preempted = False
        """Whether any rank asked to stop in the latest step whose outcome is known."""

    @contextmanager
    def with_replicas(self, what: str) -> Iterator[None]:
        """An error raised inside in one replica is raised at the end of the block in all."""
        try:
            yield
        except TaktlineError as raised:
            if not self._replicas.partners:
                raise
            raise self._replicas.agree(raised, what) or raised from raised.__cause__
        if self._replicas.partners and (elsewhere := self._replicas.agree(None, what)) is not None:
            raise elsewhere

    def share(self, mine: Record, error: TaktlineError | None, what: str) -> list[Record]:
        """The records of all ranks; raises the error of the first rank that has one."""
        if self._transport.size == 1:
            if error is not None:
                raise error
            return [mine]
        count = len(mine) - 1
        rows = self._transport.exchange([*mine[:-1], *mine.losses], what)
        records = [Record(*row[:count], losses=row[count:]) for row in rows]
        if any(record.failed for record in records):
            raise share_error(self._transport, error) or MismatchError(
                "a rank failed without saying why; look at the other ranks' output"
            )
        return records

    def conclude(
        self, failure: Failure | None, what: str, got: Mapping[int, Sequence[str]] | None = None
    ) -> dict[str, int]:
        """Agree on the outcome, and on shared losses; ``got`` has the skips of stages here.

        Returns the last stage of all ranks that gets each skip.
        """
        feed, relayed = self._feed, None
        # One process has all losses, and need not wait.
        shares = feed.call.share_losses and self._transport.size > 1
        asks = self.asks_to_stop is not None and self.asks_to_stop()
        mine = Record(failed=failure is not None, skips=bool(got), preempted=asks)
        with self.with_replicas(what):
            if shares:
                relayed = None if self.relay is None else self.relay(feed)
                numbers = losses_as_numbers(feed, relayed, failed=failure is not None)
                mine = mine._replace(losses=numbers)
            records = self.share(mine, None if failure is None else failure.error, what)
            self.preempted = any(record.preempted for record in records)
            if shares:
                put_losses([record.losses for record in records], feed, relayed)
            if not any(record.skips for record in records):
                return {}
        routes: dict[str, int] = {}
        said, shape = list((got or {}).items()), [(int, [str])]
        shared = share_values(self._transport, said, shape, "skips of a step", what="the skips")
        for stage, names in (each for skips in shared for each in skips):
            routes |= {name: max(stage, routes.get(name, 0)) for name in names}
        return routes

    def judge(self, error: BaseException, located: TaktlineError | None = None) -> None:
        """Raise if the ranks cannot go on: another rank failed, or others compute with this one."""
        if not isinstance(self._transport, Distributed):
            return
        if (cause := self._transport.explain(error)) is not None:
            raise cause from error
        # The ranks that compute with this one wait for it in the middle of an action.
        if isinstance(located, StageError) and self._replicas.computes_together(located.stage):
            self._transport.raised(located)
            raise located


def located(error: Exception, transport: Transport, kind: type[Any] = BatchError) -> TaktlineError:
    """An error for all ranks: with its rank, and of a kind of ours if it is not yet."""
    rank = f"rank {transport.rank}: " if transport.size > 1 else ""
    if isinstance(error, TaktlineError):
        found = retold(error, f"{rank}{text_of(error)}")
    else:
        found = kind(f"{rank}{type(error).__name__}: {text_of(error)}")
    found.__cause__ = error
    return found


# Digests of a call.


def digest_of(texts: Iterable[str]) -> int:
    """A number of 63 bits for some texts, the same in every process (unlike Python's hash)."""
    data = "\0".join(f"{len(text)}:{text}" for text in texts).encode(errors="surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def inputs_of(batch: Batch, flags: Sequence[str]) -> int:
    """A digest of shapes, types and plain values, which decide what crosses boundaries."""
    rest = (batch.kwargs, batch.arg_mbs, batch.kwarg_mbs)
    if not any(rest) and all(type(value) is torch.Tensor for value in batch.args):
        leaves, structure = batch.args, ""  # the usual case, without the pytree
    else:
        leaves, spec = pytree.tree_flatten((batch.args, *rest))
        structure = str(spec)
    return digest_of([*(word for leaf in leaves for word in words_of(leaf)), structure, *flags])


def compared(batch: Batch, parts: Sequence[str]) -> tuple[Any, Any]:
    """The arguments and targets that ranks compare; None where nothing was given."""
    given = {"args": batch.args or batch.arg_mbs, "kwargs": batch.kwargs or batch.kwarg_mbs}
    arguments = {name: value for name, value in given.items() if name in parts and value}
    target = batch.target if batch.target_mbs is None else batch.target_mbs
    return arguments or None, target if "target" in parts else None


def words_of(leaf: Any) -> tuple[str, ...]:
    """The type of a value, and the value; of a tensor, its type and its shape."""
    if isinstance(leaf, torch.Tensor):
        # Symbols for the lengths in a nested tensor differ between processes.
        shape = "nested" if leaf.is_nested else str(list(leaf.shape))
        return str(leaf.dtype), shape, str(leaf.requires_grad)
    kind = type(leaf)
    if kind is int:
        text = hex(leaf)  # str() refuses large ones
    elif kind is str:
        text = leaf
    else:
        text = repr(leaf) if kind in (bool, float, complex, bytes, torch.dtype) else ""
    return kind.__qualname__, text


# The data of batches.

_SAMPLED = 4096
"""The most elements of a tensor that are read."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""


def fingerprints(call: int, data: Sequence[Any]) -> list[int]:
    """A number for each part of a call's data; 0 where there is none, or it is not compared now.

    Data is compared in the first five calls, then in every 16th, as reading it waits for a GPU.
    """
    due = call <= 5 or call % 16 == 1
    return [fingerprint(each) if due and each is not None else 0 for each in data]


def fingerprint(values: Any) -> int:
    """A number from 1 to 2**63 - 1 for the values of a batch.

    Bit-equal values have the same number in every process, whatever their strides and devices. It
    depends on order, types and shapes, on up to 4,096 elements spread over each tensor, on numbers
    and strings, and on the types of other objects.
    """
    words: list[str] = []
    with torch.no_grad():
        for leaf in pytree.tree_leaves(values):
            words += words_of(leaf)[:2]
            if isinstance(leaf, torch.Tensor) and (data := _sampled(leaf)) is not None:
                words.append(data.cpu().numpy().tobytes().hex())
    return digest_of(words) or 1


def _sampled(tensor: torch.Tensor) -> torch.Tensor | None:
    """Some elements of a tensor, as whole numbers; None if it has no plain data."""
    tensor = local(tensor.detach())
    opaque = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    if opaque or tensor.is_meta or hasattr(tensor, "__tensor_flatten__"):
        return None
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype.itemsize > 8:  # complex128
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_INTEGERS[tensor.dtype.itemsize])
    step = -(-bits.numel() // _SAMPLED)
    if step <= 1:
        return bits
    while math.gcd(step, bits.numel() // len(bits)) > 1:  # it would hit the same columns again
        step += 1
    return bits.take(torch.arange(0, bits.numel(), step, device=bits.device))


# Losses: their weights, and how ranks share them.


def weigh(feed: Feed, cutter: Cutter, *, warned: bool) -> bool:
    """Set the weights of micro-batches; returns whether a user was warned that sizes differ."""
    call, count = feed.call, feed.microbatches
    rows = feed.rows if cutter.fewer else 0
    feed.scales = feed.added_scales = shares(rows, count) if call.scale_grads else [1.0] * count
    if feed.targets is None:
        return warned
    if call.loss_weights is not None:
        feed.scales = scales(call.loss_weights, feed.targets, normalised=call.scale_grads)
        return warned
    return warned or (call.scale_grads and not rows and warn_if_uneven(feed.rows, feed.targets))


def shares(rows: int, microbatches: int) -> list[float]:
    """The share of each micro-batch in the rows of a batch; without rows, all are equal.

    >>> shares(5, 2), shares(0, 2)
    ([0.6, 0.4], [0.5, 0.5])
    """
    rows = rows or microbatches
    return [(end - begin) / rows for begin, end in pairwise(bounds(rows, microbatches))]


def warn_if_uneven(rows: int, targets: Sequence[Any]) -> bool:
    """Warn if micro-batches of equal weight differ in size; returns whether they do.

    ``rows`` are those of the batch; 0 if the caller has cut it.
    """
    count = len(targets)
    if rows and rows % count == 0:
        return False
    leaves = (pytree.tree_leaves(target) for target in targets)
    tensors = ([x for x in found if isinstance(x, torch.Tensor) and x.ndim] for found in leaves)
    sizes = [len(found[0]) if found else 0 for found in tensors]
    if len(set(sizes)) == 1:
        return False
    shown = ", ".join(map(str, sizes[:8])) + (", …" if count > 8 else "")
    warn(
        f"micro-batches differ in size ({shown} rows), and each of them counts the same: the loss "
        f"and its gradients are not those of the whole batch. Use batches that {count} "
        "micro-batches divide, pass loss_weights=… to a schedule of Taktline, or use its Pipeline "
        "with whole batches, which counts rows"
    )
    return True


def scales(weights: LossWeights, targets: Sequence[Any], *, normalised: bool) -> list[float]:
    """The weight of each micro-batch's loss in the gradient.

    >>> scales([3, 1], [None, None], normalised=True)
    [0.75, 0.25]
    >>> scales(torch.Tensor.sum, [torch.ones(2), torch.ones(1)], normalised=False)
    [2.0, 1.0]
    """
    found = [weights(target) for target in targets] if callable(weights) else list(weights)
    if len(found) != len(targets):
        raise BatchError(
            f"loss_weights has {counted(len(found), 'number')}, but there are "
            f"{counted(len(targets), 'micro-batch')}; pass one for each, or a function of a "
            "micro-batch's target: a batch with fewer rows has fewer"
        )
    # Together, to wait for a GPU only once.
    numbers = torch.stack([torch.as_tensor(number).double() for number in found]).tolist()
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise BatchError(f"loss_weights must be numbers from 0 up, not {numbers}")
    total = sum(numbers)
    if normalised and total == 0:
        raise BatchError("loss_weights are all 0, so no micro-batch counts; leave out such a batch")
    return [number / total for number in numbers] if normalised else numbers


def hand_over(feed: Feed) -> torch.Tensor | None:
    """Fill the lists of a call with its losses; returns their mean, if every rank has them."""
    call = feed.call
    for wanted, found in ((call.losses, feed.losses), (call.aux_losses, feed.aux_losses)):
        if wanted is not None and found:
            zero = torch.zeros_like(next(iter(found.values())))  # for one without a loss
            wanted[:] = [found.get(m, zero) for m in range(feed.microbatches)]
    return mean_of(feed.losses, feed.scales) if call.share_losses else None


def mean_of(losses: Mapping[int, torch.Tensor], scales: Sequence[float]) -> torch.Tensor | None:
    """The weighted mean of the losses; None without losses.

    >>> mean_of({0: torch.tensor(1.0), 1: torch.tensor(5.0)}, [0.75, 0.25])
    tensor(2.)
    """
    if not losses:
        return None
    # Losses without weight are left out: they may be nan. Each is multiplied by itself, as a tensor
    # of weights would wait for the GPU.
    parts = [losses[m].double() * scale for m, scale in enumerate(scales) if scale]
    mean = torch.stack(parts).sum() / sum(scales) if parts else torch.tensor(math.nan)
    dtype = losses[0].dtype
    return mean.to(dtype if dtype.is_floating_point else torch.float64)


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The types in which losses are shared; the first one holds those of all other types."""
_NO_LOSS = -1


def losses_as_numbers(feed: Feed, relayed: torch.Tensor | None, *, failed: bool) -> list[int]:
    """The losses and scales of this rank, which other ranks read with :func:`put_losses`.

    Main losses are left out if they were :func:`relayed`, but not their type. No rank reads those
    of a step that has failed.
    """
    count = feed.microbatches
    if failed:
        return [_NO_LOSS, 0, *[0] * 3 * count]
    main, aux = ({} if relayed is not None else feed.losses), feed.aux_losses
    values = [*_joined(main, count).tolist(), *_joined(aux, count).tolist(), *feed.scales]
    types = [_DTYPES.index(x.dtype) if x.dtype in _DTYPES else 0 for x in feed.losses.values()]
    return [types[0] if types else _NO_LOSS, int(bool(aux)), *as_integers(values)]


def put_losses(ranks: Iterable[Sequence[int]], feed: Feed, relayed: torch.Tensor | None) -> None:
    """Put all ranks' losses into the feed: main ones with their scales, sums of added ones."""
    count, dtype, losses = feed.microbatches, None, ()
    has_aux, aux = False, [0.0] * count
    for code, adds, *bits in ranks:
        values = as_floats(bits)
        if code != _NO_LOSS:
            dtype, losses, feed.scales = _DTYPES[code], values[:count], values[2 * count :]
        has_aux = has_aux or bool(adds)
        aux = [total + value for total, value in zip(aux, values[count : 2 * count], strict=True)]
    found = torch.tensor(losses, dtype=dtype, device="cpu")
    if relayed is not None and dtype is not None:
        found = relayed.to(dtype)
    added = torch.tensor(aux, device="cpu").unbind() if has_aux else ()
    feed.losses, feed.aux_losses = dict(enumerate(found.unbind())), dict(enumerate(added))


def _joined(
    losses: Mapping[int, torch.Tensor], count: int, device: torch.device | None = None
) -> torch.Tensor:
    """All losses together, 0 where there are none, so that the host waits for a GPU only once."""
    device = device or next((loss.device for loss in losses.values()), torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([losses[m].to(zero) if m in losses else zero for m in range(count)])


def relayed(
    transport: Transport, rank_of: Sequence[int], device: torch.device, feed: Feed
) -> torch.Tensor:
    """The losses of a step on every rank, sent as a tensor, so that no host waits for a GPU.

    They take the way of the gradients, and reach a rank at its last stage::

        stage        0         1         2         3
        rank         0         1         2         0
        losses                 1 ◀────── 2 ◀────── 0

    ``rank_of`` has the rank of each stage. A rank that should have losses and has none sends zeros.
    """
    here, losses = transport.rank, _joined(feed.losses, feed.microbatches, device)
    data = losses.view(torch.uint8)
    last = {rank: stage for stage, rank in enumerate(rank_of)}
    source = {r: rank_of[s + 1] for r, s in last.items() if s + 1 < len(rank_of)}
    if here in source:
        transport.receiver(Channel(source[here], here, True))(data).wait()
    for target in (rank for rank, sender in source.items() if sender == here):
        transport.sender(Channel(here, target, True))(data).wait()
    return losses
