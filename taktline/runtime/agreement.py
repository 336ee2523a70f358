"""Agreement among ranks: what each says of its call, and the first difference.

Ranks share one record before a step and one at its end. If a rank has an error, all ranks raise it;
otherwise the first field in which records differ is named by a table. Data is compared by
fingerprints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from taktline import pytree
from taktline.errors import BatchError, MismatchError, StageError, TaktlineError, text_of
from taktline.meta import local
from taktline.runtime.feed import Feed, LossRelay, losses_as_numbers, put_losses
from taktline.runtime.microbatch import Batch
from taktline.runtime.program import Failure
from taktline.runtime.replicas import Replicas
from taktline.text import by_rank, counted
from taktline.transport import Transport
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import retold, share_error, share_values


class Record(NamedTuple):
    """What one rank says of its call of step() or eval(), as numbers."""

    failed: int = 0
    schedule: int = 0  # by the order of first steps
    call: int = 0  # which step() or eval() of the schedule
    step: int = 0  # training steps so far
    shares: int = 0  # whether every rank gets the losses
    traces: int = 0
    plan: int = 0
    batch: int = 0  # rows; 0 if the rank got no batch
    target: int = 0  # rows, unless the target has a chunk spec of its own
    inputs: int = 0  # a digest of the shapes and types of the arguments
    compared: int = 0  # the call whose data has these fingerprints; 0 for none
    arguments: int = 0
    targets: int = 0
    skips: int = 0  # at the end: whether stages have got skips
    preempted: int = 0  # at the end: whether the rank was asked to stop
    losses: tuple[int, ...] = ()  # at the end, if they are shared

    @classmethod
    def read(cls, ranks: Sequence[Sequence[int]]) -> list[Record]:
        """The records whose numbers the ranks have shared."""
        count = len(cls._fields) - 1
        if min(map(len, ranks)) < count:
            raise MismatchError("a rank runs another version of Taktline; install one on all ranks")
        return [Record(*numbers[:count], losses=tuple(numbers[count:])) for numbers in ranks]


class Field(NamedTuple):
    """A field of a record that all ranks must have in common, and the words if they do not."""

    name: str
    what: str
    advice: str
    show: Callable[[Any], object] = str
    optional: bool = False
    """Whether 0 stands for nothing, and fits any value."""


def _numbered(number: int) -> str:
    return f"number {number}" if number else "a new one"


def _digest(number: int) -> str:
    return f"digest {number:016x}"[:15]


_ONE_BATCH = (
    "inputs would meet the targets of other samples. Pass every rank of a pipeline the same batch: "
    "draw it from a generator of its own, or read it on one rank and hand it on with "
    "pipe.loader(…)"
)
SAME_STEP = (
    Field(
        "schedule",
        "the ranks step different schedules, counted by their first steps",
        "step the same schedules in the same order on every rank",
        _numbered,
    ),
    Field(
        "call",
        "the ranks are in different calls of step() and eval()",
        "a rank has left one out, or made one more. Make the same calls on every rank",
        _numbered,
    ),
    Field(
        "step",
        "the ranks disagree on the number of training steps so far",
        "set steps on every rank when you resume",
    ),
)
SAME_KIND = (
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
        "plan",
        "the ranks run different plans",
        "step the same schedule on every rank",
        lambda digest: f"{digest:015x}"[:8],
    ),
    Field(
        "batch",
        "the batch has different sizes",
        "pass every rank its part of one batch",
        optional=True,
    ),
)
SAME_DATA = (
    Field("arguments", "the ranks were given different arguments", _ONE_BATCH, _digest, True),
    Field("targets", "the ranks were given different targets", _ONE_BATCH, _digest, True),
)


def difference(table: Sequence[Field], ranks: Sequence[Any]) -> str | None:
    """The first field of a table that differs among the ranks, in words; None if none does."""
    for name, what, advice, show, optional in table:
        values = [getattr(rank, name) for rank in ranks]
        given = [value for value in values if value or not optional]
        if given and given.count(given[0]) != len(given):
            shown = [show(value) if value or not optional else None for value in values]
            return f"{what}: {by_rank(shown)}; {advice}"
    return None


def other_kind(records: Sequence[Record]) -> str | None:
    """Why ranks in one step have no common batch for it; None if they have."""
    if reason := difference(SAME_KIND, records):
        return reason
    batch = max(record.batch for record in records)
    for rank, record in enumerate(records):
        # Not always equal: a target may have one entry a token.
        if batch and record.target % batch:
            return (
                f"the batch has {counted(batch, 'row')}, but the target on rank {rank} has "
                f"{record.target}; pass arguments and target of one batch, with as many entries "
                "for each row, or say with target_chunk_spec=… how the target is cut by itself"
            )
    # Some GPU may have found what another one still computes.
    latest = max(record.compared for record in records)
    unknown = {"arguments": 0, "targets": 0}
    known = [each if each.compared == latest else each._replace(**unknown) for each in records]
    return difference(SAME_DATA, known)


class Agreement:
    """Raises the same error on all ranks of a pipeline and its replicas, and shares losses."""

    def __init__(self, transport: Transport, replicas: Replicas, feed: Feed) -> None:
        self._transport = transport
        self._replicas = replicas
        self._feed = feed
        self._processes = transport if isinstance(transport, Distributed) else None
        self.relay: LossRelay | None = None
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
        numbers = [*mine[:-1], *mine.losses]
        records = Record.read(self._transport.exchange(numbers, what))
        if self.relay is not None:
            self.relay.settle()
        if any(record.failed for record in records):
            raise share_error(self._transport, error) or MismatchError(
                "a rank failed without saying why; look at the other ranks' output"
            )
        return records

    def conclude(self, mine: Record, failure: Failure | None, what: str) -> bool:
        """Agree on the outcome, and on shared losses; returns whether any rank has skips."""
        feed, relayed = self._feed, None
        # One process has all losses, and need not wait.
        shares = feed.call.share_losses and self._transport.size > 1
        with self.with_replicas(what):
            if shares:
                # A rank that has failed may lack some losses; no rank reads them then.
                said = Feed(microbatches=feed.microbatches) if failure else feed
                if self.relay is not None:
                    relayed = self.relay.share(said.losses, said.microbatches)
                mine = mine._replace(losses=losses_as_numbers(said, relayed))
            mine = mine._replace(
                failed=int(failure is not None),
                preempted=int(self.asks_to_stop is not None and self.asks_to_stop()),
            )
            records = self.share(mine, None if failure is None else failure.error, what)
            self.preempted = any(record.preempted for record in records)
            if shares:
                put_losses([record.losses for record in records], feed, relayed)
        return any(record.skips for record in records)

    def routes(self, got: Mapping[int, Sequence[str]]) -> dict[str, int]:
        """The last stage of all ranks that gets each skip; ``got`` has the skips of stages here."""
        routes: dict[str, int] = {}
        mine, shape = list(got.items()), [(int, [str])]
        shared = share_values(self._transport, mine, shape, "skips of a step", what="the skips")
        for stage, names in (each for skips in shared for each in skips):
            routes |= {name: max(stage, routes.get(name, 0)) for name in names}
        return routes

    def located(self, error: Exception) -> TaktlineError:
        """An error from before or after the program, with its rank."""
        return located(error, self._transport, BatchError)

    def has_verdict(self) -> bool:
        """Whether the ranks know that one of them has failed."""
        return self._processes is not None and self._processes.verdict is not None

    def cause(self, error: BaseException) -> TaktlineError | None:
        """Why another rank's failure has raised an error here; None if it is this rank's own."""
        return None if self._processes is None else self._processes.explain(error)

    def judge(self, error: Exception, located: StageError | None) -> None:
        """Raise if the ranks cannot go on: another rank failed, or others compute with this one."""
        if (cause := self.cause(error)) is not None:
            raise cause from error
        # The ranks that compute with this one wait for it in the middle of an action.
        if located is None or self._processes is None:
            return
        if self._replicas.computes_together(located.stage):
            self._processes.raised(located)
            raise located


def located(error: Exception, transport: Transport, other: type[TaktlineError]) -> TaktlineError:
    """An error for all ranks: with its rank, and of the class ``other`` if it is not ours."""
    rank = f"rank {transport.rank}: " if transport.size > 1 else ""
    if isinstance(error, TaktlineError):
        found = retold(error, f"{rank}{text_of(error)}")
    else:
        found = other(f"{rank}{type(error).__name__}: {text_of(error)}")
    found.__cause__ = error
    return found


# Fingerprints of the data of a batch.

_SAMPLED = 4096
"""The most elements of a tensor that are read."""
_PLACE_BITS = 28
"""The bits of a place in a tensor, as a fraction of its length: 12 for one of 4,096 parts, the
others for the place in the part."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""


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
    return digest_of([*(word for leaf in leaves for word in _words_of(leaf)), structure, *flags])


