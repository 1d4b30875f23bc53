"""Server-sent events, as far as OpenAI-compatible endpoints use them: bytes to the data of events, and back.

Pure: no sockets, no clocks. The bytes of a stream may be cut anywhere; the events are the same wherever the cuts are.
What an engine sends is not trusted: an event beyond the reader's limit is an error before it is held. Only ``data:``
lines matter to OpenAI's API; other fields are skipped. Comments keep a connection alive: they are told apart from
events. A stream is whole only if it ends with ``[DONE]``: without it, the engine died.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

DONE: Final = b"[DONE]"
END: Final = b"data: [DONE]\n\n"
_encoder: Final = msgspec.json.Encoder()


class EventError(ValueError):
    """What came is no stream of events, or an event is too large."""


class Comment(bytes):
    """A comment's line, with its colon: it is no event."""


class EventReader:
    """Takes bytes as they come. One stream, one thread. max_event_bytes: of one event."""

    def __init__(self, max_event_bytes: int) -> None:
        self._max = max_event_bytes
        self._rest = bytearray()
        self._searched = 0  # no line ends before this place
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """-> the data of the events that are complete now, and the comments, in order. Raises `EventError`."""
        self._rest += piece
        events: list[bytes] = []
        start = 0
        while (end := self._rest.find(b"\n", max(start, self._searched))) >= 0:
            line = bytes(self._rest[start:end]).removesuffix(b"\r")
            start = end + 1
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data, self._data_bytes = [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
            elif line.startswith(b":"):
                events.append(Comment(line))
        del self._rest[:start]
        self._searched = len(self._rest)
        if self._data_bytes + len(self._rest) > self._max:
            raise EventError(f"an event of more than {self._max} bytes; expected a chunk of OpenAI's API")
        return events


def encode(chunk: dict[str, Any]) -> bytes:
    """-> a chunk as an event."""
    return b"data: %b\n\n" % _encoder.encode(chunk)


def decode(data: bytes) -> dict[str, Any]:
    """-> the chunk that an event carries. Raises `EventError`."""
    try:
        chunk = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"an event that is no JSON ({error}); expected a chunk of OpenAI's API") from None
    if not isinstance(chunk, dict):
        raise EventError(f"an event that is {type(chunk).__name__}; expected a JSON object")
    return chunk
