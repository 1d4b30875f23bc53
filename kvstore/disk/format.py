"""The disk tier's directory: its names, its format version, its parameters, and the locks of its users.

    PATH/FORMAT               JSON: format, version, shards, segment_bytes, identity, and a guard over these. In an
                              encrypted folder also the cipher, a salt, and a check value of the key.
    PATH/shard-0/FORMAT       A copy; either repairs the other.
    PATH/shard-0/lock         Held (flock) by the one shard that uses the folder, and by its keeper.
    PATH/shard-0/segments/    00000000.seg ...: segment_bytes each, cut into slots, nothing else in them.
    PATH/shard-0/index/       LMDB: which block lies where.

The FORMAT file is the *mark*. Safety property: the server uses a directory only if it is empty or has a mark. In any
other directory nothing is created, changed or removed. The mark is replaced as a whole (temporary file, fsync, rename),
so a crash leaves either the old mark or the new one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import xxhash

log = logging.getLogger("kvstore.disk")

VERSION: Final = 2
ENCRYPTED_VERSION: Final = 3  # the format version of encrypted folders; all other folders have `VERSION`
CIPHER: Final = "AES-256-GCM"
FORMAT_FILE: Final = "FORMAT"
LOCK_FILE: Final = "lock"
SEGMENTS: Final = "segments"
SEGMENT_SUFFIX: Final = ".seg"
INDEX: Final = "index"
DISK_LOCK_WAIT_S: Final = 5.0
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})  # the errors of a full file system, or of a used up quota
_FORMAT_NAME: Final = "kvstore-disk"
_TEMPORARY: Final = "FORMAT.new"
_SHAPE: Final = ("shards", "segment_bytes", "identity")
_NOT_CONTENT: Final = frozenset({"lost+found", _TEMPORARY, FORMAT_FILE})


class DiskFormatError(Exception):
    """The error for a directory that cannot be used as a disk tier. Its message says what was found and what to do."""


class Encryption(NamedTuple):
    """The encryption fields in the mark of an encrypted folder, both in hexadecimal."""

    salt: str
    check: str


class FolderKey(Protocol):
    """The operator's key (see `encryption`)."""

    def new_encryption(self) -> Encryption:
        """Return the mark of a new folder."""

    def is_key_of(self, encryption: Encryption) -> bool:
        """Return whether the folder was made with this key."""


@dataclass(frozen=True)
class Layout:
    """A disk tier's directory and the parameters with which it was made."""

    path: Path
    shards: int
    segment_bytes: int
    identity: str  # the placement uses it in the names of shards, so that these do not change with host and port
    encryption: Encryption | None = None

    def shard_directory(self, shard: int) -> Path:
        return self.path / f"shard-{shard}"


def segment_path(shard_directory: Path, segment: int) -> Path:
    return shard_directory / SEGMENTS / f"{segment:08d}{SEGMENT_SUFFIX}"


def open_layout(path: Path, shards: int, segment_bytes: int, key: FolderKey | None = None) -> Layout:
    """Make `path` a disk tier, or open the disk tier that is there. An existing tier keeps its own `segment_bytes`.

    key: the operator's key, for an encrypted folder.

    The supervisor calls this before it starts shards. Blocks until the disk has done its work. A damaged mark is
    repaired. Raises `DiskFormatError`. If the key is wrong, nothing is changed.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        layout = _find(path, "Give --disk another folder, one that is new or empty.")
        if layout is None:
            encryption = key.new_encryption() if key is not None else None
            layout = Layout(path, shards, segment_bytes, secrets.token_hex(8), encryption)
        check_key(layout, key)
        _check_shards(layout, shards)
        _complete(layout)
    except OSError as error:
        raise DiskFormatError(_explain(path, error)) from error
    return layout


def check_layout(path: Path, shards: int, key: FolderKey | None = None) -> None:
    """Raise `DiskFormatError` if `open_layout` could not use `path`. Changes nothing."""
    try:
        above = existing_above(path)
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "", str(above))
        if not os.access(above, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "", str(above))
        layout = _find(path, "Give --disk another folder, one that is new or empty.") if above == path else None
    except OSError as error:
        raise DiskFormatError(_explain(path, error)) from error
    if layout is not None:
        check_key(layout, key)
        _check_shards(layout, shards)


def existing_above(path: Path) -> Path:
    """Return `path`, or the nearest directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _check_shards(layout: Layout, shards: int) -> None:
    if layout.shards != shards:
        raise DiskFormatError(
            f"{layout.path} holds the blocks of {layout.shards} shards, and this server has {shards}: "
            f"start it with --shards {layout.shards}, or give --disk a new or empty folder"
        )


