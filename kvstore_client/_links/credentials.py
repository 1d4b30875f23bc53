"""The token that a client sends to servers. No log line, error or `repr` contains the token. Thread-safe."""

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
    """A token, or a file with a token. The file is read for each connection, so a new token needs no restart.

    `token`: the token itself, or the path of a file. If it is None, the environment's variables are used,
    ``KVSTORE_TOKEN`` first. Without them there is no token. Raises `TypeError` and `ValueError` for a value that cannot
    be a token, and for a file that cannot be read.
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
            raise TypeError(
                f"{where} is of type {type(token).__name__}: expected a string, or the path of a file with a token"
            )
        if self._file is not None:
            try:
                self._token = _read(self._file)
            except OSError as error:
                raise ValueError(f"{where}: {self._file}: {error.strerror}: expected a file with a token") from None

    @property
    def token(self) -> bytes:
        """Return the token in the form that HELLO carries, or empty bytes if there is none. If its file cannot be read
        now, return the token that was read last."""
        if self._file is not None:
            try:
                self._token = _read(self._file)
            except (OSError, ValueError) as error:
                log.warning("the token in %s cannot be read: %s; the earlier token is used", self._file, error)
        return self._token


def _read(file: str) -> bytes:
    with open_regular(file) as opened:
        content = opened.read(MAX_TOKEN_BYTES + 2)
    return _check(content.decode("ascii", "replace").strip(), file)


def _check(token: str, where: str) -> bytes:
    if not token or len(token) > MAX_TOKEN_BYTES or not all("!" <= letter <= "~" for letter in token):
        raise ValueError(
            f"{where}: these {len(token)} characters are not a token: expected one from `kvstore auth add`, which has "
            f"at most {MAX_TOKEN_BYTES} visible ASCII characters"
        )
    return token.encode()
