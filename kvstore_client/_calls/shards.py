"""Requests to every shard: the shards' state, the shards that may have a key, and operations on a whole namespace.

They are meant for people, scripts and tests, not for a data path, because each call asks all shards at the same time.
"""

from __future__ import annotations

import time
from typing import Final, TypeVar

import msgspec
import numpy as np

from kvstore import wire
from kvstore.wire import ErrorCode
from kvstore.wire.status import segment_slots
from kvstore_client._calls.batches import keyed_message
from kvstore_client._calls.exchange import Exchange, outcome
from kvstore_client._calls.options import Options
from kvstore_client._calls.repairs import Repairs
from kvstore_client._links.call import Call, Message, protocol_error
from kvstore_client._links.link import Link
from kvstore_client._links.view import NO_SHARD, ShardEntry
from kvstore_client.errors import TRANSPORT_ERRORS, ProtocolError
from kvstore_client.keys import KeyArray, Namespace
from kvstore_client.results import Location, ShardSettings, ShardStatus, StoreInfo

_Reply = TypeVar("_Reply", bound=wire.Reply)
_CONFIG: Final = "settings that can be changed while it runs"


class Shards:
    """The requests to all shards of one client's store. Thread-safe."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._pool = exchange.pool

    def sync(self, options: Options) -> None:
        """Wait until all blocks that this client set can be read. Without `fail_open`, this raises an error if the
        number of nodes that fail is at least the number of copies of a block."""
        places = {place.link: place.node for place in self._pool.view.places}
        calls = self._exchange.ask_all(wire.Sync, options, every_lane=True)  # a set may be in progress on any lane
        failed = {places.get(call.link.first, "") for call in calls if isinstance(call.error, TRANSPORT_ERRORS)}
        for call in calls:  # if fewer nodes failed than there are copies, the other nodes have the blocks
            outcome(call, wire.SyncReply, options.fail_open or len(failed) < self._pool.replicas)

    def ping(self, options: Options) -> float:
        """Return the time in seconds until all shards have answered. Raises if one does not answer."""
        start = time.perf_counter()
        for call in self._exchange.ask_all(wire.Ping, options):
            if call.error is not None:
                raise call.error
        return time.perf_counter() - start

    def scrub(self, options: Options) -> dict[str, int]:
        """Have every shard check its disk. Return, for each shard, the number of the pass that completes the check."""
        calls = self._exchange.ask_all(wire.Scrub, options)
        return {call.link.name: reply.passes for call, reply in _answered(calls, wire.ScrubReply, options)}

    def purge(
        self, repairs: Repairs, options: Options, every: bool = False, model: str = "", prefix: str = ""
    ) -> dict[str, wire.PurgeReply]:
        """See `KVStoreClient.purge_shards`."""
        repairs.cancel_all(options.timeout_s / 2)
        generations = self._pool.generations
        if (model or prefix) and (link := self._earlier()) is not None:
            raise ProtocolError(
                f"{link.name}: this server has an earlier release, which would purge all namespaces: upgrade "
                "the server first, or name the namespace in full. Nothing was removed"
            )
        generation = max(generations.known + 1, time.time_ns())

        def request(number: int, deadline_ms: int) -> wire.Purge:
            return wire.Purge(number, deadline_ms, every, generation, model, prefix)

        calls = self._exchange.ask_all(request, options)
        replies = {call.link.name: reply for call, reply in _answered(calls, wire.PurgeReply, options)}
        if not every:
            generations.learn(max((reply.generation for reply in replies.values()), default=0))
        return replies

    # ---- what shards keep for operators ----------------------------------------------------------------------

    def clients(self, options: Options) -> dict[str, list[wire.ConnectedClient]]:
        """See `KVStoreClient.clients`."""
        self._need_present("list of clients")
        lists: dict[Link, list[wire.ConnectedClient]] = {link: [] for link in self._pool.links}
        if not lists and not options.fail_open:
            raise self._pool.no_shards()
        after = dict.fromkeys(lists, 0)  # the last number that each shard has sent

        def request(call: Call) -> wire.Clients:
            return wire.Clients(call.id, options.deadline_ms, after[call.link])

        left, deadline = list(lists), time.monotonic() + options.timeout_s
        while left:
            calls = self._exchange.ask(left, request, options.within(deadline - time.monotonic()))
            answered = {
                call.link: reply for call, reply in self._known(calls, wire.ClientsReply, options, "list of clients")
            }
            for link in left:
                if link not in answered:
                    del lists[link]
            left = []
            for link, reply in answered.items():
                lists[link] += reply.clients
                if reply.clients and reply.clients[-1].number > after[link]:
                    after[link] = reply.clients[-1].number
                    left.append(link)
        return {link.name: found for link, found in lists.items()}

    def hottest(self, count: int, options: Options) -> dict[str, list[bytes]]:
        """See `KVStoreClient.hottest`."""
        calls = self._exchange.ask_all(lambda number, ms: wire.Hottest(number, ms, 0, count), options)
        found = {}
        for call, reply in _answered(calls, wire.HottestReply, options):
            size = reply.key_bytes
            if reply.keys and not (
                wire.MIN_KEY_BYTES <= size <= wire.MAX_KEY_BYTES
                and len(reply.keys) % size == 0
                and len(reply.keys) <= count * size
            ):
                raise ProtocolError(
                    f"{call.link}: {len(reply.keys)} bytes of keys of {size} bytes: expected at most {count} keys"
                )
            found[call.link.name] = [reply.keys[at : at + size] for at in range(0, len(reply.keys), size or 1)]
        return found

    def slow_requests(self, options: Options) -> dict[str, wire.SlowlogReply]:
        """See `KVStoreClient.slow_requests`."""
        self._need_present("slow log")
        calls = self._exchange.ask_all(wire.Slowlog, options)
        return {call.link.name: reply for call, reply in self._known(calls, wire.SlowlogReply, options, "slow log")}

    def _earlier(self) -> Link | None:
        """Return a connected shard whose release speaks only an earlier version of the protocol, if there is one."""
        return next((link for link in self._pool.links if link.sock is not None and not link.knows_generations), None)

    def _need_present(self, what: str) -> None:
        """Raise `ProtocolError` if a connected shard has an earlier release, which does not have `what`."""
        if (link := self._earlier()) is not None:
            raise _too_old(link, what)

    @staticmethod
    def _known(calls: list[Call], expected: type[_Reply], options: Options, what: str) -> list[tuple[Call, _Reply]]:
        """Like `_answered`, for requests that a shard of an earlier release refuses because it does not know them."""
        for call in calls:
            if isinstance(call.reply, wire.Error) and call.reply.code == ErrorCode.PROTOCOL:
                raise _too_old(call.link, what)
        return _answered(calls, expected, options)

    def configure(self, options: Options, name: str = "", value: str = "") -> list[ShardSettings]:
        """See `KVStoreClient.config_get` and, with a name, `KVStoreClient.config_set`."""
        self._need_present(_CONFIG)

        def request(number: int, deadline_ms: int) -> wire.Configure:
            return wire.Configure(number, deadline_ms, name, value)

        calls = self._exchange.ask_all(request, msgspec.structs.replace(options, fail_open=True))
        if not calls:
            raise self._pool.no_shards()
        return [_settings_of(call) for call in calls]

    # ---- state of the shards ---------------------------------------------------------------------------------

    def info(self, namespace: Namespace, options: Options) -> StoreInfo:
        """Return the shards' reports, and how many blocks of `namespace` these shards hold and have room for."""
        calls = self._exchange.ask_all(wire.Info, options)
        shards = [wire.decode_shard_info(reply.info) for _, reply in _answered(calls, wire.InfoReply, options)]
        block_bytes, total, full, free = namespace.block_bytes, 0, 0, 0
        for shard in shards:
            per_segment = segment_slots(shard.segment_bytes, block_bytes)
            total += shard.memory_limit_bytes // shard.segment_bytes * per_segment
            free += shard.segments_free * per_segment
            for each in shard.namespaces:
                if each.id == namespace.id:
                    full += each.blocks
                    free += each.slots - each.transient_slots - (each.blocks - each.transient_blocks) - each.writing
                elif not (each.blocks or each.writing):  # an empty namespace gives its segments to any other namespace
                    free += each.segments * per_segment
        return StoreInfo(block_bytes, total, full, free, shards)

    def statuses(self, options: Options) -> list[ShardStatus]:
        """Return the status of every shard in the present view, including shards that do not answer."""
        places = {place.link: place for place in self._pool.view.places}
        calls = self._exchange.ask_all(wire.Info, msgspec.structs.replace(options, fail_open=True))
        statuses = []
        for call in calls:
            place = places.get(call.link)
            if place is None:  # the shard joined after `places` was made
                continue
            reply = call.reply
            info = None
            if call.error is None and isinstance(reply, wire.InfoReply):
                info = wire.decode_shard_info(reply.info)
            error = call.link.broken or call.error or ProtocolError(f"{call.link}: unexpected reply to INFO")
            statuses.append(
                ShardStatus(
                    name=call.link.name,
                    node=place.node,
                    zone=_zone(place),
                    state=place.state,
                    endpoint=_endpoint(place.link),
                    weight=place.link.weight,
                    takes_sets=place.new,
                    info=info,
                    error="" if info is not None else str(error),
                    answered=info is not None or not isinstance(error, TRANSPORT_ERRORS),
                    path=call.link.path,
                )
            )
        return statuses

    def locate(self, packed: KeyArray, replicas: int, ask: bool, options: Options) -> list[Location]:
        """Return the shards that may have the block of one key, owners first. `ask`: ask them if they have it."""
        view = self._pool.view
        if not view.links:
            raise self._pool.no_shards()
        owners = view.owners(packed, replicas)[0].tolist()
        others = [number for number in view.readers(packed, replicas)[0].tolist() if number != NO_SHARD]
        places = [view.places[number] for number in dict.fromkeys([*owners, *others])]
        present = self._present(packed, places, options) if ask else {}
        owner, *copies = (view.places[number] for number in owners)
        return [
            Location(
                role="owner" if place is owner else "replica" if place in copies else "old owner",
                node=place.node,
                zone=_zone(place),
                state=place.state,
                shard=place.link.name,
                endpoint=_endpoint(place.link),
                present=present.get(place),
            )
            for place in places
        ]

    def asked(self, packed: KeyArray, replicas: int) -> frozenset[Link]:
        """Return the shards to which a read of these keys would send its first requests now."""
        view = self._pool.view
        if not view.links:
            return frozenset()
        first = view.readers(packed, replicas, self._pool.preferred_replica)[:, 0]
        return frozenset(view.links[number] for number in np.unique(first).tolist() if number != NO_SHARD)

    def _present(self, packed: KeyArray, places: list[ShardEntry], options: Options) -> dict[ShardEntry, bool]:
        """Return, for each of these shards, whether it has the block. Shards that do not answer are left out."""

        def message(call: Call) -> Message:
            request = wire.Contains(call.id, options.deadline_ms, 1, packed.shape[1])
            return keyed_message(request, packed)

        calls = [Call(place.link, self._pool.next_id(), np.arange(1), message) for place in places]
        self._exchange.run(calls, time.monotonic() + options.timeout_s)
        replies = [outcome(call, wire.ContainsReply, fail_open=True) for call in calls]
        return {
            place: reply.present == b"\1" for place, reply in zip(places, replies, strict=True) if reply is not None
        }


