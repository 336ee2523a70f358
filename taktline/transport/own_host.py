"""The address under which other hosts reach this one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path

from torch.distributed.distributed_c10d import Store

_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR
_V6_INTERFACES = Path("/proc/net/if_inet6")
_GLOBAL = "00"
"""The scope of an address that other hosts reach without naming an interface."""


def own_host(store: Store) -> str:
    """An address of the interface in GLOO_SOCKET_IFNAME, or of the route to the store.

    IPv4, if there is such an address or route, and IPv6 otherwise.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    routes = [route for host, port in hosts_of(store) for route in _routes(host, port)]
    found = list(_addresses_of(interface))
    # Of an interface that has both, the kind by which the store is reached.
    found.sort(key=lambda address: bool(routes) and (":" in address) != (":" in routes[0]))
    return [*found, *routes, "127.0.0.1" if _can_listen("127.0.0.1") else "::1"][0]


def hosts_of(store: Store) -> Iterator[tuple[str, int]]:
    """Where the store is, and the master, which the store may not name."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store  # pyright: ignore[reportAttributeAccessIssue]
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        yield host, port
    master, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if master and port.isdecimal():
        yield master, int(port)


def _routes(host: str, port: int) -> Iterator[str]:
    """This host's address on the way to another one."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, UnicodeError):
            at = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(at)  # sends nothing
                yield probe.getsockname()[0]


def _addresses_of(interface: str) -> Iterator[str]:
    """The addresses of an interface, IPv4 first."""
    if not interface:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        yield socket.inet_ntoa(fcntl.ioctl(probe, _INTERFACE_ADDRESS, request)[20:24])
    with suppress(OSError):
        rows = [line.split() for line in _V6_INTERFACES.read_text().splitlines()]
        for digits, _, _, scope, _, name in sorted(rows, key=lambda row: row[3] != _GLOBAL):
            if name == interface:
                address = str(IPv6Address(int(digits, 16)))
                yield f"{address}%{name}" if scope == "20" else address


def _can_listen(host: str) -> bool:
    with suppress(OSError), socket.create_server((host, 0)):
        return True
    return False
