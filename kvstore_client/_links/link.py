"""One connection to one shard.

A link is *down* (not connected; a call may connect), *up*, or *broken* (connecting failed or the shard went silent;
calls fail at once until the prober has connected again, see `dialing`). Its `connector` makes connections, its
`liveness` tells whether the shard still answers, and its `notices` are the messages without a reply.

Any thread may send, one message at a time: the owner of `sending`. The caller that leads (see `leading`) reads frames,
under `receive_lock`. A link that loses its place in the byte stream (a message half sent, a deadline in the middle of a
frame that cannot be discarded) is dropped, never repaired.
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
from kvstore.wire.dealer import Answer, Dealer, GetAnswer
from kvstore.wire.remote_memory import Transport
from kvstore_client._links.connector import Connector, SharedMemory
from kvstore_client._links.generations import Generations
from kvstore_client._links.liveness import Liveness
from kvstore_client._links.notices import Notices
from kvstore_client._links.ownership import Ownership
from kvstore_client._links.staging import Staging
from kvstore_client.errors import ConnectionLost, KVStoreError, ProtocolError, Timeout

SHARED_MEMORY: Final = "shared memory"  # as a path


class Link:
    """One client's connection to a shard. Thread-safe, by the locks that the module's docstring names.

    `hello`, `shared_memory`, `transport`, `tls`: see `Connector`. `wake()` makes the caller that reads the links look
    again. `generations`: of the client's namespace, which all its links share; None: its own.
    `lanes`: all links of the client to this shard, the first of which stands for the shard (see `lanes`).
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
        generations: Generations | None = None,
    ) -> None:
        self._generations = generations if generations is not None else Generations()
        self.generation = 0  # of the namespace at the shard, as far as it has said
        self.knows_generations = False  # the shard does
        self.lanes: Sequence[Link] = (self,)
        self.name = name
        self.host = host
        self.port = port
        self.fixed_name = False  # whether only a shard of this name may answer
        self.on_this_host = False  # whether the shard is, as far as is known
        self.retired = False  # it left the view, so it is not connected again
        self.sock: socket.socket | None = None
        self.broken: KVStoreError | None = None
        self.connections = 0  # greeted so far; also the number of the present connection
        self.weight = 1.0
        self._wake = wake
        self._dealer: Dealer | None = None  # of the connection `sock`
        self.staging: Staging | None = None  # of the connection `sock`, if it is local
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
        """Note what is known of the shard now."""
        for lane in self.lanes:
            lane.name, lane.host, lane.port, lane.weight = name, host, port, weight

    def reset_locks(self) -> None:
        """Make new locks: after a fork, threads of the parent may hold the old ones for ever."""
        self.sending = Ownership()
        self.receive_lock = threading.Lock()
        self.connecting = Ownership()
        self.connector.forget()

    @property
    def pending(self) -> dict[int, Answer]:
        """Answers that are owed on the present connection."""
        dealer = self._dealer
        return dealer.pending if dealer is not None else {}

    @property
    def received(self) -> int:
        """Bytes that came on the present connection."""
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
        """How blocks come: "shared memory", the name of a transport, "tls" or "tcp"."""
        dealer = self._dealer
        if dealer is not None and dealer.files is not None:
            return SHARED_MEMORY if dealer.transport is None else dealer.transport.name
        return "tcp" if self.connector.tls is None else "tls"

    @property
    def load_s(self) -> float:
        """How long an answer is likely to take, in seconds; infinite while broken."""
        if self.broken is not None:
            return math.inf
        return self.liveness.delay_s * (1 + sum(len(lane.pending) for lane in self.lanes))

    # ---- connecting ------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> wire.Welcome:
        """Make a connection. For the owner of `connecting`. Raises like `Connector.connect`."""
        sock, self._dealer, welcome = self.connector.connect(timeout_s)
        self.staging = Staging(welcome.block_bytes) if self._dealer.local and welcome.block_bytes else None
        self.sock = sock
        return welcome

    def greeting(self) -> None:
        """HELLO is about to be said: the shard may have forgotten what it said on an earlier connection."""
        self.generation = 0

    def greeted(self, welcome: wire.Welcome) -> None:
        """HELLO was answered. Raises `OSError` if the shard lacks a purge."""
        self._generations.greet(self, welcome)
        self.liveness.last_received = self.liveness.last_moved = time.monotonic()
        self.liveness.unanswered = False
        self.broken = None
        self.connections += 1

    def raised(self, generation: int) -> None:
        """The shard says which generation it is at. Raises `OSError` if it lacks a purge."""
        self._generations.hear(self, generation)

    def close(self, forked: bool = False) -> None:
        """Close the connection. Calls that wait for answers are not failed. `forked`: it is the parent's."""
        sock, dealer, self.sock, self._dealer, self.staging = self.sock, self._dealer, None, None, None
        self.notices.clear()
        if dealer is not None and not forked:  # there, a lock of the receiver may be held for ever
            dealer.close()
        if dealer is not None and dealer.files is not None:
            dealer.files.close(forked)
        elif sock is not None:
            sock.close()

    def leave_shared_memory(self, problem: str) -> None:
        """The shard's memory cannot be read: close the connection, and connect without shared memory for a while."""
        self.connector.avoid_memory(problem)
        self.drop(ConnectionLost(f"{self}: {problem}"))

    def drop(self, error: KVStoreError) -> None:
        """Close the connection and fail all calls in flight with `error`. Takes `receive_lock`."""
        with self.receive_lock:
            self.drop_locked(error)

    def drop_locked(self, error: KVStoreError) -> None:
        """`drop` for a caller that holds `receive_lock`."""
        with contextlib.suppress(OSError):
            if self.sock is not None and not self.by_reference:  # the shard would take it for the end of all loans
                self.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits to send
        owed = list(self.pending.values())
        self.close()
        for answer in owed:
            answer.fail(error)
        self._wake()

    # ---- sending ---------------------------------------------------------------------------------------------

    def owe(self, answer: Answer) -> int:
        """Expect an answer from now on. -> the number of the connection it will come on; 0: there is no connection."""
        dealer, connection = self._dealer, self.connections
        if dealer is None or self.sock is None or self._dealer is not dealer:  # lost, or just replaced
            return 0
        if not dealer.pending and not self.liveness.unanswered:
            self.liveness.last_moved = time.monotonic()
        dealer.expect(answer)
        return connection

    def release(self, request_id: int) -> None:
        """Give back all blocks that were lent to a GET that is complete. The shard is not woken for it."""
        files = self._dealer.files if self._dealer is not None else None
        if files is None or not files.release(request_id):
            self.notices.post(wire.encode(wire.Release(request_id, 0)))

    def send(self, sock: socket.socket, data: bytes, deadline: float) -> None:
        """Send all of `data`; for the owner of `sending`. Raises `Timeout`, `OSError` and `ValueError`."""
        view = memoryview(data)
        while view:
            try:
                view = view[send_views(sock, [view]) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise Timeout(f"{self}: it did not take a message by its deadline") from None

    # ---- receiving -------------------------------------------------------------------------------------------

    def receive(self, budget: int, wake_fd: int = -1, wait_s: float = 0.0) -> None:
        """Read up to `budget` bytes that have arrived. On any failure the link is dropped, and calls in flight fail.
        `wake_fd`, `wait_s`: of `Receiver.receive`, which waits for more."""
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
            except BaseException:  # KeyboardInterrupt: perhaps bytes were received that the receiver has not counted
                self.drop_locked(ConnectionLost(f"{self}: a call was interrupted"))
                raise

    def abandon(self, answer: Answer) -> None:
        """Give up an answer. After this call, no byte of the reply is written to the caller's memory, and nothing that
        was lent is kept."""
        try:
            self._wake()  # whoever is reading the link stops waiting for more
            with self.receive_lock:
                self.liveness.given_up(answer)
                answer.return_loans()
                dealer = self._dealer
                if dealer is not None:
                    dealer.abandon(answer)
                    dealer.receiver.arm()
            if isinstance(answer, GetAnswer):
                # The rest would keep a slow link busy for nothing.
                self.notices.post(wire.encode(wire.Cancel(answer.id)))
                if self.by_reference and not answer.kept:
                    self.notices.post(wire.encode(wire.Release(answer.id, 0)))
        except BaseException:  # KeyboardInterrupt: perhaps the shard was not told, and would keep what it lent
            self.drop(ConnectionLost(f"{self}: a call was interrupted"))
            raise
