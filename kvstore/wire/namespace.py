"""Decodes namespaces on the server: checks the canonical JSON that clients send in HELLO, and computes the namespace's
id."""

from __future__ import annotations

import msgspec
import xxhash

from kvstore.wire.messages import MAX_BLOCK_BYTES, MAX_NAMESPACE_BYTES, NAMESPACE_VERSION, ErrorCode, WireError


class _Extra(msgspec.Struct, frozen=True):
    block_mac: str = ""


class NamespaceHeader(msgspec.Struct, frozen=True):
    """The fields of a namespace's canonical JSON that a server uses. Clients share blocks only if all fields of their
    namespaces are equal."""

    version: int
    block_bytes: int
    model: str
    tenant: str = ""
    extra: _Extra = _Extra()

    @property
    def opaque_sums(self) -> bool:
        """Whether the blocks' checksums are MACs, which only clients with the secret can check."""
        return bool(self.extra.block_mac)


_header_decoder = msgspec.json.Decoder(NamespaceHeader)


def decode_namespace(canonical: bytes) -> NamespaceHeader:
    """Check a namespace from a client. Raises `WireError`, which says what was given and what is expected."""
    if len(canonical) > MAX_NAMESPACE_BYTES:
        raise WireError(
            ErrorCode.LIMIT, f"a namespace of {len(canonical)} bytes: expected at most {MAX_NAMESPACE_BYTES}"
        )
    try:
        canonical.decode()  # the JSON decoder does not check UTF-8 in fields that it skips
        header = _header_decoder.decode(canonical)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(ErrorCode.PROTOCOL, f"the namespace is not the expected JSON object: {error}") from None
    if header.version != NAMESPACE_VERSION:
        raise WireError(
            ErrorCode.VERSION,
            f"namespace version {header.version}: this server knows version {NAMESPACE_VERSION}",
        )
    if not 1 <= header.block_bytes <= MAX_BLOCK_BYTES:
        raise WireError(ErrorCode.BLOCK_SIZE, f"blocks of {header.block_bytes} bytes: expected 1 to {MAX_BLOCK_BYTES}")
    return header


def namespace_id(canonical: bytes) -> bytes:
    """Return the xxh3-128 of a namespace's canonical JSON, 16 bytes."""
    return xxhash.xxh3_128_digest(canonical)
