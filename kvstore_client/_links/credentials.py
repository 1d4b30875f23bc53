"""The token that a client shows to servers. It is in no log line, no error and no `repr`. Thread-safe."""

from __future__ import annotations

import logging
import os
from typing import Final

from kvstore.secret_files import open_regular

log = logging.getLogger("kvstore_client")

TOKEN_VARIABLE: Final = "KVSTORE_TOKEN"
FILE_VARIABLE: Final = "KVSTORE_TOKEN_FILE"
MAX_TOKEN_BYTES: Final = 256


class Credentials:
    """A token, or a file with one, which is read at each connection: so a new token needs no restart.

    `token`: the token itself, or a path; None: what the variables name, ``KVSTORE_TOKEN`` first; without them, none.
    Raises `TypeError` and `ValueError` for what cannot be a token, and for a file that cannot be read.
    """

    def __init__(self, token: str | os.PathLike[str] | None) -> None:
        self._file: str | None = None
        self._token = b""
        where = "token"
        if token is None:
            token = os.environ.get(TOKEN_VARIABLE) or None
            where = TOKEN_VARIABLE
            if token is None and os.environ.get(FILE_VARIABLE):
                self._file, where = os.environ[FILE_VARIABLE], FILE_VARIABLE
        if isinstance(token, str):
            self._token = _check(token, where)
        elif isinstance(token, os.PathLike):
            self._file = os.fspath(token)
        elif token is not None:
            raise TypeError(f"{where}: a {type(token).__name__}: expected a string, or a path of a file with a token")
        if self._file is not None:
            try:
                self._token = _read(self._file)
            except OSError as error:
                raise ValueError(f"{where}: {self._file}: {error.strerror}: expected a file with a token") from None

    @property
    def token(self) -> bytes:
        """The token as HELLO carries it; empty: none. From a file that cannot be read now, the last one."""
        if self._file is not None:
            try:
                self._token = _read(self._file)
            except (OSError, ValueError) as error:
                log.warning("the token in %s cannot be read: %s; the last one is used", self._file, error)
        return self._token


def _read(file: str) -> bytes:
    with open_regular(file) as opened:
        content = opened.read(MAX_TOKEN_BYTES + 2)
    return _check(content.decode("ascii", "replace").strip(), file)


def _check(token: str, where: str) -> bytes:
    if not token or len(token) > MAX_TOKEN_BYTES or not all("!" <= letter <= "~" for letter in token):
        raise ValueError(
            f"{where}: {len(token)} characters that are no token: expected what `kvstore auth add` printed, up to "
            f"{MAX_TOKEN_BYTES} visible ASCII characters"
        )
    return token.encode()
