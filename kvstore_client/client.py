"""`KVStoreClient`: stores and reads blocks by key, straight from and to the caller's memory.

A call splits its batch over the shards, sends everything, waits once, and puts the answers into the caller's order.
Copies of the data path: set = source -> kernel -> slot; get_into = slot -> kernel -> destination. `get` and
`stream_get` receive into the client's own memory instead, which the caller reads in place. With a server on this host
that lends its memory: get_into = slot -> destination, borrow = none at all, set = source -> slot for memory of
`kvstore_client.memory`, else source -> ring -> slot.

Over 400 lines because all public calls and their documentation are in one place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, TypedDict

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.wire.remote_memory import Transport
from kvstore_client import _arguments
from kvstore_client._calls.batches import first_occurrences
from kvstore_client._calls.chains import Parent, chains_of
from kvstore_client._calls.exchange import Exchange, Steps, drive
from kvstore_client._calls.options import Options
from kvstore_client._calls.promising import Promiser
from kvstore_client._calls.reading import Reader
from kvstore_client._calls.repairs import Repairs
from kvstore_client._calls.shards import Shards
from kvstore_client._calls.writing import Writer
from kvstore_client._links.block_mac import mac_of
from kvstore_client._links.buffers import BlockSource, ResultMemory, writable_rows
from kvstore_client._links.connector import SharedMemory
from kvstore_client._links.core import Core
from kvstore_client._links.credentials import Credentials
from kvstore_client._links.lanes import MAX_CONNECTIONS
from kvstore_client._links.link import Link
from kvstore_client.endpoints import parse_endpoints, with_tls
from kvstore_client.errors import KVStoreError, Timeout
from kvstore_client.keys import Keys, Namespace, pack_keys
from kvstore_client.promises import Promise
from kvstore_client.results import ClientStats, GetResult, Location, Lookup, SetResult, ShardStatus, StoreInfo

DEFAULT_TIMEOUT_S: Final = 10.0
DEFAULT_CONNECTIONS: Final = 1  # on two cores more are slower: `python -m benchmarks.remote_kv_cache.test_connections`
MAX_TIMEOUT_S: Final = wire.MAX_DEADLINE_MS / 1000

log = logging.getLogger("kvstore_client")

_clients: weakref.WeakSet[KVStoreClient] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._core.after_fork()
        client._repairs.reset()


os.register_at_fork(after_in_child=_after_fork_in_child)


class ClientKeywords(TypedDict, total=False):
    """What `KVStoreClient` takes by keyword, for code that passes it on."""

    timeout_s: float
    fail_open: bool
    checksum: bool
    replicas: int
    min_copies: int
    shared_memory: SharedMemory
    connections: int
    nixl: bool
    transport: str | None
    token: str | os.PathLike[str] | None
    block_secret: bytes | str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    keeps_copies: bool


def transport_name(nixl: bool, transport: str | None) -> str | None:
    """-> the transport that is meant by both options. Raises `ValueError` if they contradict each other."""
    if not isinstance(nixl, bool):
        raise TypeError(f"nixl={nixl!r}: expected True or False")
    if nixl and transport not in (None, "nixl"):
        raise ValueError(f"nixl=True and transport={transport!r}: expected one of them")
    return "nixl" if nixl else transport


class KVStoreClient:
    """A connection to a store, for one namespace. Thread-safe; usable in a child after a fork.

    `endpoint`: ``HOST:PORT`` (or ``tcp://HOST:PORT``), a list of nodes, or a cluster,
    ``etcd://HOST:PORT[,HOST:PORT]/NAME`` or ``dns://SERVICE:PORT``, whose nodes may come and go while the client is in
    use. If it is left out or None, it is taken from the environment's ``KVSTORE_ENDPOINT``. `timeout_s`: the deadline
    of every call, in seconds; a call can be given one of its own. `fail_open`: transport failures count as misses (or
    as `SetResult.error`) instead of raising `ConnectionLost` and `Timeout`; wrong arguments and refusals raise in any
    case. `checksum`: verify the blocks that are read; a block that does not match its checksum is a miss and is
    deleted. `replicas`: how many nodes hold a copy of each block, 1 to 3, or as many as there are; it must be the same
    for all clients of a namespace. `min_copies`: a set with fewer copies of a block than this counts it as an error.
    `shared_memory`: whether blocks of a server on this host are read in its memory instead of through a socket. "auto":
    if the server allows it; True: raise `ConnectionLost` if it does not; False: never. `stats.path` tells what is used.
    `connections`, 1 to 16: how many to each shard, where no shared memory is used. Each beside the first one has a
    thread that reads it; large reads are spread over all of them. The first is opened here, the others in the
    background; the server counts each against its limits. `transport`: read blocks of servers on other hosts with it,
    if they allow it (``--transport``); where its reads fail, and for sets, the connection is used. `nixl`: the same as
    ``transport="nixl"``, which servers allow with ``--nixl``. `token`: for servers that want one (``--auth``): the
    token, or the path of a file with it, which is read again at each connection; None: what ``KVSTORE_TOKEN`` has, or
    the file that ``KVSTORE_TOKEN_FILE`` names. Where it is refused, calls raise `NotAuthorized`. `block_secret`: the
    blocks' checksums are MACs, which only clients with this secret can make and check, so a server, a disk or a
    neighbour that returns other bytes is a miss; at least 16 bytes, by default the environment's
    ``KVSTORE_BLOCK_SECRET`` or what is in the file ``KVSTORE_BLOCK_SECRET_FILE``. Such blocks are in a namespace of
    their own: `namespace` then says so.
    `tls_ca`: PEM file of the CA that signed the servers' certificates, "system" for those that the system trusts;
    `tls_cert`, `tls_key`: this client's own, if servers ask for one. None: as ``KVSTORE_TLS_CA``, ``KVSTORE_TLS_CERT``
    and ``KVSTORE_TLS_KEY`` say. With any of them, or with ``tls://HOST:PORT``, all connections to servers are TLS 1.3,
    and none falls back to plain TCP. ``etcds://`` is etcd with TLS. `keeps_copies`: the caller keeps blocks elsewhere,
    as an engine does in its GPU, and looks at `generation` before it uses one. Then a purge waits until this client has
    heard of it, and says whether it has.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str] | None = None,
        namespace: Namespace | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        fail_open: bool = False,
        checksum: bool = True,
        replicas: int = 1,
        min_copies: int = 1,
        shared_memory: SharedMemory = "auto",
        connections: int = DEFAULT_CONNECTIONS,
        nixl: bool = False,
        transport: str | None = None,
        token: str | os.PathLike[str] | None = None,
        block_secret: bytes | str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        keeps_copies: bool = False,
    ) -> None:
        if not isinstance(namespace, Namespace):
            raise TypeError(f"namespace={namespace!r}: a {type(namespace).__name__}: expected a Namespace")
        endpoints = with_tls(parse_endpoints(endpoint), tls_ca, tls_cert, tls_key)
        timeout_s = _arguments.seconds("timeout_s", timeout_s, MAX_TIMEOUT_S)
        replicas = _arguments.whole_number("replicas", replicas, 1, wire.MAX_REPLICAS)
        min_copies = _arguments.whole_number("min_copies", min_copies, 1, replicas)
        mac = mac_of(namespace, block_secret)
        if mac is not None:
            namespace = mac.namespace
            if not checksum:
                raise ValueError(
                    "checksum=False and a block secret: expected one of them: blocks with MACs are verified"
                )
        self.namespace = namespace
        self.fail_open = fail_open
        self.replicas = replicas
        if shared_memory not in ("auto", True, False) or isinstance(shared_memory, int | float) is not isinstance(
            shared_memory, bool
        ):
            raise ValueError(f'shared_memory={shared_memory!r}: expected "auto", True or False')
        connections = _arguments.whole_number("connections", connections, 1, MAX_CONNECTIONS)
        transport = transport_name(nixl, transport)
        if transport is not None and endpoints.tls is not None:
            raise ValueError(f"transport {transport!r}: expected none with TLS, which its reads would go around")
        self._core = Core(
            endpoints,
            namespace.canonical(),
            timeout_s,
            replicas,
            shared_memory,
            connections,
            Transport.of(transport),
            Credentials(token),
            keeps_copies,
        )
        self._exchange = Exchange(self._core)
        self._repairs = Repairs(self._exchange, namespace.block_bytes, checksum, mac)
        self._reader = Reader(self._exchange, namespace.block_bytes, replicas, checksum, self._repairs, mac)
        self._writer = Writer(
            self._exchange, namespace.block_bytes, replicas, min_copies, self._repairs, self._reader, mac
        )
        self._promiser = Promiser(self._exchange, replicas)
        self._shards = Shards(self._exchange)
        self._results = ResultMemory()
        self._core.connect(fail_open)
        _clients.add(self)

    def __enter__(self) -> KVStoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def stats(self) -> ClientStats:
        """Counters since this client was made."""
        self._core.stats.path = self._core.path
        return self._core.stats

    def why_unanswered(self) -> KVStoreError:
        """The error of a shard that is out of reach now, else a `Timeout`; to log when `stats.unanswered` has risen."""
        broken = [link.broken for link in self._core.links if link.broken is not None]
        return broken[-1] if broken else Timeout("not all shards answered in time")

    @property
    def timeout_s(self) -> float:
        """The deadline of calls that set none of their own, in seconds."""
        return self._core.timeout_s

    @property
    def epoch(self) -> int:
        """The number of this client's view of the cluster: a higher one is later. 0 without a cluster."""
        return self._core.view.epoch

    @property
    def generation(self) -> int:
        """A number that rises whenever somebody purges the namespace. What was made under a lower one is of no use any
        more: drop it, and do not set it. This is what the client has heard of; with `keeps_copies`, that is at most a
        moment old while the store is in reach. 0: nobody has, as far as it knows."""
        return self._core.generations.known

    @property
    def reached(self) -> bool:
        """Whether some shard has answered since this client was made."""
        return self._core.generations.heard

    @property
    def directory_error(self) -> str:
        """Why the directory of the cluster (etcd, DNS) cannot be asked now, or names no node. Empty if all is well or
        there is no directory."""
        return self._core.directory_lost

    def close(self) -> None:
        """Disconnect. Further calls raise `ConnectionLost` (or miss)."""
        self._core.close()

    # ---- the calls -------------------------------------------------------------------------------------------

    def set(
        self,
        keys: Keys,
        blocks: Any,
        *,
        force: bool = False,
        deferred: bool = True,
        parent: Parent = None,
        position: int = 0,
        priority: int = 0,
        ttl_s: float | None = None,
        reads: int | None = None,
        generation: int | None = None,
        timeout_s: float | None = None,
    ) -> SetResult:
        """Store `blocks[i]` under `keys[i]`. A block that exists already is left alone unless `force`.

        `blocks`: a sequence of buffers, or an `(n, block_bytes)` array or CPU tensor; sent without a copy. The keys are
        of one prefix chain, head first. A chain may be set in several calls: `parent` is then the key before `keys[0]`,
        and `position` the index of `keys[0]` in the chain. For keys of several chains, `parent` is a sequence: the key
        before each one, None for a chain's first. A block is not evicted while a block behind it in its chain is at the
        same shard, and a block that would take the place of its own chain is refused. `deferred`: return when one copy
        of each block is stored; False: when all copies are, which is the same with `replicas=1`. `priority`, 0 to 3: a
        block is evicted only when no block of a lower priority can be. `ttl_s`: the blocks that this call stores expire
        after so many seconds, whatever the server's rule for the namespace says; None: by that rule. Copies that a
        server hands on to another one or that a client repairs have what is left of it. `reads`, 1 to 255: the blocks
        are transient, for engines that hand them on. Each is dropped when it was read that often, or after `ttl_s`, 60
        s if it is not given; it has one copy, is neither evicted nor written to disk nor moved, and takes memory of a
        limit of its own, beyond which it is refused. `parent`, `position`, `priority` and `deferred` then have no
        meaning, and `force` is an error. `generation`: of the namespace, when the blocks were made; if somebody has
        purged it since, they are refused. None: they were made now. Raises `BlockSizeMismatch`, `ValueError`, and the
        errors that the class names.
        """
        packed = pack_keys(keys)
        if reads and force:
            raise ValueError(f"reads={reads} and force=True: expected one of them: a transient block replaces no other")
        options = self._options(
            timeout_s,
            force=force,
            deferred=deferred,
            chains=chains_of(packed, parent, _arguments.whole_number("position", position, 0, wire.MAX_POSITION)),
            priority=_arguments.whole_number("priority", priority, 0, wire.MAX_PRIORITY),
            ttl_s=0.0 if ttl_s is None else _arguments.seconds("ttl_s", ttl_s, wire.MAX_TTL_S),
            reads=0 if reads is None else _arguments.whole_number("reads", reads, 0, wire.MAX_READS),
            generation=None
            if generation is None
            else _arguments.whole_number("generation", generation, 0, wire.MAX_GENERATION),
        )
        source = BlockSource(blocks, self.namespace.block_bytes)
        if source.count != len(packed):
            raise ValueError(f"{len(packed)} keys and {source.count} blocks: expected as many blocks as keys")
        _, unique = first_occurrences(packed)
        if not len(packed):
            return SetResult(0, 0, 0, 0, 0, 0)
        result = self._writer.set(packed, unique, source, options)
        self._core.stats.blocks_set += result.created + result.forced
        self._core.stats.bytes_out += len(packed) * self.namespace.block_bytes
        return result

    def contains(
        self, keys: Keys, *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which keys are present: `(n,)` bool. `refresh`: count this as a use of the blocks. `pin_s`, 0 to 60: protect
        the blocks found from eviction for that long (as far as the server allows), so that a later `get` finds
        them."""
        return self._reader.contains(pack_keys(keys), self._lookup_options(timeout_s, refresh, pin_s))

    def match_prefix(
        self, keys: Keys, *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> int:
        """How many leading keys of the chain are present without a gap. Options as of `contains`."""
        return self._reader.match_prefix(pack_keys(keys), self._lookup_options(timeout_s, refresh, pin_s))

    def lookup(
        self, keys: Keys, *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> Lookup:
        """How many leading keys of the chain are present without a gap, and how many are present or were promised.
        Options as of `contains`."""
        return self._reader.lookup(pack_keys(keys), self._lookup_options(timeout_s, refresh, pin_s))

    def expire(
        self, keys: Keys, *, ttl_s: float | None = None, timeout_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Give blocks another time to live, from now on: `ttl_s`; None: what the server's rule for the namespace says,
        so mostly for ever. -> which keys are present and have it: `(n,)` bool.

        Every copy of a block is told. Transient blocks keep their time, and are False. A block that is only on disk has
        its old time again after a restart of its server. Raises the errors that the class names; with `fail_open`,
        blocks whose shard does not answer are False.
        """
        ttl_s = 0.0 if ttl_s is None else _arguments.seconds("ttl_s", ttl_s, wire.MAX_TTL_S)
        packed, options = pack_keys(keys), self._options(timeout_s, ttl_s=ttl_s)
        return self._writer.expire(packed, options) if len(packed) else np.zeros(0, dtype=np.bool_)

    def promise(self, keys: Keys, *, ttl_s: float = 30.0, timeout_s: float | None = None) -> Promise:
        """Tell the store that this client will set these blocks, and learn which of them others have promised already:
        `with client.promise(keys) as promise`, and set those that are `promise.mine`.

        Who asks for a promised block with `wait_s` waits for it. The promise of a block ends when the block is set, by
        whomever; at the end of the `with` block, or with `withdraw`; after `ttl_s`, at most 600, unless it is renewed;
        and when this client's connection ends. Then those who still wait miss at once. Nothing is reserved: a promise
        takes no room, and forbids nobody to set the block. A store that has no memory for more promises refuses them.
        Raises the errors that the class names; with `fail_open`, blocks whose shard does not answer are `mine`.
        """
        ttl_s = _arguments.seconds("ttl_s", ttl_s, wire.MAX_PROMISE_MS / 1000)
        packed = pack_keys(keys)
        first, unique = first_occurrences(packed)
        return Promise(self._promiser, packed, unique, first, ttl_s, self._options(timeout_s))

    def load_prefix(self, keys: Keys, out: Any, *, timeout_s: float | None = None) -> int:
        """Receive the leading blocks of a chain straight into `out[0]`, `out[1]` … -> how many: the first missing block
        ends the run.

        It takes one round trip where `match_prefix` and `get_into` take two, and no block can be evicted in between.
        `out` as in `get_into`, with a row for each key. Rows behind the run may have been written to.
        """
        options = self._options(timeout_s, prefix=True)
        packed = pack_keys(keys)
        rows = writable_rows(out, self.namespace.block_bytes)
        if len(rows) < len(packed):
            raise ValueError(f"out: {len(rows)} rows for {len(packed)} keys: expected a row for each key")
        present = drive(self._place(packed, rows, None, options))
        gaps = np.flatnonzero(~present)
        length = int(gaps[0]) if len(gaps) else len(packed)
        self._core.stats.hits += length
        self._core.stats.misses += len(packed) - length
        return length

    def get(self, keys: Keys, *, timeout_s: float | None = None) -> GetResult:
        """All blocks at once, in memory that the client allocates: `blocks[i]` is a read-only memoryview, or None on a
        miss. The client uses the memory again, up to 64 MiB of it, when nothing refers to any of the blocks."""
        options = self._options(timeout_s)
        packed = pack_keys(keys)
        block_bytes = self.namespace.block_bytes
        rows = self._results.take(len(packed) * block_bytes).reshape(-1, block_bytes)
        first, unique = first_occurrences(packed)
        present = drive(self._get_into(packed, rows, None, first, unique, options))
        self._count(present)
        flat = memoryview(rows.reshape(-1)).toreadonly()
        blocks = [
            flat[row * block_bytes : (row + 1) * block_bytes] if hit else None
            for row, hit in zip(first.tolist(), present.tolist(), strict=True)
        ]
        hit = int(present.sum())
        return GetResult(len(packed), hit, len(packed) - hit, len(packed) - len(unique), blocks)

    def get_into(
        self,
        keys: Keys,
        out: Any,
        slots: Iterable[int] | None = None,
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Receive block i straight into `out[slots[i]]` (`out[i]` without slots). -> which blocks arrived: `(n,)` bool.

        `out`: writable memory of `(rows, block_bytes)` bytes: an array, a CPU tensor or a buffer that can be viewed as
        uint8. A row whose block is missing may have been written to. `wait_s`: wait so long for blocks that some client
        has promised; the call then takes `wait_s` and `timeout_s` at most. A block that nobody has promised, or whose
        promise ends, is missing at once. Raises `IndexError` for a slot outside `out`, `ValueError` for two equal
        slots.
        """
        return drive(self._get_into_steps(keys, out, slots, wait_s=wait_s, timeout_s=timeout_s, alone=True))

    def _get_into_steps(
        self,
        keys: Keys,
        out: Any,
        slots: Iterable[int] | None = None,
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        alone: bool = False,
    ) -> Steps[npt.NDArray[np.bool_]]:
        """`get_into` in steps, for a thread that has many calls under way."""
        wait_s = _arguments.seconds("wait_s", wait_s, MAX_TIMEOUT_S, zero=True)
        options = self._options(timeout_s, wait_s=wait_s, alone=alone)
        if options.timeout_s + options.wait_s > MAX_TIMEOUT_S:
            raise ValueError(
                f"wait_s={wait_s} and timeout_s={options.timeout_s:g}: expected {MAX_TIMEOUT_S:g} s together at most"
            )
        packed = pack_keys(keys)
        rows = writable_rows(out, self.namespace.block_bytes)
        if slots is None and len(packed) > len(rows):
            raise IndexError(f"slot {len(rows)}: out has {len(rows)} rows")
        places = None if slots is None else _arguments.slots(slots, len(packed), len(rows))
        present = yield from self._place(packed, rows, places, options)
        self._count(present)
        return present

    def _asked(self, keys: Keys) -> frozenset[Link]:
        """The shards that a read of these keys asks first."""
        return self._shards.asked(pack_keys(keys), self.replicas)

    @contextlib.contextmanager
    def borrow(
        self, keys: Keys, *, verify: bool = False, timeout_s: float | None = None
    ) -> Generator[list[memoryview | None], None, None]:
        """Read blocks where they are: `with client.borrow(keys) as blocks`, a read-only memoryview each, or None.

        With shared memory (`stats.path`) the views are of the server's own memory: nothing is copied, whatever the size
        of the blocks, and nothing is checked unless `verify` asks for it or they have MACs (and then only once: the
        server could change them afterwards). Without it they are received as by `get`. The server keeps the blocks
        until the end of the `with` block, when `blocks` is emptied. A view, or an array or
        tensor made of one, that is still there by then keeps all blocks of the call until it is gone and this client
        makes its next call. The server lends a quarter of its memory to one client, so give back soon. A child process
        must not use views that its parent borrowed.
        """
        options = self._options(timeout_s)
        packed = pack_keys(keys)
        first, unique = first_occurrences(packed)
        if not len(packed):
            yield []
            return
        blocks: list[memoryview | None] = []
        borrowed = self._reader.borrow(packed, unique, verify, options)
        try:
            found = borrowed.blocks
            blocks += found if len(unique) == len(packed) else [found[origin] for origin in first.tolist()]
            del found
            hits = int(np.count_nonzero(borrowed.present[first]))
            self._core.stats.hits += hits
            self._core.stats.misses += len(packed) - hits
            yield blocks
        finally:
            blocks[:] = [None] * len(blocks)
            borrowed.end()

    def stream_get(
        self, keys: Keys, *, timeout_s: float | None = None
    ) -> Generator[tuple[int, memoryview], None, None]:
        """Yield the blocks that are found, as they arrive, in any order: `(index into keys, read-only memoryview)`.

        A block stays valid as long as it is referenced. Each block may take `timeout_s`. The caller may stop early.
        """
        options = self._options(timeout_s)
        packed = pack_keys(keys)
        first, unique = first_occurrences(packed)
        repeats: dict[int, list[int]] = {}
        if len(unique) < len(packed):
            for position, origin in enumerate(first.tolist()):
                repeats.setdefault(origin, []).append(position)
        return self._stream(packed, unique, repeats, options)

    def delete(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Remove blocks. -> how many were there."""
        options = self._options(timeout_s)
        packed = pack_keys(keys)
        if not len(packed):
            return 0
        _, unique = first_occurrences(packed)
        return self._writer.delete(packed[unique], options)

    def purge(self, *, all_namespaces: bool = False, timeout_s: float | None = None) -> int:
        """Remove all blocks of this client's namespace, from memory and disk of every shard. -> how many there were;
        with `replicas` each copy counts.

        It raises the namespace's `generation`. From then on no block from before is found, and engines neither use nor
        set the copies that they hold. Returns when the blocks cannot come back, not even after a crash, and when
        clients that keep copies have heard of it, 3 s later at most. Blocks that any client sets meanwhile may be
        removed or not. `all_namespaces`: empty the whole store instead, whoever uses it. A large disk tier takes
        seconds: give a `timeout_s` that allows for it. A shard that does not answer is not emptied; that raises, or
        with `fail_open` the shard is left out of the count. Purge again when it is back: until then its blocks are
        misses for clients that know of the purge.
        """
        replies = self.purge_shards(all_namespaces=all_namespaces, timeout_s=timeout_s)
        return sum(reply.purged for reply in replies.values())

    def purge_shards(
        self, *, all_namespaces: bool = False, model: str = "", id_prefix: str = "", timeout_s: float | None = None
    ) -> dict[str, wire.PurgeReply]:
        """`purge`, with what each shard answered, by its name. With `all_namespaces` and one of the others: the
        namespaces whose model matches the pattern `model` (as `fnmatch` has it) and whose id begins with `id_prefix`.
        Raises `ProtocolError`, with nothing done, if a shard of an earlier release does not know these two."""
        return self._shards.purge(self._repairs, self._options(timeout_s), all_namespaces, model, id_prefix)

    # ---- every shard -----------------------------------------------------------------------------------------

    def sync(self, *, timeout_s: float | None = None) -> None:
        """Return when every deferred set of this client can be read. Raises if too many nodes fail for that."""
        self._shards.sync(self._options(timeout_s))

    def ping(self, *, timeout_s: float | None = None) -> float:
        """-> seconds until all shards had answered. Raises `ConnectionLost` or `Timeout`, even with `fail_open`."""
        return self._shards.ping(self._options(timeout_s))

    def info(self, *, timeout_s: float | None = None) -> StoreInfo:
        """The state of the store. A shard that does not answer raises, or with `fail_open` it is left out; `shards()`
        lists it with the reason."""
        return self._shards.info(self.namespace, self._options(timeout_s))

    def scrub(self, *, timeout_s: float | None = None) -> dict[str, int]:
        """Have every shard check its blocks on disk now; returns without waiting for the check.

        -> by shard (its `name` in `info`), the value of `disk.scrub_passes` with which the check is complete; 0 if the
        shard has no active disk tier. Shards that do not answer raise, or with `fail_open` they are left out.
        """
        return self._shards.scrub(self._options(timeout_s))

    def shards(self, *, timeout_s: float | None = None) -> list[ShardStatus]:
        """Ask every shard that this client knows for its state. A shard that does not answer is listed with the reason
        and does not raise. The list is empty while no node of a cluster is known (`directory_error` may say why)."""
        return self._shards.statuses(self._options(timeout_s))

    def locate(
        self, key: bytes, *, replicas: int | None = None, ask: bool = True, timeout_s: float | None = None
    ) -> list[Location]:
        """The shards that may have a key's block, its owner first, then the other replicas, then old owners.

        `replicas`: assume that clients keep so many copies; None: as many as this client keeps. `ask`: ask the shards
        whether they have the block. Raises `ConnectionLost` if no shard is known; a shard that does not answer does not
        raise.
        """
        if replicas is not None:
            replicas = _arguments.whole_number("replicas", replicas, 1, wire.MAX_REPLICAS)
        return self._shards.locate(pack_keys([key]), replicas or self.replicas, ask, self._options(timeout_s))

    # ---- internals -------------------------------------------------------------------------------------------

    def _options(self, timeout_s: float | None, **chosen: Any) -> Options:
        """The options of one call, completed by those of the client."""
        if timeout_s is None:
            timeout_s = self._core.timeout_s
        else:
            timeout_s = _arguments.seconds("timeout_s", timeout_s, MAX_TIMEOUT_S)
        return Options(timeout_s=timeout_s, fail_open=self.fail_open, **chosen)

    def _lookup_options(self, timeout_s: float | None, refresh: bool, pin_s: float) -> Options:
        pin_s = _arguments.seconds("pin_s", pin_s, wire.MAX_PIN_S, zero=True)
        return self._options(timeout_s, refresh=refresh, pin_s=pin_s)

    def _place(
        self,
        packed: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.uint8],
        slots: Sequence[int] | None,
        options: Options,
    ) -> Steps[npt.NDArray[np.bool_]]:
        """Read blocks into `rows[slots[i]]`, or `rows[i]` without slots. The block of a repeated key is read once and
        copied."""
        first, unique = first_occurrences(packed)
        present = yield from self._get_into(packed, rows, slots, first, unique, options)
        if len(unique) < len(packed):
            places = range(len(packed)) if slots is None else slots
            for position, origin in enumerate(first.tolist()):
                if origin != position and present[position]:
                    rows[places[position]] = rows[places[origin]]
        return present

    def _get_into(
        self,
        packed: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.uint8],
        slots: Sequence[int] | None,
        first: npt.NDArray[np.intp],
        unique: npt.NDArray[np.intp],
        options: Options,
    ) -> Steps[npt.NDArray[np.bool_]]:
        if not len(packed):
            return np.zeros(0, dtype=np.bool_)
        found = yield from self._reader.get_into(packed, unique, rows, slots, options)
        return np.asarray(found[first])

    def _count(self, present: npt.NDArray[np.bool_]) -> None:
        hits = int(present.sum())
        self._core.stats.hits += hits
        self._core.stats.misses += len(present) - hits

    def _stream(
        self,
        packed: npt.NDArray[np.uint8],
        unique: npt.NDArray[np.intp],
        repeats: dict[int, list[int]],
        options: Options,
    ) -> Generator[tuple[int, memoryview], None, None]:
        hits = 0
        try:
            if len(packed):
                with contextlib.closing(self._reader.stream(packed, unique, options)) as arriving:
                    for position, block in arriving:
                        for repeat in repeats.get(position, (position,)):
                            hits += 1
                            yield repeat, block
                        del block
        finally:
            self._core.stats.hits += hits
            self._core.stats.misses += len(packed) - hits
