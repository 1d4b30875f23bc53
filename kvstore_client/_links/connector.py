"""Makes a link's connection: connects, greets, sends HELLO, and changes to the Unix socket of a shard on this host."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable
from typing import Final, Literal, Protocol

from kvstore import wire
from kvstore.tls import TLSOptions
from kvstore.wire import zmtp
from kvstore.wire.dealer import Dealer, Refusal
from kvstore.wire.remote_memory import DESCRIPTORS, Sharing, Transport
from kvstore_client._links.going_local import go_local
from kvstore_client._links.liveness import Liveness
from kvstore_client._links.resolving import connected
from kvstore_client.errors import ConnectionLost, ProtocolError, Timeout, from_wire, readable

SharedMemory = Literal["auto"] | bool
WITHOUT_MEMORY_S: Final = 30.0  # how long a shard's memory is not used after an attempt to read it failed


class ConnectingLink(Protocol):
    """The part of a link that this module uses."""

    name: str
    host: str
    port: int
    fixed_name: bool
    on_this_host: bool
    connections: int
    liveness: Liveness

    def greeting(self) -> None: ...

    def greeted(self, welcome: wire.Welcome) -> None: ...

    def raised(self, generation: int) -> None: ...


class Connector:
    """The connector of one link. Only the owner of the link's `connecting` may use it, but any thread may `interrupt`.

    * `hello()`: Makes the client's HELLO.
    * `shared_memory`: Whether to connect to a shard on this host through its Unix socket, so that the shard can lend
      blocks in shared memory. "auto" does so if possible.
    * `transport`: How to read the memory of a shard on another host, if the shard allows it; or None.
    * `tls`: How to connect with TLS; None for connections without it.
    """

    sharing: Sharing = DESCRIPTORS  # how memory is shared with a shard on this host

    def __init__(
        self,
        link: ConnectingLink,
        hello: Callable[[], wire.Hello],
        shared_memory: SharedMemory,
        transport: Transport | None,
        tls: TLSOptions | None,
    ) -> None:
        self.tls = tls
        self._link = link
        self._hello = hello
        self._shared_memory = shared_memory
        self._transport = transport
        self._problem, self._problem_at = "", -math.inf  # why and when reading the shard's memory last failed
        self._greet_by = math.inf  # until when the server must have greeted
        self._unconnected: socket.socket | None = None  # the socket that is being connected for the link

    def connect(self, timeout_s: float, greet_s: float = math.inf) -> tuple[socket.socket, Dealer, wire.Welcome]:
        """Make a connection, and return it when the server has answered HELLO. Raises `ConnectionLost`, `Timeout`,
        `ProtocolError`, or the server's refusal. `greet_s`: how long the server may take to greet, which a server does
        at once unless it hangs. It may take longer to answer HELLO, for example if the token is wrong."""
        link = self._link
        began = time.monotonic()
        deadline, self._greet_by = began + timeout_s, began + min(timeout_s, greet_s)
        try:
            sock = connected(link.host, link.port, self._greet_by, self._note)
            link.on_this_host = sock.getpeername()[0] == sock.getsockname()[0]
            if self.tls is not None:
                from kvstore.tls.outgoing import join  # this imports `ssl`, which only TLS needs

                sock = join(sock, link.host, self.tls, self._greet_by, self._note)
        except TimeoutError:
            raise Timeout(f"{link}: no connection within {min(timeout_s, greet_s):.3g} s") from None
        except OSError as error:
            raise ConnectionLost(f"{link}: {error.strerror or error}") from None
        try:
            dealer, welcome = self._shake_hands(sock, deadline)
            name = welcome.shards[welcome.shard].name
            if link.fixed_name and name != link.name:
                raise ConnectionLost(f"{link}: expected shard {link.name} there, but shard {name} answered")
            if self._shared_memory is not False:
                must, problem = self._shared_memory is True, self._why_in_band
                sock, dealer = go_local(sock, dealer, welcome, deadline, self._shake_hands, str(link), must, problem)
            return sock, dealer, welcome
        except BaseException as error:
            sock.close()
            # Another program may have taken the port of a server that has ended, or the list of nodes may be wrong.
            stranger = ConnectionLost if link.fixed_name or link.connections else ProtocolError
            if isinstance(error, Refusal):
                refused = from_wire(error.code, f"{link}: {error}")
                raise (stranger(str(refused)) if type(refused) is ProtocolError else refused) from None
            if isinstance(error, zmtp.ZMTPError | wire.WireError):
                said = readable(str(error))
                raise stranger(f"{link} is not a kvstore server that this client can use: {said}") from None
            if isinstance(error, TimeoutError):
                raise Timeout(f"{link}: no answer to HELLO within {time.monotonic() - began:.2g} s") from None
            if isinstance(error, OSError):
                raise ConnectionLost(f"{link}: {error.strerror or error}") from None
            raise
        finally:
            self._unconnected = None

    def _note(self, sock: socket.socket) -> None:
        self._unconnected = sock

    def interrupt(self) -> None:
        """Make another thread's `connect` fail now."""
        sock = self._unconnected
        if sock is not None:
            with contextlib.suppress(OSError):  # the connection has already failed
                sock.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Forget the socket that is being connected. This is for a child process, where the connecting thread does not
        exist."""
        self._unconnected = None

    def avoid_memory(self, problem: str) -> None:
        """Do not read the shard's memory for a while, because reading it failed."""
        self._problem, self._problem_at = problem, time.monotonic()

    @property
    def _why_in_band(self) -> str:
        """Return why the shard's memory must not be read for now, or an empty string if it may be read."""
        return self._problem if time.monotonic() - self._problem_at < WITHOUT_MEMORY_S else ""

    def _shake_hands(self, sock: socket.socket, deadline: float, local: bool = False) -> tuple[Dealer, wire.Welcome]:
        """Greet and send HELLO on a connected socket. `local`: whether it is the shard's Unix socket. Raises `OSError`,
        `ZMTPError`, `WireError` and `Refusal`."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        link = self._link
        transport = None if self._why_in_band else self._transport
        dealer = Dealer(sock, link.liveness.answered, self.sharing, transport, local)
        dealer.greet(deadline if local else self._greet_by)
        dealer.on_raised = link.raised
        link.greeting()
        welcome = dealer.say_hello(self._hello(), deadline)
        link.greeted(welcome)
        return dealer, welcome
