"""Whom limits of an address are for. Who has one IPv6 address mostly has all 2^64 of its network, so it is the network
that counts where anybody may come. Plain functions; any thread."""

from __future__ import annotations

import socket
from typing import Final

_MAPPED: Final = bytes(10) + b"\xff\xff"  # an IPv4 address in an IPv6 one: RFC 4291, 2.5.5.2


def network_of(address: str) -> str:
    """-> the /64 of an IPv6 address, as ``2001:db8:0:1::/64``; any other address as it is, and one of IPv4 that an IPv6
    one stands for."""
    if ":" not in address:
        return address
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:
        return address
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"
