"""One connection to one shard.

A link is *down* (not connected; a call may connect it), *up*, or *broken* (connecting failed, or the shard was silent
for too long). Calls to a broken link fail at once until it is connected again in the background (see `dialing`). A
link's `connector` makes connections, its `liveness` checks that the shard still answers, and its `notices` are messages
without a reply.

Any thread may send, but only one message at a time is sent, by the owner of `sending`. The caller that leads (see
`leading`) reads frames, under `receive_lock`. A connection with a broken byte stream is dropped, never repaired. A
stream is broken if only a part of a message was sent, or if a deadline passed within a frame that cannot be discarded.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore import wire
from kvstore._cext import send_views
from kvstore.tls import TLSOptions
from kvstore.wire import zmtp
from kvstore.wire.dealer import Dealer, GetAnswer, ReplyCollector
from kvstore.wire.remote_memory import Transport
from kvstore_client._links.connector import Connector, SharedMemory
from kvstore_client._links.generations import KnownGenerations
from kvstore_client._links.liveness import Liveness
from kvstore_client._links.notices import Notices
from kvstore_client._links.ownership import Ownership
from kvstore_client._links.staging import SharedStaging
from kvstore_client.errors import ConnectionLost, KVStoreError, ProtocolError, Timeout

SHARED_MEMORY: Final = "shared memory"  # a value of `path`


class Link:
    """One client's connection to a shard. It is thread-safe because of the locks that the module's docstring names.

    * `hello`, `shared_memory`, `transport`, `tls`: See `Connector`.
    * `wake()`: Makes the caller that reads the links check its condition again.
    * `generations`: The object that all links of the client share. If it is None, the link makes one.
    * `lanes`: All links of the client to this shard. The first of them stands for the shard (see `lanes`).
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        hello: Callable[[], wire.Hello],
        wake: Callable[[], None],
        shared_memory: SharedMemory = "auto",
        transport: Transport | None = None,
        tls: TLSOptions | None = None,
        generations: KnownGenerations | None = None,
    ) -> None:
        self._generations = generations if generations is not None else KnownGenerations()
        self.generation = 0  # the namespace's generation at the shard, as it last reported
        self.knows_generations = False  # whether the shard's protocol has generations
        self.lanes: Sequence[Link] = (self,)
        self.name = name
        self.host = host
        self.port = port
        self.fixed_name = False  # whether only a shard of this name is accepted
        self.on_this_host = False  # whether the shard is known to be on this host
        self.retired = False  # whether the link left the view, so that it is not connected again
        self.sock: socket.socket | None = None
        self.broken: KVStoreError | None = None
        self.connections = 0  # the number of connections made, and so the number of the present one
        self.weight = 1.0
        self._wake = wake
        self._dealer: Dealer | None = None  # the dealer of the connection `sock`
        self.staging: SharedStaging | None = None  # the staging of the connection `sock`, if that is local
        self.notices = Notices(self)
        self.liveness = Liveness(self)
        self.connector = Connector(self, hello, shared_memory, transport, tls)
        self.reset_locks()

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def first(self) -> Link:
        """The link that stands for the shard."""
        return self.lanes[0]

    def rename(self, name: str, host: str, port: int, weight: float) -> None:
        """Set the shard's present name, address and weight."""
        for lane in self.lanes:
            lane.name, lane.host, lane.port, lane.weight = name, host, port, weight

    def reset_locks(self) -> None:
        """Make new locks. After a fork, the old ones may stay locked forever, as the parent's threads held them."""
        self.sending = Ownership()
        self.receive_lock = threading.Lock()
        self.connecting = Ownership()
        self.connector.forget()

    @property
    def pending(self) -> dict[int, ReplyCollector]:
        """The answers that the present connection still owes."""
        dealer = self._dealer
        return dealer.pending if dealer is not None else {}

    @property
    def received(self) -> int:
        """The number of bytes received on the present connection."""
        dealer = self._dealer
        return dealer.receiver.received if dealer is not None else 0

    @property
    def by_reference(self) -> bool:
        """Whether GETs are answered by references to blocks in the shard's memory."""
        dealer = self._dealer
        return dealer is not None and dealer.files is not None

    @property
    def local(self) -> bool:
        """Whether the present connection is over the shard's Unix socket."""
        dealer = self._dealer
        return dealer is not None and dealer.local

    @property
    def path(self) -> str:
        """How blocks are received: "shared memory", the name of a transport, "tls" or "tcp"."""
        dealer = self._dealer
        if dealer is not None and dealer.files is not None:
            return SHARED_MEMORY if dealer.transport is None else dealer.transport.name
        return "tcp" if self.connector.tls is None else "tls"

    @property
    def load_s(self) -> float:
        """How long an answer is likely to take, in seconds; infinite while the link is broken."""
        if self.broken is not None:
            return math.inf
        return self.liveness.delay_s * (1 + sum(len(lane.pending) for lane in self.lanes))

    # ---- connecting ------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float, greet_s: float = math.inf) -> wire.Welcome:
        """Make a connection. Only the owner of `connecting` calls this. For arguments and errors, see
        `Connector.connect`."""
        sock, self._dealer, welcome = self.connector.connect(timeout_s, greet_s)
        self.staging = SharedStaging(welcome.block_bytes) if self._dealer.local and welcome.block_bytes else None
        self.sock = sock
        return welcome

    def greeting(self) -> None:
        """Forget the shard's generation. This is called before HELLO is sent, because the shard may have lost it."""
        self.generation = 0

    def greeted(self, welcome: wire.Welcome) -> None:
        """Note that the shard has answered HELLO. Raises `OSError` if the shard has missed a purge."""
        self._generations.greet(self, welcome)
        self.liveness.last_received = self.liveness.last_moved = time.monotonic()
        self.liveness.unanswered = False
        self.broken = None
        self.connections += 1

    def raised(self, generation: int) -> None:
        """Note the generation that the shard reports. Raises `OSError` if the shard has missed a purge."""
        self._generations.hear(self, generation)

    def close(self, forked: bool = False) -> None:
        """Close the connection without failing the calls in flight. `forked`: whether it is the parent's connection."""
        sock, dealer, self.sock, self._dealer, self.staging = self.sock, self._dealer, None, None, None
        self.notices.clear()
        if dealer is not None and not forked:  # after a fork, a lock of the receiver may be held forever
            dealer.close()
        if dealer is not None and dealer.files is not None:
            dealer.files.close(forked)
        elif sock is not None:
            sock.close()

    def leave_shared_memory(self, problem: str) -> None:
        """Close the connection because the shard's memory cannot be read. For a while, connect without that memory."""
        self.connector.avoid_memory(problem)
        self.drop(ConnectionLost(f"{self}: {problem}"))

    def drop(self, error: KVStoreError) -> None:
        """Close the connection and fail all calls in flight with `error`. Takes `receive_lock`."""
        with self.receive_lock:
            self.drop_locked(error)

    def drop_locked(self, error: KVStoreError) -> None:
        """Like `drop`, for a caller that holds `receive_lock`."""
        with contextlib.suppress(OSError):
            if self.sock is not None and not self.by_reference:  # after a shutdown, a local shard would end all loans
                self.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits to send
        owed = list(self.pending.values())
        self.close()
        for answer in owed:
            answer.fail(error)
        self._wake()

    # ---- sending ---------------------------------------------------------------------------------------------

    def owe(self, answer: ReplyCollector) -> int:
        """Expect an answer from now on. Return the number of the connection that owes it, or 0 without a connection."""
        dealer, connection = self._dealer, self.connections
        if dealer is None or self.sock is None or self._dealer is not dealer:  # the dealer was lost or replaced
            return 0
        if not dealer.pending and not self.liveness.unanswered:
            self.liveness.last_moved = time.monotonic()
        dealer.expect(answer)
        return connection

    def release(self, request_id: int) -> None:
        """Give back all blocks that were lent for a completed GET. This does not wake the shard."""
        files = self._dealer.files if self._dealer is not None else None
        if files is None or not files.release(request_id):
            self.notices.post(wire.encode(wire.Release(request_id, 0)))

    def send(self, sock: socket.socket, data: bytes, deadline: float) -> None:
        """Send all of `data`. Only the owner of `sending` calls this. Raises `Timeout`, `OSError` and `ValueError`."""
        view = memoryview(data)
        while view:
            try:
                view = view[send_views(sock, [view]) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise Timeout(f"{self}: the shard did not take a message by the deadline") from None

    # ---- receiving -------------------------------------------------------------------------------------------

    def receive(self, budget: int, wake_fd: int = -1, wait_s: float = 0.0) -> None:
        """Read up to `budget` bytes that have arrived. On any failure the link is dropped, and calls in flight fail.
        `wake_fd`, `wait_s`: passed to `Receiver.receive`, which waits for more bytes."""
        with self.receive_lock:
            dealer = self._dealer
            if dealer is None:
                return
            receiver = dealer.receiver
            before = receiver.received
            try:
                alive = receiver.receive(budget, wake_fd, wait_s)
                if receiver.received > before:
                    liveness = self.liveness
                    liveness.last_received = liveness.last_moved = time.monotonic()
                    liveness.unanswered = False
                if not alive:
                    self.drop_locked(ConnectionLost(f"{self}: the server closed the connection"))
            except OSError as error:
                self.drop_locked(ConnectionLost(f"{self}: {error.strerror or error}"))
            except (zmtp.ZMTPError, wire.WireError) as error:
                self.drop_locked(ProtocolError(f"{self}: {error}"))
            except BaseException:  # KeyboardInterrupt: the receiver may not have counted all received bytes
                self.drop_locked(ConnectionLost(f"{self}: a call was interrupted"))
                raise

    def abandon(self, answer: ReplyCollector) -> None:
        """Give up an answer and give its lent blocks back. After this call, no byte of the reply is written to the
        caller's memory."""
        try:
            self._wake()  # the thread that reads the link stops waiting for more
            with self.receive_lock:
                self.liveness.given_up(answer)
                answer.return_loans()
                dealer = self._dealer
                if dealer is not None:
                    dealer.abandon(answer)
                    dealer.receiver.arm()
            if isinstance(answer, GetAnswer):
                # The rest of the answer would uselessly keep a slow link busy.
                self.notices.post(wire.encode(wire.Cancel(answer.id)))
                if self.by_reference and not answer.kept:
                    self.notices.post(wire.encode(wire.Release(answer.id, 0)))
        except BaseException:  # KeyboardInterrupt: the shard may not know that the lent blocks are free
            self.drop(ConnectionLost(f"{self}: a call was interrupted"))
            raise
