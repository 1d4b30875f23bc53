"""The description of a verb: the struct of its request, and a row with everything else that both sides must know.

`messages.VERBS` is the table of the rows. Code that depends on the verb of a request reads the verb's row: the code for
limits, for checks of rights, namespace and place, and for histograms, metrics and logs. The shard has one handler for
each row (`kvstore/shard/handlers.py`). Plain data; thread-safe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

READ: Final = 1
WRITE: Final = 2
DELETE: Final = 4
ADMIN: Final = 8
MONITOR: Final = 16
LOGGED_IN: Final = 32  # any client that has logged in
ANYBODY: Final = 64  # any client, logged in or not
RIGHTS: Final = {"read": READ, "write": WRITE, "delete": DELETE, "admin": ADMIN, "monitor": MONITOR}
"""What the file of ``--auth`` may give a principal, where they are called verbs."""


class _Header(msgspec.Struct, array_like=True, frozen=True, gc=False):
    id: int


class Request(_Header, frozen=True):
    """A header that a client sends."""


class KeyedRequest(Request, frozen=True):
    """A header that is followed by a frame of keys. Its sender's connection needs a namespace and a place."""

    deadline_ms: int
    count: int
    key_bytes: int


class Reply(_Header, frozen=True):
    """A header that a shard sends."""


class Bound(NamedTuple):
    """The range of a field, and the error text for a value outside it. In the text, {} stands for the value."""

    field: str
    least: float
    most: float
    text: str


RequestT = TypeVar("RequestT", bound=Request)


@dataclass(eq=False)
class Verb(Generic[RequestT]):
    """One row of the table."""

    request: type[RequestT]
    right: int  # a bit mask; the sender needs one of these rights
    bounds: Sequence[Bound] = ()
    check: Callable[[RequestT], None] | None = None  # raises `WireError` for fields that contradict each other
    timed: bool = False  # a histogram counts how long it takes
    disk: bool = False  # its answer may wait for the disk; a second histogram counts the requests that waited
    namespace: bool = False  # the connection needs a namespace
    place: bool = False  # the connection needs a place, and may not use this verb while it waits for one
    large: bool = False  # its reply may be large, and is sent only after earlier replies were read
    name: str = ""  # in metrics, logs and, in capitals, the protocol; if empty, the name of the request
    keyed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.keyed = issubclass(self.request, KeyedRequest)
        self.namespace = self.namespace or self.keyed
        self.place = self.place or self.keyed
        self.name = self.name or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.request.__name__).lower()


def table(*rows: Verb[Any]) -> dict[type[Request], Verb[Any]]:
    """Return the rows by the type of their request. Each type has exactly one row."""
    found = {row.request: row for row in rows}
    assert len(found) == len(rows), "a request with two rows"
    return found
