"""What a verb is: the struct of its request, and a row that says everything else both sides must know of it.

`messages.VERBS` is the table of the rows. Whatever depends on the verb of a request reads its row: its limits, the
check of rights, of the namespace and of a place, histograms, metrics and logs. The shard has one handler for each row
(`kvstore/shard/answers.py`). Plain data; any thread.
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
KNOWN: Final = 32  # whoever has logged in
ANYBODY: Final = 64  # also who has not logged in
RIGHTS: Final = {"read": READ, "write": WRITE, "delete": DELETE, "admin": ADMIN, "monitor": MONITOR}
"""What the file of ``--auth`` may give a principal, where they are called verbs."""


class _Header(msgspec.Struct, array_like=True, frozen=True, gc=False):
    id: int


class Request(_Header, frozen=True):
    """A header that a client sends."""


class KeyedRequest(Request, frozen=True):
    """A header that a frame of keys follows. It needs a namespace, and a place for its connection."""

    deadline_ms: int
    count: int
    key_bytes: int


class Reply(_Header, frozen=True):
    """A header that a shard sends."""


class Bound(NamedTuple):
    """Between what a field must be, and what its sender is told otherwise: {} stands for its value."""

    field: str
    least: float
    most: float
    text: str


RequestT = TypeVar("RequestT", bound=Request)


@dataclass(eq=False)
class Verb(Generic[RequestT]):
    """One row of the table."""

    request: type[RequestT]
    right: int  # bits: the sender needs one of them
    bounds: Sequence[Bound] = ()
    check: Callable[[RequestT], None] | None = None  # raises `WireError` for fields that do not fit one another
    timed: bool = False  # there is a histogram of how long it takes
    disk: bool = False  # its answer may wait for the disk: a second histogram has those that did
    namespace: bool = False  # the connection needs one
    place: bool = False  # it is not for connections that wait at the door
    large: bool = False  # its reply may be: not before earlier replies were read
    keyed: bool = field(init=False)
    name: str = field(init=False)  # as metrics and logs have it; in capitals, as the protocol does

    def __post_init__(self) -> None:
        self.keyed = issubclass(self.request, KeyedRequest)
        self.namespace = self.namespace or self.keyed
        self.place = self.place or self.keyed
        self.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.request.__name__).lower()


def table(*rows: Verb[Any]) -> dict[type[Request], Verb[Any]]:
    """-> the rows by the type of their request, each of which has one."""
    found = {row.request: row for row in rows}
    assert len(found) == len(rows), "a request with two rows"
    return found