def read_layout(path: Path) -> Layout:
    """Return the layout of the disk tier at `path`. Changes nothing. Raises `DiskFormatError`."""
    advice = "Give the folder that a server's --disk names."
    try:
        layout = _find(path, advice)
    except OSError as error:
        raise DiskFormatError(_explain(path, error)) from error
    if layout is None:
        raise DiskFormatError(f"{path} is empty: expected the folder of a disk tier. {advice}")
    return layout


def check_key(layout: Layout, key: FolderKey | None) -> None:
    """Raise `DiskFormatError` unless `key` is the folder's key, or there is no key and the folder is not encrypted."""
    path = layout.path
    if layout.encryption is None:
        if key is not None:
            raise DiskFormatError(
                f"{path} holds blocks that are not encrypted, and a key was given: start without --disk-key-file and "
                "--disk-key-command, or give --disk a new or empty folder. Nothing was changed"
            )
        return
    if key is None:
        raise DiskFormatError(
            f"{path} is encrypted: give its key with --disk-key-file or --disk-key-command, or give --disk a new or "
            "empty folder. Nothing was changed"
        )
    if not key.is_key_of(layout.encryption):
        raise DiskFormatError(
            f"{path} is encrypted with another key than the one given: give the key that it was made with, or give "
            "--disk a new or empty folder. Nothing was changed"
        )


def lock_shard(directory: Path) -> int:
    """Lock a shard's folder. Return a descriptor that holds the lock until its last copy is closed.

    Blocks for up to `DISK_LOCK_WAIT_S` seconds, because an earlier owner that was just killed may still be ending.
    Raises `DiskFormatError`.
    """
    try:
        fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DiskFormatError(_explain(directory, error)) from error
    try:
        if not flock_within(fd, fcntl.LOCK_EX, DISK_LOCK_WAIT_S):
            raise DiskFormatError(f"{directory} is in use by {lock_holder(fd)}: stop it, or give --disk another folder")
        _write_holder(fd)
    except OSError as error:
        os.close(fd)
        raise DiskFormatError(_explain(directory, error)) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_holder(fd: int) -> None:
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        if error.errno not in NO_SPACE:  # only messages need the number, so it may be missing on a full file system
            raise


def flock_within(fd: int, operation: int, wait_s: float) -> bool:
    """Lock the lock file `fd` with flock's `operation`. Blocks until it is locked. Return False after `wait_s` seconds.
    Raises `OSError`."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(0.02)


def lock_holder(fd: int) -> str:
    """Describe the process that has locked a shard's lock file, for a message."""
    pid = os.pread(fd, 32, 0).strip()
    return f"process {pid.decode()}" if pid.isdigit() else "another process"


# ---- the mark ----------------------------------------------------------------------------------------------------


def _mark(layout: Layout) -> bytes:
    encryption = layout.encryption
    fields: dict[str, object] = {
        "format": _FORMAT_NAME,
        "version": VERSION if encryption is None else ENCRYPTED_VERSION,
    }
    fields |= {name: getattr(layout, name) for name in _SHAPE}
    if encryption is not None:
        fields["encryption"] = {"cipher": CIPHER, **encryption._asdict()}
    return _dump({**fields, "guard": _guard(fields)}) + b"\n"


