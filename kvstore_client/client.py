"""`KVStoreClient`: stores and reads blocks by key, straight from and to the caller's memory.

A call splits its batch over the shards, sends everything, waits once, and puts the answers into the caller's order.
Copies of the data path: set = source -> kernel -> slot; get_into = slot -> kernel -> destination. `get` and
`stream_get` receive into the client's own memory, which the caller reads in place. A server on this host may lend its
memory. Then the copies are: get_into = slot -> destination; borrow = none at all; set = source -> slot if the source is
memory from `kvstore_client.memory`, else source -> ring -> slot.

Over 400 lines because all public calls and their documentation are in one place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypedDict, overload

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
from kvstore_client._links.buffers import Blocks, BlockSource, Memory, ResultMemory, writable_rows
from kvstore_client._links.connector import SharedMemory
from kvstore_client._links.credentials import Credentials
from kvstore_client._links.lanes import MAX_LANES
from kvstore_client._links.link import Link
from kvstore_client._links.link_pool import LinkPool
from kvstore_client.endpoints import parse_endpoints, with_tls
from kvstore_client.errors import KVStoreError, Timeout
from kvstore_client.keys import Keys, Namespace, pack_keys
from kvstore_client.promises import Promise
from kvstore_client.results import (
    ClientStats,
    ConnectedClient,
    GetResult,
    Location,
    Lookup,
    PurgeReply,
    SetResult,
    ShardSettings,
    ShardStatus,
    SlowlogReply,
    StoreInfo,
)

if TYPE_CHECKING:
    from typing import Unpack  # since Python 3.11

DEFAULT_TIMEOUT_S: Final = 10.0
DEFAULT_CONNECTIONS: Final = 1  # more are slower on 2 cores: `python -m benchmarks.remote_kv_cache.bench_connections`
MAX_TIMEOUT_S: Final = wire.MAX_DEADLINE_MS / 1000

log = logging.getLogger("kvstore_client")

_clients: weakref.WeakSet[KVStoreClient] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._pool.after_fork()
        client._repairs.reset()


os.register_at_fork(after_in_child=_after_fork_in_child)


class ClientKeywords(TypedDict, total=False):
    """The options that `KVStoreClient` takes by keyword, for code that passes them on."""

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
    """Return the transport that the two options name. Raises `ValueError` if they contradict each other."""
    if not isinstance(nixl, bool):
        raise TypeError(f"nixl={nixl!r}: expected True or False")
    if nixl and transport not in (None, "nixl"):
        raise ValueError(f"nixl=True and transport={transport!r}: expected one of them")
    return "nixl" if nixl else transport


class KVStoreClient:
    """A connection to a store, for one namespace. Thread-safe. A child process may use it after a fork.

    * `endpoint`: Addresses of nodes, or the URL of a cluster. By default, the environment's ``KVSTORE_ENDPOINT`` is
      used. A node is ``HOST:PORT``, ``tcp://HOST:PORT`` or ``tls://HOST:PORT``. Several nodes are given as a list, or
      as one string with commas. No node may be given twice, not even under two names. A cluster is
      ``etcd://HOST:PORT[,HOST:PORT]/NAME`` (``etcds://`` for etcd with TLS) or ``dns://SERVICE:PORT``. A cluster's
      nodes may join and leave while the client is in use.
    * `namespace`: The namespace of all blocks that this client sets and reads; required. With a block secret, the
      client's attribute `namespace` differs from the one given here, because it carries a mark of the secret.
    * `timeout_s`: The deadline of every call, in seconds; above 0, at most 600. Each call can set another one.
    * `fail_open`: If True, a block whose shard is out of reach is a miss, and no `ConnectionLost` or `Timeout` is
      raised. A set counts blocks of shards out of reach in `SetResult.error`. Wrong arguments and refusals always raise
      an error. Making the client takes at most 1.5 s if nodes are silent.
    * `checksum`: Whether to verify the blocks that are read. A block that does not match its checksum is a miss and is
      deleted. With a block secret, `checksum` must be True.
    * `replicas`: The number of nodes that hold a copy of each block; 1 to 3. If there are fewer nodes, each of them
      holds a copy. The number must be the same for all clients of a namespace.
    * `min_copies`: The number of copies below which a set counts a block as an error; 1 to `replicas`.
    * `shared_memory`: Whether to read blocks of a server on this host from its memory instead of through a socket.
      With "auto", the memory is used if the server allows it. With True, `ConnectionLost` is raised if the server does
      not allow it. With False, the memory is never used. `stats.path` says how blocks are read.
    * `connections`: The number of connections to each shard whose memory is not shared with the client; 1 to 16. Large
      reads are spread over all connections. The first is opened at once, the others in the background. A thread reads
      each connection except the first. The server counts each connection against its limits.
    * `nixl`: Short for ``transport="nixl"``. Servers allow it with ``--nixl``.
    * `transport`: The name of a transport for reads from servers on other hosts. Servers allow it with
      ``--transport``. Sets use the TCP connection. So do reads, if the transport fails or a server does not allow it. A
      transport cannot be used with TLS.
    * `token`: The token for servers that require one (``--auth``); at most 256 bytes. A string is the token itself. A
      `pathlib.Path` names a file with the token, which is read again for each connection. By default,
      ``KVSTORE_TOKEN`` is used, or the file that ``KVSTORE_TOKEN_FILE`` names. Calls raise `NotAuthorized` if the
      token is refused.
    * `block_secret`: A secret that turns the blocks' checksums into MACs; at least 16 bytes. Only clients with this
      secret can make and check these MACs, so altered bytes from a server, a disk or a neighbour are a miss. By
      default, ``KVSTORE_BLOCK_SECRET`` is used, or the content of the file that ``KVSTORE_BLOCK_SECRET_FILE`` names.
      Blocks with MACs are in a namespace of their own.
    * `tls_ca`: The PEM file of the CA that signed the servers' certificates, or "system" for the CAs that the system
      trusts. By default, ``KVSTORE_TLS_CA`` is used. With any of the three TLS options, or with ``tls://HOST:PORT``,
      all connections to servers use TLS 1.3, and none falls back to plain TCP.
    * `tls_cert`: The PEM file of this client's own certificate, if servers require one. It needs `tls_key`. By default,
      ``KVSTORE_TLS_CERT`` is used.
    * `tls_key`: The PEM file of the key of `tls_cert`. By default, ``KVSTORE_TLS_KEY`` is used.
    * `keeps_copies`: Whether the caller keeps copies of blocks elsewhere, as an engine does in its GPU. The caller must
      then check `generation` before it uses a copy. A purge waits until this client has received the new generation,
      and reports whether it has.

    Raises: `TypeError` and `ValueError` for a wrong argument. It raises `ImportError` if the package of a transport or
    of clusters is not installed. It raises `NotAuthorized` or `OutOfMemory` if a server refuses the client. Without
    `fail_open`, it raises `ConnectionLost` or `Timeout` if the store is out of reach.
    """

    # The namespace is required, although it comes after an argument with a default.
    @overload
    def __init__(
        self, endpoint: str | Sequence[str] | None, namespace: Namespace, **options: Unpack[ClientKeywords]
    ) -> None: ...

    @overload
    def __init__(
        self,
        endpoint: str | Sequence[str] | None = None,
        *,
        namespace: Namespace,
        **options: Unpack[ClientKeywords],
    ) -> None: ...

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
            raise TypeError(f"namespace={namespace!r} is of type {type(namespace).__name__}: expected a Namespace")
        endpoints = with_tls(parse_endpoints(endpoint), tls_ca, tls_cert, tls_key)
        timeout_s = _arguments.seconds("timeout_s", timeout_s, MAX_TIMEOUT_S)
        replicas = _arguments.whole_number("replicas", replicas, 1, wire.MAX_REPLICAS)
        min_copies = _arguments.whole_number("min_copies", min_copies, 1, replicas)
        checksum = _arguments.flag("checksum", checksum)
        mac = mac_of(namespace, block_secret)
        if mac is not None:
            namespace = mac.namespace
            if not checksum:
                raise ValueError(
                    "checksum=False and a block secret: expected one of them, because blocks with MACs are verified"
                )
        self.namespace = namespace
        self.fail_open = _arguments.flag("fail_open", fail_open)
        self.replicas = replicas
        if shared_memory not in ("auto", True, False) or isinstance(shared_memory, int | float) is not isinstance(
            shared_memory, bool
        ):
            raise ValueError(f'shared_memory={shared_memory!r}: expected "auto", True or False')
        connections = _arguments.whole_number("connections", connections, 1, MAX_LANES)
        transport = transport_name(nixl, transport)
        if transport is not None and endpoints.tls is not None:
            raise ValueError(f"transport {transport!r}: expected none with TLS, because its reads would bypass TLS")
        self._pool = LinkPool(
            endpoints,
            namespace.canonical(),
            timeout_s,
            replicas,
            shared_memory,
            connections,
            Transport.of(transport),
            Credentials(token),
            _arguments.flag("keeps_copies", keeps_copies),
            self.fail_open,
        )
        self._exchange = Exchange(self._pool)
        self._repairs = Repairs(self._exchange, namespace.block_bytes, checksum, mac)
        self._reader = Reader(self._exchange, namespace.block_bytes, replicas, checksum, self._repairs, mac)
        self._writer = Writer(
            self._exchange, namespace.block_bytes, replicas, min_copies, self._repairs, self._reader, mac
        )
        self._promiser = Promiser(self._exchange, replicas)
        self._shards = Shards(self._exchange)
        self._results = ResultMemory()
        self._pool.connect()
        _clients.add(self)

    def __repr__(self) -> str:
        shards = ", ".join(map(repr, self._pool.links)) or "no shard known"
        return f"<{type(self).__name__} of {shards}; model {self.namespace.model!r}>"

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`, because connections cannot be pickled or copied."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: make one in each process, with the same endpoint "
            "and namespace (a Namespace can be pickled)"
        )

    def __enter__(self) -> KVStoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def stats(self) -> ClientStats:
        """The counters of this client since it was made: a `ClientStats`."""
        self._pool.stats.path = self._pool.path
        return self._pool.stats

    def why_unanswered(self) -> KVStoreError:
        """Return the error of a shard that is out of reach now, or a `Timeout` if there is none. It is meant for a log
        line when `stats.unanswered` rises.
        """
        broken = [link.broken for link in self._pool.links if link.broken is not None]
        return broken[-1] if broken else Timeout("not all shards answered in time")

    @property
    def timeout_s(self) -> float:
        """The deadline of calls that do not set their own, in seconds."""
        return self._pool.timeout_s

    @property
    def shard_count(self) -> int:
        """The number of shards that this client knows. A node's shards are known when one of them has answered."""
        return len(self._pool.links)

    @property
    def epoch(self) -> int:
        """The number of this client's view of the cluster, which rises with each new view; 0 without a cluster."""
        return self._pool.view.epoch

    @property
    def generation(self) -> int:
        """A number that rises at each purge of the namespace; 0 if no purge is known. Drop copies that were made under
        a lower generation, and do not set them. The value is the highest one that this client has received. With
        `keeps_copies`, the client receives a new value within a moment, as long as the store is in reach.
        """
        return self._pool.generations.known

    @property
    def reached(self) -> bool:
        """Whether some shard has answered since this client was made."""
        return self._pool.generations.heard

    @property
    def directory_error(self) -> str:
        """The reason why the cluster's directory (etcd or DNS) does not answer now, or names no node. It is empty if
        the directory answers, or if there is no directory.
        """
        return self._pool.directory_lost

    def close(self) -> None:
        """Disconnect. Later calls raise `ConnectionLost`; with `fail_open`, they are misses."""
        self._pool.close()

    # ---- the calls -------------------------------------------------------------------------------------------

    def set(
        self,
        keys: Keys,
        blocks: Blocks,
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
        """Store `blocks[i]` under `keys[i]`. A block that exists already is not changed unless `force` is True.

        By default, the keys form one prefix chain, head first. A block is not evicted while a later block of its chain
        is on the same shard. A block is refused if room for it could be made only by evicting blocks of its own chain.

        * `blocks`: A sequence of buffers, or an `(n, block_bytes)` array or CPU tensor. They are sent without a copy.
        * `force`: Whether to replace blocks that exist. It cannot be used with `reads`.
        * `deferred`: Whether to return when one copy of each block is stored, instead of all copies. With
          `replicas=1`, it makes no difference.
        * `parent`: The key before `keys[0]`, if the chain is set in several calls. For keys of several chains, give a
          sequence with the key before each key, and None for the first key of a chain.
        * `position`: The index of `keys[0]` in its chain; 0 to 2**31 - 1.
        * `priority`: The priority of the blocks in eviction, 0 to 3. A block is evicted only if no block of its
          namespace with a lower priority can be evicted.
        * `ttl_s`: The time to live of the blocks that this call stores, in seconds; above 0, at most ten years. By
          default, the server's rule for the namespace applies. A copy that a server sends to another server, or that a
          client sets as a repair, expires when the original does.
        * `reads`: The number of reads after which each block is dropped; 1 to 255. It makes the blocks *transient*, for
          engines that hand blocks over. With None or 0, they are not transient. A transient block is also dropped after
          `ttl_s`, which is then 60 s by default. It has one copy. It is never evicted, written to disk or moved.
          Transient blocks have a memory limit of their own, and are refused beyond it. `parent`, `position`, `priority`
          and `deferred` then have no effect, and `force` is an error.
        * `generation`: The namespace's generation when the blocks were made; by default, the present one. If the
          namespace has been purged since, the blocks are refused, and counted in `SetResult.stale`.

        Returns: A `SetResult`: the number of blocks for each outcome.

        Raises: `BlockSizeMismatch` for a block of another size; `ValueError` if there are not as many blocks as keys.
        """
        packed = pack_keys(keys)
        if reads and force:
            raise ValueError(f"reads={reads} and force=True: expected one of them: a transient block replaces no other")
        options = self._options(
            timeout_s,
            force=_arguments.flag("force", force),
            deferred=_arguments.flag("deferred", deferred),
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
        self._pool.stats.blocks_set += result.created + result.forced
        self._pool.stats.bytes_out += len(packed) * self.namespace.block_bytes
        return result

    def contains(
        self, keys: Keys, *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Return which keys are present.

        * `refresh`: Whether this call counts as a use of the blocks.
        * `pin_s`: How long the blocks that are found are protected from eviction, in seconds; 0 to 60. A `get` within
          this time finds them. A shard pins at most half of its slots; of more blocks it pins the first. A tenant may
          have a lower limit.

        Returns: An `(n,)` array of bool.
        """
        return self._reader.contains(pack_keys(keys), self._lookup_options(timeout_s, refresh, pin_s))

    def match_prefix(
        self, keys: Keys, *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> int:
        """Return how many leading keys of the chain are present without a gap.

        * `refresh`: As in `contains`.
        * `pin_s`: As in `contains`.

        Returns: An int.
        """
        return self._reader.match_prefix(pack_keys(keys), self._lookup_options(timeout_s, refresh, pin_s))

    def lookup(
        self, keys: Keys, *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> Lookup:
        """Return how many leading keys of the chain are present without a gap, and how many are present or promised.

        * `refresh`: As in `contains`.
        * `pin_s`: As in `contains`.

        Returns: A `Lookup`.
        """
        return self._reader.lookup(pack_keys(keys), self._lookup_options(timeout_s, refresh, pin_s))

    def expire(
        self, keys: Keys, *, ttl_s: float | None = None, timeout_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Give blocks another time to live, which starts now.

        The new time applies to every copy of a block. Transient blocks keep their old time, and are False in the
        result. If a block is only on disk, it has its old time again after a restart of its server. With `fail_open`,
        blocks whose shard does not answer are False.

        * `ttl_s`: The new time to live in seconds; above 0, at most ten years. By default, the server's rule for the
          namespace applies. Under that rule, blocks usually do not expire.

        Returns: An `(n,)` array of bool: which keys are present and have the new time to live.
        """
        ttl_s = 0.0 if ttl_s is None else _arguments.seconds("ttl_s", ttl_s, wire.MAX_TTL_S)
        packed, options = pack_keys(keys), self._options(timeout_s, ttl_s=ttl_s)
        return self._writer.expire(packed, options) if len(packed) else np.zeros(0, dtype=np.bool_)

    def promise(self, keys: Keys, *, ttl_s: float = 30.0, timeout_s: float | None = None) -> Promise:
        """Announce that this client will set these blocks, and learn which of them other clients have promised already.

        Use it as `with client.promise(keys) as promise`, and set the blocks that are `promise.mine`. A client that
        reads a promised block with `wait_s` waits for it. The promise of a block ends when any client sets the block.
        It also ends with the `with` block, with `withdraw`, after `ttl_s` unless it is renewed, and when this client's
        connection ends. In these cases, clients that still wait get a miss at once. A promise reserves nothing: it
        takes no room for the block, and any client may set the block. A store that has no memory for more promises
        refuses them. With `fail_open`, blocks whose shard does not answer are `mine`. Two calls of one client get the
        same blocks as `mine`: the store tells clients apart, not the requests of one engine.

        * `ttl_s`: How long the promise lasts, in seconds; above 0, at most 600.

        Returns: A `Promise`.
        """
        ttl_s = _arguments.seconds("ttl_s", ttl_s, wire.MAX_PROMISE_MS / 1000)
        packed = pack_keys(keys)
        first, unique = first_occurrences(packed)
        return Promise(self._promiser, packed, unique, first, ttl_s, self._options(timeout_s))

    def load_prefix(self, keys: Keys, out: Memory, *, timeout_s: float | None = None) -> int:
        """Receive the leading blocks of a chain straight into `out[0]`, `out[1]` …, up to the first missing block.

        It takes one round trip, while `match_prefix` followed by `get_into` takes two, between which blocks could be
        evicted. Rows after that of the last received block may have been overwritten.

        * `out`: Memory as in `get_into`, with a row for each key.

        Returns: An int: the number of leading blocks that are now in `out`.

        Raises: `ValueError` if `out` has fewer rows than there are keys.
        """
        options = self._options(timeout_s, prefix=True)
        packed = pack_keys(keys)
        rows = writable_rows(out, self.namespace.block_bytes)
        if len(rows) < len(packed):
            raise ValueError(f"out: {len(rows)} rows for {len(packed)} keys: expected a row for each key")
        present = drive(self._place(packed, rows, None, options))
        gaps = np.flatnonzero(~present)
        length = int(gaps[0]) if len(gaps) else len(packed)
        self._pool.stats.hits += length
        self._pool.stats.misses += len(packed) - length
        return length

    def get(self, keys: Keys, *, timeout_s: float | None = None) -> GetResult:
        """Read all blocks at once, into memory that the client allocates.

        When nothing refers to any of the blocks any more, the client uses up to 64 MiB of this memory again.

        Returns: A `GetResult`, whose `blocks[i]` is a read-only memoryview, or None on a miss.
        """
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
        out: Memory,
        slots: Iterable[int] | None = None,
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Receive block i straight into `out[slots[i]]`, or into `out[i]` without `slots`.

        * `out`: Writable memory of `(rows, block_bytes)` bytes: an array, a CPU tensor or a buffer. It must be possible
          to view `out` as uint8. A row whose block is missing may have been overwritten.
        * `slots`: For each key, the row of `out` for its block. No row may be named twice. By default, key i has row i.
        * `wait_s`: How long to wait for blocks that some client has promised, in seconds; 0 to 600. The call then takes
          at most `wait_s` + `timeout_s`; this sum must be at most 600. A block that no client has promised, or whose
          promise ends, is a miss at once.

        Returns: An `(n,)` array of bool: which blocks arrived.

        Raises: `IndexError` for a slot outside `out`; `ValueError` for two equal slots.
        """
        return drive(self._get_into_steps(keys, out, slots, wait_s=wait_s, timeout_s=timeout_s, alone=True))

    def _get_into_steps(
        self,
        keys: Keys,
        out: Memory,
        slots: Iterable[int] | None = None,
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        alone: bool = False,
    ) -> Steps[npt.NDArray[np.bool_]]:
        """Run `get_into` in steps, for a thread that has many calls in progress."""
        wait_s = _arguments.seconds("wait_s", wait_s, MAX_TIMEOUT_S, zero=True)
        options = self._options(timeout_s, wait_s=wait_s, alone=alone)
        if options.timeout_s + options.wait_s > MAX_TIMEOUT_S:
            raise ValueError(
                f"wait_s={wait_s} and timeout_s={options.timeout_s:g}: expected a sum of at most {MAX_TIMEOUT_S:g} s"
            )
        packed = pack_keys(keys)
        rows = writable_rows(out, self.namespace.block_bytes)
        if slots is None and len(packed) > len(rows):
            raise IndexError(f"slot {len(rows)} does not exist: out has {len(rows)} rows")
        places = None if slots is None else _arguments.slots(slots, len(packed), len(rows))
        present = yield from self._place(packed, rows, places, options)
        self._count(present)
        return present

    def _asked(self, keys: Keys) -> frozenset[Link]:
        """Return the shards to which a read of these keys sends its first requests."""
        return self._shards.asked(pack_keys(keys), self.replicas)

    @contextlib.contextmanager
    def borrow(
        self, keys: Keys, *, verify: bool = False, timeout_s: float | None = None
    ) -> Generator[list[memoryview | None], None, None]:
        """Read blocks where they are: `with client.borrow(keys) as blocks`.

        With shared memory (see `stats.path`), the views show the server's own memory, so nothing is copied, whatever
        the size of the blocks. Blocks are checked only if `verify` is set or they have MACs, and only once: the server
        could change them after that. Without shared memory, the blocks are received as by `get`.

        The server keeps the blocks until the end of the `with` block, when all elements of `blocks` become None. If
        anything still refers to a view then, such as an array or a tensor made of it, the server keeps all blocks of
        the call. It keeps them until the view is gone and this client makes its next call. The server lends at most a
        quarter of its memory to one client, so give blocks back soon. A child process must not use views that its
        parent borrowed.

        * `verify`: Whether to check the blocks against their checksums.

        Returns: A context manager. Its `blocks` is a list with a read-only memoryview for each block, or None on a
        miss.
        """
        options = self._options(timeout_s)
        packed = pack_keys(keys)
        first, unique = first_occurrences(packed)
        if not len(packed):
            yield []
            return
        blocks: list[memoryview | None] = []
        borrowed = self._reader.borrow(packed, unique, _arguments.flag("verify", verify), options)
        try:
            found = borrowed.blocks
            blocks += found if len(unique) == len(packed) else [found[origin] for origin in first.tolist()]
            del found
            hits = int(np.count_nonzero(borrowed.present[first]))
            self._pool.stats.hits += hits
            self._pool.stats.misses += len(packed) - hits
            yield blocks
        finally:
            blocks[:] = [None] * len(blocks)
            borrowed.end()

    def stream_get(
        self, keys: Keys, *, timeout_s: float | None = None
    ) -> Generator[tuple[int, memoryview], None, None]:
        """Read blocks one by one, in the order in which they arrive.

        A block stays valid as long as something refers to it. The deadline `timeout_s` applies to each block. The
        caller may stop early.

        Returns: A generator of `(index into keys, read-only memoryview)` for each block that is found.
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
        """Remove blocks.

        Returns: An int: the number of blocks that were there.
        """
        options = self._options(timeout_s)
        packed = pack_keys(keys)
        if not len(packed):
            return 0
        _, unique = first_occurrences(packed)
        return self._writer.delete(packed[unique], options)

    def purge(self, *, all_namespaces: bool = False, timeout_s: float | None = None) -> int:
        """Remove all blocks of this client's namespace from the memory and the disk of every shard.

        The purge raises the namespace's `generation`. From then on, no earlier block is found, and engines neither use
        nor set the copies that they hold. The call returns when the blocks cannot come back, not even after a crash.
        It also waits, for at most 3 s, until the clients that keep copies have received the new generation. Blocks that
        a client sets during the purge may or may not be removed. Emptying a large disk tier takes seconds, so give a
        `timeout_s` that allows for it.

        A shard that does not answer is not emptied. The call then raises an error; with `fail_open`, it leaves that
        shard out of the count. Purge again when the shard is back. Until then, its blocks are misses for clients that
        know of the purge.

        * `all_namespaces`: Whether to empty the whole store instead, for all its users.

        Returns: An int: the number of blocks that were there. With `replicas`, each copy counts.
        """
        replies = self.purge_shards(all_namespaces=all_namespaces, timeout_s=timeout_s)
        return sum(reply.purged for reply in replies.values())

    def purge_shards(
        self, *, all_namespaces: bool = False, model: str = "", id_prefix: str = "", timeout_s: float | None = None
    ) -> dict[str, PurgeReply]:
        """Purge as `purge` does, and return each shard's answer.

        * `all_namespaces`: Whether to purge all namespaces that `model` and `id_prefix` select. By default, `model` and
          `id_prefix` select all namespaces of the store.
        * `model`: A pattern, as in `fnmatch`, for the models of the namespaces to purge. An empty pattern matches any
          model. This option needs `all_namespaces`.
        * `id_prefix`: The beginning of the ids of the namespaces to purge, in hexadecimal. An empty one matches any id.
          This option needs `all_namespaces`.

        Returns: A dict from a shard's name to its `PurgeReply`.

        Raises: `ProtocolError`, with nothing removed, if a shard of an earlier release does not know `model` and
        `id_prefix`.
        """
        if (model or id_prefix) and not all_namespaces:
            given = f"model={model!r}" if model else f"id_prefix={id_prefix!r}"
            raise ValueError(f"{given} and all_namespaces=False: expected True, or no choice of namespaces")
        return self._shards.purge(
            self._repairs,
            self._options(timeout_s),
            _arguments.flag("all_namespaces", all_namespaces),
            _arguments.text("model", model),
            _arguments.text("id_prefix", id_prefix),
        )

    # ---- every shard -----------------------------------------------------------------------------------------

    def sync(self, *, timeout_s: float | None = None) -> None:
        """Wait until all blocks of this client's deferred sets can be read.

        Returns: None.

        Raises: without `fail_open`, `ConnectionLost` or `Timeout` if the number of nodes that fail is at least the
        number of copies of a block.
        """
        self._shards.sync(self._options(timeout_s))

    def ping(self, *, timeout_s: float | None = None) -> float:
        """Measure how long it takes until all shards have answered.

        Returns: A float: the time in seconds.

        Raises: `ConnectionLost` or `Timeout`, even with `fail_open`.
        """
        return self._shards.ping(self._options(timeout_s))

    def info(self, *, timeout_s: float | None = None) -> StoreInfo:
        """Request the state of the store.

        The call raises an error if a shard does not answer; with `fail_open`, that shard is left out. `shards()` gives
        the reason.

        Returns: A `StoreInfo`.
        """
        return self._shards.info(self.namespace, self._options(timeout_s))

    def scrub(self, *, timeout_s: float | None = None) -> dict[str, int]:
        """Have every shard check its blocks on disk now, and return without waiting for the check.

        The call raises an error if a shard does not answer; with `fail_open`, that shard is left out.

        Returns: A dict from a shard's name to the value of `disk.scrub_passes` at which the check is complete. The
        value is 0 for a shard without an active disk tier.
        """
        return self._shards.scrub(self._options(timeout_s))

    def config_get(self, *, timeout_s: float | None = None) -> list[ShardSettings]:
        """Request the settings that can be changed while the servers run.

        Returns: A list of `ShardSettings`, one for each shard.

        Raises: `ConnectionLost` if no shard is known. `ProtocolError` if a server has an earlier release. No error is
        raised for a shard that does not answer or refuses the request: its answer has the `error`.
        """
        return self._shards.configure(self._options(timeout_s))

    def config_set(self, name: str, value: str, *, timeout_s: float | None = None) -> list[ShardSettings]:
        """Change a setting of every shard, until its server is restarted.

        * `name`: The name of a setting that `config_get` has.
        * `value`: The new value, as text.

        Returns: A list of `ShardSettings`, one for each shard. A shard whose answer has an `error` may be unchanged.

        Raises: The same as `config_get`, with nothing changed.
        """
        if not _arguments.text("name", name):
            raise ValueError("the name of the setting is empty: expected a name that config_get has")
        return self._shards.configure(self._options(timeout_s), name, _arguments.text("value", value))

    def shards(self, *, timeout_s: float | None = None) -> list[ShardStatus]:
        """Request the state of every shard that this client knows.

        The list is empty while no node of a cluster is known; `directory_error` may say why.

        Returns: A list of `ShardStatus`.

        No error is raised for a shard that does not answer. The list contains that shard, with the reason.
        """
        return self._shards.statuses(self._options(timeout_s))

    def clients(self, *, timeout_s: float | None = None) -> dict[str, list[ConnectedClient]]:
        """List the open connections of every shard, including those of this client.

        The call raises an error if a shard does not answer; with `fail_open`, that shard is left out. With logins, it
        lists the connections of the token's tenant.

        Returns: A dict from a shard's name to a list of `ConnectedClient`, in the order in which they connected.

        Raises: `NotAuthorized` without the verb `monitor` or `admin`, and `ProtocolError` if a shard has an earlier
        release.
        """
        return self._shards.clients(self._options(timeout_s))

    def slow_requests(self, *, timeout_s: float | None = None) -> dict[str, SlowlogReply]:
        """Request the slow log of every shard. It has the last requests of all clients that took long.

        The server's option ``--slowlog-ms`` says how long, by default 100 ms. Clients cannot change it; `limit_ms` of
        the reply has its value.

        The call raises an error if a shard does not answer; with `fail_open`, that shard is left out. With logins, it
        returns the requests of the token's tenant.

        Returns: A dict from a shard's name to its `SlowlogReply`, whose `requests` has the last request first.

        Raises: `NotAuthorized` without the verb `monitor` or `admin`, and `ProtocolError` if a shard has an earlier
        release.
        """
        return self._shards.slow_requests(self._options(timeout_s))

    def hottest(self, *, count: int = 20, timeout_s: float | None = None) -> dict[str, list[bytes]]:
        """List the most recently used keys of this client's namespace on every shard.

        The use of a block counts for the earlier blocks of its chain, too, so they come before it. Shards do not report
        times of use. The call raises an error if a shard does not answer; with `fail_open`, that shard is left out.

        * `count`: The most keys of each shard; 1 to 131072.

        Returns: A dict from a shard's name to a list of keys, the most recently used first.

        Raises: `NotAuthorized` without the verb `admin`.
        """
        count = _arguments.whole_number("count", count, 1, wire.MAX_HOTTEST_KEYS)
        return self._shards.hottest(count, self._options(timeout_s))

    def locate(
        self, key: bytes, *, replicas: int | None = None, ask: bool = True, timeout_s: float | None = None
    ) -> list[Location]:
        """List the shards that may have a key's block: its owner first, then the other replicas, then old owners.

        * `key`: The key, 8 to 64 bytes.
        * `replicas`: The number of copies that clients are assumed to keep; 1 to 3. By default, the number of this
          client.
        * `ask`: Whether to ask the shards if they have the block. If False, `Location.present` is None.

        Returns: A list of `Location`.

        Raises: `ConnectionLost` if no shard is known. No error is raised for a shard that does not answer.
        """
        if replicas is not None:
            replicas = _arguments.whole_number("replicas", replicas, 1, wire.MAX_REPLICAS)
        return self._shards.locate(pack_keys([key]), replicas or self.replicas, ask, self._options(timeout_s))

    # ---- internals -------------------------------------------------------------------------------------------

    def _options(self, timeout_s: float | None, **chosen: Any) -> Options:
        """Return the options of one call: `chosen`, and the client's own options for the others."""
        if timeout_s is None:
            timeout_s = self._pool.timeout_s
        else:
            timeout_s = _arguments.seconds("timeout_s", timeout_s, MAX_TIMEOUT_S)
        return Options(timeout_s=timeout_s, fail_open=self.fail_open, **chosen)

    def _lookup_options(self, timeout_s: float | None, refresh: bool, pin_s: float) -> Options:
        pin_s = _arguments.seconds("pin_s", pin_s, wire.MAX_PIN_S, zero=True)
        return self._options(timeout_s, refresh=_arguments.flag("refresh", refresh), pin_s=pin_s)

    def _place(
        self,
        packed: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.uint8],
        slots: Sequence[int] | None,
        options: Options,
    ) -> Steps[npt.NDArray[np.bool_]]:
        """Read block i into `rows[slots[i]]`, or into `rows[i]` without slots. If a key is repeated, its block is read
        once and then copied."""
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
        self._pool.stats.hits += hits
        self._pool.stats.misses += len(present) - hits

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
            self._pool.stats.hits += hits
            self._pool.stats.misses += len(packed) - hits
