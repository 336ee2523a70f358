"""The control plane at scale: connections, messages and hops, without processes."""

from __future__ import annotations

from math import log2

import pytest

from taktline.transport.control_links import nearest, neighbours
from taktline.transport.control_news import ENDED, LOST
from taktline.transport.verdict import Cause, Verdict
from tests.transport.simulated import PIPELINE, Simulation


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64, 1000])
def test_neighbours_are_few_and_mutual(size: int) -> None:
    for process in range(size):
        near = neighbours(process, size)
        assert process not in near or size == 1
        assert len(near) <= max(1, 2 * log2(size)) + 1
        assert all(process in neighbours(other, size) for other in near)


@pytest.mark.parametrize("size", [2, 6, 13, 64, 1000])
def test_every_way_is_short(size: int) -> None:
    for target in range(1, size):
        at, hops = 0, 0
        while at != target:
            near = neighbours(at, size)
            found = target if target in near else nearest(target, near, at, size)
            assert found is not None
            at, hops = found, hops + 1
        assert hops <= max(1, log2(size))


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
    assert all(len(p._links.connected) <= 2 * log2(size) for p in simulation.planes)
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
    world.planes[30]._say_goodbye()
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


def test_a_value_reaches_far_processes_once() -> None:
    world = Simulation(64)
    world.planes[0].post([0, 3, 33, 63], "here", "early")
    world.connect()
    world.planes[63].post([0, 3, 33, 63], "here", "late")
    told = {0: "early", 63: "late"}
    world.run(lambda: all(world.planes[p].told("here") == told for p in (0, 3, 33, 63)))
    assert not world.planes[5].told("here")


def test_a_value_is_not_lost_with_who_was_to_pass_it_on() -> None:
    world = Simulation(64)
    world.connect()
    world.settle()
    way = nearest(33, neighbours(0, 64), 0, 64)
    assert way is not None
    world.planes[0].post([33], "here", "a value")
    world.planes[0].turn()
    world.kill(way)
    world.run(lambda: world.planes[33].told("here") == {0: "a value"})


def test_who_asks_hears_of_all_and_of_those_who_are_silent() -> None:
    world = Simulation(64)
    for process, plane in enumerate(world.planes):
        plane.state = lambda process=process: (f"{process}F0", True)
    world.connect()
    world.alive.remove(40)  # it is stopped
    world.run(lambda: world.time > 5.0)
    before = world.messages
    for asking in (0, 7):
        asks = world.planes[asking]
        asks._hear(("ask", next(asks._numbers)), asking)
        asks._routes.spread()
    heard = [world.planes[asking].news.heard for asking in (0, 7)]
    world.run(lambda: all(len(each) == 63 for each in heard))
    assert (world.messages - before) / 64 < 8 * 11  # batches: not one for each state and neighbour
    report = world.planes[0].news.stalled(range(64), [1], "activations")
    assert report.process == 40
    assert "rank 40: silent for 4 seconds (stopped, or cut off); then: 40F0" in report.text
    assert "rank 39: 39F0\n" in report.text