def _dump(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _guard(fields: dict[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(_dump(fields))


def _read_mark(path: Path, file: Path) -> Layout | None:
    """Return the layout in a mark, or None if the file is missing or damaged.

    Raises `DiskFormatError` if this release does not know the format version or the encryption.
    """
    try:
        with file.open("rb") as opened:
            fields = json.loads(opened.read(4096))
    except (FileNotFoundError, ValueError):
        return None
    if (
        not isinstance(fields, dict)
        or fields.pop("guard", None) != _guard(fields)
        or fields.get("format") != _FORMAT_NAME
    ):
        return None
    version, shards, segment_bytes, identity = (fields.get(name) for name in ("version", *_SHAPE))
    if version not in (VERSION, ENCRYPTED_VERSION):
        raise DiskFormatError(
            f"{path} has disk format version {version}, and this server knows versions {VERSION} and "
            f"{ENCRYPTED_VERSION}: use the release that made it, or give --disk a new or empty folder"
        )
    if not isinstance(shards, int) or not isinstance(segment_bytes, int) or not isinstance(identity, str):
        return None
    encryption = None
    if version == ENCRYPTED_VERSION:
        encryption = _read_encryption(fields.get("encryption"))
        if encryption is None:
            raise DiskFormatError(
                f"{path} has disk format version {version} with an encryption that this server does not know. Expected "
                f"{CIPHER}. Use the release that made it, or give --disk a new or empty folder"
            )
    return Layout(path, shards, segment_bytes, identity, encryption)


def _read_encryption(given: Any) -> Encryption | None:
    if not isinstance(given, dict) or given.get("cipher") != CIPHER:
        return None
    found = Encryption(given.get("salt", ""), given.get("check", ""))
    try:
        return found if all(len(bytes.fromhex(text)) == 32 for text in found) else None
    except (TypeError, ValueError):
        return None


def _find(path: Path, advice: str) -> Layout | None:
    """Return the layout in a directory's mark or in one of its copies, or None if the directory is empty.

    Raises `DiskFormatError`, whose message includes `advice` if the directory is not a disk tier.
    """
    names = set(os.listdir(path))
    layout = _read_mark(path, path / FORMAT_FILE) if FORMAT_FILE in names else None
    if layout is not None:
        return layout
    shards = sorted(name for name in names if name.startswith("shard-") and (path / name).is_dir())
    for name in shards:
        layout = _read_mark(path, path / name / FORMAT_FILE)
        if layout is not None:
            return layout
    content = sorted(names - _NOT_CONTENT)
    if content or FORMAT_FILE in names:
        found = ", ".join(repr(name) for name in content[:3]) + (" ..." if len(content) > 3 else "")
        raise DiskFormatError(
            f"{path} is not a disk tier of kvstore: it has no readable file {FORMAT_FILE}"
            + (f", but holds {found}" if content else "")
            + f". Nothing was changed. The folder of a disk tier contains {FORMAT_FILE}, shard-0, shard-1 and so on, "
            + f"made by kvstore-server. {advice}"
        )
    return None


def _complete(layout: Layout) -> None:
    """Create missing files and folders, and repair damaged marks. The top mark comes first, to claim the directory."""
    path = layout.path
    _write_mark(path, layout)
    for shard in range(layout.shards):
        directory = layout.shard_directory(shard)
        (directory / SEGMENTS).mkdir(parents=True, exist_ok=True)
        other = _read_mark(path, directory / FORMAT_FILE)
        if other is not None and other != layout:
            raise DiskFormatError(
                f"{directory} belongs to a disk tier of {other.shards} shards and segments of {other.segment_bytes} "
                f"bytes. But {path} has {layout.shards} shards and segments of {layout.segment_bytes} bytes. "
                "Move the folder back to its own disk tier"
            )
        _write_mark(directory, layout)
        os.close(os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # fails if not writable
    _sync_directory(path)


def _write_mark(directory: Path, layout: Layout) -> None:
    """Write the mark of `layout` to `directory` and flush it, unless it is already there."""
    file = directory / FORMAT_FILE
    mark = _mark(layout)
    found = file.read_bytes() if file.exists() else None
    if found == mark:
        return
    if found is not None:
        log.warning("%s was damaged: repaired from a copy", file)
    temporary = directory / _TEMPORARY
    with temporary.open("wb") as opened:
        opened.write(mark)
        opened.flush()
        os.fsync(opened.fileno())
    temporary.replace(file)
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _explain(path: Path, error: OSError) -> str:
    """Describe an error of the file system, and what an operator can do about it."""
    where = error.filename or path
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{where} is not a directory: give --disk another path"
    if error.errno == errno.EROFS:
        return f"{where} is on a read-only file system: mount it writable, or give --disk another folder"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission to use {where}: give user {os.geteuid()} the right to read and write {path}"
    return f"{path} cannot be used as a disk tier: {error}"
