"""The control plane at scale: connections, messages and hops, without processes."""

from __future__ import annotations

from contextlib import suppress
from math import log2

import pytest

from taktline.transport.control_plane import PeerFailure
from taktline.transport.links import neighbours
from taktline.transport.news import ENDED, LOST, Cause, Verdict
from tests.transport.simulated import PIPELINE, Simulation


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64, 1000])
def test_neighbours_are_few_and_mutual(size: int) -> None:
    for process in range(size):
        near = neighbours(process, size)
        assert process not in near or size == 1
        assert len(near) <= max(1, 2 * log2(size)) + 1
        assert all(process in neighbours(other, size) for other in near)


@pytest.fixture(scope="module")
def world() -> Simulation:
    simulation = Simulation(64)
    simulation.connect()
    simulation.settle()
    return simulation


@pytest.mark.parametrize("size", [16, 256, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_death_is_heard_of_in_few_hops_and_messages(size: int) -> None:
    simulation = Simulation(size)
    simulation.connect()
    simulation.settle()
    assert all(len(p.connected) <= 2 * log2(size) for p in simulation.planes)
    before = simulation.messages
    simulation.kill(size // 3)
    hops, _ = simulation.hear_of({size // 3})
    assert hops <= log2(size) + 2
    assert (simulation.messages - before) / size <= 2 * log2(size)
    first = size // 3 // PIPELINE * PIPELINE
    group = simulation.alive & {*range(first, first + PIPELINE)}
    simulation.run(lambda: all(simulation.members[process].verdict for process in group))
    for process in simulation.alive:
        verdict = simulation.members[process].verdict
        if process in group:
            assert verdict is not None
            assert (verdict.cause, verdict.process) == (Cause.LOST, size // 3)
        else:
            assert verdict is None


def test_many_deaths_at_once(world: Simulation) -> None:
    deaths = {*range(8, 16), 40, 41, 63}
    for process in deaths:
        world.kill(process)
    world.hear_of(deaths)
    assert all(
        {p: how for p, how in world.planes[process].news.gone.items() if p in deaths}
        == dict.fromkeys(deaths, LOST)
        for process in world.alive
    )


def test_an_end_in_order_is_known_to_all_and_no_fault(world: Simulation) -> None:
    world.planes[30].send("gone", 30, ENDED)
    world.settle()
    world.kill(30)
    world.hear_of({30})
    assert {world.planes[process].news.gone[30] for process in world.alive} == {ENDED}


def test_a_verdict_reaches_its_group_past_those_who_are_stopped(world: Simulation) -> None:
    stopped = {49, 50, 52}
    world.alive -= stopped
    world.planes[48].announce(Verdict(Cause.RAISED, 48, "ValueError"))
    group = [p for p in world.members[48].processes if p in world.alive]
    world.run(lambda: all(world.members[p].verdict for p in group))
    world.alive |= stopped
    world.run(lambda: all(world.members[p].verdict for p in stopped))


def test_who_has_come_is_heard_of_past_those_who_have_died() -> None:
    world = Simulation(64)
    world.connect()
    world.settle()
    for process in (33, 34, 36):  # the way from 32 to 37 in few hops
        world.kill(process)
    with suppress(PeerFailure):
        world.planes[32].meet(world.members[32], 0.0)
    world.run(lambda: 32 in world.planes[37]._at(world.members[37].place).come)


def test_who_asks_hears_of_all_and_of_those_who_are_silent() -> None:
    world = Simulation(64)
    for process, plane in enumerate(world.planes):
        plane.news.state = lambda process=process: (f"{process}F0", True)
    world.connect()
    world.settle()
    world.alive.remove(40)  # it is stopped
    world.run(lambda: world.time > 5.0)
    before = world.messages
    for asking in (0, 7):
        world.planes[asking].send("ask", asking, 100 + asking)
    heard = [world.planes[asking].news.heard for asking in (0, 7)]
    world.run(lambda: all(len(each) == 63 for each in heard))
    assert (world.messages - before) / 64 < 8 * 11  # batches: not one for each state and neighbour
    report = world.planes[0].news.stalled(range(64), [1], "activations")
    assert report.process == 40
    assert "rank 40: silent for 4 seconds (stopped, or cut off); then: 40F0" in report.text
    assert "rank 39: 39F0\n" in report.text
