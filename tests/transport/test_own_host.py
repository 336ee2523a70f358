"""The address at which a process listens: that of the interface, or of the route to the store."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from taktline.transport import sockets as module
from taktline.transport.control_plane import Plane
from taktline.transport.sockets import own_host
from tests.transport.test_control_plane import meet


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def store_at(host: str) -> TCPStore:
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=IPV6), "localhost"])
def test_the_route_to_the_store(host: str) -> None:
    found = own_host(PrefixStore("group", PrefixStore("job", store_at(host))))
    assert found == (host if host != "localhost" else "127.0.0.1")


@IPV6
def test_planes_over_ipv6() -> None:
    store = store_at("::1")
    planes = [Plane(store, process, 3, "test") for process in range(3)]
    try:
        assert {plane.address[0] for plane in planes} == {"::1"}
        meet(planes, [0, 1, 2])
    finally:
        for plane in planes:
            plane.close()


def test_a_store_without_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_host(HashStore()) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "::1" if has_ipv6() else "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert own_host(HashStore()) == ("::1" if has_ipv6() else "127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "." * 99)
    assert own_host(HashStore()) == "127.0.0.1"
    monkeypatch.setattr(module, "_can_listen", lambda host: False)
    assert own_host(HashStore()) == "::1"


@pytest.mark.skipif(not Path("/sys/class/net/lo").exists(), reason="no interface lo")
def test_the_interface_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert own_host(store_at("127.0.0.1")) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    assert own_host(store_at("127.0.0.1")) == "127.0.0.1"
