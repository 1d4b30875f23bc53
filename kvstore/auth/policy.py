"""Reads and checks the file of ``--auth``, which lists principals with hashed tokens, and tenants with limits.

The file is read again when it changes. If a new version of the file cannot be used, it is refused as a whole, and the
last valid one stays in force. All classes are plain data, except `AuthFile`, which only one thread may use.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstore.auth.rights import EVERY_TENANT, Rights, verbs_of
from kvstore.auth.tokens import MAX_TOKEN_BYTES, PRINCIPAL_NAME, check_hash, is_quick, matches, name_in
from kvstore.secret_files import open_regular
from kvstore.sizes import parse_size
from kvstore.wire import RIGHTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger("kvstore.auth")

MAX_FILE_BYTES: Final = 4 << 20
MAX_TOKENS: Final = 4  # per principal, because a login may have to check each of them
MIN_SECRET: Final = 32
MAX_LIMIT: Final = (1 << 63) - 1  # the highest value of any limit
# Matches a key with many parts. The parser's time grows with the square of their number: it was 14 s for a key of
# 60 KB. No valid key has three parts.
_LONG_KEY: Final = re.compile(r"(?:^|[\[{,])[ \t]*(?:[\w-]+[ \t]*\.[ \t]*){8}", re.MULTILINE | re.ASCII)
_SIZES: Final = ("memory", "memory_guaranteed", "disk", "transient", "pinned")


class AuthFileError(Exception):
    """The file cannot be used. The message names the file and says what is wrong. It contains no token or hash."""


class _Principal(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    tenant: str
    verbs: list[str]
    tokens: list[str]
    namespaces: list[str] = msgspec.field(default_factory=lambda: ["*"])


class _Limits(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    memory: str | int | None = None
    memory_guaranteed: str | int = 0
    disk: str | int | None = None
    transient: str | int | None = None
    pinned: str | int | None = None
    connections: int | None = None
    requests_per_s: float | None = None
    bytes_per_s: str | int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    principals: list[_Principal] = []
    tenants: dict[str, _Limits] = {}
    member_secret: str = ""


msgspec.convert({}, _File)  # msgspec crashes when two threads are the first to use a type at the same time


@dataclass(frozen=True)
class Limits:
    """What a tenant may use of a node, in bytes and per second. None means no limit.

    `memory_guaranteed`: the memory that other tenants cannot evict. `pinned`: the memory that the tenant's clients may
    pin.
    """

    memory: int | None = None
    memory_guaranteed: int = 0
    disk: int | None = None
    transient: int | None = None
    pinned: int | None = None
    connections: int | None = None
    requests_per_s: float | None = None
    bytes_per_s: int | None = None


NO_LIMITS: Final = Limits()
# A hash that no token has. It is checked for a name that is unknown, so that this takes as long as for a known name.
_NOBODYS: Final = "scrypt:4096:8:1:bm9ib2R5IGhhcyBpdA==:bm9ib2R5IGhhcyB0aGlzIHRva2VuLCBhdCBhbGwhISE="


@dataclass(frozen=True)
class Principal:
    """One principal of the file."""

    rights: Rights
    tokens: tuple[str, ...]  # hashes


@dataclass(frozen=True)
class Policy:
    """The content of the file."""

    principals: dict[str, Principal]
    tenants: dict[str, Limits]
    member_secret: str = ""
    slow: bool = False  # whether some of the hashes take long to check

    def recognize(self, token: bytes) -> tuple[Rights, str] | None:
        """Return the rights that belong to this token, and the hash that the token matches. Return None if it matches
        no hash that is quick to check. The call takes microseconds. Thread-safe."""
        principal = self.principals.get(name_in(token))
        if principal is not None:
            for kept in filter(is_quick, principal.tokens):
                if matches(token, kept):
                    return principal.rights, kept
        return None

    def login(self, token: bytes) -> tuple[Rights, str] | None:
        """Do the same as `recognize`, but check slow hashes as well. If the policy is `slow`, this takes 10 ms or more,
        even for unknown names. Thread-safe."""
        found = self.recognize(token)
        if found is not None or not self.slow:
            return found
        principal = self.principals.get(name_in(token))
        slow = [kept for kept in principal.tokens if not is_quick(kept)] if principal is not None else []
        for kept in slow or [_NOBODYS]:
            right = matches(token[:MAX_TOKEN_BYTES], kept)
            if right and principal is not None:
                return principal.rights, kept
        return None

    def rights_of(self, name: str, kept: str) -> Rights | None:
        """Return the rights of a principal that has logged in with the token of this hash, or None if the principal no
        longer has that token."""
        principal = self.principals.get(name)
        return principal.rights if principal is not None and kept in principal.tokens else None

    @property
    def tenant_names(self) -> set[str]:
        """The tenants that the file names, either with limits or in a principal."""
        named = {principal.rights.tenant for principal in self.principals.values()}
        return (named | self.tenants.keys()) - {EVERY_TENANT}

    def limits_of(self, tenant: str) -> Limits:
        """Return the limits of a tenant."""
        return self.tenants.get(tenant, NO_LIMITS)


def member_cookie(secret: str, node: str, host: str, port: int) -> str:
    """Return the cookie that members show to the node of this id at this address. A node that receives a cookie cannot
    compute another cookie from it. A node that takes another node's id gets a cookie that the real node does not
    accept, because the address differs."""
    return hmac.new(secret.encode(), f"kvstore member {node} {host}:{port}".encode(), "sha256").hexdigest()


def parse_policy(text: str, where: str) -> Policy:
    """Return the policy in a file's text. `where`: the file's name, for error messages. Raises `AuthFileError`."""
    if _LONG_KEY.search(text):
        raise AuthFileError(f"{where}: a key has more than eight parts: expected keys such as [tenants.NAME]")
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except msgspec.ValidationError as error:
        raise AuthFileError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:  # raised for numbers with thousands of digits and for deep tables
        raise AuthFileError(f"{where}: not TOML: {error}") from None
    if file.member_secret and len(file.member_secret) < MIN_SECRET:
        raise AuthFileError(
            f"{where}: member_secret has {len(file.member_secret)} characters: expected {MIN_SECRET} or more random "
            "characters"
        )
    principals: dict[str, Principal] = {}
    for number, given in enumerate(file.principals, 1):
        principal = _principal(given, f"{where}: principal {number} ({given.name!r})")
        if given.name in principals:
            raise AuthFileError(f"{where}: two principals are named {given.name!r}: expected different names")
        principals[given.name] = principal
    return Policy(
        principals,
        {name: _limits(name, limits, f"{where}: tenant {name!r}") for name, limits in file.tenants.items()},
        file.member_secret,
        any(not is_quick(kept) for principal in principals.values() for kept in principal.tokens),
    )


def _principal(given: _Principal, where: str) -> Principal:
    if not PRINCIPAL_NAME.fullmatch(given.name):
        raise AuthFileError(f"{where}: expected a name of 1 to 64 letters, digits, '_' and '-'")
    check_tenant(given.tenant, where)
    if not given.verbs:
        raise AuthFileError(f"{where}: no verbs are given: expected one or more of {', '.join(RIGHTS)}")
    if not given.namespaces:
        raise AuthFileError(f'{where}: no namespaces are given: expected patterns of model names, or ["*"] for all')
    if not 1 <= len(given.tokens) <= MAX_TOKENS:
        raise AuthFileError(f"{where}: {len(given.tokens)} tokens: expected 1 to {MAX_TOKENS}")
    for number, kept in enumerate(given.tokens, 1):
        try:
            check_hash(kept)
        except ValueError as error:
            raise AuthFileError(f"{where}: token {number}: {error}") from None
    try:
        verbs = verbs_of(given.verbs)
    except ValueError as error:
        raise AuthFileError(f"{where}: {error}") from None
    return Principal(Rights(given.name, given.tenant, verbs, tuple(given.namespaces)), tuple(given.tokens))


def check_tenant(tenant: str, where: str) -> None:
    """Raise `AuthFileError` unless this is a tenant's name, or the name that stands for all tenants."""
    if tenant != EVERY_TENANT and not PRINCIPAL_NAME.fullmatch(tenant):
        raise AuthFileError(
            f"{where}: tenant {tenant!r}: expected 1 to 64 letters, digits, '_' and '-', or '{EVERY_TENANT}' for all"
        )


