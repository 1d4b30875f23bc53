"""Server-sent events, as OpenAI-compatible endpoints use them: parses bytes into the data of events, and encodes
events.

Pure: it uses no sockets and no clocks. The bytes of a stream may arrive in pieces of any size, without effect on the
events. Data from an engine is not trusted: an event that exceeds the reader's limit is an error before it can fill the
memory. OpenAI's API uses only ``data:`` lines, so other fields are skipped. Comments, which keep a connection alive,
are returned as `Comment`. A stream is complete only if it ends with ``[DONE]``; otherwise the engine has died.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

DONE: Final = b"[DONE]"
END: Final = b"data: [DONE]\n\n"
_encoder: Final = msgspec.json.Encoder()


class EventError(ValueError):
    """The bytes are not a stream of events, or contain an event that is too large."""


class Comment(bytes):
    """The line of a comment, including its colon. It is not an event."""


class EventReader:
    """Parses the bytes of one stream as they arrive. Used by one thread. `max_event_bytes`: the most bytes of one
    event."""

    def __init__(self, max_event_bytes: int) -> None:
        self._max = max_event_bytes
        self._rest = bytearray()
        self._searched = 0  # no line ends before this position
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that are complete now, and the comments, in order. Raises `EventError`."""
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
            raise EventError(f"an event has more than {self._max} bytes; expected a chunk of OpenAI's API")
        return events


def encode(chunk: dict[str, Any]) -> bytes:
    """Return a chunk as an event."""
    return b"data: %b\n\n" % _encoder.encode(chunk)


def decode(data: bytes) -> dict[str, Any]:
    """Return the chunk in an event's data. Raises `EventError`."""
    try:
        chunk = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"an event is not JSON ({error}); expected a chunk of OpenAI's API") from None
    if not isinstance(chunk, dict):
        raise EventError(f"an event is of type {type(chunk).__name__}; expected a JSON object")
    return chunk
