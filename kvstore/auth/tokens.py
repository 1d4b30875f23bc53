"""Tokens: how they are made, and how they are kept.

A token is ``kvs_NAME.SECRET``; the secret has 256 random bits. The file keeps its HMAC-SHA256, whose key is a salt: a
quick hash will do, because nobody can guess 256 bits, however cheap each guess is, and who has a token does not wait
behind those who guess. Files of earlier releases have scrypt hashes (RFC 7914), which take about 10 ms each.
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
_QUICK: Final = "sha256"
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
    """-> what the file keeps of a token: ``sha256:SALT:HASH``, in base64."""
    salt = secrets.token_bytes(_SALT_BYTES)
    hashed = hmac.digest(salt, token.encode(), _QUICK)
    return f"{_QUICK}:{base64.b64encode(salt).decode()}:{base64.b64encode(hashed).decode()}"


def check_hash(kept: str) -> None:
    """Raise `ValueError` unless this is what `hash_token` makes, or made. The message does not repeat it."""
    _parse(kept)


def is_quick(kept: str) -> bool:
    """Whether a token is compared with this hash in microseconds, not in about 10 ms."""
    return kept.startswith(f"{_QUICK}:")


def matches(token: bytes, kept: str) -> bool:
    """Whether this is the token of that hash. Takes the same time for any token; scrypt works without the GIL."""
    cost, salt, hashed = _parse(kept)
    if cost is None:
        given = hmac.digest(salt, token, _QUICK)
    else:
        n, r, p = cost
        given = hashlib.scrypt(token, salt=salt, n=n, r=r, p=p, maxmem=_MEMORY, dklen=len(hashed))
    return hmac.compare_digest(given, hashed)


def _parse(kept: str) -> tuple[tuple[int, int, int] | None, bytes, bytes]:
    """-> what scrypt costs, None for the quick hash; salt; hash."""
    kind, *numbers = kept.split(":")
    try:
        *given_cost, salt, hashed = numbers
        parsed = base64.b64decode(salt, validate=True), base64.b64decode(hashed, validate=True)
        if kind == _QUICK and not given_cost and len(parsed[0]) >= 8 and len(parsed[1]) == 32:
            return None, *parsed
        n, r, p = map(int, given_cost)
    except (ValueError, binascii.Error):
        raise ValueError(
            f"expected {_QUICK}:SALT:HASH, as `kvstore auth add` writes it, or scrypt:N:r:p:SALT:HASH"
        ) from None
    fits = all(1 <= given <= most for given, most in zip((n, r, p), _MOST, strict=True))
    fits = fits and n > 1 and n & (n - 1) == 0 and 128 * n * r < _MEMORY
    if kind != "scrypt" or not fits or len(parsed[0]) < 8 or not 16 <= len(parsed[1]) <= 64:
        raise ValueError(
            f"expected scrypt with N (a power of two), r and p of at most {_MOST}, in {_MEMORY >> 20} MiB, and 8 bytes "
            "of salt"
        )
    return (n, r, p), *parsed
