"""Tokens: how they are made, and how they are kept.

A token is ``kvs_NAME.SECRET``; the secret has 256 random bits. The file keeps its scrypt hash (RFC 7914). The hash is
cheap as such hashes go (4 MiB, about 10 ms), because nobody can guess 256 bits, however cheap each guess is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of principals and tenants
MAX_TOKEN_BYTES: Final = 256
PREFIX: Final = "kvs_"  # so that scanners for secrets find tokens
_SECRET_BYTES: Final = 32
_SALT_BYTES: Final = 16
_COST: Final = (4096, 8, 1)
_MOST: Final = (1 << 17, 32, 16)  # of a hash that a file gives: one check must not stop the server
_MEMORY: Final = 256 << 20


def make_token(name: str) -> str:
    """-> a new token of the principal of this name."""
    return f"{PREFIX}{name}.{secrets.token_urlsafe(_SECRET_BYTES)}"


def name_in(token: bytes) -> str:
    """-> the principal whose token this says it is; empty if it is no token."""
    if len(token) > MAX_TOKEN_BYTES:
        return ""
    text = token.decode("ascii", "replace")
    name, dot, _ = text.removeprefix(PREFIX).partition(".")
    return name if dot and text.startswith(PREFIX) and NAME.fullmatch(name) else ""


def hash_token(token: str) -> str:
    """-> what the file keeps of a token: ``scrypt:N:r:p:SALT:HASH``, in base64."""
    n, r, p = _COST
    salt = secrets.token_bytes(_SALT_BYTES)
    hashed = hashlib.scrypt(token.encode(), salt=salt, n=n, r=r, p=p, maxmem=_MEMORY)
    return f"scrypt:{n}:{r}:{p}:{base64.b64encode(salt).decode()}:{base64.b64encode(hashed).decode()}"


def check_hash(kept: str) -> None:
    """Raise `ValueError` unless this is what `hash_token` makes. The message does not repeat it."""
    _parse(kept)


def matches(token: bytes, kept: str) -> bool:
    """Whether this is the token of that hash. Takes about 10 ms, without the interpreter's lock; compares in constant
    time."""
    n, r, p, salt, hashed = _parse(kept)
    given = hashlib.scrypt(token, salt=salt, n=n, r=r, p=p, maxmem=_MEMORY, dklen=len(hashed))
    return hmac.compare_digest(given, hashed)


def _parse(kept: str) -> tuple[int, int, int, bytes, bytes]:
    try:
        kind, n, r, p, salt, hashed = kept.split(":")
        cost = int(n), int(r), int(p)
        parsed = base64.b64decode(salt, validate=True), base64.b64decode(hashed, validate=True)
    except (ValueError, binascii.Error):
        raise ValueError("expected scrypt:N:r:p:SALT:HASH, as `kvstore auth add` writes it") from None
    fits = all(1 <= given <= most for given, most in zip(cost, _MOST, strict=True))
    fits = fits and cost[0] > 1 and cost[0] & (cost[0] - 1) == 0 and 128 * cost[0] * cost[1] < _MEMORY
    if kind != "scrypt" or not fits or len(parsed[0]) < 8 or not 16 <= len(parsed[1]) <= 64:
        raise ValueError(
            f"expected scrypt with N (a power of two), r and p of at most {_MOST}, in {_MEMORY >> 20} MiB, and 8 bytes "
            "of salt"
        )
    return (*cost, *parsed)
