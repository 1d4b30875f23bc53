"""Reads traces in the format of Mooncake: one JSON object a line, with what a real service was asked and when.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, ...]}

`timestamp` is in milliseconds. Each hash id names 512 tokens of the prompt and all before them, so there are
ceil(input_length / 512) of them. A file whose name ends with .gz is decompressed.

What must hold: a line that does not fit is an error with its number. A trace that is read in part or bent into shape
would give numbers of another load.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec

from kvstore_serving.load.prompts import HASHED_TOKENS
from kvstore_serving.load.records import Planned

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TraceError(ValueError):
    """The trace cannot be read; the message names the file and the line."""


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace. `timestamp`: in milliseconds."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Id]


_decoder = msgspec.json.Decoder(TraceLine)


def parse_line(line: bytes) -> TraceLine:
    """Raises `ValueError` with what is wrong."""
    parsed = _decoder.decode(line)
    needed = -(-parsed.input_length // HASHED_TOKENS)
    if len(parsed.hash_ids) != needed:
        raise ValueError(
            f"{len(parsed.hash_ids)} hash_ids for an input_length of {parsed.input_length}: expected {needed}, one for "
            f"each {HASHED_TOKENS} tokens"
        )
    return parsed


def read_trace(path: Path, limit: int | None = None) -> Iterator[TraceLine]:
    """The first `limit` requests of a file. Raises `TraceError` when one is wrong or out of order."""
    try:
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            before_ms, count = 0.0, 0
            for number, text in enumerate(file, start=1):
                if count == limit:
                    return
                if not text.strip():
                    continue
                try:
                    line = parse_line(text)
                except ValueError as error:
                    raise TraceError(f"{path}, line {number}: {error}") from error
                if line.timestamp < before_ms:
                    raise TraceError(
                        f"{path}, line {number}: timestamp {line.timestamp:g} is before the one above it, "
                        f"{before_ms:g}: sort the trace by timestamp"
                    )
                before_ms, count = line.timestamp, count + 1
                yield line
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def replay(
    path: Path,
    *,
    speed: float,
    requests: int | None,
    warmup: int,
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> Iterator[Planned]:
    """The requests of a trace, at its own times divided by `speed`, the first at 0.

    The first `warmup` are not counted, and come on top of `requests`. Longer prompts and outputs than the most are
    clipped: of a prompt the beginning stays, and with it what it shares with others. Raises `TraceError`.
    """
    first_ms: float | None = None
    for index, line in enumerate(read_trace(path, None if requests is None else warmup + requests)):
        first_ms = line.timestamp if first_ms is None else first_ms
        input_tokens = min(line.input_length, max_input_tokens or line.input_length)
        output_tokens = min(line.output_length, max_output_tokens or line.output_length)
        yield Planned(
            index=index,
            at_s=(line.timestamp - first_ms) / 1000 / speed,
            hash_ids=line.hash_ids[: -(-input_tokens // HASHED_TOKENS)],
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            counted=index >= warmup,
            clipped=(input_tokens, output_tokens) != (line.input_length, line.output_length),
        )