def _answered(calls: list[Call], expected: type[_Reply], options: Options) -> list[tuple[Call, _Reply]]:
    """Return the calls that were answered, with their replies. Raises the error of any other call, except transport
    errors with `fail_open`."""
    replies = [(call, outcome(call, expected, options.fail_open)) for call in calls]
    return [(call, reply) for call, reply in replies if reply is not None]


def _too_old(link: Link, what: str) -> ProtocolError:
    return ProtocolError(f"{link}: this server has an earlier release, which has no {what}: upgrade the server")


def _settings_of(call: Call) -> ShardSettings:
    link, reply = call.link, call.reply
    name, endpoint = link.name, _endpoint(link)
    if isinstance(reply, wire.ConfigureReply) and call.error is None:
        return ShardSettings(name, endpoint, reply.settings, reply.before)
    unknown = isinstance(reply, wire.Error) and reply.code == wire.ErrorCode.PROTOCOL
    error = _too_old(link, _CONFIG) if unknown else call.error or protocol_error(link, reply)
    return ShardSettings(name, endpoint, error=error)


def _zone(place: ShardEntry) -> str:
    """Return the zone of a shard's node, empty if it has none. In a view, a node without a zone is its own zone."""
    return "" if place.zone == place.node else place.zone


def _endpoint(link: Link) -> str:
    host, port = link.host, link.port
    scheme = "tcp" if link.connector.tls is None else "tls"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
