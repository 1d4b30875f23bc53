"""What a server reads of a namespace: its canonical JSON as clients send it in HELLO, checked, and its id."""

from __future__ import annotations

import msgspec
import xxhash

from kvstore.wire.messages import MAX_BLOCK_BYTES, MAX_NAMESPACE_BYTES, NAMESPACE_VERSION, ErrorCode, WireError


class NamespaceHeader(msgspec.Struct, frozen=True):
    """What a server reads of a namespace's canonical JSON; the rest only has to be equal for bytes to be shared."""

    version: int
    block_bytes: int
    model: str


def decode_namespace(canonical: bytes) -> NamespaceHeader:
    """Check a namespace as a client sent it. `WireError` names what was given and what is expected."""
    if len(canonical) > MAX_NAMESPACE_BYTES:
        raise WireError(
            ErrorCode.LIMIT, f"a namespace of {len(canonical)} bytes: expected at most {MAX_NAMESPACE_BYTES}"
        )
    try:
        canonical.decode()  # the decoder does not look into fields it skips
        header = msgspec.json.decode(canonical, type=NamespaceHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(ErrorCode.PROTOCOL, f"the namespace is not the JSON object expected: {error}") from None
    if header.version != NAMESPACE_VERSION:
        raise WireError(
            ErrorCode.VERSION,
            f"namespace version {header.version}: this server knows version {NAMESPACE_VERSION}",
        )
    if not 1 <= header.block_bytes <= MAX_BLOCK_BYTES:
        raise WireError(ErrorCode.BLOCK_SIZE, f"blocks of {header.block_bytes} bytes: expected 1 to {MAX_BLOCK_BYTES}")
    return header


def namespace_id(canonical: bytes) -> bytes:
    """xxh3-128 of a namespace's canonical JSON: 16 bytes."""
    return xxhash.xxh3_128_digest(canonical)
