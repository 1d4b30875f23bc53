"""Traces: the requests of a real service and their times, with one JSON object on each line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, ...]}

Each hash id stands for a block of the prompt and all blocks before it. Published traces differ in two properties that
are not in any field:

| trace | tokens of a block | timestamps |
|---|---|---|
| Mooncake | 512 | milliseconds |
| Qwen-Bailian, which has `chat_id` | 16 | seconds |

The block size is found from the numbers of hash ids. The unit of time follows from the kind of trace, and a trace is
refused if no service could have the resulting rate. Both properties can also be given. Other fields are ignored.

What must hold: a line that does not fit is an error that names the line's number. If a trace were read in part or
silently corrected, the figures would be those of another load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec

from kvstore_serving.load.prompts import HASHED_TOKENS
from kvstore_serving.load.records import Planned
from kvstore_serving.load.trace_file import NotLines, lines_of

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]
UNITS: Final[dict[TimeUnit, float]] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # units in a second
_IN_SECONDS: Final = "chat_id"  # a field of the traces whose timestamps are seconds
# Tried in this order if more than one size fits.
_BLOCK_TOKENS: Final = (HASHED_TOKENS, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8, 4, 2, 1)
# The lowest and highest rates that a service may have, in requests a second. Published traces have 1 to 50; with a
# wrong unit, the rate would be a thousand times as high or as low.
_LEAST_RPS: Final = 1 / 30
_MOST_RPS: Final = 300.0
_Z99: Final = 2.326
_FIRST_TAIL_ID: Final = 1 << 63  # above all ids in traces


class TraceError(ValueError):
    """The trace cannot be read; the message names the file and the line."""


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace. `timestamp`: its time in the trace's unit."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Id]


class _Blocks(NamedTuple):
    """How prompts are cut into blocks. `whole`: whether only whole blocks have ids, so that a shorter last block has
    none."""

    tokens: int
    whole: bool = False

    def ids(self, input_length: int) -> int:
        """Return how many ids a prompt has."""
        return input_length // self.tokens if self.whole else -(-input_length // self.tokens)


@dataclass(frozen=True)
class Trace:
    """The requests of a trace, in the order of their times.

    at_s: the times in seconds; the first is 0
    hash_ids: for each request, one id for each block of `block_tokens` tokens; the last block may be shorter
    ignored: fields in the lines that are not used
    unusual: a remark on the rate, if the unit was given and no service would have this rate
    """

    at_s: Sequence[float]
    input_tokens: Sequence[int]
    output_tokens: Sequence[int]
    hash_ids: Sequence[Sequence[int]]
    block_tokens: int
    time_unit: TimeUnit
    ignored: Sequence[str]
    unusual: str = ""

    def __len__(self) -> int:
        return len(self.at_s)


_decode: Final = msgspec.json.Decoder(TraceLine).decode
_decode_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read_trace(
    path: Path, limit: int | None = None, *, block_tokens: int | None = None, time_unit: TimeUnit | None = None
) -> Trace:
    """Read the first `limit` requests of a file. `block_tokens`, `time_unit`: None to detect them, as the module
    describes.

    Raises `TraceError` if the file or a line is wrong or out of order, or if there is no request.
    """
    lines: list[TraceLine] = []
    numbers: list[int] = []  # line numbers in the file
    fields: dict[str, None] = {}
    try:
        for number, text in enumerate(lines_of(path), start=1):
            if len(lines) == limit:
                break
            if not text.strip():
                continue
            lines.append(_line(path, number, text, lines))
            numbers.append(number)
            fields.update(dict.fromkeys(_decode_fields(text)))
    except (OSError, NotLines) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise TraceError(f"{path}: the trace has no requests")
    blocks = _blocks(path, lines, numbers, block_tokens)
    unit = time_unit or ("s" if _IN_SECONDS in fields else "ms")
    first = lines[0].timestamp
    at_s = [(line.timestamp - first) / UNITS[unit] for line in lines]
    unusual = _unusual(at_s, unit)
    if unusual and time_unit is None:
        raise TraceError(f"{path}: {unusual}. If {unit} is right, give --time-unit {unit}")
    return Trace(
        at_s=at_s,
        input_tokens=[line.input_length for line in lines],
        output_tokens=[line.output_length for line in lines],
        hash_ids=[_with_tail(line, index, blocks) for index, line in enumerate(lines)],
        block_tokens=blocks.tokens,
        time_unit=unit,
        ignored=[name for name in fields if name not in TraceLine.__struct_fields__],
        unusual=unusual,
    )


def _line(path: Path, number: int, text: bytes, before: Sequence[TraceLine]) -> TraceLine:
    try:
        line = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}, line {number}: {error}; expected a JSON object with {', '.join(TraceLine.__struct_fields__)}"
        ) from error
    if before and line.timestamp < before[-1].timestamp:
        raise TraceError(
            f"{path}, line {number}: timestamp {line.timestamp:.15g} is earlier than the one before it, "
            f"{before[-1].timestamp:.15g}: sort the trace by timestamp"
        )
    return line


def _blocks(path: Path, lines: Sequence[TraceLine], numbers: Sequence[int], given: int | None) -> _Blocks:
    """Return how the prompts of these lines are cut into blocks. Raises `TraceError` for the first line that is cut
    differently from most lines."""
    sizes = _BLOCK_TOKENS if given is None else (given,)
    ways = [_Blocks(size, whole) for whole in (False, True) for size in sizes]
    lengths = [(line.input_length, len(line.hash_ids)) for line in lines]
    fits = [sum(way.ids(tokens) == ids for tokens, ids in lengths) for way in ways]
    best = ways[fits.index(max(fits))]
    for number, (tokens, ids) in zip(numbers, lengths, strict=True):
        if best.ids(tokens) != ids:
            found = "" if given is None else ", as given"
            raise TraceError(
                f"{path}, line {number}: {ids} hash_ids for an input_length of {tokens}: expected {best.ids(tokens)}, "
                f"one for each {best.tokens} tokens{found}. If blocks have another size, give it with --block-tokens"
            )
    return best


def _with_tail(line: TraceLine, index: int, blocks: _Blocks) -> Sequence[int]:
    """Return the ids of a prompt. If the last block has no id, it gets an id that no other prompt shares."""
    has_tail = blocks.whole and line.input_length % blocks.tokens
    return [*line.hash_ids, _FIRST_TAIL_ID + index] if has_tail else line.hash_ids


def _unusual(at_s: Sequence[float], unit: TimeUnit) -> str:
    """Return what is wrong with the rate in this unit, or an empty string if the rate may be right. The requests are a
    sample, so the true rate lies in a range around the measured one. The rate counts as wrong if all of that range is
    too low or too high. For few requests the range is wide, so hardly any rate counts as wrong."""
    gaps, span_s = len(at_s) - 1, at_s[-1]
    if span_s <= 0:
        return ""
    low, high = _poisson_bound(gaps, -_Z99) / span_s, _poisson_bound(gaps + 1, _Z99) / span_s
    if low <= _MOST_RPS and high >= _LEAST_RPS:
        return ""
    rate = gaps / span_s
    per_s = {name: rate * many / UNITS[unit] for name, many in UNITS.items()}
    usual = [
        f"{_said(per_s[name])} with --time-unit {name}" for name in UNITS if _LEAST_RPS <= per_s[name] <= _MOST_RPS
    ]
    return (
        f"with timestamps in {unit}, the trace has {_said(rate)}; expected {_said(_LEAST_RPS)} to {_said(_MOST_RPS)}. "
        f"Give the right unit: {', '.join(usual) or 'no unit gives a usual rate'}"
    )


def _said(rate_rps: float) -> str:
    return f"{rate_rps:.3g} requests a second" if rate_rps >= 1 else f"one request in {1 / rate_rps:.3g} s"


def _poisson_bound(count: int, z: float) -> float:
    """Return the lowest mean with which a Poisson count of `count` is consistent; it is 0 for a count of 0. Called with
    `count` + 1 and a `z` above 0, it returns the highest mean. Uses Wilson and Hilferty's approximation."""
    return count * max(0.0, 1 - 1 / (9 * count) + z / (3 * math.sqrt(count))) ** 3 if count else 0.0


