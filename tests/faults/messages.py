"""What processes are told, and what they say."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

import taktline as tl

PR_SET_PDEATHSIG, CLONE_NEWNET = 1, 0x40000000
STEP = (tl.StageError, tl.MismatchError)
"""After which training goes on, as is documented, if they do not say so themselves."""


@dataclass(frozen=True)
class Place:
    """Where a process runs, and where it finds the store."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: it keeps the store itself."""
    namespace: str = ""
    interface: str = "lo"
    quiet: bool = True

    def enter(self) -> None:
        """Move this process there; it has one thread yet."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # hangs or not, nothing is left behind
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        faulthandler.register(signal.SIGUSR1)
        os.environ |= {"GLOO_SOCKET_IFNAME": self.interface, "MASTER_ADDR": self.host}
        if self.namespace:
            with open(f"/run/netns/{self.namespace}") as file:
                if libc.setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns", self.namespace)

    def store(self) -> TCPStore:
        return TCPStore(
            self.host,
            self.port,
            is_master=not self.port,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )


@dataclass(frozen=True)
class Struck:
    """Sent by a rank just before the fault."""

    at: float
    stage: int | None


@dataclass(frozen=True)
class Answer:
    """What a rank knows, and since when."""

    at: float
    kind: str = ""
    """The error's; empty if there was none."""
    ours: bool = False
    text: str = ""
    peer: int | None = None
    where: tuple[Any, ...] | None = None
    """Rank, stage, micro-batch and action, if the error says so."""
    recoverable: str | None = None
    numbers: tuple[float, ...] = ()
    """Losses, and the norm of the gradients."""

    def __str__(self) -> str:
        text = " / ".join(self.text.splitlines())
        return f"{self.kind}: {text[:300]}" if self.kind else "nothing"

    @classmethod
    def of(cls, error: BaseException) -> Answer:
        fields = ("rank", "stage", "microbatch", "action")
        known = isinstance(error, tl.StageError)
        return cls(
            time.monotonic(),
            type(error).__name__,
            isinstance(error, tl.TaktlineError),
            str(error),
            getattr(error, "peer", None),
            tuple(getattr(error, field) for field in fields) if known else None,
            getattr(error, "recoverable", "step" if isinstance(error, STEP) else None),
        )
