"""Makes tokens, and makes and checks the hashes of tokens that the file keeps.

A token is ``kvs_NAME.SECRET``; the secret has 256 random bits. The file keeps the token's HMAC-SHA256, whose key is a
salt. A quick hash is enough, because 256 bits cannot be guessed even if each guess is cheap. With a quick hash, a
client with a token does not wait behind clients that guess. Files of earlier releases have scrypt hashes (RFC 7914),
which take about 10 ms each.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from typing import Final

PRINCIPAL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the names of principals and tenants
MAX_TOKEN_BYTES: Final = 256
TOKEN_PREFIX: Final = "kvs_"  # so that secret scanners find tokens
_SECRET_BYTES: Final = 32
_SALT_BYTES: Final = 16
_QUICK: Final = "sha256"
_MAX_COST: Final = (1 << 17, 32, 16)  # the highest cost of a hash in a file, because one check must not stop the server
_MEMORY: Final = 256 << 20


def make_token(name: str) -> str:
    """Return a new token for the principal of this name."""
    return f"{TOKEN_PREFIX}{name}.{secrets.token_urlsafe(_SECRET_BYTES)}"


def name_in(token: bytes) -> str:
    """Return the name of the principal in a token, or an empty string if `token` is not a token."""
    if len(token) > MAX_TOKEN_BYTES:
        return ""
    text = token.decode("ascii", "replace")
    name, dot, _ = text.removeprefix(TOKEN_PREFIX).partition(".")
    return name if dot and text.startswith(TOKEN_PREFIX) and PRINCIPAL_NAME.fullmatch(name) else ""


def hash_token(token: str) -> str:
    """Return the text that the file keeps for a token: ``sha256:SALT:HASH``, in base64."""
    salt = secrets.token_bytes(_SALT_BYTES)
    hashed = hmac.digest(salt, token.encode(), _QUICK)
    return f"{_QUICK}:{base64.b64encode(salt).decode()}:{base64.b64encode(hashed).decode()}"


def check_hash(kept: str) -> None:
    """Raise `ValueError` unless this hash has the form that `hash_token` makes now, or made in an earlier release. The
    message does not repeat the hash."""
    _parse(kept)


def is_quick(kept: str) -> bool:
    """Return whether comparing a token with this hash takes microseconds, not about 10 ms."""
    return kept.startswith(f"{_QUICK}:")


def matches(token: bytes, kept: str) -> bool:
    """Return whether this token has that hash. The call takes the same time for any token, and scrypt releases the
    GIL."""
    cost, salt, hashed = _parse(kept)
    if cost is None:
        given = hmac.digest(salt, token, _QUICK)
    else:
        n, r, p = cost
        given = hashlib.scrypt(token, salt=salt, n=n, r=r, p=p, maxmem=_MEMORY, dklen=len(hashed))
    return hmac.compare_digest(given, hashed)


def _parse(kept: str) -> tuple[tuple[int, int, int] | None, bytes, bytes]:
    """Return the cost of scrypt (None for the quick hash), the salt, and the hash."""
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
    fits = all(1 <= given <= most for given, most in zip((n, r, p), _MAX_COST, strict=True))
    fits = fits and n > 1 and n & (n - 1) == 0 and 128 * n * r < _MEMORY
    if kind != "scrypt" or not fits or len(parsed[0]) < 8 or not 16 <= len(parsed[1]) <= 64:
        raise ValueError(
            f"expected scrypt with N (a power of two), r and p of at most {_MAX_COST}, less than {_MEMORY >> 20} MiB "
            "of memory, and 8 or more bytes of salt"
        )
    return (n, r, p), *parsed
