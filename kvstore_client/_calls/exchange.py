"""Sends the requests of a call to all shards at once, and waits for all answers together.

No shard waits for another. Shards that are connected get their requests while others are being connected. If a socket
is full, the next one is tried. If a shard stays silent, only its own requests fail.

A call is written once, as a generator. Where it has to wait, it yields an `Awaited`, and `send` tells it whether the
condition holds. At the end it returns the result. `drive` runs one call on the calling thread, which blocks where the
call waits, connects or finds a socket full. A multiplexer (`kvstore_client.engine.multiplexer`) runs many calls on one
thread, which never blocks: without `alone`, the call yields in all three cases. A call may be ended wherever it waits.
`close` makes the generator give up its requests, and after that no byte is written to the caller's memory. A generator
may be run by several threads, but only by one at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from kvstore import wire
from kvstore.wire.zmtp import frame
from kvstore_client._calls.batches import chunks, keyed_message, take
from kvstore_client._calls.borrowed import OpenLoans
from kvstore_client._calls.options import Options
from kvstore_client._links.buffers import BlockSource
from kvstore_client._links.call import Call, Message, protocol_error
from kvstore_client._links.in_turn import Turn
from kvstore_client._links.lanes import usable
from kvstore_client._links.link import Link
from kvstore_client._links.link_pool import LinkPool
from kvstore_client._links.sending import Sending, send_all
from kvstore_client._links.staging import SharedStaging
from kvstore_client._links.view import Numbers
from kvstore_client.errors import TRANSPORT_ERRORS, ConnectionLost, KVStoreError, Timeout
from kvstore_client.keys import KeyArray
from kvstore_client.memory import SharedRegion

log = logging.getLogger("kvstore_client")

T = TypeVar("T")
_T = TypeVar("_T", bound=wire.Reply)

# The share of a call's time that is kept for reading the answers of fast shards, if a slow shard takes no requests.
ANSWER_SHARE: Final = 0.1
MOST_ANSWER_S: Final = 0.2
SHARE_S: Final = 1.0  # how long a shard on this host may take to map memory
_DIAL_POLL_S: Final = 0.05
_ROOM_S: Final = 0.005  # after this time, a thread that runs many calls tries a full socket again
_MOST_READ_BYTES: Final = 64 << 20


class Awaited(NamedTuple):
    """A condition that a call waits for. `ready`: returns whether to go on. Any thread may call it, and it never
    blocks. `deadline`: the time at which to go on regardless. `pool`: the pool whose links must be read meanwhile, or
    None if the condition does not depend on links and is checked at the deadline. `calls`: the calls to wait for."""

    pool: LinkPool | None
    ready: Callable[[], bool]
    deadline: float
    calls: Sequence[Call] = ()


Steps: TypeAlias = "Generator[Awaited, bool, T]"


def drive(steps: Steps[T]) -> T:
    """Run a call on this thread and return its result. An exception during a wait, such as Ctrl-C, ends the call."""
    try:
        pool, ready, deadline, _ = next(steps)
        while True:
            if pool is None:
                time.sleep(max(0.0, deadline - time.monotonic()))
            pool, ready, deadline, _ = steps.send(ready() if pool is None else pool.wait(ready, deadline))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


class Exchange:
    """Runs calls over a client's links. Thread-safe."""

    def __init__(self, pool: LinkPool) -> None:
        self.pool = pool
        self.lingering = OpenLoans()  # borrowed blocks that are still in use

    def calls(
        self,
        packed: KeyArray,
        groups: Iterable[tuple[Link, Numbers]],
        request: Callable[[int, int, int], wire.KeyedRequest],
    ) -> list[Call]:
        """Return calls about keys, which `run` can send. `groups`: links, each with the positions of the keys to send
        to it. `request(id, number of keys, bytes of a key)` makes the header of one call."""

        def message(call: Call) -> Message:
            keys = take(packed, call.positions)
            return keyed_message(request(call.id, *keys.shape), keys)

        return [
            Call(link, self.pool.next_id(), some, message)
            for link, positions in groups
            for some in chunks(positions, wire.MAX_KEYS)
        ]

    def run(
        self,
        calls: Sequence[Call],
        deadline: float,
        patience_s: float | None = None,
        enough: Callable[[], bool] | None = None,
        groups: Sequence[Sequence[Call]] = (),
    ) -> None:
        """Run `steps` on the calling thread."""
        drive(self.steps(calls, deadline, patience_s, enough, groups))

    def steps(
        self,
        calls: Sequence[Call],
        deadline: float,
        patience_s: float | None = None,
        enough: Callable[[], bool] | None = None,
        groups: Sequence[Sequence[Call]] = (),
        alone: bool = True,
    ) -> Steps[None]:
        """Send all calls and wait for all answers, or until `enough()` is true. At `deadline`, every call is done.

        `patience_s`: if other shards can be asked, how long a shard may be silent before its request is given up. If
        `enough` ends the wait, answers that come later are read and ignored. `groups`: all calls, in groups that are
        sent one after the other, each when the turn of the group before it is over. If a turn ends at its time limit,
        all other groups are sent at once. `alone`: whether the calling thread may block.
        """
        try:
            left = list(groups) or [calls]
            while len(left) > 1:
                turn = Turn(left[0])
                yield from self._sent(left.pop(0), deadline, patience_s, alone, more=True)
                if not (yield Awaited(self.pool, turn.over, min(deadline, time.monotonic() + turn.turn_s), calls)):
                    left = [[call for group in left for call in group]]
            yield from self._sent(left[0], deadline, patience_s, alone)
            yield from self._answered(calls, deadline, patience_s, enough)
            again = [call for call in calls if call.retry]
            if again and not (enough is not None and enough()):
                self._renew(again)
                yield from self._sent(again, deadline, patience_s, alone)
                yield from self._answered(again, deadline, patience_s, enough)
        except BaseException:  # KeyboardInterrupt, or the call is ended while it waits
            # No caller waits for the answers any more, so none of their bytes may be written to the caller's memory.
            for call in calls:
                if call.unfinished:
                    call.link.abandon(call.answer)
                    call.answer.fail(Timeout(f"{call.link}: the call was interrupted"))  # frees its staged blocks
            raise

    def ask_all(
        self, request: Callable[[int, int], wire.Request], options: Options, every_lane: bool = False
    ) -> list[Call]:
        """Send the request `request(id, deadline_ms)` to every shard, wait for the answers, and return the calls.
        Raises if no shard is known, except with `fail_open`. `every_lane`: send it on each connection that is up."""
        links = self.pool.links if not every_lane else [lane for each in self.pool.links for lane in usable(each)]
        if not links and not options.fail_open:
            raise self.pool.no_shards()
        return self.ask(links, lambda call: request(call.id, options.deadline_ms), options)

    def ask(self, links: Iterable[Link], request: Callable[[Call], wire.Request], options: Options) -> list[Call]:
        """Send the request `request(call)` on each link, wait for the answers, and return the calls."""

        def message(call: Call) -> Message:
            return [[frame(wire.encode(request(call)), False)]]

        calls = [Call(link, self.pool.next_id(), np.empty(0, dtype=np.intp), message) for link in links]
        self.run(calls, time.monotonic() + options.timeout_s)
        return calls

    def staging(self, link: Link, source: BlockSource, deadline: float) -> SharedStaging | None:
        """Return the object that stages blocks for SETs by references to a shard on this host. If the shard lacks the
        memory for that, first share it. Return None if blocks are to be sent through the socket."""
        staging = link.staging
        if staging is None:
            return None
        region = source.only_region()
        if not staging.ready_for(region):
            # Another thread may be about to share the same memory.
            if not staging.sharing.acquire(timeout=max(0.0, min(SHARE_S, deadline - time.monotonic()))):
                return None
            try:
                if region is not None and not (staging.ready_for(region) or staging.full):
                    self._share(link, staging, region, deadline)
                if not staging.ready_for(region):
                    self._share_ring(link, staging, deadline)
            finally:
                staging.sharing.release()
        return None if staging.refused else staging

    def _share_ring(self, link: Link, staging: SharedStaging, deadline: float) -> None:
        try:
            staging.ring = staging.make_ring()
        except OSError as error:
            log.warning("%s: blocks are sent through the socket, because no memory can be shared: %s", link, error)
            staging.refused = True
        else:
            self._share(link, staging, staging.ring, deadline)

    def _share(self, link: Link, staging: SharedStaging, region: SharedRegion, deadline: float) -> None:
        from kvstore_client._links.sharing import share  # needed only with a shard on this host

        answer = share(link, region, self.pool.next_id(), min(deadline, time.monotonic() + SHARE_S))
        if answer is not None:
            self.pool.wait(lambda: answer.done, min(deadline, time.monotonic() + SHARE_S))
            if isinstance(answer.reply, wire.ShareReply):
                staging.shared.add(region.number)
                return
            if not answer.done:
                link.abandon(answer)
        problem = answer.reply if answer is not None else "the connection was lost"
        log.warning("%s: blocks are sent through the socket, because the shard takes no memory: %s", link, problem)
        staging.refused = True

    def send_again(self, calls: Sequence[Call], deadline: float, patience_s: float | None) -> None:
        """Send calls again after their connection was found dead, or after the shard had no place for it."""
        self._renew(calls)
        self.send(calls, deadline, patience_s)

    def _renew(self, calls: Sequence[Call]) -> None:
        for call in calls:
            refusal = call.error
            if call.without_place and refusal is not None:
                self.pool.dialer.give_up_lane(call.link, refusal)
            call.renew(self.pool.next_id())

    def send(self, calls: Sequence[Call], deadline: float, patience_s: float | None, more: bool = False) -> None:
        """Send the calls. Links that are up are served at once, while the others connect. Calls fail if their link
        cannot be connected. `more`: whether other calls are sent afterwards."""
        by_link, deadline = self._to_send(calls, deadline, patience_s, more)
        up = [link for link in by_link if link.sock is not None]
        down = [link for link in by_link if link not in up]
        connecting = self.pool.dialer.connect(down, deadline) if down else ()
        self._send(by_link, up, deadline)
        for done in connecting:
            for link, error in done:
                if error is not None:
                    for call in by_link[link]:
                        call.answer.fail(error)
            self._send(by_link, [link for link, error in done if error is None], deadline)

    def _to_send(
        self, calls: Sequence[Call], deadline: float, patience_s: float | None, more: bool
    ) -> tuple[dict[Link, list[Call]], float]:
        """Return the calls by link, and the deadline for sending them."""
        now = time.monotonic()
        if patience_s is not None:
            deadline = min(deadline, now + patience_s)
        self.lingering.sweep()
        if self.pool.generations.untold:
            self.pool.generations.tell(self.pool.connections)
        by_link: dict[Link, list[Call]] = {}
        for call in calls:
            by_link.setdefault(call.link, []).append(call)
        if more or len(by_link) > 1:
            deadline -= min(MOST_ANSWER_S, ANSWER_SHARE * max(0.0, deadline - now))
        return by_link, deadline

    def _send(self, by_link: dict[Link, list[Call]], links: Sequence[Link], deadline: float) -> None:
        sendings = [_sending(link, by_link[link]) for link in links]
        for sending in send_all(sendings, deadline, self.pool.look_after, self.pool.wait):
            self._takes_nothing(sending.link)

    def _takes_nothing(self, link: Link) -> None:
        self.pool.dialer.break_link(link, Timeout(f"{link}: it takes no requests"))

    def _sent(
        self, calls: Sequence[Call], deadline: float, patience_s: float | None, alone: bool, more: bool = False
    ) -> Steps[None]:
        if alone:
            self.send(calls, deadline, patience_s, more)
        else:
            yield from self._send_beside(calls, deadline, patience_s, more)

    def _send_beside(self, calls: Sequence[Call], deadline: float, patience_s: float | None, more: bool) -> Steps[None]:
        """Like `send`, for a thread that has other calls in progress: links connect on other threads, and a full socket
        is tried again later. It can only send requests whose pieces have no conditions."""
        pool, dialer = self.pool, self.pool.dialer
        by_link, deadline = self._to_send(calls, deadline, patience_s, more)
        down = [link for link in by_link if link.sock is None]
        for link in down:
            dialer.beside(link)
        active = [_sending(link, by_link[link]) for link in by_link if link not in down]

        def one_is_connected() -> bool:
            return any(not dialer.is_connecting(link) for link in down)

        try:
            while True:
                active = [sending for sending in active if not sending.advance(0.0)]
                now = time.monotonic()
                for link in [link for link in down if now >= deadline or not dialer.is_connecting(link)]:
                    down.remove(link)
                    try:
                        dialer.ensure_up(link, now)
                    except KVStoreError as error:
                        for call in by_link[link]:
                            call.answer.fail(error)
                    else:
                        active.append(_sending(link, by_link[link]))
                if not active and not down:
                    return
                if now >= deadline:
                    break
                yield Awaited(pool, one_is_connected, min(deadline, now + (_ROOM_S if active else _DIAL_POLL_S)), calls)
                pool.look_after()
            for sending in active:
                began = sending.began
                sending.abandon(Timeout(f"{sending.link}: it did not take the request by its deadline"))
                if began:
                    self._takes_nothing(sending.link)
        except BaseException:
            for sending in active:
                sending.abandon(ConnectionLost(f"{sending.link}: the call was interrupted"))
            raise

    def wait(
        self, calls: Sequence[Call], deadline: float, patience_s: float | None, enough: Callable[[], bool] | None = None
    ) -> None:
        """Wait for all answers, or until `enough()` is true. Calls that get no answer in time fail."""
        drive(self._answered(calls, deadline, patience_s, enough))

    def _answered(
        self,
        calls: Sequence[Call],
        deadline: float,
        patience_s: float | None,
        enough: Callable[[], bool] | None = None,
    ) -> Steps[None]:
        answers = [call.answer for call in calls]

        def ready() -> bool:
            done = True
            for answer in answers:
                if answer.lent:
                    return True
                done = done and answer.done
            return done or (enough is not None and enough())

        while True:
            if patience_s is None:
                yield Awaited(self.pool, ready, deadline, calls)
            else:
                yield from self._wait_for_each(calls, ready, deadline, patience_s)
            if not any(call.answer.lent and call.read_lent() for call in calls):
                break
            if enough is not None and enough():
                return
        if enough is not None and enough():
            return
        for call in [call for call in calls if call.unfinished]:
            if not call.done:
                call.link.receive(_MOST_READ_BYTES)  # its answer may have arrived since the last read
            while call.read_lent():
                pass
            if not call.done:
                self.pool.lost(call.link, call.answer)
            while call.read_lent():  # another thread may have read it meanwhile
                pass

    def _wait_for_each(
        self, calls: Sequence[Call], ready: Callable[[], bool], deadline: float, patience_s: float
    ) -> Steps[None]:
        """Wait until `ready()` is true, and give up requests to shards that have been silent for `patience_s`."""
        pool, began, look_s = self.pool, time.monotonic(), min(_DIAL_POLL_S, patience_s / 2)
        while not (yield Awaited(pool, ready, min(deadline, time.monotonic() + look_s), calls)):
            now = time.monotonic()
            if now >= deadline or pool.closed:
                return
            for call in calls:
                silent_s = min(now - began, call.link.liveness.silence_s(now))
                if not call.done and silent_s >= patience_s:
                    pool.lost(call.link, call.answer)


def _sending(link: Link, calls: Sequence[Call]) -> Sending:
    for call in calls:
        call.connection = link.connections
    return Sending(link, calls)


def outcome(call: Call, expected: type[_T], fail_open: bool) -> _T | None:
    """Return the reply, or None after a transport error with `fail_open`. Otherwise raise the call's error."""
    error = call.error
    if error is None:
        if isinstance(call.reply, expected):
            return call.reply
        error = protocol_error(call.link, call.reply)
    if fail_open and isinstance(error, TRANSPORT_ERRORS):
        return None
    raise error
