"""The lines of a trace's file as it was published: plain, or compressed with gzip or zstd.

The first bytes of a file show its format; its name does not matter. If a file has another format, the error says which
format it is, what was expected and what to do. Zstd is in Python's standard library from 3.14 on; older versions need
the package `zstandard`.
"""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Final, NamedTuple, Protocol

_FILE_PIECE_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 64 << 20
_UTF8_MARK: Final = b"\xef\xbb\xbf"
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED: Final = b"\x2a\x4d\x18"  # after a byte 50 to 5f, this is a skippable frame, with which pzstd begins
_TRACE_EXPECTED: Final = "expected JSON lines, plain or compressed with gzip or zstd"
# Other kinds of files that users may give, by their first bytes, with what to do about them.
_OTHERS: Final = {
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: fetch the file with `git lfs pull`",
    b"\xfd7zXZ\x00": "compressed with xz: decompress it",
    b"BZh": "compressed with bzip2: decompress it",
    b"PK\x03\x04": "a ZIP archive: unpack it",
    b"PAR1": "a Parquet file: convert it",
    b"\xff\xfe": "text in UTF-16: convert it to UTF-8",
    b"\xfe\xff": "text in UTF-16: convert it to UTF-8",
    b"[": "a JSON array: make one line of each object, as `jq -c '.[]'` does",
}


class NotLines(ValueError):
    """The file has another format, or cannot be decompressed. The message does not contain the file's name."""


class _Decompressor(Protocol):
    """Decompresses one member or frame, after which another one may follow."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _Compression(NamedTuple):
    name: str
    start: Callable[[], _Decompressor]
    error: type[Exception]


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without their ends and without a byte order mark. Raises `NotLines` and `OSError`."""
    with path.open("rb") as file:
        for number, line in enumerate(_lines(_pieces(file))):
            yield line if number else _first(line)


def _first(line: bytes) -> bytes:
    for mark, what in _OTHERS.items():
        if line.removeprefix(_UTF8_MARK).startswith(mark):
            raise NotLines(f"it is {what}; {_TRACE_EXPECTED}")
    return line.removeprefix(_UTF8_MARK)


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []
    size = 0
    for piece in pieces:
        *lines, rest = piece.split(b"\n")
        for line in lines:
            yield b"".join([*begun, line])
            begun, size = [], 0
        begun.append(rest)
        size += len(rest)
        if size > _MAX_LINE_BYTES:
            raise NotLines(f"a line has more than {_MAX_LINE_BYTES >> 20} MiB; {_TRACE_EXPECTED}")
    if size:
        yield b"".join(begun)


def _pieces(file: BufferedReader) -> Iterator[bytes]:
    packed = iter(lambda: file.read(_FILE_PIECE_BYTES), b"")
    compression = _compression(file.peek(4)[:4])
    return packed if compression is None else _decompressed(packed, compression)


def _compression(head: bytes) -> _Compression | None:
    if head.startswith(_GZIP):
        return _Compression("gzip", lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), zlib.error)
    if head != _ZSTD and not (head[1:] == _ZSTD_SKIPPED and head[0] >> 4 == 5):
        return None
    in_python = sys.version_info >= (3, 14)
    try:
        zstd = importlib.import_module("compression.zstd" if in_python else "zstandard")
    except ModuleNotFoundError as error:
        raise NotLines(
            f"it is compressed with zstd, but {error.name} is not installed: pip install "
            '"llm-kvstore[serving]", or decompress it with `zstd -d`'
        ) from error
    start = zstd.ZstdDecompressor if in_python else lambda: zstd.ZstdDecompressor().decompressobj()
    return _Compression("zstd", start, zstd.ZstdError)


def _decompressed(packed: Iterable[bytes], compression: _Compression) -> Iterator[bytes]:
    decompressor = compression.start()
    try:
        for piece in packed:
            rest = piece
            while rest:
                if decompressor.eof:
                    decompressor = compression.start()
                yield decompressor.decompress(rest)
                rest = decompressor.unused_data.lstrip(b"\0") if decompressor.eof else b""  # files may be padded
    except compression.error as error:
        raise NotLines(f"it cannot be decompressed ({compression.name}: {error}): get the file again") from error
    if not decompressor.eof:
        raise NotLines(f"it is cut off: the {compression.name} data ends too early; get the file again")
