"""A call: one request in flight to one shard.

The calling thread makes the call. Its answer is filled in by the thread that reads the connection at the time (see
`leading`). The caller reads the answer once the call is `done`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore._cext import BlockFrames
from kvstore.wire import ErrorCode
from kvstore.wire.dealer import ReplyCollector
from kvstore.wire.remote_memory import RemoteMemoryError
from kvstore_client._links.link import Link
from kvstore_client._links.targets import PlacedBlocks
from kvstore_client.errors import ConnectionLost, KVStoreError, ProtocolError, from_wire

# Either bytes or blocks to send next, or a condition that must hold before the next piece can be made. A received
# answer may fulfil the condition.
Piece: TypeAlias = "list[memoryview | bytes] | BlockFrames | Callable[[], bool]"
Message: TypeAlias = Iterable[Piece]
RELEASE_BYTES: Final = 4 << 20


class Call:
    """A request: its link, the positions of its keys in the caller's batch, its message, and its answer.

    `make_message(call)` yields the pieces of the message as they are needed. `make_answer(id)` makes the object that
    takes the reply.
    """

    __slots__ = ("_make_answer", "_make_message", "answer", "connection", "link", "positions", "renewed")

    def __init__(
        self,
        link: Link,
        request_id: int,
        positions: npt.NDArray[np.intp],
        make_message: Callable[[Call], Message],
        make_answer: Callable[[int], ReplyCollector] = ReplyCollector,
    ) -> None:
        self.link = link
        self.positions = positions
        self.answer = make_answer(request_id)
        self.connection = 0  # the number of the link's connection that it was sent on; 0 if not sent
        self.renewed = False
        self._make_message = make_message
        self._make_answer = make_answer

    @property
    def id(self) -> int:
        return self.answer.id

    @property
    def done(self) -> bool:
        """Whether the reply has come, or the call has failed."""
        return self.answer.done

    @property
    def unfinished(self) -> bool:
        """Whether more of the reply may come, or some lent blocks have not been read."""
        return not self.answer.done or bool(self.answer.lent)

    @property
    def reply(self) -> wire.Reply | None:
        return self.answer.reply

    @property
    def error(self) -> KVStoreError | None:
        """Why there is no reply: the connection was lost, the deadline passed, or the shard refused the request."""
        reply, error = self.answer.reply, self.answer.error
        if error is None and isinstance(reply, wire.Error):
            return from_wire(reply.code, f"{self.link}: {reply.message}")
        assert error is None or isinstance(error, KVStoreError)
        return error

    @property
    def count(self) -> int:
        return len(self.positions)

    @property
    def retry(self) -> bool:
        """Whether to send the request once more. After its connection was found dead, it is sent on a new one. After a
        lane other than the first was lost, or the shard had no place for it, it is sent on the first lane."""
        answer = self.answer
        if answer.error is None and not isinstance(answer.reply, wire.Error):
            return False
        lost = isinstance(answer.error, ConnectionLost)
        lost = lost and (self.link.broken is None or self.link is not self.link.first)
        return (lost or self.without_place) and not self.renewed and self.connection > 0

    @property
    def without_place(self) -> bool:
        """Whether the request was sent on a lane other than the first, and the shard refused it for lack of a place."""
        reply = self.answer.reply
        refused = isinstance(reply, wire.Error) and reply.code == ErrorCode.NO_PLACE
        return refused and self.link is not self.link.first

    def message(self) -> Message:
        return self._make_message(self)

    def read_lent(self) -> bool:
        """Read blocks that were lent in shared memory, and give them back. Return whether there were such blocks."""
        answer = self.answer
        if not answer.lent:
            return False
        assert isinstance(answer, PlacedBlocks)
        try:
            lent = answer.read_lent()
        except RemoteMemoryError as error:
            self.fail(ConnectionLost(f"{self.link}: {error}"))
            answer.return_loans()
            self.link.leave_shared_memory(str(error))
            return True
        # A loan is released in small parts, so that the shard can see the progress of a slow reader.
        count = answer.to_release(1 if lent is not None else RELEASE_BYTES)
        if count and lent is not None and answer.done and len(answer.lent) == 1:
            self.link.release(answer.id)
        elif count:
            self.link.notices.post(wire.encode(wire.Release(answer.id, count)))
        if lent is not None:
            lent.give_back()
            answer.lent.popleft()
        return True

    def fail(self, error: KVStoreError) -> None:
        """End the call with an error, because there is no reply or its type is unexpected."""
        self.answer.error = error
        self.answer.done = True

    def renew(self, request_id: int) -> None:
        """Make this call a new, unsent request."""
        self.link = self.link.first
        self.renewed = True
        self.answer = self._make_answer(request_id)


def protocol_error(link: Link, reply: object) -> ProtocolError:
    """Return the error for a reply whose type does not answer the request."""
    return ProtocolError(f"{link}: unexpected reply {type(reply).__name__}")
