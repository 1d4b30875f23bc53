"""Finds the network to which an address belongs. A client with one IPv6 address usually has all 2^64 addresses of its
network. So connections of clients that have not logged in are counted per network, not per address. Thread-safe."""

from __future__ import annotations

import socket
from typing import Final

_MAPPED: Final = bytes(10) + b"\xff\xff"  # an IPv4 address in an IPv6 one: RFC 4291, 2.5.5.2


def network_of(address: str) -> str:
    """Return the /64 network of an IPv6 address, such as ``2001:db8:0:1::/64``. For an IPv6 address that contains an
    IPv4 address, return the IPv4 address. Return any other address unchanged."""
    if ":" not in address:
        return address
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:
        return address
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"
