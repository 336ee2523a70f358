"""Copies of the state before a step: each rank's own, and that of one other rank, in host memory.

::

    before a step     every rank copies its weights, buffers and optimizer states
    during the step   two threads send the copy to another rank, and receive one
    at its end        once all ranks have their copies, those of earlier steps are dropped

So a state is whole unless a rank is lost together with the one that has its copy. A copy has the
model's names, in the form of a checkpoint, and is loaded into other stages as that is.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from taktline.checkpoint.files import Checkpoint, merged
from taktline.checkpoint.model_state import ModelState
from taktline.checkpoint.saving import Training, described
from taktline.checks import read
from taktline.errors import TransportError
from taktline.meta import DTYPES, name_of
from taktline.transport.base import Transport, bytes_of
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import share_texts, share_values

_HEAD = struct.Struct("<3q")
"""Before a copy: its moment, and how long its description is."""
_ALIGNED = 16
"""Bytes; any type of torch can begin there."""


class Moment(NamedTuple):
    """Before which training step, in which world, a state was copied; later ones are greater."""

    generation: int
    step: int


class Copy(NamedTuple):
    """The state of one rank, in one piece of memory."""

    moment: Moment
    owner: int
    """The number of its process."""
    world: list[int]
    """All processes whose states belong together."""
    part: dict[str, Any]
    memory: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in the memory, by their names in a checkpoint."""
        begins, _ = _places(self.part)
        found: dict[str, torch.Tensor] = {}
        for (name, entry), begin in zip(self.part["tensors"].items(), begins, strict=True):
            dtype = DTYPES[entry["dtype"]]
            size = prod(entry["shape"]) * dtype.itemsize
            found[name] = self.memory[begin : begin + size].view(dtype).view(entry["shape"])
        return found


def _places(part: dict[str, Any]) -> tuple[list[int], int]:
    """Where tensors begin in the memory of a copy, and how long that is."""
    entries = part["tensors"].values()
    sizes = [prod(each["shape"]) * DTYPES[each["dtype"]].itemsize for each in entries]
    *begins, end = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
    return begins, end


@dataclass(slots=True)
class _Source:
    """What a rank copies, as long as that are the same tensors."""

    key: list[Any]
    part: dict[str, Any]
    text: bytes
    """The owner, the world and the part, for other ranks."""
    size: int
    tensors: dict[str, torch.Tensor]
    rooms: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict[int, Any])
    """The tensors in the memory of copies, by its address."""


def partners(processes: Sequence[int], host_of: Callable[[int], str]) -> dict[int, int]:
    """Who keeps whose copy: one on another host, as far as that can be.

    >>> partners([0, 1, 2, 3], lambda process: "ab"[process // 2])
    {0: 2, 2: 1, 1: 3, 3: 0}
    """
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for process in processes:
        hosts[host_of(process)].append(process)
    turns = range(max(map(len, hosts.values())))
    ring = [each[turn] for turn in turns for each in hosts.values() if turn < len(each)]
    return dict(zip(ring, [*ring[1:], ring[0]], strict=True))


