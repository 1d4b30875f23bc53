"""One connection to one shard.

A link is *down* (not connected; a call may connect), *up*, or *broken* (connecting failed or the shard went silent;
calls fail at once until the prober has connected again, see `probing`). A shard that owes an answer and sends nothing
gets a ZMTP PING. A shard that is still working on the answer replies to the PING at once.

Any thread may send, one message at a time: the owner of `sending`. The caller that leads (see `leading`) reads frames,
under `receive_lock`. A link that loses its place in the byte stream (a message half sent, a deadline in the middle of a
frame that cannot be discarded) is dropped, never repaired.

Over 400 lines because every part of it may find that the connection is lost, and then all must agree.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal

from kvstore import wire
from kvstore._cext import send_views
from kvstore.tls import TLSOptions
from kvstore.wire import zmtp
from kvstore.wire.dealer import Answer, Dealer, GetAnswer, Refusal
from kvstore.wire.remote_memory import DESCRIPTORS, Sharing
from kvstore_client._links.going_local import go_local
from kvstore_client._links.ownership import Ownership
from kvstore_client._links.resolving import connected
from kvstore_client._links.staging import Staging
from kvstore_client.errors import ConnectionLost, KVStoreError, ProtocolError, Timeout, from_wire

PING_AFTER_S: Final = 1.0  # silence, while an answer is owed, after which a PING is sent
DEAD_AFTER_S: Final = 2.5  # silence after which a shard is dead; one that vanishes is noticed within 3 s
SharedMemory = Literal["auto"] | bool
_PING: Final = zmtp.command(b"PING", bytes(2))  # a time to live of 0: the shard need not watch us in turn
WITHOUT_MEMORY_S: Final = 30.0  # for which a shard whose memory could not be read is used without
DELAY_WEIGHT: Final = 0.2  # weight of the newest answer in the mean delay
GIVE_BACK_S: Final = 0.2  # for the rest of a small message, when the socket takes nothing more
DELAY_HALF_LIFE_S: Final = 5.0  # the mean delay fades, so that a shard that was slow is tried again


class Link:
    """One client's connection to a shard. Thread-safe, by the locks that the module's docstring names.

    `hello()` makes the client's HELLO; `wake()` makes the caller that reads the links look again. `shared_memory`:
    connect to a shard on this host over its Unix socket, where it lends blocks in shared memory; "auto": if that is
    possible. `nixl`: how to read the memory of a shard elsewhere that allows it; None: not at all. `tls`: how to
    connect with TLS; None: without it.
    `lanes`: all links of the client to this shard, the first of which stands for the shard (see `lanes`).
    """

    sharing: Sharing = DESCRIPTORS  # how memory is shared with a shard on this host

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        hello: Callable[[], wire.Hello],
        wake: Callable[[], None],
        shared_memory: SharedMemory = "auto",
        nixl: Sharing | None = None,
        tls: TLSOptions | None = None,
    ) -> None:
        self.lanes: Sequence[Link] = (self,)
        self.name = name
        self.host = host
        self.port = port
        self.fixed_name = False  # whether only a shard of this name may answer
        self.on_this_host = False  # whether the shard is, as far as is known
        self.retired = False  # it left the view, so it is not connected again
        self.sock: socket.socket | None = None
        self.broken: KVStoreError | None = None
        self.last_received = 0.0
        self.last_moved = 0.0  # when bytes were received, a full socket took more, or an answer was first owed
        self.unanswered = False  # whether a request that was given up had got no byte in answer
        self.connections = 0  # made so far; also the number of the present connection
        self.weight = 1.0
        self.reset_locks()
        self._hello = hello
        self._wake = wake
        self.shared_memory = shared_memory
        self._nixl = nixl
        self.tls = tls
        self._notices: deque[bytes] = deque()  # messages that were posted and not sent
        self._dealer: Dealer | None = None  # of the connection `sock`
        self.staging: Staging | None = None  # of the connection `sock`, if it is local
        self._problem, self._problem_at = "", -math.inf  # why and when the shard's memory could not be read
        self._doubted = 0.0  # when the present silence was first noticed
        self._pinged = 0.0
        self._delay_s = 0.0  # moving mean of the time from a request's last byte to the first byte of its answer
        self._delay_known = 0.0  # when `_delay_s` was updated

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
        self._unconnected: socket.socket | None = None  # of the owner of `connecting`: a socket that is not `sock` yet

    @property
    def pending(self) -> dict[int, Answer]:
        """Answers that are owed on the present connection."""
        dealer = self._dealer
        return dealer.pending if dealer is not None else {}

    @property
    def landing(self) -> bool:
        """Whether an answer is owed whose blocks go straight to their places."""
        dealer = self._dealer
        return dealer is not None and dealer.receiver.landing

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
        """How blocks come: "shared memory", "nixl", "tls" or "tcp"."""
        if self.local:
            return "shared memory"
        return "nixl" if self.by_reference else "tcp" if self.tls is None else "tls"

    @property
    def _why_in_band(self) -> str:
        """Why the shard's memory is not to be read for now; empty if it may be."""
        return self._problem if time.monotonic() - self._problem_at < WITHOUT_MEMORY_S else ""

    # ---- connecting ------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> wire.Welcome:
        """Connect, greet, say HELLO. Raises `ConnectionLost`, `Timeout`, `ProtocolError`, or the server's refusal."""
        deadline = time.monotonic() + timeout_s
        try:
            sock = connected(self.host, self.port, deadline, self._note_unconnected)
            self.on_this_host = sock.getpeername()[0] == sock.getsockname()[0]
            if self.tls is not None:
                from kvstore.tls.outgoing import join  # imports `ssl`, for those who need it

                sock = join(sock, self.host, self.tls, deadline, self._note_unconnected)
        except TimeoutError:
            raise Timeout(f"{self}: no connection within {timeout_s:.3g} s") from None
        except OSError as error:
            raise ConnectionLost(f"{self}: {error.strerror or error}") from None
        try:
            dealer, welcome = self.shake_hands(sock, deadline)
            name = welcome.shards[welcome.shard].name
            if self.fixed_name and name != self.name:
                raise ConnectionLost(f"{self}: expected shard {self.name} there, but shard {name} answered")
            if self.shared_memory is not False:
                must = str(self) if self.shared_memory is True else ""
                sock, dealer = go_local(
                    sock, dealer, welcome, deadline, self.shake_hands, must, self._why_in_band, self.on_this_host
                )
            self._dealer = dealer
            self.staging = Staging(welcome.block_bytes) if dealer.local and welcome.block_bytes else None
            self.sock = sock
            return welcome
        except BaseException as error:
            sock.close()
            if isinstance(error, Refusal):
                raise from_wire(error.code, f"{self}: {error}") from None
            if isinstance(error, zmtp.ZMTPError | wire.WireError):
                # In a cluster, another program may have the port of a node that is gone. In a list, the user erred.
                kind = ConnectionLost if self.fixed_name else ProtocolError
                raise kind(f"{self} is not a kvstore server that this client can use: {error}") from None
            if isinstance(error, TimeoutError):
                raise Timeout(f"{self}: no answer to HELLO within {timeout_s:.3g} s") from None
            if isinstance(error, OSError):
                raise ConnectionLost(f"{self}: {error.strerror or error}") from None
            raise
        finally:
            self._unconnected = None

    def interrupt(self) -> None:
        """Make another thread's `connect` fail now."""
        sock = self._unconnected
        if sock is not None:
            with contextlib.suppress(OSError):  # the connection failed by itself
                sock.shutdown(socket.SHUT_RDWR)

    def _note_unconnected(self, sock: socket.socket) -> None:
        self._unconnected = sock

    def shake_hands(self, sock: socket.socket, deadline: float, local: bool = False) -> tuple[Dealer, wire.Welcome]:
        """Greet and say HELLO on a connected socket. `local`: it is connected to the shard's Unix socket. Raises
        `OSError`, `ZMTPError`, `WireError` and `Refusal`."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        dealer = Dealer(sock, self._learn_delay, self.sharing, None if self._why_in_band else self._nixl, local)
        dealer.greet(deadline)
        welcome = dealer.say_hello(self._hello(), deadline)
        self.last_received = self.last_moved = time.monotonic()
        self.unanswered = False
        self.broken = None
        self.connections += 1
        return dealer, welcome

    def close(self, forked: bool = False) -> None:
        """Close the connection. Calls that wait for answers are not failed. `forked`: it is the parent's."""
        sock, dealer, self.sock, self._dealer, self.staging = self.sock, self._dealer, None, None, None
        self._notices.clear()
        if dealer is not None and not forked:  # there, a lock of the receiver may be held for ever
            dealer.close()
        if dealer is not None and dealer.files is not None:
            dealer.files.close(forked)
        elif sock is not None:
            sock.close()

    def leave_shared_memory(self, problem: str) -> None:
        """The shard's memory cannot be read: close the connection, and connect without shared memory for a while."""
        self._problem, self._problem_at = problem, time.monotonic()
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

    # ---- liveness and load -----------------------------------------------------------------------------------

    @property
    def load_s(self) -> float:
        """How long an answer is likely to take, in seconds; infinite while broken."""
        if self.broken is not None:
            return math.inf
        faded: float = 0.5 ** ((time.monotonic() - self._delay_known) / DELAY_HALF_LIFE_S)
        return self._delay_s * faded * (1 + sum(len(lane.pending) for lane in self.lanes))

    def silence_s(self, now: float) -> float:
        """For how long no byte has moved although an answer is owed; 0 if none is owed."""
        return now - self.last_moved if self.pending and self.sock is not None else 0.0

    def look_after(self, now: float) -> bool:
        """Send a PING to a silent shard. -> False if it has been silent for so long that it must be dead."""
        if self.silence_s(now) < PING_AFTER_S:
            return True
        self.receive(zmtp.GREETING_BYTES)  # bytes may have arrived that no caller has read
        if self.silence_s(now) < PING_AFTER_S:
            return True
        if self._doubted < self.last_moved:  # perhaps no caller has looked for long: the shard's time starts only now
            self._doubted = now
        if now - self._doubted >= DEAD_AFTER_S - PING_AFTER_S:
            return False
        if self._pinged < self._doubted:
            me = object()
            try:  # if another thread is sending a message, that tests the shard as well as a PING
                sock = self.sock
                if sock is not None and self.sending.take(me, 0.0):
                    self._pinged = now
                    return sock.send(_PING) == len(_PING)  # half a PING would garble the message after it
            except OSError:
                return True  # a full socket or a lost connection: the silence decides
            finally:
                if self.sending.owner is me:
                    self.sending.owner = None
                    self.sending.wake()
                    self.send_notices()
        return True

    def owe(self, answer: Answer) -> int:
        """Expect an answer from now on. -> the number of the connection it will come on; 0: there is no connection."""
        dealer, connection = self._dealer, self.connections
        if dealer is None or self.sock is None or self._dealer is not dealer:  # lost, or just replaced
            return 0
        if not dealer.pending and not self.unanswered:
            self.last_moved = time.monotonic()
        dealer.expect(answer)
        return connection

    def _learn_delay(self, answer: Answer, began_at: float) -> None:
        """Update the mean delay: the first byte of an answer arrived at `began_at`."""
        self._delay_s += DELAY_WEIGHT * (max(0.0, began_at - answer.sent_at) - self._delay_s)
        self._delay_known = time.monotonic()
        answer.sent_at = 0.0

    # ---- sending ---------------------------------------------------------------------------------------------

    def post(self, header: bytes) -> None:
        """Send a message that has no reply (CREDIT, CANCEL, RELEASE). Never blocks: if another thread is sending, that
        one sends it when its own message is sent in whole; if the socket is full, the next one does."""
        self._notices.append(zmtp.frame(header, False))
        self.send_notices()

    def release(self, request_id: int) -> None:
        """Give back all blocks that were lent to a GET that is complete. The shard is not woken for it."""
        files = self._dealer.files if self._dealer is not None else None
        if files is None or not files.release(request_id):
            self.post(wire.encode(wire.Release(request_id, 0)))

    def send_notices(self) -> None:
        """Send what was posted, unless another thread is sending: it calls this when it is done."""
        while self._notices:
            me = object()
            try:
                if not self.sending.take(me, 0.0) or not self.flush_notices():
                    return
            finally:
                if self.sending.owner is me:
                    self.sending.owner = None
                    self.sending.wake()

    def flush_notices(self) -> bool:
        """Send what was posted; for the owner of `sending`, between messages. -> False if the socket takes no more now,
        or the connection is lost."""
        sock, notices = self.sock, self._notices
        try:
            while notices:
                if sock is None:
                    notices.clear()
                    return False
                data = notices.popleft()
                try:
                    sent = send_views(sock, [data])
                except BlockingIOError:
                    notices.appendleft(data)
                    return False
                if sent < len(data):
                    self.send(sock, data[sent:], time.monotonic() + GIVE_BACK_S)
        except (OSError, ValueError, Timeout) as error:  # ValueError: another thread has just closed the socket
            self.drop(ConnectionLost(f"{self}: {error}"))
            return False
        except BaseException:  # KeyboardInterrupt: perhaps a part of a message was sent
            self.drop(ConnectionLost(f"{self}: a call was interrupted"))
            raise
        return True

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
                    self.last_received = self.last_moved = time.monotonic()
                    self.unanswered = False
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
                if answer.sent_at > self.last_received:
                    self.unanswered = True
                    self._delay_s = max(self._delay_s, time.monotonic() - answer.sent_at)
                    self._delay_known = time.monotonic()
                answer.return_loans()
                dealer = self._dealer
                if dealer is not None:
                    dealer.abandon(answer)
                    dealer.receiver.arm()
            if isinstance(answer, GetAnswer):
                self.post(wire.encode(wire.Cancel(answer.id)))  # the rest would keep a slow link busy for nothing
                if self.by_reference and not answer.kept:
                    self.post(wire.encode(wire.Release(answer.id, 0)))
        except BaseException:  # KeyboardInterrupt: perhaps the shard was not told, and would keep what it lent
            self.drop(ConnectionLost(f"{self}: a call was interrupted"))
            raise
