"""Files that commands write when their result is there: as a whole, or not at all.

A command checks at its start that it will be able to write its file, and writes it at its end. In between, the file
stays as it was. What cannot be replaced is opened and written: what is no regular file, such as /dev/stdout, and a file
that is a mount of its own, as in a container.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise `OSError` if `replace_file` could not write the file. Nothing is changed, and no file is left."""
    if path.exists():
        path.open("ab").close()
    if _replaced(path):
        tempfile.TemporaryFile(dir=path.resolve().parent).close()


def replace_file(path: Path, content: bytes) -> None:
    """Write the file. Others see either the old content or the new one. The mode stays as it was. Raises `OSError` with
    this file's name."""
    try:
        if not _replaced(path) or not _replace(path.resolve(), content):  # resolved, so that a link stays a link
            path.write_bytes(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _replace(path: Path, content: bytes) -> bool:
    """Write a file beside this one and rename it. Return False if the file is a mount, which has no other name."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(file, "wb") as opened:
            if path.exists():
                os.fchmod(file, path.stat().st_mode & 0o7777)
            opened.write(content)
        os.replace(beside, path)
    except BaseException as error:
        beside.unlink()
        if isinstance(error, OSError) and error.errno == errno.EBUSY:
            return False
        raise
    return True


def _replaced(path: Path) -> bool:
    return path.is_file() or not path.exists()
