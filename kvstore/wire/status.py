"""The content of an INFO reply: the state of a shard, its disk tier and its namespaces. Plain data; thread-safe.

The type of each field of INFO has a row of metadata: what the field is, where a shard takes it from, and where it is
shown. The shard's report, the metrics, `/status.json`, the HTTP page, `kvstore info` and `kvstore top` read these rows,
so a new field needs no change in them. The name of a field ends with its unit: `..._bytes`, `..._s`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from kvstore.wire.messages import FLAGGED_TRANSPORT

TAKES_NO_BLOCKS: Final = ("out of space", "off")  # the states of a disk tier in which it takes no new blocks
MAX_SEGMENT_SLOTS: Final = 1 << 16  # of a segment in memory; if its blocks are very small, a part of it stays empty


# Bounds of the histograms of `RequestTimes`, in seconds: 32 µs, 64 µs … 16.8 s.
FIRST_BOUND: Final = 5
REQUEST_BOUNDS_S: Final = tuple((1 << power) / 1e6 for power in range(FIRST_BOUND, 25))

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


@dataclass(frozen=True)
class Field:
    """The row of a field. An empty member means that the field is not used in this way."""

    take: str = ""  # the path from the reporting object to the value, as "state.sets"; empty if the value is given
    metric: str = ""  # its name for Prometheus; the name of a counter lacks `_total`
    help: str = ""
    label: str = ""  # for a map: the meaning of its keys
    info: str = ""  # "TABLE: COLUMN" of `kvstore info`
    page: str = ""  # column of the page's table of shards, key in `/status.json`; for a counter, the last minute
    top: str = ""  # column of `kvstore top`: the shards' sum; for a counter, the change since the last poll …
    per_second: bool = False  # … and divided by the time since then
    counter: bool = False  # whether it only grows while the shard's process lives
    name: str = ""  # set by `fields_of`

    @property
    def unit(self) -> str:
        """ "bytes", "s", or empty if the value has no unit or is not a number."""
        return "bytes" if "bytes" in self.name.split("_") else "s" if self.name.endswith("_s") else ""

    @property
    def top_key(self) -> str:
        """Its key in the output of `kvstore top --json`."""
        return f"{self.name}_per_s" if self.per_second else self.name


Gauge = Field
Counter = functools.partial(Field, counter=True)


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> Sequence[Field]:
    """Return the rows of a struct's fields, in their order. A field without metadata has an empty row."""
    hints = get_type_hints(struct, include_extras=True)
    return [replace(_row(hints[name]), name=name) for name in struct.__struct_fields__]


def _row(hint: object) -> Field:
    return next((each for each in get_args(hint) if isinstance(each, Field)), Field())


def report(struct: type[_Struct], source: object, **given: Any) -> _Struct:
    """Return a struct whose fields are taken from `source` as their rows say.

    `given`: the values of fields whose rows have no `take`.
    A field keeps its default if the first attribute of its `take` is None, because the shard then does not have that
    part.
    """
    for name, part, take in _ways(struct):
        if getattr(source, part) is not None:
            given[name] = take(source)
    return struct(**given)


@functools.cache
def _ways(struct: type[msgspec.Struct]) -> Sequence[tuple[str, str, Callable[[object], Any]]]:
    taken = [field for field in fields_of(struct) if field.take]
    return [(field.name, field.take.partition(".")[0], attrgetter(field.take)) for field in taken]


