"""Finding and reading blocks: `contains`, `match_prefix`, `get_into` and `stream_get`, in as many rounds as needed.

Copies: slot -> kernel -> destination. If a block's owner lacks it and another shard has it, the block is copied once
more, for its repair. A block with wrong bytes counts as missing at the shard that sent it. It is deleted there, and
requested from the next shard that may have it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.wire import frame_blocks
from kvstore.wire.dealer import FrameBuffers
from kvstore_client._calls.batches import chunks, keyed_message, milliseconds, take
from kvstore_client._calls.borrowed import Borrowed
from kvstore_client._calls.copied import Copied
from kvstore_client._calls.exchange import Exchange, Steps, drive, outcome
from kvstore_client._calls.options import Options
from kvstore_client._calls.repairs import Repairs
from kvstore_client._calls.rounds import Rounds
from kvstore_client._links.buffers import KEPT_BUFFERS
from kvstore_client._links.call import Call, Message, protocol_error
from kvstore_client._links.in_turn import Turn, in_turn
from kvstore_client._links.lanes import least_busy, spread
from kvstore_client._links.link import Link
from kvstore_client._links.targets import BlockTarget, BorrowTarget, IntoTarget, PlacedBlocks, QueueTarget
from kvstore_client._links.view import Numbers
from kvstore_client.errors import TRANSPORT_ERRORS, NotAuthorized
from kvstore_client.keys import KeyArray
from kvstore_client.results import Lookup

if TYPE_CHECKING:
    from kvstore_client._links.block_mac import BatchMacs, BlockMac, SecretMissing

STREAM_CREDIT_BYTES: Final = 8 << 20
DISCARD_TIMEOUT_S: Final = 0.2  # the longest time that a reader waits for the deletion of a damaged block

_ABSENT: Final = int(wire.Presence.ABSENT)  # plain ints, because NumPy is slow with an enumeration's members
_PRESENT: Final = int(wire.Presence.PRESENT)

Present = npt.NDArray[np.bool_]

log = logging.getLogger("kvstore_client")


def _leading(flags: Present) -> int:
    """Return the number of leading elements that are True."""
    return len(flags) if flags.all() else int(flags.argmin())


class Reader:
    """Finds blocks of one namespace. Thread-safe."""

    def __init__(
        self,
        exchange: Exchange,
        block_bytes: int,
        replicas: int,
        verify: bool,
        repairs: Repairs,
        mac: BlockMac | SecretMissing | None,
    ) -> None:
        self._exchange = exchange
        self._mac = mac
        self._pool = exchange.pool
        self._block_bytes = block_bytes
        self._buffers = FrameBuffers(block_bytes, max(4, KEPT_BUFFERS // (frame_blocks(block_bytes) * block_bytes)))
        self._replicas = replicas
        self._verify = verify
        self._repairs = repairs

    def contains(self, packed: KeyArray, options: Options) -> Present:
        """Return, for each key, whether its block is present."""
        present: Present = self._states(packed, options, False) == _PRESENT
        return present

    def lookup(self, packed: KeyArray, options: Options) -> Lookup:
        """Return how many leading keys of the chain are present, and how many are present or promised."""
        states = self._states(packed, options, True)
        return Lookup(_leading(states == _PRESENT), _leading(states != _ABSENT))

    def _states(self, packed: KeyArray, options: Options, promised: bool) -> npt.NDArray[np.uint8]:
        """Return one `wire.Presence` for each key. `promised`: whether to report promised blocks as such."""
        states = np.zeros(len(packed), dtype=np.uint8)
        deadline_ms, refresh, pin_s = options.deadline_ms, options.refresh, options.pin_s

        def request(number: int, keys: int, key_bytes: int) -> wire.Contains:
            return wire.Contains(number, deadline_ms, keys, key_bytes, refresh, pin_s, promised)

        rounds = Rounds(self._pool, packed, np.arange(len(packed)), self._replicas, options.timeout_s)
        while groups := rounds.next():
            calls = self._exchange.calls(packed, groups, request)
            self._exchange.run(calls, rounds.deadline, rounds.patience_s)
            for call in calls:
                reply = call.reply
                if call.error is not None:
                    continue
                if not isinstance(reply, wire.ContainsReply) or len(reply.present) != call.count:
                    call.fail(protocol_error(call.link, reply))
                    continue
                found = np.frombuffer(reply.present, dtype=np.uint8)
                if call.count == len(states):
                    np.copyto(states, found, where=found != _ABSENT)
                else:
                    states[call.positions] = np.where(found, found, states[call.positions])
            rounds.settle(calls, states == _PRESENT)
        self._end(rounds, options)
        return states

    def match_prefix(self, packed: KeyArray, options: Options) -> int:
        """Return how many leading keys of the chain are present without a gap."""
        links = self._pool.links
        if len(links) != 1:  # a chain is spread over all shards, and each shard knows only some of its keys
            absent = np.flatnonzero(~self.contains(packed, options))
            return int(absent[0]) if len(absent) else len(packed)
        deadline_ms, refresh, pin_s = options.deadline_ms, options.refresh, options.pin_s

        def request(number: int, keys: int, key_bytes: int) -> wire.MatchPrefix:
            return wire.MatchPrefix(number, deadline_ms, keys, key_bytes, refresh, pin_s)

        calls = self._exchange.calls(packed, [(links[0], np.arange(len(packed)))], request)
        self._exchange.run(calls, time.monotonic() + options.timeout_s)
        length = 0
        for call in calls:
            if isinstance(call.error, TRANSPORT_ERRORS):
                self._pool.stats.unanswered += call.count
            reply = outcome(call, wire.MatchReply, options.fail_open)
            if reply is not None and not 0 <= reply.length <= call.count:
                raise protocol_error(call.link, reply)
            length += reply.length if reply is not None else 0
            if reply is None or reply.length < call.count:
                break
        return length

    def get_into(
        self,
        packed: KeyArray,
        unique: Numbers,
        rows: npt.NDArray[np.uint8],
        slots: Sequence[int] | None,
        options: Options,
    ) -> Steps[Present]:
        """Read the blocks at positions `unique` into their rows. Return, for each position, whether the block arrived.

        With `options.prefix`, every shard sends only the blocks before the first one that it lacks. So all blocks
        before the first gap of the whole chain arrive, but only a few of the blocks behind the gap.
        """
        target = IntoTarget(rows, slots, len(packed), self._verify, self._macs(packed))
        wait_until = time.monotonic() + options.wait_s
        missing = unique
        while len(missing):
            view = self._pool.view
            yield from self._read_into(packed, missing, target, options, wait_until)
            if not options.wait_s or self._pool.view is view:
                break
            # The owners have changed. Blocks that did not arrive may be promised or present at the new owners.
            missing = missing[~target.present[missing]]
        return target.present

    def _read_into(
        self, packed: KeyArray, positions: Numbers, target: IntoTarget, options: Options, wait_until: float
    ) -> Steps[None]:
        """Read the blocks at these positions, and wait for promised ones until `wait_until`."""
        wait_s = max(0.0, wait_until - time.monotonic())
        generation = self._pool.generations.known
        rounds = Rounds(self._pool, packed, positions, self._replicas, options.timeout_s + wait_s, waits=wait_s > 0)
        while groups := rounds.next():
            lacking = rounds.lacking()
            calls = self._get_calls(packed, groups, target, options, 0, bool(lacking), wait_until)
            # With `wait_s`, no shard waits for its turn, because all shards must wait for blocks at the same time.
            turns = () if options.wait_s else in_turn(calls)
            alone = options.alone
            yield from self._exchange.steps(calls, rounds.deadline, rounds.patience_s, groups=turns, alone=alone)
            yield from self._settle(rounds, calls, target.present, packed, target, alone)
            copied = Copied(packed, calls) if lacking else None
            for link, owned in lacking:
                found = owned[target.present[owned]]
                if copied is not None and len(found):
                    attributes = copied.to(rounds.owned_by(link), found)
                    kept = attributes["reads"] == 0  # transient blocks are not copied
                    found = found[kept]
                    rows = map(target.row, found.tolist())
                    self._repairs.put(link, packed[found], rows, attributes[kept], generation)
        self._end(rounds, options)

    def borrow(self, packed: KeyArray, unique: Numbers, verify: bool, options: Options) -> Borrowed:
        """Read the blocks at positions `unique` in place if possible. The caller must call the result's `end`."""
        target = BorrowTarget(self._buffers, self._block_bytes, len(packed), verify, self._macs(packed))
        borrowed = Borrowed(target, self._exchange.lingering)
        try:
            rounds = Rounds(self._pool, packed, unique, self._replicas, options.timeout_s)
            while groups := rounds.next():
                calls = self._get_calls(packed, groups, target, options, 0, False)
                borrowed.calls.extend(calls)
                self._exchange.run(calls, rounds.deadline, rounds.patience_s, groups=in_turn(calls))
                drive(self._settle(rounds, calls, target.present, packed, target, True))
            self._end(rounds, options)
        except BaseException:
            borrowed.end()
            raise
        return borrowed

    def stream(
        self, packed: KeyArray, unique: Numbers, options: Options
    ) -> Generator[tuple[int, memoryview], None, None]:
        """Yield the blocks at positions `unique` as `(position, block)`, in the order in which they arrive."""
        present = np.zeros(len(packed), dtype=np.bool_)
        target = QueueTarget(self._buffers, self._block_bytes, self._verify, self._macs(packed))
        credit = max(STREAM_CREDIT_BYTES, 2 * self._block_bytes)
        generation = self._pool.generations.known
        rounds = Rounds(self._pool, packed, unique, self._replicas, options.timeout_s)
        while groups := rounds.next():
            lacking: dict[int, list[tuple[Link, Numbers]]] = {}
            for link, positions in rounds.lacking():
                owned = rounds.owned_by(link)
                for position in positions.tolist():
                    lacking.setdefault(position, []).append((link, owned))
            calls = self._get_calls(packed, groups, target, options, credit, bool(lacking))
            copied = Copied(packed, calls) if lacking else None
            try:
                for position, block in self._arriving(calls, target, credit, rounds, options.timeout_s):
                    present[position] = True
                    if copied is not None:
                        one = np.array([position])
                        for link, owned in lacking.get(position, ()):
                            self._repairs.put(link, packed[one], [block], copied.to(owned, one), generation)
                    yield position, block
                    del block
            finally:
                for call in calls:
                    if call.unfinished:
                        call.link.abandon(call.answer)
            drive(self._settle(rounds, calls, present, packed, target, True))
        self._end(rounds, options)

    def _arriving(
        self, calls: Sequence[Call], target: QueueTarget, credit: int, rounds: Rounds, timeout_s: float
    ) -> Generator[tuple[int, memoryview], None, None]:
        """Yield the blocks of one round of a stream. The time limit `timeout_s` applies to each block, and starts when
        the caller requests the next block."""
        exchange, patience_s = self._exchange, rounds.patience_s
        granted = [0] * len(calls)
        hits = 0
        later = in_turn(calls)
        sent: list[Call] = []

        def something() -> bool:
            return bool(target.ready) or all(call.done for call in sent)

        while True:
            while later and all(call.done for call in sent):
                turn_ends = time.monotonic() + Turn(later[0]).turn_s
                exchange.send(later[0], rounds.deadline, patience_s, more=len(later) > 1)
                sent += later.pop(0)
            if later:
                self._pool.wait(something, min(rounds.deadline, turn_ends))
                if time.monotonic() >= min(rounds.deadline, turn_ends):
                    rest = [call for group in later for call in group]
                    exchange.send(rest, rounds.deadline, patience_s)
                    sent += rest
                    later = []
                    continue
            else:
                exchange.wait(calls, rounds.deadline, patience_s, something)
            if not target.ready and not later:
                again = [call for call in calls if call.retry and not hits]
                if not again:
                    return
                exchange.send_again(again, rounds.deadline, patience_s)
            while target.ready:
                position, block = target.ready.popleft()
                if block is None:
                    continue
                hits += 1
                yield position, block
                del block
                rounds.deadline = time.monotonic() + timeout_s
            for number, call in enumerate(calls):
                assert isinstance(call.answer, PlacedBlocks)
                taken = call.answer.arrived * self._block_bytes
                if not call.done and not call.link.by_reference and taken - granted[number] >= credit // 2:
                    grant = wire.Credit(call.id, taken - granted[number])
                    call.link.notices.post(wire.encode(grant))
                    granted[number] = taken

    # ---- shared by reads -------------------------------------------------------------------------------------

    def _macs(self, packed: KeyArray) -> BatchMacs | None:
        """Return the object that computes the blocks' MACs, or None if their checksums are not MACs."""
        return self._mac.batch(packed) if self._mac is not None else None

    def _get_calls(
        self,
        packed: KeyArray,
        groups: Sequence[tuple[Link, Numbers]],
        target: IntoTarget | QueueTarget,
        options: Options,
        credit: int,
        attributes: bool,
        wait_until: float = 0.0,
    ) -> list[Call]:
        """Return the GETs of a round. `attributes`: whether the found blocks are also to be set on another shard.
        `wait_until`: the monotonic time until which the shards wait for promised blocks."""
        key_bytes = packed.shape[1]

        def message(call: Call) -> Message:
            keys = take(packed, call.positions)
            wait_ms = int(max(0.0, wait_until - time.monotonic()) * 1000) if wait_until else 0
            references = call.link.by_reference  # lent blocks stay until they are given back, so no credit is needed
            request = wire.Get(
                call.id,
                options.deadline_ms + wait_ms,
                len(keys),
                key_bytes,
                0 if references else credit,
                prefix=options.prefix,
                attributes=attributes,
                references=references,
                wait_ms=wait_ms,
            )
            return keyed_message(request, keys)

        if options.prefix:  # not cut into pieces, because blocks of pieces behind a gap would be useless
            groups = [(least_busy(link), positions) for link, positions in groups]
        else:
            groups = spread(groups, self._block_bytes)
        kept_bytes = key_bytes if attributes else 0
        return [
            Call(
                link,
                self._pool.next_id(),
                some,
                message,
                functools.partial(PlacedBlocks, positions=some, target=target, key_bytes=kept_bytes),
            )
            for link, positions in groups
            for some in chunks(positions, wire.MAX_KEYS)
        ]

    def _settle(
        self, rounds: Rounds, calls: list[Call], present: Present, packed: KeyArray, target: BlockTarget, alone: bool
    ) -> Steps[None]:
        for call in calls:
            assert isinstance(call.answer, PlacedBlocks)
            call.answer.settle()
            self._pool.stats.bytes_in += call.answer.hit * self._block_bytes
        if target.bad:
            bad, target.bad = target.bad, []
            self._pool.stats.checksum_errors += len(bad)
            yield from self._discard(packed, bad, calls, target.macs is None, rounds.deadline, alone)
        rounds.settle(calls, present)

    def _discard(
        self, packed: KeyArray, bad: list[int], calls: Sequence[Call], checked: bool, deadline: float, alone: bool
    ) -> Steps[None]:
        """Have the shards that sent wrong bytes delete the blocks. If this fails, the next reader tries it again.

        With `checked`, a shard deletes a block only if its own check fails too, because the fault may be this client's.
        Shards cannot check MACs.
        """
        timeout_s = min(DISCARD_TIMEOUT_S, max(0.001, deadline - time.monotonic()))
        deadline_ms = milliseconds(timeout_s)

        def message(call: Call) -> Message:
            keys = packed[call.positions]
            return keyed_message(wire.Delete(call.id, deadline_ms, len(keys), keys.shape[1], damaged=checked), keys)

        wrong = np.array(bad, dtype=np.intp)
        discards = [
            Call(call.link, self._pool.next_id(), some, message)
            for call in calls
            if len(some := np.intersect1d(call.positions, wrong))
        ]
        yield from self._exchange.steps(discards, time.monotonic() + timeout_s, alone=alone)
        for call in discards:
            error = call.error
            if isinstance(error, (*TRANSPORT_ERRORS, NotAuthorized)):
                log.warning("%d blocks with wrong bytes stay on %s: %s", call.count, call.link, error)
            elif error is not None:
                raise error

    def _end(self, rounds: Rounds, options: Options) -> None:
        stats = self._pool.stats
        stats.found_elsewhere += rounds.found_elsewhere
        stats.failovers += rounds.failovers
        rounds.check(options.fail_open)