def planned_of(
    trace: Trace,
    *,
    speed: float,
    warmup: int,
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> Iterator[Planned]:
    """Yield the requests of a trace, at the trace's own times divided by `speed`.

    The first `warmup` are not counted. Prompts and outputs above the limits are clipped. A clipped prompt keeps its
    beginning, because it may share this part with other prompts.
    """
    rows = zip(trace.at_s, trace.input_tokens, trace.output_tokens, trace.hash_ids, strict=True)
    for index, (at_s, inputs, outputs, hash_ids) in enumerate(rows):
        input_tokens = min(inputs, max_input_tokens or inputs)
        output_tokens = min(outputs, max_output_tokens or outputs)
        yield Planned(
            index=index,
            at_s=at_s / speed,
            hash_ids=hash_ids[: -(-input_tokens // trace.block_tokens)],
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            counted=index >= warmup,
            clipped=(input_tokens, output_tokens) != (inputs, outputs),
            block_tokens=trace.block_tokens,
        )


def replay(
    path: Path,
    *,
    speed: float,
    requests: int | None,
    warmup: int,
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
    block_tokens: int | None = None,
    time_unit: TimeUnit | None = None,
) -> Iterator[Planned]:
    """Yield the requests of a file, as `planned_of` does. `warmup` requests are read in addition to `requests`. Raises
    `TraceError`."""
    limit = None if requests is None else warmup + requests
    trace = read_trace(path, limit, block_tokens=block_tokens, time_unit=time_unit)
    clip = {"max_input_tokens": max_input_tokens, "max_output_tokens": max_output_tokens}
    return planned_of(trace, speed=speed, warmup=warmup, **clip)
