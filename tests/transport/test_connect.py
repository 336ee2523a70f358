"""Connections between processes: without TCP on one host, over TCP between two."""

from __future__ import annotations

import socket
import sys

import pytest

from taktline.transport.sockets import Address, Listener, call, purpose_of

SOON = 20.0
PURPOSE = purpose_of("a test")


def connected(listener: Listener, address: Address) -> list[socket.socket]:
    """Both ends of a connection, once data has gone both ways."""
    caller = call(address, PURPOSE, 7, SOON)
    [(purpose, number, called)] = listener.accept(SOON)
    assert (purpose, number) == (PURPOSE, 7)
    ends = [caller, called]
    for sender, receiver in (ends, ends[::-1]):
        sender.sendall(b"hello")
        receiver.settimeout(SOON)
        assert receiver.recv(9) == b"hello"
    return ends


def families(ends: list[socket.socket]) -> set[socket.AddressFamily]:
    found = {socket.AddressFamily(end.family) for end in ends}
    for end in ends:
        end.close()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has names without files")
def test_processes_on_one_host_are_connected_without_tcp() -> None:
    with Listener("127.0.0.1") as listener:
        assert families(connected(listener, listener.address)) == {socket.AF_UNIX}


@pytest.mark.parametrize("name", ["", "on-another-host"])
def test_processes_on_two_hosts_are_connected_over_tcp(name: str) -> None:
    with Listener("127.0.0.1") as listener:
        elsewhere = (*listener.address[:3], name)
        assert families(connected(listener, elsewhere)) == {socket.AF_INET}
