"""The headers that the proxy does not pass on: those of one hop (RFC 9110, section 7.6.1), and those about the encoding
of the body, which are set anew."""

from __future__ import annotations

from typing import Final

OF_A_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length"),
    }
)


def of_this_hop(connection: str) -> frozenset[str]:
    """Return the names, in lower case, of the headers that are not passed on. `connection`: the header that may name
    more of them."""
    return OF_A_HOP | {each.strip().lower() for each in connection.split(",")}