def free_memory() -> int:
    """The bytes that this host, or the container, has left; 0 if that cannot be known."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        rows = (row.split() for row in Path("/proc/meminfo").read_text().splitlines())
        found += [int(row[1]) << 10 for row in rows if row[0] == "MemAvailable:"]
    with suppress(OSError, ValueError):
        most, used = (
            Path(f"/sys/fs/cgroup/memory.{each}").read_text() for each in ("max", "current")
        )
        found.append(int(most) - int(used))
    return max(0, min(found, default=0))


class Mirrors:
    """The copies that this process has, its own and that of another rank."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._held: dict[tuple[Moment, int], Copy] = {}
        self._spare: list[torch.Tensor] = []
        """The memory of dropped copies."""
        self._source: _Source | None = None
        self._ends: list[socket.socket] = []
        self._flight: list[threading.Thread] = []
        self._arrived = [False, False]
        """Whether the latest copy was sent, and the other one received."""
        self._failure: Exception | None = None
        self._copied: Any = None
        """When a device has copied the latest state."""
        self._me = 0

    def connect(self, transport: Transport) -> None:
        """Connect with the ranks that keep, and send, a copy; on every rank."""
        self.disconnect()
        self._source = None
        if not isinstance(transport, Distributed):
            return
        plane = transport.plane
        self._me = plane.process
        to = partners(transport.processes, lambda process: plane.addresses[process][0])
        keeper, source = to[self._me], next(each for each, at in to.items() if at == self._me)
        self._ends = [
            transport.connect(keeper, f"the copy of {self._me}"),
            transport.connect(source, f"the copy of {source}"),
        ]

    def disconnect(self) -> None:
        """End what is under way."""
        for each in self._ends:
            _shut(each)
        for thread in self._flight:
            thread.join()
        for each in self._ends:
            each.close()
        self._ends, self._flight = [], []

    def begin(self, moment: Moment, model: ModelState, world: list[int]) -> None:
        """Copy the state of this rank, and begin to exchange copies."""
        source = self._described(model, world)
        device = next((each.device for each in source.tensors.values() if each.is_cuda), None)
        own = Copy(moment, self._me, world, source.part, self._room(source.size, device))
        self._copied = self._fill(own, source, device)
        self._held[moment, self._me] = own
        self._arrived = [not self._ends, not self._ends]
        if self._ends:
            todo = (self._send, (own, source.text)), (self._receive, ())
            self._flight = [
                threading.Thread(target=self._run, args=each, name="taktline mirror", daemon=True)
                for each in todo
            ]
            for thread in self._flight:
                thread.start()

    def _described(self, model: ModelState, world: list[int]) -> _Source:
        """What is copied; described anew only if there are other tensors or values."""
        key: list[Any] = [
            id(x) for m in model.modules.values() for x in (*m.parameters(), *m.buffers())
        ]
        for optimizer in self._training.optimizers:
            for parameter, state in optimizer.state.items():
                key.append(id(parameter))
                key += [id(x) if isinstance(x, torch.Tensor) else x for x in state.values()]
        if self._source is None or self._source.key != key:
            part, tensors = described(model, self._training, {})
            part["tensors"] = {
                name: {"dtype": name_of(each.dtype), "shape": list(each.shape), "pieces": []}
                for name, each in tensors.items()
            }
            text = json.dumps([self._me, world, part]).encode()
            self._source = _Source(key, part, text, _places(part)[1], tensors)
        return self._source

    @torch.no_grad()
    def _fill(self, copy: Copy, source: _Source, device: torch.device | None) -> Any:
        """Copy tensors, without waiting for a device; returns what says when that is done."""
        address, tensors = copy.memory.data_ptr(), source.tensors
        if address not in source.rooms:
            source.rooms[address] = copy.tensors()
        rooms = source.rooms[address]
        # The step changes buffers, so these are copied before it.
        now = {n for n in rooms if n.startswith("model/") and type(tensors[n]) is torch.Tensor}
        for name in now:
            rooms[name].copy_(tensors[name], non_blocking=True)
        copies = None if device is None else torch.cuda.Stream(device)
        if copies is not None:
            copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies):
            for name in rooms.keys() - now:
                rooms[name].copy_(tensors[name], non_blocking=True)
        return None if copies is None else copies.record_event()

    def _room(self, size: int, device: torch.device | None = None) -> torch.Tensor:
        pinned = device is not None
        for number, spare in enumerate(self._spare):
            if (spare.nbytes, spare.is_pinned()) == (size, pinned):
                return self._spare.pop(number)
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def settle(self) -> None:
        """Let what a device computes from now on wait until the state is copied."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _run(self, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            do(*arguments)
            self._arrived[do == self._receive] = True
        except OSError:
            pass  # the other rank is lost, which all will hear, or this one goes on without it
        except Exception as error:
            self._failure = error

    def _send(self, own: Copy, text: bytes) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._ends[0].sendall(_HEAD.pack(*own.moment, len(text)) + text)
        self._ends[0].sendall(_memory(own.memory))

    def _receive(self) -> None:
        generation, step, length = _HEAD.unpack(_taken(self._ends[1], _HEAD.size))
        shape = (int, [int], {str: object})
        owner, world, part = read(_taken(self._ends[1], length), shape, what="a copied state")
        room = self._room(_places(part)[1])
        _take(self._ends[1], _memory(room))
        moment = Moment(generation, step)
        self._held[moment, owner] = Copy(moment, owner, world, part, room)

    def arrived(self, seconds: float) -> bool:
        """Whether the latest copies have arrived, here and at the other rank."""
        for thread in self._flight if seconds else ():
            thread.join(seconds)
        if self._failure is not None:
            raise self._failure
        return all(self._arrived)

    def keep(self, moment: Moment) -> None:
        """Drop all copies of earlier moments; the next ones use their memory."""
        dropped = [self._held.pop(key) for key in list(self._held) if key[0] < moment]
        self._spare = [copy.memory for copy in dropped]

    # After a loss.

    def find(self, transport: Transport) -> Found | None:
        """The latest state that is whole on the ranks that are left; None if there is none."""
        mine = [[*copy.moment, copy.owner, copy.world] for copy in self._held.values()]
        shape = [(int, int, int, [int])]
        rows = share_values(transport, mine, shape, "who has which state", what="its copies")
        holders: dict[Moment, dict[int, int]] = defaultdict(dict)
        worlds: dict[Moment, list[int]] = {}
        for rank, row in enumerate(rows):
            for generation, step, owner, world in row:
                moment = Moment(generation, step)
                worlds[moment] = world
                holders[moment].setdefault(owner, rank)
        whole = [moment for moment in worlds if holders[moment].keys() >= set(worlds[moment])]
        if not whole:
            return None
        moment = max(whole)
        here = {owner: copy for (at, owner), copy in self._held.items() if at == moment}
        return Found(here, transport, moment, holders[moment])


class Found(Checkpoint):
    """A state whose parts are on several ranks, to be loaded as a checkpoint is.

    All ranks load it at the same time: in :meth:`prepare` they send each other the tensors.
    """

    def __init__(
        self,
        here: Mapping[int, Copy],
        transport: Transport,
        moment: Moment,
        holders: Mapping[int, int],
    ) -> None:
        self.moment, self._transport = moment, transport
        own = [owner for owner in here if holders[owner] == transport.rank]
        mine = {str(owner): here[owner].part for owner in own}
        texts = share_texts(transport, json.dumps(mine), "the parts of a state")
        found = {int(owner): part for text in texts for owner, part in json.loads(text).items()}
        parts = dict(sorted(found.items()))
        self._holder: dict[str, int] = {}
        tensors: dict[str, Any] = {}
        for owner, part in parts.items():
            for name, entry in part["tensors"].items():
                self._holder.setdefault(name, holders[owner])
                tensors.setdefault(name, entry)
        plain = [{**part, "tensors": {}} for part in parts.values()]
        whole = merged(plain, moment.step) | {"tensors": tensors}
        self._understand(whole, Path("the copies of the ranks"))
        self._values: dict[str, torch.Tensor] = {
            name: value for copy in here.values() for name, value in copy.tensors().items()
        }

    def prepare(self, names: Iterable[str]) -> None:
        """Get the tensors of these names from the ranks that have them; on every rank."""
        wanted: dict[int, list[str]] = defaultdict(list)
        for name in dict.fromkeys(names):
            if name not in self._values:
                wanted[self._holder[name]].append(name)
        asked = {str(rank): each for rank, each in wanted.items()}
        what = "the tensors that ranks need"
        rows = share_values(self._transport, asked, {str: [str]}, what, what=what)
        transport = self._transport
        if not isinstance(transport, Distributed):
            return
        here, ends = transport.rank, list[tuple[socket.socket, list[str]]]()
        senders: list[threading.Thread] = []
        for peer, row in enumerate(rows):
            give, take = row.get(str(here), []), rows[here].get(str(peer), [])
            if peer != here and (give or take):
                end = transport.connect(transport.processes[peer], "the tensors of a state")
                ends.append((end, take))
                senders.append(threading.Thread(target=self._give, args=(end, give), daemon=True))
                senders[-1].start()
        try:
            for end, take in ends:
                for name in take:
                    entry = self.tensors[name]
                    room = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                    _take(end, _memory(room))
                    self._values[name] = room
        except OSError as error:
            raise transport.broken("the tensors of a state") from error
        finally:
            for sender in senders:
                sender.join()
            for end, _ in ends:
                end.close()

    def _give(self, end: socket.socket, names: Sequence[str]) -> None:
        with suppress(OSError):  # then the other rank is lost, as others will notice
            for name in names:
                end.sendall(_memory(self._values[name]))

    def check(self, name: str, like: torch.Tensor) -> None:
        """They come from the memory of this job, so there is nothing to check."""

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a tensor that was prepared."""
        tensor.detach().copy_(self._values[name])


def _memory(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor).numpy().data


def _take(end: socket.socket, room: memoryview) -> None:
    """Fill memory with what arrives."""
    while room:
        count = end.recv_into(room)
        if not count:
            raise ConnectionResetError("the connection has ended")
        room = room[count:]


def _taken(end: socket.socket, size: int) -> bytes:
    if size > 1 << 30:
        raise TransportError(f"the description of a state takes {size:,} bytes")
    room = bytearray(size)
    _take(end, memoryview(room))
    return bytes(room)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
