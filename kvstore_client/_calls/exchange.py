"""The requests of a call, sent to all their shards at once and awaited together.

No shard waits for another: shards that are up are sent to while the rest connects, a full socket leaves the turn to
the next one, and a shard that stays silent fails only its own requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from kvstore import wire
from kvstore.wire.zmtp import frame
from kvstore_client._calls.options import Options
from kvstore_client._links.call import Call, Message
from kvstore_client._links.core import Core, protocol_error
from kvstore_client._links.link import Link
from kvstore_client._links.sending import Sending, send_all
from kvstore_client.errors import TRANSPORT_ERRORS, Timeout

_T = TypeVar("_T", bound=wire.Reply)

# The share of a call's time that is kept for reading the answers of fast shards after a slow one took no more requests.
ANSWER_SHARE: Final = 0.1
MOST_ANSWER_S: Final = 0.2
_LOOK_S: Final = 0.05
_READ_BYTES: Final = 64 << 20


class Exchange:
    """Runs calls over a client's links. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def run(
        self,
        calls: Sequence[Call],
        deadline: float,
        patience_s: float | None = None,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Send all calls and wait for all answers, or until `enough()`. At `deadline`, every call is done in any case.

        `patience_s`: a request to a shard that is silent for so long is given up, because another shard can be asked.
        The answers of calls that `enough` left undone are read and ignored when they come.
        """
        try:
            self.send(calls, deadline, patience_s)
            self.wait(calls, deadline, patience_s, enough)
            again = [call for call in calls if call.retry]
            if again and not (enough is not None and enough()):
                self.send_again(again, deadline, patience_s)
                self.wait(again, deadline, patience_s, enough)
        except BaseException:  # KeyboardInterrupt
            # Nobody waits for the answers any more, so no byte of them may be written to the caller's memory.
            for call in calls:
                if not call.done:
                    call.link.abandon(call.answer)
            raise

    def ask_all(self, request: Callable[[int, int], wire.Request], options: Options) -> list[Call]:
        """Send every shard the same request, `request(id, deadline_ms)`, and wait for the answers. -> the calls, done.
        Raises if no shard is known, unless `fail_open`."""
        deadline_ms = options.deadline_ms

        def message(call: Call) -> Message:
            return [[frame(wire.encode(request(call.id, deadline_ms)), False)]]

        links = self.core.links
        if not links and not options.fail_open:
            raise self.core.no_shards()
        no_keys = np.empty(0, dtype=np.intp)
        calls = [Call(link, self.core.next_id(), no_keys, message) for link in links]
        self.run(calls, time.monotonic() + options.timeout_s)
        return calls

    def send_again(self, calls: Sequence[Call], deadline: float, patience_s: float | None) -> None:
        """Send calls again whose connection had died without notice."""
        for call in calls:
            call.renew(self.core.next_id())
        self.send(calls, deadline, patience_s)

    def send(self, calls: Sequence[Call], deadline: float, patience_s: float | None) -> None:
        """Send the calls. Links that are up are sent to first, while the others connect; calls to links that cannot be
        connected fail."""
        now = time.monotonic()
        if patience_s is not None:
            deadline = min(deadline, now + patience_s)
        by_link: dict[Link, list[Call]] = {}
        for call in calls:
            by_link.setdefault(call.link, []).append(call)
        if len(by_link) > 1:
            deadline -= min(MOST_ANSWER_S, ANSWER_SHARE * max(0.0, deadline - now))
        up = [link for link in by_link if link.sock is not None]
        down = [link for link in by_link if link not in up]
        connecting = self.core.connect_links(down, deadline) if down else ()
        self._send(by_link, up, deadline)
        for done in connecting:
            for link, error in done:
                if error is not None:
                    for call in by_link[link]:
                        call.answer.fail(error)
            self._send(by_link, [link for link, error in done if error is None], deadline)

    def _send(self, by_link: dict[Link, list[Call]], links: Sequence[Link], deadline: float) -> None:
        for link in links:
            for call in by_link[link]:
                call.connection = link.connections
        sendings = [Sending(link, by_link[link]) for link in links]
        for sending in send_all(sendings, deadline, self.core.look_after):
            self.core.break_link(sending.link, Timeout(f"{sending.link}: it takes no requests"))

    def wait(
        self,
        calls: Sequence[Call],
        deadline: float,
        patience_s: float | None,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Wait until all answers are there, or until `enough()`. Calls without an answer in time fail."""
        answers = [call.answer for call in calls]

        def ready() -> bool:
            for answer in answers:
                if not answer.done:
                    return enough is not None and enough()
            return True

        core, began = self.core, time.monotonic()
        if patience_s is None:
            core.wait(ready, deadline)
        else:
            while not core.wait(ready, min(deadline, time.monotonic() + min(_LOOK_S, patience_s / 2))):
                now = time.monotonic()
                if now >= deadline or core.closed:
                    break
                for call in calls:
                    silent_s = min(now - began, call.link.silence_s(now))
                    if not call.done and silent_s >= patience_s:
                        core.lost(call.link, call.answer)
        if enough is not None and enough():
            return
        for call in calls:
            if not call.done:
                call.link.receive(_READ_BYTES)  # its answer may have arrived since the last read
            if not call.done:
                core.lost(call.link, call.answer)


def outcome(call: Call, expected: type[_T], fail_open: bool) -> _T | None:
    """The reply; None for a transport failure under `fail_open`; raises otherwise."""
    error = call.error
    if error is None:
        if isinstance(call.reply, expected):
            return call.reply
        error = protocol_error(call.link, call.reply)
    if fail_open and isinstance(error, TRANSPORT_ERRORS):
        return None
    raise error
