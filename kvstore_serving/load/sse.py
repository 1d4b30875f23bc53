"""Server-sent events, as far as OpenAI-compatible endpoints use them: from bytes as they arrive to the data of events.

The bytes of a stream are cut anywhere: inside a line, between CR and LF, inside a character. The parser keeps what is
not complete, and gives the same events wherever the cuts are. It does not look inside the data.
"""

from __future__ import annotations

from typing import Final

MAX_EVENT_BYTES: Final = 16 << 20  # an event that is longer is not one of an endpoint's


class EventTooLong(ValueError):
    """The stream has more bytes without the end of an event than an event may have."""


class EventParser:
    """Of one stream. Not thread-safe."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """-> the data of the events that end in these bytes. Raises `EventTooLong`."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        ended = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if not text:
                if self._data:
                    ended.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data, self._data_bytes = [], 0
            elif text.startswith(b"data:"):
                data = text[5:].removeprefix(b" ")
                self._data.append(data)
                self._data_bytes += len(data)
            # Other fields and comments, which keep a connection alive, say nothing about tokens.
        if self._data_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"no end of an event within {MAX_EVENT_BYTES} bytes")
        return ended
