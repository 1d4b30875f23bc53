"""Headers of one hop, which go no further (RFC 9110, section 7.6.1), and of how a body is sent, which is done anew."""

from __future__ import annotations

from typing import Final

OF_A_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length"),
    }
)


def of_this_hop(connection: str) -> frozenset[str]:
    """-> the names, in small letters, that are not passed on. `connection`: that header, which may name more."""
    return OF_A_HOP | {each.strip().lower() for each in connection.split(",")}
