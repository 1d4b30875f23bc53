"""What raises the generation of a namespace on this shard, and who is told of it.

A PURGE, or a client that knows of one from another shard (HELLO, SET, RAISE), raises it. From that moment on no older
block is found, and none is taken: SETs that were under way are refused, promises end, GETs in progress find nothing
more. The blocks themselves are removed by `Background`, in steps; until all are, the whole namespace is hidden. Clients
are told at once, before anything that is sent to them later, and those that hold copies answer when they have let go
of them.

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
from kvstore.store.namespaces import Store
from kvstore.wire import ADMIN, WRITE, decode_namespace, namespace_id

KNOWS_GENERATIONS: Final = 4  # the oldest protocol version that has them
MOST_SILENT: Final = 16  # addresses that a reply names
MOST_EARLY: Final = 256


class Removal(Protocol):
    """Blocks of earlier generations, which are being removed."""

    canonical: bytes
    blocks: int  # that were removed so far
    done: bool


class Purging:
    """The generations of the namespaces, and the connections that use each. `remove`: has the older blocks of a
    namespace, given as canonical JSON, removed. `recovering`: whether the shard does not know
    yet which blocks it has."""

    def __init__(
        self,
        store: Store,
        generations: Generations,
        remove: Callable[[bytes], Removal],
        recovering: Callable[[], bool],
    ) -> None:
        self.generations = generations
        self._store = store
        self._remove = remove
        self._recovering = recovering
        self._peers: dict[bytes, set[Peer]] = {}  # by namespace
        self._early: dict[bytes, tuple[int, Removal]] = {}  # by namespace: what a client had removed, at a generation

    # ---- connections -----------------------------------------------------------------------------------------

    def enter(self, peer: Peer, request: wire.Hello) -> int:
        """A connection uses a namespace from now on. -> its generation. Raises `WireError`."""
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
        """The connection has ended, or uses another namespace."""
        namespace = peer.session.namespace
        peers = self._peers.get(namespace)
        if peers is not None:
            peers.discard(peer)
            if not peers:
                del self._peers[namespace]

    # ---- raising ---------------------------------------------------------------------------------------------

    def learn(self, peer: Peer, generation: int) -> int:
        """A client knows of this generation of its namespace. -> at which the namespace is now.

        Where there is nothing to lose it is taken over from whoever may write; otherwise from whoever may purge. A
        shard that lacks a purge stays behind until then, and its blocks are misses for clients that know of it. Raises
        `WireError`.
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
        """Raise the generations of the namespaces that a PURGE names, and begin to empty them. -> these, as canonical
        JSON. Raises `WireError`."""
        check_generation(request.generation)
        chosen = list(self._chosen(request, rights, canonical))
        ids = list(map(namespace_id, chosen))
        own = max(map(self.generations.of, ids), default=0)
        # At the one that it wants, a client that heard of this purge elsewhere was faster. At a higher one, another
        # purge was, and blocks may have been set since.
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
        """-> what was removed of a namespace before the PURGE that raised its generation came: a client that heard of
        it from another shard was faster. None: nothing; each is given once."""
        generation, removal = self._early.pop(canonical, (0, None))
        return removal if generation == self.generations.of(namespace_id(canonical)) else None

    def _chosen(self, request: wire.Purge, rights: Rights, canonical: bytes) -> Iterator[bytes]:
        """Those with blocks, and those of which engines hold copies, also of what the store has lost."""
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
        """End what belongs to an earlier generation, and tell those who hold copies."""
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
        """A client has let go of what it held of earlier generations."""
        peer.session.noted = max(peer.session.noted, generation)

    def holders(self, canonical: bytes) -> set[Peer]:
        """-> the connections, in this namespace, of clients that hold copies."""
        return {peer for peer in self._peers.get(canonical, ()) if peer.session.holds}

    def silent(self, holders: set[Peer]) -> list[Peer]:
        """-> those of these that are still there and have not let go of older copies."""
        return [
            peer
            for peer in holders
            if not peer.outbox.closed and peer.session.noted < self.generations.of(peer.session.namespace_id)
        ]
