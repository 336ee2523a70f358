"""The control plane: connections, the time to connect, and until everyone knows of a death.

First with real processes, which have nothing but a control plane: they are forked from one that has
imported torch. One of them is killed. Then the same code without processes and sockets, where the
messages are counted, and the hops until the last process knows.

``python benchmarks/control_plane.py --processes 2 4 8 --simulated 256``
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import signal
import threading
import time
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

from torch._C._distributed_c10d import FileStore

from taktline.transport.control_plane import Plane
from tests.transport.simulated import Simulation

SOON = 120.0


def serve(process: int, size: int, path: str, pipe: Connection) -> None:
    """One process: connect when told to, then wait until another one is gone."""
    store = FileStore(path, size)  # a server would be measured, too
    pipe.send(None)
    pipe.recv()
    plane = Plane(store, process, size, "benchmark")
    while plane.missing:
        time.sleep(0.002)
    threads = sum(thread.name == "taktline control" for thread in threading.enumerate())
    pipe.send((time.monotonic(), len(plane.connected), threads))
    while not plane.news.gone:
        time.sleep(0.002)
    pipe.send((time.monotonic(), *plane.news.gone))
    pipe.recv()
    os._exit(0)  # so that nobody says goodbye


def measured(size: int, path: str) -> str:
    """A line for so many processes, which meet at a path."""
    context = mp.get_context("fork")
    pipes: list[Any] = []
    processes: list[Any] = []
    for number in range(size):
        here, there = context.Pipe()
        processes.append(context.Process(target=serve, args=(number, size, path, there)))
        processes[-1].start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    begun = time.monotonic()
    for pipe in pipes:
        pipe.send(None)
    met = [pipe.recv() for pipe in pipes]
    time.sleep(1.0)
    victim = size // 2
    struck = time.monotonic()
    os.kill(processes[victim].pid, signal.SIGKILL)
    left = [pipe for number, pipe in enumerate(pipes) if number != victim]
    heard = [pipe.recv() for pipe in left if wait([pipe], SOON)]
    assert [said[1:] for said in heard] == [(victim,)] * (size - 1)
    for pipe in left:
        pipe.send(None)
    for process in processes:
        process.join()
    return (
        f"{size:5} processes   {max(count for _, count, _ in met):3} connections and "
        f"{max(threads for *_, threads in met)} thread each   "
        f"connected after {max(at for at, *_ in met) - begun:5.2f} s   "
        f"all know of a death after {max(at for at, _ in heard) - struck:5.3f} s"
    )


def simulated(size: int) -> str:
    """The same without processes."""
    simulation = Simulation(size)
    rounds = simulation.connect()
    connecting = simulation.messages / size
    simulation.settle()
    before = simulation.messages
    simulation.kill(size // 2)
    hops, _ = simulation.hear_of({size // 2})
    return (
        f"{size:5} simulated   {max(len(p.connected) for p in simulation.planes):3} "
        f"connections and 1 thread each   connected after {rounds:3} rounds, {connecting:.0f} "
        f"messages each   all know of a death after {hops} hops, "
        f"{(simulation.messages - before) / size:.0f} messages each"
    )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--simulated", type=int, nargs="*", default=[256, 1024])
    options = parser.parse_args()
    for size in options.processes:
        with TemporaryDirectory() as folder:
            print(measured(size, f"{folder}/store"), flush=True)
    for size in options.simulated:
        print(simulated(size), flush=True)


if __name__ == "__main__":
    main()
