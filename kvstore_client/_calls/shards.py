"""Questions to every shard: what state they are in, where a key belongs, and what concerns a namespace as a whole.

For people, scripts and tests, not for a data path: each call asks all shards, side by side.
"""

from __future__ import annotations

import time
from typing import TypeVar

import msgspec
import numpy as np

from kvstore import wire
from kvstore_client._calls.batches import keyed_message
from kvstore_client._calls.exchange import Exchange, outcome
from kvstore_client._calls.options import Options
from kvstore_client._calls.repairs import Repairs
from kvstore_client._links.call import Call, Message
from kvstore_client._links.view import NOBODY, Place
from kvstore_client.errors import TRANSPORT_ERRORS
from kvstore_client.keys import KeyArray, Namespace
from kvstore_client.results import Location, ShardStatus, StoreInfo

_Reply = TypeVar("_Reply", bound=wire.Reply)


class Shards:
    """All shards of one client's store. Thread-safe."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._core = exchange.core

    def sync(self, options: Options) -> None:
        """Return when every set of this client can be read; raises unless enough copies can be."""
        places = {place.link: place.node for place in self._core.view.places}
        calls = self._exchange.ask_all(wire.Sync, options)
        failed = {places.get(call.link, "") for call in calls if isinstance(call.error, TRANSPORT_ERRORS)}
        for call in calls:  # fewer nodes than there are copies: the others have the blocks
            outcome(call, wire.SyncReply, options.fail_open or len(failed) < self._core.replicas)

    def ping(self, options: Options) -> float:
        """Seconds until all had answered."""
        start = time.perf_counter()
        for call in self._exchange.ask_all(wire.Ping, options):
            if call.error is not None:
                raise call.error
        return time.perf_counter() - start

    def scrub(self, options: Options) -> dict[str, int]:
        """By shard, the pass over its disk with which the check is complete."""
        calls = self._exchange.ask_all(wire.Scrub, options)
        return {call.link.name: reply.passes for call, reply in _answered(calls, wire.ScrubReply, options)}

    def purge(self, all_namespaces: bool, repairs: Repairs, options: Options) -> int:
        """Remove all blocks of the namespace, or of all. -> how many there were."""
        repairs.cancel_all(options.timeout_s / 2)
        calls = self._exchange.ask_all(lambda number, deadline: wire.Purge(number, deadline, all_namespaces), options)
        return sum(reply.purged for _, reply in _answered(calls, wire.PurgeReply, options))

    # ---- their state -----------------------------------------------------------------------------------------

    def info(self, namespace: Namespace, options: Options) -> StoreInfo:
        """The shards that answer, and what they have of `namespace`."""
        calls = self._exchange.ask_all(wire.Info, options)
        shards = [_shard_info(reply) for _, reply in _answered(calls, wire.InfoReply, options)]
        block_bytes, total, full, free = namespace.block_bytes, 0, 0, 0
        for shard in shards:
            per_segment = shard.segment_bytes // block_bytes
            total += shard.memory_limit_bytes // shard.segment_bytes * per_segment
            free += shard.segments_free * per_segment
            for each in shard.namespaces:
                if each.id == namespace.id:
                    full += each.blocks
                    free += each.slots - each.blocks - each.writing
                elif not (each.blocks or each.writing):  # it gives its segments up to whoever needs them
                    free += each.segments * per_segment
        return StoreInfo(block_bytes, total, full, free, shards)

    def statuses(self, options: Options) -> list[ShardStatus]:
        """Every shard of the present view, also those that do not answer."""
        places = {place.link: place for place in self._core.view.places}
        calls = self._exchange.ask_all(wire.Info, msgspec.structs.replace(options, fail_open=True))
        statuses = []
        for call in calls:
            place = places.get(call.link)
            if place is None:  # it joined in this instant
                continue
            reply = call.reply
            info = _shard_info(reply) if call.error is None and isinstance(reply, wire.InfoReply) else None
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
                )
            )
        return statuses

    def locate(self, packed: KeyArray, replicas: int, ask: bool, options: Options) -> list[Location]:
        """Who may have the block of one key, the one that is asked first in front."""
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

    def _present(self, packed: KeyArray, places: list[Place], options: Options) -> dict[Place, bool]:
        """Who of these has the block; without those that do not answer."""

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
    """The calls that were answered, with their replies; raises for the others, unless `fail_open` lets them go."""
    replies = [(call, outcome(call, expected, options.fail_open)) for call in calls]
    return [(call, reply) for call, reply in replies if reply is not None]


def _shard_info(reply: wire.InfoReply) -> wire.ShardInfo:
    return msgspec.msgpack.decode(reply.info, type=wire.ShardInfo)


def _zone(place: Place) -> str:
    """A node without a zone is one of its own in a view."""
    return "" if place.zone == place.node else place.zone


def _endpoint(place: Place) -> str:
    host, port = place.link.host, place.link.port
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