def segment_slots(segment_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a segment of memory holds."""
    return min(segment_bytes // block_bytes, MAX_SEGMENT_SLOTS)


# Tables, mostly with one line per field.
# fmt: off


class NamespaceInfo(msgspec.Struct, frozen=True):
    """One namespace on one shard, as its `NamespaceStore` reports it."""

    id: str
    namespace: str
    block_bytes: Annotated[int, Field("block_bytes")]
    blocks: Annotated[int, Gauge("memory.index.ready", "kvstore_blocks", "Blocks that can be read.",
        info="blocks: in memory")]
    writing: Annotated[int, Field("memory.index.writing")]
    segments: int
    slots: Annotated[int, Field("memory.index.slots")]
    memory_bytes: Annotated[int, Gauge("memory.nbytes", "kvstore_namespace_memory_bytes",
        "Segments of the namespace, in bytes.", info="blocks: memory")]
    pinned: Annotated[int, Gauge("", "kvstore_pinned_blocks", "Blocks kept from eviction by a pin.",
        info="blocks: pinned")]
    hits: Annotated[int, Counter("hits", "kvstore_hit_blocks", "Blocks asked for by GET and sent.", info="use: hits")]
    misses: Annotated[int, Counter("misses", "kvstore_missed_blocks", "Blocks asked for by GET and not there.",
        info="use: misses")]
    created: Annotated[int, Counter("created", "kvstore_created_blocks", "Blocks stored.", info="use: created")]
    evicted: Annotated[int, Counter("memory.evicted", "kvstore_evicted_blocks",
        "Blocks evicted from memory to make room.", info="use: evicted")]
    disk_blocks: Annotated[int, Gauge("disk.index.ready", "kvstore_namespace_disk_blocks", "Blocks on disk.",
        info="blocks: on disk")] = 0
    disk_bytes: Annotated[int, Gauge("disk.nbytes", "kvstore_namespace_disk_bytes",
        "Segments on disk of the namespace, in bytes.")] = 0
    disk_evicted: Annotated[int, Counter("disk.evicted", "kvstore_namespace_disk_evicted_blocks",
        "Blocks evicted from disk to make room.")] = 0
    replicas: Annotated[int, Field("replicas")] = 1  # the largest number of copies of each block that a client keeps
    promised: Annotated[int, Gauge("", "kvstore_promised_blocks", "Blocks that clients have promised to set.")] = 0
    awaited: Annotated[int, Gauge("", "kvstore_awaited_blocks",
        "Blocks that are not there yet and that clients wait for.")] = 0
    # `blocks`, `slots` and `memory_bytes` include transient blocks. The next three fields count only transient blocks;
    # the last two of them cover the whole segments of these blocks.
    transient_blocks: Annotated[int, Gauge("memory.index.transient", "kvstore_transient_blocks",
        "Transient blocks that can be read.", info="blocks: transient")] = 0
    transient_slots: Annotated[int, Field("memory.index.transient_slots")] = 0
    transient_bytes: Annotated[int, Field("memory.transient_bytes")] = 0
    generation: int = 0  # 0 if the shard knows of no purge


class TenantInfo(msgspec.Struct, frozen=True):
    """One tenant's use of a shard, and the shard's part of the tenant's limits. A limit of -1 means no limit."""

    tenant: str
    memory_bytes: Annotated[int, Gauge("", "kvstore_tenant_memory_bytes", "Block memory of the tenant's namespaces.")]
    memory_guaranteed_bytes: Annotated[int, Gauge("", "kvstore_tenant_memory_guaranteed_bytes",
        "What the shard guarantees it of that.")]
    memory_limit_bytes: int
    disk_bytes: Annotated[int, Gauge("", "kvstore_tenant_disk_bytes", "What its namespaces have on disk.")]
    disk_limit_bytes: int
    connections: Annotated[int, Gauge("", "kvstore_tenant_connections", "Connections of the tenant.")]
    refused: Annotated[dict[str, int], Counter("", "kvstore_tenant_refused",
        "Requests, connections and pins that a limit of the tenant refused.", label="limit")]


class DiskInfo(msgspec.Struct, frozen=True):
    """One shard's disk tier, as its `DiskTier` reports it. Counters count since the shard started."""

    directory: str
    state: Annotated[str, Field("volume.state.value")]  # "recovering", "on", "out of space" or "off"
    reason: Annotated[str, Field("volume.reason")]  # why it is out of space or off
    limit_bytes: Annotated[int, Gauge("volume.config.limit_bytes", "kvstore_disk_limit_bytes",
        "What the shard may take on disk.", info="disk: limit")]
    used_bytes: Annotated[int, Gauge("volume.segments.used_bytes", "kvstore_disk_used_bytes",
        "What the shard's segment files take on disk.", info="disk: used")]
    segment_bytes: Annotated[int, Field("volume.config.segment_bytes")]
    segments_free: Annotated[int, Field("volume.segments.free")]
    blocks: Annotated[int, Gauge("", "kvstore_disk_blocks", "Blocks on disk.", info="disk: blocks")]
    evicted: Annotated[int, Counter("volume.members.evicted", "kvstore_disk_evicted_blocks",
        "Blocks evicted from disk to make room.", info="disk work: evicted")]
    dirty_blocks: Annotated[int, Gauge("writing.dirty_blocks", "kvstore_disk_dirty_blocks",
        "Blocks in memory that wait to be written.")]
    dirty_bytes: Annotated[int, Gauge("writing.dirty_bytes", "kvstore_disk_dirty_bytes",
        "Bytes in memory that wait to be written.")]
    behind: Annotated[bool, Gauge("writing.behind", "kvstore_disk_behind",
        "1 while clients that set wait for the disk to catch up.")]
    written_blocks: Annotated[int, Counter("writing.blocks", "kvstore_disk_written_blocks",
        "Blocks written from memory to disk.")]
    written_bytes: Annotated[int, Counter("writing.bytes", "kvstore_disk_written_bytes",
        "Bytes written from memory to disk.")]
    skipped_blocks: Annotated[int, Counter("writing.skipped", "kvstore_disk_skipped_blocks",
        "Blocks not written: no room on disk.", info="disk work: skipped")]
    fetched_blocks: Annotated[int, Counter("fetching.blocks", "kvstore_disk_fetched_blocks",
        "Blocks read from disk into memory.")]
    fetched_bytes: Annotated[int, Counter("fetching.bytes", "kvstore_disk_fetched_bytes",
        "Bytes read from disk into memory.")]
    corrupt_blocks: Annotated[int, Counter("fetching.corrupt", "kvstore_disk_corrupt_blocks",
        "Blocks found damaged on disk, and dropped.", info="disk checks: corrupt")]
    recovered_blocks: Annotated[int, Gauge("", "kvstore_disk_recovered_blocks", "Blocks found on disk at the start.")]
    lost_blocks: Annotated[int, Gauge("", "kvstore_disk_lost_blocks",
        "Blocks not found again at the start: damage, expiry, no file.", info="disk checks: lost")]
    recovery_s: Annotated[float, Gauge("", "kvstore_disk_recovery_seconds",
        "Seconds from the start until they could be read.")]
    warming: Annotated[bool, Gauge("", "kvstore_disk_warming",
        "1 while the hottest blocks are being brought to memory.")]
    scrub_passes: Annotated[int, Counter("scrubbing.passes", "kvstore_disk_scrub_passes",
        "Complete passes of the scrubber.")]
    scrubbing: Annotated[bool, Field("scrubbing.running")]
    scrubbed_blocks: Annotated[int, Counter("scrubbing.blocks", "kvstore_disk_scrubbed_blocks",
        "Blocks the scrubber checked.")]
    scrubbed_bytes: Annotated[int, Counter("scrubbing.bytes", "kvstore_disk_scrubbed_bytes",
        "Bytes the scrubber checked.")]
    scrub_corrupt_blocks: Annotated[int, Counter("scrubbing.corrupt", "kvstore_disk_scrub_corrupt_blocks",
        "Damaged blocks the scrubber found.", info="disk checks: found damaged")]


class RequestTimes(msgspec.Struct, frozen=True):
    """How long the requests of one verb took in the shard: those that waited for the disk, or those that did not."""

    verb: str  # "set", "get", "contains" …
    tier: str  # "memory", or "disk" if they waited for it
    seconds: float  # the sum of all requests
    counts: list[int]  # for each of `REQUEST_BOUNDS_S`, requests below it but not below the one before; then the rest


class ShardInfo(msgspec.Struct, frozen=True):
    """One shard's state, as its `Report` gives it. Counters count since the shard started."""

    node: Annotated[str, Field("config.node")]
    shard: Annotated[int, Field("config.shard")]
    pid: Annotated[int, Field(info="shards: pid")]
    version: str
    uptime_s: Annotated[float, Gauge("", "kvstore_uptime_seconds", "Seconds since the shard process started.",
        info="shards: up")]
    memory_limit_bytes: Annotated[int, Gauge("config.memory_bytes", "kvstore_memory_limit_bytes",
        "Block memory the shard may use.", info="memory: limit")]
    memory_used_bytes: Annotated[int, Gauge("", "kvstore_memory_used_bytes",
        "Segments that belong to a namespace, in bytes.", info="memory: used")]
    rss_bytes: Annotated[int, Gauge("", "kvstore_resident_bytes", "Resident memory of the shard process.",
        info="memory: resident")]
    segment_bytes: Annotated[int, Field("store.arena.segment_bytes")]
    segments_free: Annotated[int, Field("store.arena.free")]
    connections: Annotated[int, Gauge("state.connections", "kvstore_connections", "Open client connections.",
        info="shards: clients")]
    streams: Annotated[int, Gauge("state.streams", "kvstore_streams", "GETs in progress.")]
    draining: Annotated[bool, Field("state.draining")]
    sets: Annotated[int, Counter("state.sets", "kvstore_set_requests", "SET requests.", info="requests: sets")]
    gets: Annotated[int, Counter("state.gets", "kvstore_get_requests", "GET requests.", info="requests: gets")]
    lookups: Annotated[int, Counter("state.lookups", "kvstore_lookup_requests", "CONTAINS and MATCH_PREFIX requests.",
        info="requests: lookups")]
    bytes_in: Annotated[int, Counter("state.bytes_in", "kvstore_received_bytes",
        "Bytes received from clients, or copied from their memory.", info="requests: received")]
    bytes_out: Annotated[int, Counter("", "kvstore_sent_bytes", "Bytes sent to clients, or lent to them.",
        info="requests: sent")]
    errors: Annotated[int, Counter("state.errors", "kvstore_errors",
        "Requests refused and connections closed for a fault of the client.", info="shards: errors")]
    namespaces: list[NamespaceInfo]
    policy: Annotated[str, Field("config.policy", info="shards: policy")] = "lru"
    index_bytes: Annotated[int, Gauge("store.index_bytes", "kvstore_index_bytes",
        "Memory of the indexes of both tiers.", info="memory: index")] = 0
    disk: DiskInfo | None = None
    name: str = ""  # as in WELCOME; placement hashes it
    # how much more fits in memory before a block is evicted, in whole segments
    room_bytes: Annotated[int, Field("store.room_bytes")] = 0
    # These four count blocks of all namespaces, including namespaces that are gone.
    hits: Annotated[int, Counter("store.hits", "kvstore_shard_hit_blocks",
        "Blocks asked for by GET and sent, of all namespaces.")] = 0
    misses: Annotated[int, Counter("store.misses", "kvstore_shard_missed_blocks",
        "Blocks asked for by GET and not there, of all namespaces.")] = 0
    created: Annotated[int, Counter("store.created", "kvstore_shard_created_blocks",
        "Blocks stored, of all namespaces.")] = 0
    evicted: Annotated[int, Counter("store.memory.evicted", "kvstore_shard_evicted_blocks",
        "Blocks evicted from memory, of all namespaces.", page="Evicted", top="evicted", per_second=True)] = 0
    slow_turns: Annotated[dict[str, int], Counter("state.turns.slow", "kvstore_slow_turns",
        "Turns of the shard's loop that took over 50 ms, by the stage that took most of their time.", label="stage",
        page="Slow turns", top="slow")] = {}
    longest_turn_s: Annotated[float, Gauge("state.turns.longest_s", "kvstore_longest_turn_seconds",
        "The longest turn of the shard's loop since its start.")] = 0.0
    held_bytes: Annotated[dict[str, int], Gauge("state.account.held", "kvstore_held_bytes",
        "Memory beside blocks and index that the shard holds for its clients, by what holds it.", label="holder")] = {}
    held_limit_bytes: Annotated[int, Gauge("", "kvstore_held_limit_bytes",
        "The most that the shard holds for its clients.")] = 0
    refused: Annotated[dict[str, int], Counter("state.refused", "kvstore_refused_requests",
        "Requests refused, by the limit that was reached.", label="limit")] = {}
    unix_socket: Annotated[str, Field("config.unix_path")] = ""  # for clients on its host; empty if there is none
    lent_blocks: Annotated[int, Gauge("lending.blocks", "kvstore_lent_blocks",
        "Blocks that clients on this host read in shared memory.")] = 0
    lent_bytes: Annotated[int, Gauge("lending.held_bytes", "kvstore_lent_bytes",
        "The same in bytes; at most half of the shard's memory.", info="memory: lent")] = 0
    nixl: bool = False  # `transport` is NIXL
    transient_bytes: Annotated[int, Gauge("", "kvstore_transient_bytes", "Segments of transient blocks, in bytes.",
        info="transient: memory")] = 0
    transient_limit_bytes: Annotated[int, Gauge("", "kvstore_transient_limit_bytes", "The most that these may be.",
        info="transient: limit")] = 0
    tenant: str = ""  # the tenant whose namespaces are listed; empty if all are
    tenants: list[TenantInfo] = []
    unauthorized: Annotated[int, Counter("state.unauthorized", "kvstore_unauthorized_requests",
        "Requests that their principal may not make.")] = 0
    failed_logins: Annotated[int, Counter("logins.failed", "kvstore_failed_logins",
        "Logins with a token that is not valid.")] = 0
    requests: list[RequestTimes] = []
    # The highest generation of its namespaces. If it changes, a namespace was purged.
    generation: Annotated[int, Field("generations.highest")] = 0
    # How clients on other hosts may read its memory; empty if they may not.
    transport: Annotated[str, Field("config.transport")] = ""
    slow_requests: Annotated[dict[str, int], Counter("state.slow.count", "kvstore_slow_requests",
        "Requests over slowlog_ms, by the stage that took most of their time.", label="stage",
        info="requests: slow")] = {}

    def __post_init__(self) -> None:
        if self.transport == FLAGGED_TRANSPORT:
            msgspec.structs.force_setattr(self, "nixl", True)


# fmt: on

# Decoders are made when modules are imported, because msgspec crashes the process when two threads are the first to
# decode a type at the same time (seen with 0.22.0).
_shard_info_decoder = msgspec.msgpack.Decoder(ShardInfo)


def decode_shard_info(info: bytes | bytearray | memoryview) -> ShardInfo:
    """Return the state in an INFO_REPLY. Raises `msgspec.DecodeError` or `UnicodeDecodeError` if `info` is not
    valid."""
    return _shard_info_decoder.decode(info)
