"""Reads secrets from files. No message ever contains a part of a secret."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

MAX_SECRET_BYTES: Final = 4096


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading. Raises `OSError`. A file that is not regular is an error, too, because reading from a
    pipe would wait."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return file


def read_secret(path: str | Path, what: str) -> bytes:
    """Return the bytes of a file without white space at its ends.

    `what`: the option that names the file, for the beginning of error messages.
    The call may block for as long as the file system needs. Raises `ValueError` if the file cannot be read, if users
    other than its owner and group have access to it, or if it is empty or longer than `MAX_SECRET_BYTES`.
    """
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror or error}: expected a file that can be read") from None
    if mode & stat.S_IRWXO:
        raise ValueError(
            f"{what} {path}: its mode is {stat.S_IMODE(mode):04o}, so every user of this machine has access: "
            f"expected 0600, or 0640 with a group; run chmod o= {path}"
        )
    if len(data) > MAX_SECRET_BYTES:
        raise ValueError(f"{what} {path}: it has more than {MAX_SECRET_BYTES} bytes: expected a shorter secret")
    if not data.strip():
        raise ValueError(f"{what} {path}: it is empty: expected a secret")
    return data.strip()
