"""Requests to every shard: their state, the shards of a key, and operations on a whole namespace.

They are for people, scripts and tests, not for a data path: each call asks all shards, side by side.
"""

from __future__ import annotations

import time
from typing import TypeVar

import msgspec
import numpy as np

from kvstore import wire
from kvstore.wire.status import segment_slots
from kvstore_client._calls.batches import keyed_message
from kvstore_client._calls.exchange import Exchange, outcome
from kvstore_client._calls.options import Options
from kvstore_client._calls.repairs import Repairs
from kvstore_client._links.call import Call, Message
from kvstore_client._links.link import Link
from kvstore_client._links.view import NOBODY, Place
from kvstore_client.errors import TRANSPORT_ERRORS, ProtocolError
from kvstore_client.keys import KeyArray, Namespace
from kvstore_client.results import Location, ShardStatus, StoreInfo

_Reply = TypeVar("_Reply", bound=wire.Reply)


class Shards:
    """The requests to all shards of one client's store. Thread-safe."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._core = exchange.core

    def sync(self, options: Options) -> None:
        """Return when every set of this client can be read. Raises if as many nodes fail as there are copies of a
        block, unless `fail_open`."""
        places = {place.link: place.node for place in self._core.view.places}
        calls = self._exchange.ask_all(wire.Sync, options, every_lane=True)  # a set may be under way on any of them
        failed = {places.get(call.link.first, "") for call in calls if isinstance(call.error, TRANSPORT_ERRORS)}
        for call in calls:  # if fewer nodes failed than there are copies, the other nodes have the blocks
            outcome(call, wire.SyncReply, options.fail_open or len(failed) < self._core.replicas)

    def ping(self, options: Options) -> float:
        """-> seconds until all shards had answered. Raises if one does not."""
        start = time.perf_counter()
        for call in self._exchange.ask_all(wire.Ping, options):
            if call.error is not None:
                raise call.error
        return time.perf_counter() - start

    def scrub(self, options: Options) -> dict[str, int]:
        """Have every shard check its disk. -> by shard, the number of the pass with which its check is complete."""
        calls = self._exchange.ask_all(wire.Scrub, options)
        return {call.link.name: reply.passes for call, reply in _answered(calls, wire.ScrubReply, options)}

    def purge(
        self, repairs: Repairs, options: Options, every: bool = False, model: str = "", prefix: str = ""
    ) -> dict[str, wire.PurgeReply]:
        """See `KVStoreClient.purge_shards`."""
        repairs.cancel_all(options.timeout_s / 2)
        generations = self._core.generations
        for link in self._core.links if model or prefix else ():
            if link.sock is not None and not link.knows_generations:
                raise ProtocolError(
                    f"{link.name}: a server of an earlier release, which would remove all namespaces: upgrade it "
                    "first, or name the namespace in full. Nothing was removed"
                )
        generation = max(generations.known + 1, time.time_ns())

        def request(number: int, deadline_ms: int) -> wire.Purge:
            return wire.Purge(number, deadline_ms, every, generation, model, prefix)

        calls = self._exchange.ask_all(request, options)
        replies = {call.link.name: reply for call, reply in _answered(calls, wire.PurgeReply, options)}
        if not every:
            generations.learn(max((reply.generation for reply in replies.values()), default=0))
        return replies

    # ---- state of the shards ---------------------------------------------------------------------------------

    def info(self, namespace: Namespace, options: Options) -> StoreInfo:
        """The shards that answer, and how many blocks of `namespace` they hold or have room for."""
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
                elif not (each.blocks or each.writing):  # an empty namespace gives its segments to any that needs them
                    free += each.segments * per_segment
        return StoreInfo(block_bytes, total, full, free, shards)

    def statuses(self, options: Options) -> list[ShardStatus]:
        """The status of every shard of the present view, including shards that do not answer."""
        places = {place.link: place for place in self._core.view.places}
        calls = self._exchange.ask_all(wire.Info, msgspec.structs.replace(options, fail_open=True))
        statuses = []
        for call in calls:
            place = places.get(call.link)
            if place is None:  # it joined after `places` was made
                continue
            reply = call.reply
            info = None
            if call.error is None and isinstance(reply, wire.InfoReply):
                info = wire.decode_shard_info(reply.info)
            error = call.link.broken or call.error or f"{call.link}: unexpected reply to INFO"
            statuses.append(
                ShardStatus(
                    name=call.link.name,
                    node=place.node,
                    zone=_zone(place),
                    state=place.state,
                    endpoint=_endpoint(place),
                    weight=place.link.weight,
                    takes_sets=place.new,
                    info=info,
                    error="" if info is not None else str(error),
                    path=call.link.path,
                )
            )
        return statuses

    def locate(self, packed: KeyArray, replicas: int, ask: bool, options: Options) -> list[Location]:
        """The shards that may have the block of one key, owners first. `ask`: ask them whether they have it."""
        view = self._core.view
        if not view.links:
            raise self._core.no_shards()
        owners = view.owners(packed, replicas)[0].tolist()
        others = [number for number in view.readers(packed, replicas)[0].tolist() if number != NOBODY]
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
                endpoint=_endpoint(place),
                present=present.get(place),
            )
            for place in places
        ]

    def asked(self, packed: KeyArray, replicas: int) -> frozenset[Link]:
        """The shards that a read of these keys asks first, now."""
        view = self._core.view
        if not view.links:
            return frozenset()
        first = view.readers(packed, replicas, self._core.turn)[:, 0]
        return frozenset(view.links[number] for number in np.unique(first).tolist() if number != NOBODY)

    def _present(self, packed: KeyArray, places: list[Place], options: Options) -> dict[Place, bool]:
        """Whether each of these shards has the block; shards that do not answer are left out."""

        def message(call: Call) -> Message:
            request = wire.Contains(call.id, options.deadline_ms, 1, packed.shape[1])
            return keyed_message(request, packed)

        calls = [Call(place.link, self._core.next_id(), np.arange(1), message) for place in places]
        self._exchange.run(calls, time.monotonic() + options.timeout_s)
        replies = [outcome(call, wire.ContainsReply, fail_open=True) for call in calls]
        return {
            place: reply.present == b"\1" for place, reply in zip(places, replies, strict=True) if reply is not None
        }


def _answered(calls: list[Call], expected: type[_Reply], options: Options) -> list[tuple[Call, _Reply]]:
    """The calls that were answered, with their replies. Raises for the others, except for transport errors under
    `fail_open`."""
    replies = [(call, outcome(call, expected, options.fail_open)) for call in calls]
    return [(call, reply) for call, reply in replies if reply is not None]


def _zone(place: Place) -> str:
    """The zone of a place, empty if it has none: in a view, a node without a zone is a zone of its own."""
    return "" if place.zone == place.node else place.zone


def _endpoint(place: Place) -> str:
    host, port = place.link.host, place.link.port
    scheme = "tcp" if place.link.connector.tls is None else "tls"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
