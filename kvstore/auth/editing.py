"""Changes the file of ``--auth``: adds principals and replaces tokens. The rest of the text stays, including comments.

A file is replaced as a whole, under a lock, and only after the new text was parsed and has the intended meaning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvstore.auth.policy import MAX_TOKENS, AuthFileError, Policy, check_tenant, parse_policy
from kvstore.auth.rights import EVERY_TENANT, verbs_of
from kvstore.auth.tokens import PRINCIPAL_NAME, hash_token, make_token
from kvstore.sizes import spell_size

HEADER: Final = """\
# Who may use a kvstore server: kvstore-server --auth THIS_FILE. `kvstore auth add` adds a principal,
# `kvstore auth rotate` gives one a new token. Servers read the file again when it changes. Keep it readable by the
# server alone.

# What the members of a cluster show each other: the same on every node.
member_secret = "{secret}"
"""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing the file while the body runs."""
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise AuthFileError(f"{path}: {error.strerror}: expected a file in a folder that exists") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise AuthFileError(
            f"{path}: no such file: expected the file of --auth, as `kvstore auth add` makes it"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise AuthFileError(f"{path}: {error}") from None


def _replace(path: Path, text: str) -> None:
    """Write the file, and keep its mode and its owner. A new file can be accessed only by its owner."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        status = os.stat(path) if path.exists() else None
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                if status is not None:
                    os.fchmod(fd, status.st_mode & 0o7777)
                    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                        os.fchown(fd, status.st_uid, status.st_gid)
                file.write(text)
                file.flush()
                os.fsync(fd)
            os.replace(beside, path)
        except BaseException:
            beside.unlink()
            raise
    except OSError as error:
        raise AuthFileError(f"{path}: cannot be written: {error.strerror}") from None


def add(
    path: Path,
    name: str,
    tenant: str,
    verbs: Sequence[str],
    namespaces: Sequence[str] = ("*",),
    quota_bytes: int | None = None,
) -> str:
    """Add a principal, and create the file if there is none. Return the principal's token.

    `quota_bytes`: the most memory that the principal's tenant may use. Raises `AuthFileError` if the file cannot be
    used or already has the principal, and `ValueError` for a wrong argument.
    """
    if not PRINCIPAL_NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: expected 1 to 64 letters, digits, '_' and '-'")
    try:
        check_tenant(tenant, "given")
    except AuthFileError as error:
        raise ValueError(str(error)) from None
    if not verbs:
        raise ValueError("no verbs are given: expected one or more, such as read,write")
    verbs_of(list(verbs))
    token = make_token(name)
    with _locked(path):
        text = _read(path) if path.exists() else HEADER.format(secret=secrets.token_hex(32))
        policy = parse_policy(text, str(path))
        if name in policy.principals:
            raise AuthFileError(f"{path}: principal {name!r} exists: give it a new token with `kvstore auth rotate`")
        lines = [
            text.rstrip("\n"),
            "",
            "[[principals]]",
            f"name = {json.dumps(name)}",
            f"tenant = {json.dumps(tenant)}",
            f"verbs = {json.dumps(list(verbs))}",
            f"namespaces = {json.dumps(list(namespaces))}",
            f"tokens = [{json.dumps(hash_token(token))}]",
        ]
        if quota_bytes is not None:
            lines += _quota(policy, tenant, quota_bytes, path)
        text = "\n".join(lines) + "\n"
        parse_policy(text, str(path))
        _replace(path, text)
    return token


def _quota(policy: Policy, tenant: str, quota_bytes: int, path: Path) -> list[str]:
    if tenant == EVERY_TENANT:
        raise ValueError("a quota applies to one tenant: expected the tenant's name in --tenant")
    limits = policy.tenants.get(tenant)
    if limits is None:
        return ["", f"[tenants.{tenant}]", f"memory = {json.dumps(spell_size(quota_bytes))}"]
    if limits.memory != quota_bytes:
        raise AuthFileError(
            f"{path}: tenant {tenant!r} has memory = {limits.memory} there, but the quota given is {quota_bytes}: "
            "change the file, or give no quota"
        )
    return []


def rotate(path: Path, name: str, end_old: bool = False) -> str:
    """Give a principal a new token, and return it. The previous token stays valid until the next rotation. With
    `end_old`, only the new token is valid. Raises `AuthFileError`."""
    token = make_token(name)
    with _locked(path):
        text = _read(path)
        policy = parse_policy(text, str(path))
        principal = policy.principals.get(name)
        if principal is None:
            known = ", ".join(sorted(policy.principals)) or "none"
            raise AuthFileError(f"{path}: no principal {name!r}: expected one of {known}")
        kept = [hash_token(token), *([] if end_old else principal.tokens[:1])]
        assert len(kept) <= MAX_TOKENS
        text = _with_tokens(text, principal.tokens, kept)
        if parse_policy(text, str(path)).principals[name].tokens != tuple(kept):
            raise AuthFileError(
                f"{path}: the tokens of {name!r} cannot be replaced: expected one list of strings in the file"
            )
        _replace(path, text)
    return token


def _with_tokens(text: str, old: Sequence[str], new: Sequence[str]) -> str:
    """Return the text in which the list of the hashes `old` is replaced with the list `new`."""
    quoted = r"""\s*,?\s*""".join(f"[\"']{re.escape(each)}[\"']" for each in old)
    return re.sub(rf"\[\s*{quoted}\s*,?\s*\]", lambda _: json.dumps(list(new)), text, count=1)
