"""Every shard of a store asked for its state: who answers what, and who does not answer and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvstore import wire
from kvstore.wire import ShardInfo
from kvstore_cli.output import CommandFailed
from kvstore_client._calls.exchange import outcome
from kvstore_client._links.view import Place
from kvstore_client.client import KVStoreClient
from kvstore_client.errors import TRANSPORT_ERRORS
from kvstore_client.keys import KeyArray


class Answer(NamedTuple):
    """What one shard said. `info` is None if it did not answer; `reason` says why."""

    place: Place
    info: ShardInfo | None
    reason: str


def ask_every_shard(client: KVStoreClient) -> list[Answer]:
    """Ask every shard for its state. Whoever does not answer is in the result as well, also without `fail_open`."""
    places = {place.link: place for place in client._core.view.places}
    answers = []
    for call in client._exchange.ask_all(wire.Info, client._options(None)):
        place, info, reason = places[call.link], None, ""
        try:
            reply = outcome(call, wire.InfoReply, fail_open=False)
            assert reply is not None
            info = msgspec.msgpack.decode(reply.info, type=ShardInfo)
        except TRANSPORT_ERRORS as error:
            reason = str(call.link.broken or error)
        answers.append(Answer(place, info, reason))
    return answers


def owners_of(client: KVStoreClient, keys: KeyArray) -> list[str]:
    """The name of the shard that each block is set on first."""
    view = client._core.view
    return [view.links[number].name for number in view.owners(keys, 1)[:, 0].tolist()]


class SilentShard(msgspec.Struct, frozen=True):
    """A shard that did not answer."""

    node: str
    address: str  # HOST:PORT
    reason: str


class StoreState(msgspec.Struct, frozen=True):
    """What `kvstore info` shows."""

    shards: Sequence[ShardInfo]  # that answered
    silent: Sequence[SilentShard]

    @property
    def failure(self) -> CommandFailed | None:
        """Why the state is not complete; None: it is."""
        if not self.silent:
            return None
        total = len(self.shards) + len(self.silent)
        reasons = "; ".join(dict.fromkeys(shard.reason for shard in self.silent))
        return CommandFailed("unreachable", f"{len(self.silent)} of {total} shards did not answer: {reasons}")


def store_state(client: KVStoreClient) -> StoreState:
    """The state of all shards. `client` should be `fail_open`, so that it can be made while a node is down."""
    answers = ask_every_shard(client)
    return StoreState(
        [answer.info for answer in answers if answer.info is not None],
        [
            SilentShard(answer.place.node, str(answer.place.link), answer.reason)
            for answer in answers
            if answer.info is None
        ],
    )
