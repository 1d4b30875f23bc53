"""Traces of requests in Mooncake's format: one JSON object a line, plain or gzip.

``timestamp`` in ms, ``input_length`` and ``output_length`` in tokens, ``hash_ids``: the prompt's chain of block ids,
head first. An id stands for its block and for all before it, so equal ids are equal prefixes. The eviction simulator
uses only the order of the lines and the chains, as its cache has no clock; the cluster simulator uses the times.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.wire import MAX_KEYS

KEY_BYTES: Final = 16
FORMAT: Final = "a JSON object a line, with timestamp, input_length, output_length and hash_ids"
_GZIP_MAGIC: Final = b"\x1f\x8b"

Chain = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint8]


class TraceError(Exception):
    """A file is not a trace. The message names the file, line and field, and what was expected."""


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]], msgspec.Meta(max_length=MAX_KEYS)]


@dataclass(frozen=True)
class Trace:
    """The requests in order. Blocks are numbered from 0 in the order of their first appearance."""

    name: str
    chains: Sequence[Chain]
    keys: Keys  # (distinct, KEY_BYTES): by block number
    times_s: Sequence[float] = ()  # of each request; empty: not known

    @classmethod
    def of(cls, name: str, requests: Iterable[Sequence[int]], times_s: Sequence[float] = ()) -> Trace:
        """Make a trace from chains of block ids."""
        numbers: dict[int, int] = {}
        chains = [
            np.array([numbers.setdefault(block, len(numbers)) for block in request], dtype=np.int32)
            for request in requests
        ]
        digests = b"".join(xxhash.xxh3_128_digest(block.to_bytes(8, "little")) for block in numbers)
        return cls(name, chains, np.frombuffer(digests, dtype=np.uint8).reshape(-1, KEY_BYTES), times_s)

    @property
    def references(self) -> int:
        """How many blocks all requests together ask for."""
        return sum(map(len, self.chains))

    @property
    def distinct(self) -> int:
        """The number of different blocks."""
        return len(self.keys)

    def first(self, requests: int | None) -> Trace:
        """The first requests of the trace; None: all of them."""
        chains = self.chains[:requests]
        last = max((int(chain.max()) for chain in chains if len(chain)), default=-1)
        return Trace(self.name, chains, self.keys[: last + 1], self.times_s[:requests])


def read_trace(path: Path) -> Trace:
    """Read a trace from a file. Raises `TraceError`."""
    lines = list(_lines(path))
    trace = Trace.of(path.name, (line.hash_ids for line in lines), [line.timestamp / 1000 for line in lines])
    if not trace.distinct:
        raise TraceError(f"{path}: no blocks in it: expected {FORMAT}")
    return trace


def _lines(path: Path) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    number = 0
    try:
        with path.open("rb") as file:
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        with gzip.open(path) if packed else path.open("rb") as file:
            for line in file:
                number += 1
                if line.strip():
                    yield decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}, line {number}: {_plain(str(error))}; a trace is {FORMAT}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}, after line {number}: cannot be read: {error}") from None


def _plain(message: str) -> str:
    """msgspec's message in the form ``hash_ids[3]: expected ...``."""
    what, _, where = message.partition(" - at ")
    what = what[:1].lower() + what[1:]
    field = where.strip("`").removeprefix("$").removeprefix(".")
    return f"{field}: {what}" if field else what