def _words_of(leaf: Any) -> tuple[str, ...]:
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


class Fingerprint:
    """A number from 1 to 2**63 - 1 for the values of a batch.

    Bit-equal values have the same number in every process, whatever their strides and devices. It
    depends on order, types and shapes, on up to 4,096 elements spread over each tensor, on numbers
    and strings, and on the types of other objects.

    A GPU computes it and copies it to the host without waiting: it is :attr:`ready` some time
    later.
    """

    def __init__(self, values: Any) -> None:
        self._known = 0
        self._coming: list[tuple[torch.Tensor, torch.Event]] = []
        # Not in the caller's inference mode: the cached constants must be usable outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for place, leaf in enumerate(pytree.tree_leaves(values)):
                salt = digest_of([str(place), *_words_of(leaf)[:2]])
                self._known += salt
                if not isinstance(leaf, torch.Tensor) or (data := _sampled(leaf)) is None:
                    continue
                if data.device.type == "cpu":
                    self._known += int(data) * (salt | 1)
                else:
                    self._coming.append(_to_host(data * (salt | 1)))

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` returns at once."""
        return all(event.query() for _, event in self._coming)

    def read(self) -> int:
        """The number; waits until it is ready."""
        for _, event in self._coming:
            event.synchronize()
        total = self._known + sum(int(number) for number, _ in self._coming)
        return total % 2**64 % (2**63 - 1) + 1


def _to_host(number: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
    """A number that is being copied from a device, and the event at its end."""
    here = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
    here.copy_(number, non_blocking=True)
    event = torch.Event(number.device)
    event.record(torch.accelerator.current_stream(number.device))
    return here, event


class DataCheck:
    """Computes the fingerprints of some calls' data, without waiting for a GPU."""

    def __init__(self) -> None:
        self._pending: tuple[int, list[Fingerprint | None]] | None = None

    def fingerprints(self, call: int, *data: Any) -> tuple[int, ...]:
        """The latest call with known fingerprints, and those of its data, 0 where there is none.

        The first five calls are looked at, then every 16th. From a GPU they may be those of an
        earlier call.
        """
        if self._pending is None and (call <= 5 or call % 16 == 1):
            self._pending = call, [None if each is None else Fingerprint(each) for each in data]
        if self._pending is None or not all(x is None or x.ready for x in self._pending[1]):
            return 0, *[0] * len(data)
        (known, found), self._pending = self._pending, None
        return known, *(0 if each is None else each.read() for each in found)


def _sampled(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum of a tensor's sampled elements, each with a weight of its own, modulo 2**64."""
    tensor = local(tensor.detach())
    opaque = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    if opaque or tensor.is_meta or hasattr(tensor, "__tensor_flatten__"):
        return None
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype.itemsize > 8:  # complex128
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_INTEGERS[tensor.dtype.itemsize])
    places, weights = _constants(tensor.device)
    if (count := bits.numel()) > _SAMPLED:
        bits = bits.take((places * count) >> _PLACE_BITS)
    bits = bits.flatten()
    if bits.dtype is torch.int64:
        # In halves: the low bits of many float64 are zeros, and stay so in a product.
        bits = bits.contiguous().view(torch.int32)
    return (bits * weights[: bits.numel()]).sum()


@lru_cache(maxsize=16)
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The sampled places in a tensor, and odd weights; the same in every process.

    One place in each of 4,096 equal parts, at unequal distances: equal ones might always hit the
    same column.
    """
    drawn = np.random.PCG64(0).random_raw(3 * _SAMPLED).view(np.int64)
    within = drawn[:_SAMPLED] & (2**_PLACE_BITS // _SAMPLED - 1)
    places = np.arange(_SAMPLED) * (2**_PLACE_BITS // _SAMPLED) + within
    weights = drawn[_SAMPLED:] | 1
    return torch.tensor(places, device=device), torch.tensor(weights, device=device)
