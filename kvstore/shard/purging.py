"""Raising the generation of a namespace on this shard, and informing the clients of the namespace.

A generation is raised by a PURGE, or by a client that knows of a purge from another shard (HELLO, SET, RAISE). From
then on no older block is found or accepted: SETs in progress are refused, promises end, and GETs in progress find no
more blocks. `Background` removes the blocks themselves in steps, and the whole namespace is hidden until all are
removed. Clients are informed at once, before anything else is sent to them. Clients that hold copies reply when they
have dropped the copies.

Only the loop's thread uses this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Final, Protocol

from kvstore import wire
from kvstore.auth.rights import Rights
from kvstore.shard.peer import Peer
from kvstore.store.generations import Generations, check_generation, next_generation
from kvstore.store.namespaces import ShardStore
from kvstore.wire import ADMIN, WRITE, decode_namespace, namespace_id

KNOWS_GENERATIONS: Final = 4  # the oldest protocol version that has generations
MOST_SILENT: Final = 16  # the most addresses that a reply names
MOST_EARLY: Final = 256


class Removal(Protocol):
    """A removal of blocks of earlier generations."""

    canonical: bytes
    blocks: int  # the number of blocks removed so far
    done: bool


class Purging:
    """The generations of the namespaces, and the connections that use each namespace.

    remove: a function that starts to remove the older blocks of a namespace, given as canonical JSON.
    recovering: a function that returns whether the shard does not know yet which blocks it has.
    """

    def __init__(
        self,
        store: ShardStore,
        generations: Generations,
        remove: Callable[[bytes], Removal],
        recovering: Callable[[], bool],
    ) -> None:
        self.generations = generations
        self._store = store
        self._remove = remove
        self._recovering = recovering
        self._peers: dict[bytes, set[Peer]] = {}  # by namespace
        self._early: dict[bytes, tuple[int, Removal]] = {}  # by namespace: removals that began before a PURGE

    # ---- connections -----------------------------------------------------------------------------------------

    def enter(self, peer: Peer, request: wire.Hello) -> int:
        """Record that a connection uses a namespace from now on. Return the generation of the namespace. Raises
        `WireError`."""
        session = peer.session
        if not session.namespace:
            return 0
        session.namespace_id = namespace_id(session.namespace)
        session.knows_generations = wire.agreed_protocol(request) >= KNOWS_GENERATIONS
        session.holds = request.holds and session.knows_generations
        session.noted = self.learn(peer, request.generation)
        self._peers.setdefault(session.namespace, set()).add(peer)
        return session.noted

    def leave(self, peer: Peer) -> None:
        """Forget a connection that has ended, or that uses another namespace."""
        namespace = peer.session.namespace
        peers = self._peers.get(namespace)
        if peers is not None:
            peers.discard(peer)
            if not peers:
                del self._peers[namespace]

    # ---- raising ---------------------------------------------------------------------------------------------

    def learn(self, peer: Peer, generation: int) -> int:
        """Raise the generation of a client's namespace to the generation that the client knows. Return the namespace's
        generation afterwards.

        If the namespace has no blocks to lose, any client that may write can raise its generation. Otherwise only a
        client that may purge can do so. Until then, a shard that missed a purge keeps its generation, and its blocks
        are misses for the clients that know of the purge. Raises `WireError`.
        """
        session = peer.session
        own = self.generations.of(session.namespace_id)
        if generation <= own:
            return own
        check_generation(generation)
        namespace = self._store.get(session.namespace)
        nothing = not self._recovering() and (namespace is None or namespace.empty)
        if session.rights.verbs & (ADMIN | WRITE if nothing else ADMIN):
            self.generations.raise_to(session.namespace_id, generation)
            if nothing:
                self.generations.save()
            else:
                self.generations.begin_emptying(session.namespace_id)
                self.generations.save()
                self._early[session.namespace] = generation, self._remove(session.namespace)
                if len(self._early) > MOST_EARLY:
                    del self._early[next(iter(self._early))]
            self._end_older(session.namespace)
        return self.generations.of(session.namespace_id)

    def purge(self, request: wire.Purge, rights: Rights, canonical: bytes) -> list[bytes]:
        """Raise the generations of the namespaces that a PURGE names, and begin to empty them. Return these namespaces
        as canonical JSON. Raises `WireError`."""
        check_generation(request.generation)
        chosen = list(self._chosen(request, rights, canonical))
        ids = list(map(namespace_id, chosen))
        own = max(map(self.generations.of, ids), default=0)
        # If the namespace already has the requested generation, a client has learned of this purge from another shard.
        # If it has a higher generation, there was another purge, and blocks may have been set since.
        generation = request.generation if 0 < request.generation >= own else next_generation(own)
        if request.all and not (request.model or request.prefix) and rights.owns_all:
            self.generations.raise_all(generation)
        for identity in ids:
            self.generations.raise_to(identity, generation)
            self.generations.begin_emptying(identity)
        self.generations.save()
        for each in chosen:
            self._end_older(each)
        return chosen

    def early(self, canonical: bytes) -> Removal | None:
        """Return the removal that began before the PURGE arrived, because a client learned of the purge from another
        shard first. Return None if there was no such removal. Each removal is returned only once."""
        generation, removal = self._early.pop(canonical, (0, None))
        return removal if generation == self.generations.of(namespace_id(canonical)) else None

    def _chosen(self, request: wire.Purge, rights: Rights, canonical: bytes) -> Iterator[bytes]:
        """Yield the namespaces to purge: those that have blocks, and those whose clients hold copies of blocks, even if
        the store has lost the blocks."""
        if not request.all:
            yield canonical
            return
        held = {each for each, peers in self._peers.items() if any(peer.session.holds for peer in peers)}
        for each in held | {namespace.canonical for namespace in self._store}:
            header = decode_namespace(each)
            if not (rights.owns(header.tenant) and rights.use(header.model)):
                continue
            if request.model and not fnmatchcase(header.model, request.model):
                continue
            if namespace_id(each).hex().startswith(request.prefix.lower()):
                yield each

    def _end_older(self, canonical: bytes) -> None:
        """End the streams and promises of an earlier generation, and inform the clients of the namespace."""
        for peer in list(self._peers.get(canonical, ())):
            if peer.session.knows_generations:
                peer.outbox.reply(wire.Raised(0, self.generations.of(peer.session.namespace_id)))
            for stream in list(peer.outbox.streams.values()):
                stream.give_up()
        namespace = self._store.get(canonical)
        if namespace is not None:
            namespace.promises.end_all()

    # ---- answers ---------------------------------------------------------------------------------------------

    def noted(self, peer: Peer, generation: int) -> None:
        """Record that a client has dropped its copies of earlier generations."""
        peer.session.noted = max(peer.session.noted, generation)

    def holders(self, canonical: bytes) -> set[Peer]:
        """Return the connections that use this namespace and whose clients hold copies."""
        return {peer for peer in self._peers.get(canonical, ()) if peer.session.holds}

    def silent(self, holders: set[Peer]) -> list[Peer]:
        """Return the holders that are still connected but have not dropped their older copies."""
        return [
            peer
            for peer in holders
            if not peer.outbox.closed and peer.session.noted < self.generations.of(peer.session.namespace_id)
        ]
