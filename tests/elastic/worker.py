"""One rank of a job that goes on after losses: a plain loop, and what is to befall this rank."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import taktline as tl
from taktline.transport.control_plane import Plane
from tests.settled import settle

WIDTH, ROWS, PARTS = 8, 8, 4
PHASES = ("forward", "backward", "loss", "update", "clip", "between", "copy", "build")


@dataclass(frozen=True)
class Strike:
    """What befalls a rank: how, before which step has ended, and where."""

    how: str
    """kill, stop, or cut: a connection to another rank."""
    rank: int
    """By its number at the start."""
    step: int
    phase: str
    number: int = 0
    """Which one of its kind in the step."""
    side: tuple[int, ...] = ()
    """The ranks that it still reaches, if its network is parted; to "build", who was lost."""


@dataclass(frozen=True)
class Job:
    """What all ranks do."""

    ranks: int
    steps: int
    strikes: tuple[Strike, ...] = ()
    whole: bool = True
    """Whether the model is cut by the pipeline."""
    layers: int = 8
    schedule: str = "1f1b"
    every: int = 1
    timeout: float = 60.0
    folder: str = ""
    evals: bool = False
    """Whether it evaluates after each update."""
    traces: tuple[int, ...] = ()
    """The steps whose timelines are drawn."""
    loads: bool = False
    """Whether batches come from a loader, in an order that is drawn in each epoch."""
    saves: tuple[int, ...] = ()
    """The steps after which it saves."""


@dataclass
class Told:
    """What a rank has seen."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evals: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    recoveries: list[Any] = field(default_factory=list)
    ranks: int = 0
    error: str = ""
    drawings: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """From each detection until the next step was committed."""


class Block(nn.Module):
    """A layer; what is called in it may be struck."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hit("forward")
        x = x + torch.tanh(self.wide(self.norm(x)))
        if x.requires_grad:
            x.register_hook(lambda _: hit("backward"))
        return x


def model(layers: int) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(layers)]
    blocks[-1].wide.weight = blocks[0].wide.weight
    return nn.Sequential(*blocks).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """That of a step."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


EPOCH = 4
"""The batches of an epoch."""


def epochs(job: Job, wrap: Callable[[Any], Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of all steps."""
    if not job.loads:
        yield from map(batch, range(job.steps))
        return
    torch.manual_seed(1)
    parts = zip(*map(batch, range(EPOCH)), strict=True)
    data = TensorDataset(*map(torch.cat, parts))
    loader = wrap(DataLoader(data, batch_size=ROWS, shuffle=True))
    for _ in range(job.steps // EPOCH):
        yield from loader


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    hit("loss")
    return nn.functional.mse_loss(output, target)


def plain(job: Job, without: Sequence[int] = ()) -> Told:
    """The same loop without a pipeline; some steps may have no update."""
    net, told = model(job.layers), Told()
    optimizer, scheduler = _optimizer(net)
    for step, (x, y) in enumerate(epochs(job, lambda loader: loader)):
        total = 0.0
        for a, b in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            loss = nn.functional.mse_loss(net(a), b) / PARTS
            loss.backward()
            total += loss.item()
        told.losses.append(total)
        told.norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
        if step not in without:
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if job.evals:
            with torch.no_grad():
                told.evals += [
                    float(nn.functional.mse_loss(net(a), b)) for a, b in ((x, y), (y, x))
                ]
    told.state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return told


def _optimizer(net: Any) -> tuple[torch.optim.Optimizer, Any]:
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.0}, {"params": []}]
    for name, parameter in net.named_parameters():
        groups["norm" not in name]["params"].append((name, parameter))
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)


# Strikes.

_now: dict[str, Any] = {"step": -1, "due": (), "rank": -1, "pipe": None, "cut": None}
_counts: Counter[str] = Counter()


def hit(phase: str) -> None:
    """Be struck, if it is time."""
    number, _counts[phase] = _counts[phase], _counts[phase] + 1
    for strike in _now["due"]:
        at = strike.rank, strike.step, strike.phase, strike.number
        if at == (_now["rank"], _now["step"], phase, number):
            _now["due"] = tuple(each for each in _now["due"] if each != strike)
            _strike(strike)


def _strike(strike: Strike) -> None:
    how = strike.how
    if how == "cut":
        for transport in _now["pipe"]._built.ranks.distributed:
            for connection in list(transport._connections.values())[:1]:
                connection.shut()
        return
    with suppress(OSError):
        _now["cut"].send(("struck", time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def train(rank: int, job: Job) -> Told:
    """A plain loop."""
    told, net = Told(), model(job.layers)
    _now.update(due=job.strikes, rank=rank)
    given: Any = net if job.whole else list(net)
    options: dict[str, Any] = {"microbatches": PARTS, "loss_fn": loss_fn, "timeout": job.timeout}
    if job.whole:
        options["example"] = (batch(0)[0][: ROWS // PARTS],)
    pipe = tl.Pipeline(given, schedule=job.schedule, device="cpu", elastic=True, **options)
    optimizer, scheduler = _optimizer(pipe)
    optimizer.register_step_post_hook(lambda *_: hit("update"))
    _now["pipe"] = pipe
    detected: list[float] = []

    def note(recovery: Any) -> None:
        told.recoveries.append(recovery)
        detected.append(time.monotonic() - recovery.seconds)

    around: dict[str, Any] = {"every": job.every, "on_recovery": note}
    if job.folder:
        around["folder"] = job.folder
    with pipe.elastic(optimizer, **around):
        _watch(pipe)
        for step, (x, y) in enumerate(epochs(job, pipe.loader)):
            _counts.clear()
            _now["step"] = step
            with pipe.trace() if step in job.traces else nullcontext() as trace:
                told.losses.append(pipe.step(x, target=y).item())
            if trace is not None:
                told.drawings.append(trace.timeline.to_text())
            told.seconds += [time.monotonic() - begin for begin in detected]
            detected.clear()
            hit("between")
            told.norms.append(float(pipe.clip_grad_norm_(0.1)))
            hit("clip")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if job.evals:
                told.evals.append(pipe.eval(x, target=y).item())
                told.evals.append(pipe.eval(y, target=x).item())
            if step in job.saves:
                pipe.save(job.folder, optimizer)
        told.state = pipe.state_dict(gathered=True)
    told.ranks = pipe.plan.ranks
    return told


def _watch(pipe: Any) -> None:
    """Strike while a copy is on its way, or a pipeline is built anew."""
    elastic = pipe._elastic
    if elastic is None:
        return
    mirrors = elastic._mirrors
    send, find = mirrors._send, mirrors.find

    def sending(*copy: Any) -> None:
        hit("copy")
        send(*copy)

    def finding(transport: Any) -> Any:
        for strike in _now["due"]:
            is_now = not set(strike.side) & set(Plane.current().numbers)
            if (strike.phase, strike.rank) == ("build", _now["rank"]) and is_now:
                _strike(strike)
        return find(transport)

    mirrors._send, mirrors.find = sending, finding


def work(rank: int, job: Job, port: int, pipe: Connection) -> None:
    """The main function of a rank."""
    settle()
    _now["cut"] = pipe
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        told = train(rank, job)
    except BaseException as error:
        told = Told(error=f"{type(error).__name__}: {error}")
    with suppress(OSError):
        # Pickled here: tensors would be sent as shared memory, which ends with this process.
        pipe.send(("told", pickle.dumps(told)))
        pipe.close()