def _limits(name: str, given: _Limits, where: str) -> Limits:
    if not PRINCIPAL_NAME.fullmatch(name):
        raise AuthFileError(f"{where}: expected a name of 1 to 64 letters, digits, '_' and '-'")
    values: dict[str, Any] = {}
    for field in (*_SIZES, "bytes_per_s"):
        value = getattr(given, field)
        if value is None:
            continue
        try:
            values[field] = value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            raise AuthFileError(f"{where}: {field}: {error}") from None
    for field in ("connections", "requests_per_s"):
        values[field] = getattr(given, field)
    for field, value in values.items():
        if value is not None and not 0 <= value <= MAX_LIMIT:  # also refuses nan
            raise AuthFileError(f"{where}: {field} is {value}: expected 0 or more, and at most {MAX_LIMIT}")
    limits = Limits(**values)
    if limits.memory is not None and limits.memory_guaranteed > limits.memory:
        raise AuthFileError(
            f"{where}: memory_guaranteed {limits.memory_guaranteed} is more than memory {limits.memory}"
        )
    return limits


class AuthFile:
    """The file of ``--auth``. `policy` is the policy in force. At first, it is the policy that was read when this
    object was made. The owner of this object may replace it."""

    def __init__(self, path: str | Path) -> None:
        """Read the file. Raises `AuthFileError`."""
        self.path = Path(path)
        self._seen: tuple[int, ...] = ()
        self.policy = self._latest = self._read()

    def read_again(self, asked: bool = False) -> Policy | None:
        """Read the file if it has changed or if `asked`, and return its policy. Return None if the file is unchanged or
        cannot be used. A file that cannot be used is logged. The call may take long. Only one thread at a time may call
        it."""
        if not asked and self._stamp() == self._seen:
            return None
        try:
            policy = self._read()
        except AuthFileError as error:
            log.error("%s; the previous policy stays in force", error)
            return None
        if policy == self._latest:
            return None
        self._latest = policy
        return policy

    def _stamp(self) -> tuple[int, ...]:
        try:
            status = os.stat(self.path)
        except OSError:
            return ()
        return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def _read(self) -> Policy:
        self._seen = self._stamp()  # before reading, so that a change meanwhile is noticed next time
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
                    raise AuthFileError(
                        f"{self.path}: its mode is {stat.S_IMODE(status.st_mode):o}, so others may read or change it: "
                        "run chmod 600 on it"
                    )
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                size = max(status.st_size, len(data))
                raise AuthFileError(f"{self.path}: {size} bytes: expected at most {MAX_FILE_BYTES}")
            text = data.decode()
        except OSError as error:
            raise AuthFileError(
                f"{self.path}: {error.strerror}: expected a file as `kvstore auth add` makes it"
            ) from None
        except UnicodeDecodeError as error:
            raise AuthFileError(f"{self.path}: not UTF-8: {error}") from None
        if not text.strip():
            raise AuthFileError(f"{self.path}: it is empty: expected a file as `kvstore auth add` makes it")
        return parse_policy(text, str(self.path))
