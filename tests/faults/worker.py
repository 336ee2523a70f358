"""One rank: a process that does what it is told over a pipe, and says what became of it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import signature
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import init_device_mesh

import taktline as tl
from taktline.transport.control_plane import Plane
from tests.faults.case import TIMEOUT, Case
from tests.faults.messages import Answer, Place, Struck
from tests.faults.model import LUCK, WIDTH, Block, Sour, Trap, in_parts
from tests.settled import settle

SAMPLES = {"1f1b": 2, "interleaved_1f1b": 2, "gpipe": 4096, "zbv": 4096}
"""In a micro-batch, by schedule: large tensors take another way than small ones."""
ASIDE_SECONDS, DRAG_SECONDS = 0.3, 0.8
"""When a rank is struck that waits for others, and how long one of these takes."""
STALL_SECONDS = 0.8
"""Little, so that a watchdog has been there before the next step."""
STEP_SECONDS = 0.02
"""What a rank computes in a step of a march."""


class Rank:
    """What the process does between two orders."""

    def __init__(self, case: Case, rank: int, pipe: Connection) -> None:
        self.case, self.rank, self._pipe = case, rank, pipe
        self.trap = Trap()
        self._pipeline: tl.Pipeline | None = None
        self._beside: Any = None

    def meet(self, store: Store) -> Answer:
        """Join the process group, as torchrun has it."""
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank)}
        os.environ |= {"WORLD_SIZE": str(self.case.ranks)}
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.case.ranks,
            timeout=timedelta(seconds=TIMEOUT),
        )
        return Answer(time.monotonic())

    def build(self) -> Answer:
        """Make the pipeline, and see that it works."""
        torch.manual_seed(0)
        blocks = [Block(stage, self.trap) for stage in range(self.case.stages)]
        if self.case.wrapper == "none":
            blocks[-1].wide.weight = blocks[0].wide.weight
        self._pipeline = tl.Pipeline(
            blocks,
            schedule=self.case.schedule,
            microbatches=self.case.microbatches,
            loss_fn=self._loss,
            device="cpu",
            **self._options(),
        )
        for schedule in self._pipeline.schedules.values():
            schedule.stall_after = STALL_SECONDS
        self.step()
        return self.step()

    def _options(self) -> dict[str, Any]:
        """The wrapper, and the timeout, which torch's meshes do not take over from their world."""
        wrapper, sizes = self.case.wrapper, (self.case.depth, self.case.beside)
        options: dict[str, Any] = {"prepare": self._prepare}
        if "timeout" in signature(tl.Pipeline).parameters:
            options["timeout"] = TIMEOUT
        if wrapper != "none":
            names = ("pp", "tp" if wrapper == "tp" else "dp")
            options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            self._beside = options["mesh"][names[1]]
        if wrapper in ("ddp", "fsdp"):
            options["data_parallel"] = wrapper
        return options

    def _prepare(self, block: nn.Module, stage: int) -> nn.Module:
        self.trap.hit("P", stage)
        return in_parts(block, self._beside) if self.case.wrapper == "tp" else block

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.trap.hit("L", self.case.stages - 1)
        return nn.functional.mse_loss(output, target)

    @property
    def pipeline(self) -> tl.Pipeline:
        assert self._pipeline is not None
        return self._pipeline

    def step(self) -> Answer:
        """A step from scratch: the same numbers each time."""
        for parameter in self.pipeline.parameters():
            parameter.grad = None
        loss = self.pipeline.step(self._batch, target=-self._batch)
        return Answer(time.monotonic(), numbers=(loss.item(), self.pipeline.grad_norm().item()))

    def reconnect(self) -> Answer:
        """New groups, then a step."""
        getattr(self.pipeline, "reconnect")()  # noqa: B009
        return self.step()

    def march(self, steps: int) -> Answer:
        """Many steps: their loss, and how far apart they are."""
        losses = []
        for _ in range(steps):
            time.sleep(STEP_SECONDS)
            losses.append(self.step().numbers[0])
        return Answer(time.monotonic(), numbers=(losses[0], max(losses) - min(losses)))

    def eval(self) -> Answer:
        loss = self.pipeline.eval(self._batch, target=-self._batch)
        return Answer(time.monotonic(), numbers=(loss.item(),))

    def save(self) -> Answer:
        """Gather the state, and train on: a rank that others need not wait for knows then."""
        self.pipeline.state_dict(gathered=True)
        return self.step()

    def address(self) -> Answer:
        """Where the control plane of this process listens."""
        return Answer(time.monotonic(), where=Plane.current().address)

    def checkpoint(self, call: str, folder: str, victim: int, how: str) -> Answer:
        """Save or load, where the data of one rank hangs."""
        data = _Hangs(how) if self.rank == victim else _Hangs("not")
        self.pipeline.zero_grad()  # a save holds no gradients
        getattr(self.pipeline, call)(folder, data=data)
        return Answer(time.monotonic())

    def grad_norm(self) -> Answer:
        return Answer(time.monotonic(), numbers=(self.pipeline.grad_norm().item(),))

    @property
    def _batch(self) -> Tensor:
        size = SAMPLES[self.case.schedule] * self.case.microbatches
        return torch.linspace(-1, 1, size * WIDTH).view(size, WIDTH)

    def face(self, case: Case) -> Answer:
        """The call in which the fault comes."""
        when = case.when
        self.trap.due = None
        call = getattr(self, when.call)
        if self.rank != case.victim or not case.what.act:
            time.sleep(when.late)
            if when.aside and when.at and self.rank < case.beside:
                self.trap.arm(*self._point(case), lambda _: time.sleep(DRAG_SECONDS))
            return call()
        strike: Callable[[int | None], None] = partial(self._strike, case)
        if when.aside:
            timer = threading.Timer(ASIDE_SECONDS, strike, [None])
            strike = lambda _: timer.start()  # noqa: E731
        if when.at is None:
            time.sleep(when.lag)
            strike(None)
        else:
            self.trap.arm(*self._point(case), strike)
        return getattr(self, case.what.act, call)()

    def _point(self, case: Case) -> tuple[str, int]:
        """Which forward, backward or loss of this rank it is."""
        assert case.when.at is not None
        kind, part = case.when.at
        total = case.microbatches
        if case.fault == "loss":
            kind = "L"
        else:
            total *= case.stages // case.depth
        return kind, int(part * (total - 1))

    def _strike(self, case: Case, stage: int | None) -> None:
        time.sleep(case.when.lag if case.when.at else 0.0)
        self._pipe.send(Struck(time.monotonic(), stage))
        act = case.what.act
        if act in SIGNALS:
            os.kill(os.getpid(), SIGNALS[act])
        elif act == "exit":
            os._exit(3)
        elif act == "hang":
            time.sleep(2 * TIMEOUT)
        elif act == "error":
            raise RuntimeError(LUCK)
        elif act == "quit":
            raise SystemExit(3)
        elif act == "sour":
            self._sour()

    def _sour(self) -> None:
        """Make the gradient of a tied weight one that cannot be added to another."""

        def hook(parameter: Tensor) -> None:
            soured.remove()
            assert parameter.grad is not None
            parameter.grad = parameter.grad.as_subclass(Sour)

        stage = min(self.pipeline.stages)
        stage = stage if stage == 0 else max(self.pipeline.stages)
        weight = dict(self.pipeline.stages[stage].named_parameters())["wide.weight"]
        soured = weight.register_post_accumulate_grad_hook(hook)

    def leave(self) -> None:
        """Let go of everything, as a script does at its end."""
        self._pipeline = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Hangs:
    """What a rank saves as its data: it sleeps, or computes, for longer than the timeout."""

    def __init__(self, how: str) -> None:
        self._how = how

    def state_dict(self) -> dict[str, Any]:
        until = time.monotonic() + 2 * TIMEOUT
        while self._how != "not" and time.monotonic() < until:
            time.sleep(60.0 if self._how == "sleeps" else 0.0)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict()


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}


def keep_store(place: Place, pipe: Connection) -> None:
    """The main function of a process that keeps the store, as torchrun's agent does."""
    place.enter()
    store = replace(place, port=0).store()
    pipe.send(store.port)
    with suppress(EOFError):
        pipe.recv()


def work(case: Case, rank: int, place: Place, pipe: Connection) -> None:
    """The main function of a rank: obeys until it is told to leave, or the other end closes."""
    place.enter()
    settle()
    store = place.store()
    pipe.send(store.port)
    me = Rank(case, rank, pipe)
    with suppress(EOFError, OSError):
        while (order := pipe.recv()) is not None:
            verb, *arguments = order
            try:
                if verb == "meet":
                    arguments = [store]
                pipe.send(getattr(me, verb)(*arguments))
            except BaseException as error:  # KeyboardInterrupt and SystemExit are answers, too
                pipe.send(Answer.of(error))
    me.leave()
