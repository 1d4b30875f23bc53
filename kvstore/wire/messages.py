"""The wire protocol: message types, limits, errors. A pure codec: no sockets, no clocks, no threads.

A message is a ZMTP multipart message between a DEALER (client) and a ROUTER (shard). Its first frame is a header:
a msgpack array ``[tag, field, ...]`` described by one of the structs below. Keys, payload and checksums follow in
separate frames and never pass through msgpack. `docs/protocol.md` is normative; golden vectors test it.

Safety property: no memory is allocated for a frame before its size is compared with a limit, and a header either
decodes into exactly one of the structs below or raises `WireError` with a code and a sentence for the sender.

Compatibility: fields may be appended with a default; an old peer ignores fields that it does not know. Any other change
needs a new `PROTOCOL_VERSION`. HELLO names the range of versions that the client speaks, the shard takes the highest
that both speak (`agreed_protocol`), and WELCOME names it; it holds for the connection. Each release speaks the version
of the release before it, too, so that nodes and engines are upgraded one by one.

Over 400 lines because all messages of the protocol, their limits and their checks are in one place.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final, TypeVar

import msgspec

from kvstore.wire.verbs import (
    ADMIN,
    ANYBODY,
    DELETE,
    KNOWN,
    MONITOR,
    READ,
    WRITE,
    Bound,
    KeyedRequest,
    Reply,
    Request,
    Verb,
    table,
)

PROTOCOL_VERSION: Final = 4
OLDEST_PROTOCOL: Final = 3  # of the release before this one
NAMESPACE_VERSION: Final = 1
FLAGGED_TRANSPORT: Final = "nixl"  # had a field of its own in HELLO and WELCOME before transports had names

MIN_KEY_BYTES: Final = 8
MAX_KEY_BYTES: Final = 64
MAX_HEADER_BYTES: Final = 64 * 1024
MAX_KEYS: Final = 8192  # per request; clients split longer batches
MAX_NAMESPACE_BYTES: Final = 8 * 1024
MAX_BLOCK_BYTES: Final = 64 << 20
MAX_PIN_S: Final = 60.0
MAX_PRIORITY: Final = 3
MAX_POSITION: Final = (1 << 31) - 1  # of a block in its chain
MAX_TTL_S: Final = 10 * 365 * 86400
MAX_READS: Final = 255  # of a transient block
TRANSIENT_TTL_S: Final = 60.0  # of a transient block for which none was given
MAX_REPLICAS: Final = 3
MAX_GENERATION: Final = (1 << 63) - 1
MAX_HOTTEST_BYTES: Final = 8 << 20  # all keys of one HOTTEST reply together
MAX_DEADLINE_MS: Final = 600_000
MAX_PROMISE_MS: Final = 600_000
CHECKSUM_BYTES: Final = 8
ATTRIBUTES_BYTES: Final = 6  # what goes with a block to another shard, beside a key: see attributes.py

# A payload frame of small blocks is filled up to this size. Measured: with one such frame a system call, the copies of
# both ends overlap; with 4 MiB a call a transfer took 1.15 times as long.
FRAME_BYTES: Final = 1 << 20
MAX_FRAME_BLOCKS: Final = 512  # one system call takes at most 1024 pieces
GROUP_BYTES: Final = 4 << 20  # so much of a GET is made ready, and announced, at a time


def frame_blocks(block_bytes: int) -> int:
    """-> the number of blocks in a payload frame: as many as fit `FRAME_BYTES`, 1 to `MAX_FRAME_BLOCKS`."""
    return max(1, min(MAX_FRAME_BLOCKS, FRAME_BYTES // block_bytes))


class ErrorCode(enum.IntEnum):
    """Why a request was refused. The number goes over the wire; the name is for people."""

    PROTOCOL = 1  # malformed: frame, header, sizes, order
    VERSION = 2  # a protocol or namespace version that this server does not support
    NO_NAMESPACE = 3  # a block request before a HELLO with a namespace
    BLOCK_SIZE = 4  # payload does not match the namespace's block_bytes
    KEY_SIZE = 5  # key length out of range, or different from the namespace's
    LIMIT = 6  # over a limit of the protocol
    NOT_AUTHORIZED = 7
    OUT_OF_MEMORY = 8  # a block of this size can never be placed here
    SHUTTING_DOWN = 9
    NO_PLACE = 10  # too many connections: this one may ask PING and INFO only, until another one ends


class Outcome(enum.IntEnum):
    """The result of a SET for one block."""

    CREATED = 0
    EXISTED = 1
    FORCED = 2
    DUPLICATED = 3
    ERROR = 4  # no room for it, or room only at the cost of blocks before it in its chain
    PENDING = 5  # another client was writing it, and it is not there yet; it counts as one that existed


class Presence(enum.IntEnum):
    """What a CONTAINS found out about one block."""

    ABSENT = 0
    PRESENT = 1
    PROMISED = 2  # it is not there, but a client has promised to set it; told only if the request asked for that


class Promised(enum.IntEnum):
    """The result of a PROMISE for one block."""

    MINE = 0  # this connection has promised it
    PRESENT = 1  # it is there, or being written
    OTHERS = 2  # another client has promised it


class WireError(Exception):
    """A message cannot be accepted. The error has the code and the sentence that the sender gets."""

    def __init__(self, code: ErrorCode, message: str, request_id: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id  # 0: not known here; the reader that catches the error fills it in


# ---- client -> shard -------------------------------------------------------------------------------------------


class Hello(Request, tag=1, frozen=True):
    """The first message of a connection. With an empty `namespace` only PING, INFO, SYNC, SCRUB and PURGE of all
    namespaces are allowed."""

    protocol: int  # the oldest version that the client speaks; a shard of version 3 speaks this one or none
    namespace: bytes = b""  # canonical JSON
    client: str = ""  # for logs
    credentials: bytes = b""
    replicas: int = 1  # copies that this client keeps of each block; nodes that move blocks keep as many
    cookie: str = ""  # the node's, from its record in the cluster: a supervisor shows that it belongs to the cluster
    release_ring: bool = False  # on a Unix socket: the client takes RELEASE_RING
    nixl: bool = False  # `transport` is this one, for shards that know no other
    newest: int = 0  # the newest version that the client speaks; 0: only `protocol`
    generation: int = 0  # the highest of the namespace that the client knows
    holds: bool = False  # the client keeps copies of blocks: it answers RAISED with NOTED
    transport: str = ""  # elsewhere: how the client can read the shard's memory; empty: not at all, or see `nixl`


class Set(KeyedRequest, tag=2, frozen=True):
    """Frames: header, keys, payload frames, checksums (`CHECKSUM_BYTES` little-endian a block).

    `chained`: the keys are a part of one chain, head first; only then the fields after it count. The chain's other keys
    may be at other shards. `parent`: the key before the first one, or the `end` of the part before; empty if the chain
    begins here. `end`: the last key of the client's call, if it went to another shard: the next part may name it as its
    parent. `position`: of the first key in the chain.

    `call`: a number for the client's call, the same in all its SETs of this chain, unlike those of other calls; 0: not
    known. `offsets`: u32le, the place of each key in that call; empty: one after the other, from 0.

    `attributes`: an entry of `attributes.py` for each of up to `MAX_FRAME_BLOCKS` blocks, which are copies of another
    shard's. Then `priority`, `ttl_s`, `chained` and the fields after it do not count.

    `references`: the blocks are in memory that the client shares. Then frames of `shared.STAGED` entries follow the
    keys, and neither payload nor checksums. The shard says with TAKEN how far it has read.

    `reads`, 1 .. MAX_READS: the blocks are transient: each is dropped when it was read so often, or after `ttl_s`
    (0: TRANSIENT_TTL_S). They are in no chain, and have no priority. 0: ordinary blocks.

    `generation`: of the namespace, in which the blocks were made. A shard at a higher one refuses them all.
    """

    force: bool = False
    priority: int = 0  # 0 .. MAX_PRIORITY: evicted only when no block of a lower priority is left
    outcomes: bool = False  # have the reply contain an `Outcome` for each block
    ttl_s: float = 0.0  # the blocks expire after so many seconds; 0: the shard's rule for the namespace applies
    chained: bool = False
    parent: bytes = b""
    end: bytes = b""
    position: int = 0
    attributes: bytes = b""
    call: int = 0
    offsets: bytes = b""
    references: bool = False
    reads: int = 0
    generation: int = 0


class Get(KeyedRequest, tag=3, frozen=True):
    """Frames: header, keys. The reply is a series of PARTs.

    `credit` > 0: the shard may send so many bytes of payload before it needs more CREDIT. `refresh`: the GET counts as
    a use of the blocks, and in hits and misses. `prefix`: the keys are a chain, and only its leading run of blocks that
    are present is requested. `attributes`: have PARTs say what goes with each block. `references`: have PARTs say where
    in shared memory the blocks are, as far as that is possible; only on a Unix socket. `wait_ms`: wait so long for
    blocks that were promised; with `prefix` they count as present.
    """

    credit: int = 0
    refresh: bool = True
    prefix: bool = False
    attributes: bool = False
    references: bool = False
    wait_ms: int = 0


class Contains(KeyedRequest, tag=4, frozen=True):
    """Frames: header, keys. `pin_s` > 0: blocks that are found are not evicted for so many seconds. `promised`: have
    the reply tell which keys were promised."""

    refresh: bool = False
    pin_s: float = 0.0
    promised: bool = False


class MatchPrefix(KeyedRequest, tag=5, frozen=True):
    """Frames: header, keys (a chain, head first). Asks for the length of the leading run that is present."""

    refresh: bool = False
    pin_s: float = 0.0


class Delete(KeyedRequest, tag=6, frozen=True):
    """Frames: header, keys. `damaged`: delete only blocks whose bytes do not match their checksum."""

    damaged: bool = False


class Sync(Request, tag=7, frozen=True):
    """The reply comes when the blocks of every earlier SET on this connection are readable."""

    deadline_ms: int


class Info(Request, tag=8, frozen=True):
    deadline_ms: int


class Ping(Request, tag=9, frozen=True):
    deadline_ms: int


class Credit(Request, tag=10, frozen=True):
    """`bytes` more bytes of payload may be sent for GET `id`. No reply."""

    bytes: int


class Cancel(Request, tag=11, frozen=True):
    """The client does not want the rest of GET `id`. No reply."""


class Scrub(Request, tag=12, frozen=True):
    """Check every block on disk against its checksum now, in one pass. INFO tells the progress."""

    deadline_ms: int


class Hottest(Request, tag=13, frozen=True):
    """Request keys of the connection's namespace, most recently used first: `limit` keys after the first `skip`.

    A block comes after those before it in its chain. `before`: have the reply name the block that each one follows.
    """

    deadline_ms: int
    skip: int
    limit: int
    before: bool = False


class Purge(Request, tag=14, frozen=True):
    """Remove all blocks of the connection's namespace, and raise its generation; with `all`, of every namespace of the
    shard that the sender may use, and whose model matches the pattern `model`, and whose id begins with `prefix` (in
    hexadecimal), if they are given.

    `generation`: to which it is raised, at least; the same for all shards of a store.
    """

    deadline_ms: int
    all: bool = False
    generation: int = 0
    model: str = ""
    prefix: str = ""


class Release(Request, tag=15, frozen=True):
    """The client reads the first `count` blocks that GET `id` has referenced no more; 0: none of them. No reply."""

    count: int


class Share(Request, tag=16, frozen=True):
    """A file of the client's memory, whose descriptor comes with this message's bytes, on a Unix socket. SETs refer to
    it by `number`. It must be sealed against shrinking. `handle`: what another kind of memory needs to be attached."""

    number: int
    nbytes: int
    handle: bytes = b""


class Promise(KeyedRequest, tag=17, frozen=True):
    """Frames: header, keys. The client is about to set these blocks: who asks for them may wait. The promise of a key
    ends when it is set, with WITHDRAW, with the connection, or after `ttl_ms`. Who has promised a key may do so again,
    which renews it."""

    ttl_ms: int


class Withdraw(KeyedRequest, tag=18, frozen=True):
    """Frames: header, keys. The client will not set those of these blocks that this connection has promised."""


class Expire(KeyedRequest, tag=19, frozen=True):
    """Frames: header, keys. Give blocks another time to live, from now on. 0: the shard's rule for the namespace
    applies, as in SET. Transient blocks keep theirs."""

    ttl_s: float = 0.0


class Raise(Request, tag=20, frozen=True):
    """The client knows of this generation of the connection's namespace, from another shard of the store. A shard that
    has no blocks of the namespace takes it over from whoever may write; one that has some, and lacks the purge, only
    from whoever may purge: then it removes them, as for PURGE. No reply, but RAISED if the shard stays behind."""

    generation: int


class Noted(Request, tag=21, frozen=True):
    """The client has let go of all that it holds of generations of the connection's namespace before this one. No
    reply."""

    generation: int


# ---- shard -> client -------------------------------------------------------------------------------------------


class ShardAddress(msgspec.Struct, array_like=True, frozen=True):
    """The address of a shard. An empty `host` stands for the host at which the client has reached this node."""

    name: str  # stable across restarts; placement hashes it
    host: str
    port: int
    weight: float  # memory bytes


class Welcome(Reply, tag=65, frozen=True):
    protocol: int  # the version that is spoken on this connection
    version: str
    node: str
    shard: int
    block_bytes: int
    shards: list[ShardAddress]
    zone: str = ""  # nodes of one zone fail together; replicas go to different zones
    unix_socket: str = ""  # path of this shard's Unix socket on its host; empty: it has none
    instance: str = ""  # random, made at the shard's start: who finds it at a Unix socket is on the shard's host
    nixl: bool = False  # `transport` is this one, for clients that know no other
    generation: int = 0  # of the namespace, on this shard; 0: nobody has purged it, as far as the shard knows
    transport: str = ""  # elsewhere: GETs on this connection may ask for references, to be read in this way


class SetReply(Reply, tag=66, frozen=True):
    total: int
    created: int
    existed: int
    forced: int
    duplicated: int
    error: int
    outcomes: bytes = b""  # one `Outcome` a key, if the SET asked for them
    evicted: int = 0  # blocks that made room for these
    generation: int = 0  # not 0: the blocks were refused, because the namespace is at this generation


class Part(Reply, tag=67, frozen=True):
    """Blocks of GET `id`. Frames: header and, unless it has no blocks, one payload frame.

    `positions`: u32le, indexes into the request's keys; `sums`: u64le checksums; `attributes`: entries of
    `attributes.py`, if the GET asked for them; one of each a block. `references`: an entry of `shared.py` a block; then
    no payload frame follows.

    The PART with `last` ends the reply; its counts of hits and misses are complete. The next `following` bytes of
    payload come in the PARTs right behind this one, so the client need not be woken for fewer.
    """

    positions: bytes
    sums: bytes
    last: bool
    hit: int = 0
    miss: int = 0
    following: int = 0
    attributes: bytes = b""
    references: bytes = b""


class ContainsReply(Reply, tag=68, frozen=True):
    """`present`: one byte a key, a `Presence`."""

    present: bytes


class MatchReply(Reply, tag=69, frozen=True):
    length: int


class DeleteReply(Reply, tag=70, frozen=True):
    deleted: int


class SyncReply(Reply, tag=71, frozen=True):
    """The blocks of every earlier SET on this connection are readable."""


class InfoReply(Reply, tag=72, frozen=True):
    """`info`: a `ShardInfo` as msgpack."""

    info: bytes


class Pong(Reply, tag=73, frozen=True):
    """The shard is there."""


class ScrubReply(Reply, tag=74, frozen=True):
    """The pass is complete when `scrub_passes` of INFO has reached `passes`. 0: no disk tier is on."""

    passes: int


class HottestReply(Reply, tag=75, frozen=True):
    """`keys`: concatenated, `key_bytes` each. `total`: how many blocks the namespace has on this shard. `before`: if it
    was asked for, for each key the nearest block before it in its chain; the key itself if there is none."""

    key_bytes: int
    keys: bytes
    total: int
    before: bytes = b""


class PurgeReply(Reply, tag=76, frozen=True):
    """The blocks that were there when the PURGE came are removed, also from disk, and cannot come back."""

    purged: int  # blocks
    generation: int = 0  # that the namespaces are at now, at least
    namespaces: list[str] = msgspec.field(default_factory=list)  # the ids of those that were purged, in hexadecimal
    told: int = 0  # connections of clients that hold copies, and were told
    silent: list[str] = msgspec.field(default_factory=list)  # the addresses of those that have not answered


class Extent(Reply, tag=77, frozen=True):
    """A file of shared memory, whose descriptor comes with this message's bytes. PARTs refer to it by `number`.
    `handle`: what another kind of memory needs to be attached."""

    number: int
    nbytes: int
    handle: bytes = b""


class Retired(Reply, tag=78, frozen=True):
    """These files have no memory any more; no PART refers to them. `numbers`: u64le."""

    numbers: bytes


class ShareReply(Reply, tag=79, frozen=True):
    """SETs may refer to the file."""


class Taken(Reply, tag=80, frozen=True):
    """The shard has read the first `count` blocks of SET `id`: the client may use their memory for something else."""

    count: int


class ReleaseRing(Reply, tag=81, frozen=True):
    """Shared memory whose descriptor comes with this message's bytes: a `shared.IdRing`, into which the client may put
    the ids of GETs instead of a RELEASE of all their blocks."""

    nbytes: int


class PromiseReply(Reply, tag=82, frozen=True):
    """`answers`: one byte a key, a `Promised`."""

    answers: bytes


class WithdrawReply(Reply, tag=83, frozen=True):
    """`withdrawn`: how many keys' promises this ended."""

    withdrawn: int


class ExpireReply(Reply, tag=84, frozen=True):
    """`present`: one byte a key: 1 if its block is there and has the new time to live, else 0."""

    present: bytes


class Raised(Reply, tag=85, frozen=True):
    """The connection's namespace is at this generation now: what was made in an earlier one is of no use any more. It
    comes before anything that the shard sends later."""

    generation: int


class Error(Reply, tag=127, frozen=True):
    """A request was refused. `id` 0: the message was so malformed that its request is not known."""

    code: int
    message: str


# ---- the table of verbs ----------------------------------------------------------------------------------------


_Greeting = TypeVar("_Greeting", Hello, Welcome)


def transport_of(greeting: Hello | Welcome) -> str:
    """-> how the client reads the shard's memory from another host; empty: it does not."""
    return greeting.transport or (FLAGGED_TRANSPORT if greeting.nixl else "")


def with_transport(greeting: _Greeting, name: str) -> _Greeting:
    """-> the message with the name of a transport."""
    return msgspec.structs.replace(greeting, transport=name, nixl=name == FLAGGED_TRANSPORT)


_DEADLINE: Final = Bound(
    "deadline_ms", 1, MAX_DEADLINE_MS, f"a deadline of {{}} ms: expected 1 to {MAX_DEADLINE_MS} ms"
)
_COUNT: Final = Bound("count", 0, MAX_KEYS, f"{{}} keys in one request: expected 0 to {MAX_KEYS}; split the batch")
_GENERATION: Final = Bound("generation", 0, MAX_GENERATION, f"generation {{}}: expected 0 to {MAX_GENERATION}")
_TTL: Final = Bound("ttl_s", 0, MAX_TTL_S, f"a time to live of {{}} s: expected 0 to {MAX_TTL_S} s")
_REPLICAS: Final = Bound("replicas", 1, MAX_REPLICAS, f"{{}} replicas: expected 1 to {MAX_REPLICAS}")
_PRIORITY: Final = Bound("priority", 0, MAX_PRIORITY, f"a priority of {{}}: expected 0 to {MAX_PRIORITY}")
_POSITION: Final = Bound("position", 0, MAX_POSITION, f"a position of {{}} in a chain: expected 0 to {MAX_POSITION}")
_PIN: Final = Bound("pin_s", 0, MAX_PIN_S, f"a pin of {{}} s: expected 0 to {MAX_PIN_S:g} s")
_RELEASED: Final = Bound("count", 0, (1 << 63) - 1, "a RELEASE of {} blocks: expected 0 or more, below 2**63")
_PROMISE: Final = Bound("ttl_ms", 1, MAX_PROMISE_MS, f"a promise for {{}} ms: expected 1 to {MAX_PROMISE_MS} ms")


def _check_bounds(request: Request, bounds: Sequence[Bound]) -> None:
    for field, least, most, text in bounds:
        value = getattr(request, field)
        if not least <= value <= most:
            raise WireError(ErrorCode.LIMIT, text.format(value))


def _check_keyed(request: KeyedRequest) -> None:
    if not MIN_KEY_BYTES <= request.key_bytes <= MAX_KEY_BYTES:
        raise WireError(
            ErrorCode.KEY_SIZE,
            f"keys of {request.key_bytes} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}",
        )
    _check_bounds(request, (_COUNT, _DEADLINE))


def _check_set(request: Set) -> None:
    for name, key in (("parent", request.parent), ("end", request.end)):
        if len(key) not in (0, request.key_bytes):
            raise WireError(
                ErrorCode.KEY_SIZE,
                f"{name} is a key of {len(key)} bytes: expected {request.key_bytes} like the other keys, or none",
            )
    if not 0 <= request.call < 1 << 63 or len(request.offsets) not in (0, 4 * request.count):
        raise WireError(
            ErrorCode.PROTOCOL,
            f"{len(request.offsets)} bytes of offsets of {request.count} keys in call {request.call}: expected none or "
            f"{4 * request.count} bytes, and a call from 0 to 2**63-1",
        )
    if request.attributes:
        expected = request.count * (ATTRIBUTES_BYTES + request.key_bytes)
        if request.count > MAX_FRAME_BLOCKS or len(request.attributes) != expected:
            raise WireError(
                ErrorCode.PROTOCOL,
                f"{len(request.attributes)} bytes of attributes for {request.count} blocks: expected {expected} bytes, "
                f"and at most {MAX_FRAME_BLOCKS} blocks",
            )
    excluded = request.force or request.chained or request.attributes
    if not 0 <= request.reads <= MAX_READS or (request.reads and excluded):
        raise WireError(
            ErrorCode.PROTOCOL,
            f"a SET for {request.reads} reads: expected 0 to {MAX_READS}; and 0 with force, chained or attributes",
        )


def _check_get(request: Get) -> None:
    if not 0 <= request.wait_ms <= request.deadline_ms:
        raise WireError(
            ErrorCode.LIMIT, f"a wait of {request.wait_ms} ms: expected 0 to the deadline, {request.deadline_ms} ms"
        )
    if request.credit < 0:
        raise WireError(ErrorCode.PROTOCOL, f"a credit of {request.credit} bytes: expected 0 or more")
    if request.credit and request.references:
        raise WireError(
            ErrorCode.PROTOCOL,
            f"a GET by references with a credit of {request.credit} bytes: expected 0, because RELEASE grants more",
        )


def _check_hottest(request: Hottest) -> None:
    if not (0 <= request.skip < 1 << 63 and 0 <= request.limit < 1 << 63):
        raise WireError(
            ErrorCode.LIMIT,
            f"{request.limit} keys after the first {request.skip}: expected 0 or more, below 2**63, of each",
        )


def _check_share(request: Share) -> None:
    if not (0 <= request.number < 1 << 63 and 0 < request.nbytes < 1 << 63):
        raise WireError(
            ErrorCode.LIMIT,
            f"SHARE of file {request.number} of {request.nbytes} bytes: expected numbers below 2**63, at least a byte",
        )


VERBS: Final = table(
    Verb(Hello, ANYBODY, (_REPLICAS, _GENERATION), large=True),
    Verb(Set, WRITE, (_PRIORITY, _TTL, _POSITION, _GENERATION), _check_set, timed=True, disk=True),
    Verb(Get, READ, (), _check_get, timed=True, disk=True),
    Verb(Contains, READ, (_PIN,), timed=True),
    Verb(MatchPrefix, READ, (_PIN,), timed=True),
    Verb(Delete, DELETE, timed=True, disk=True),
    Verb(Sync, KNOWN),
    Verb(Info, ADMIN | MONITOR, large=True),
    Verb(Ping, ANYBODY),
    Verb(Credit, ANYBODY),  # this one, CANCEL and RELEASE say something about a GET of the same connection
    Verb(Cancel, ANYBODY),
    Verb(Scrub, ADMIN),
    Verb(Hottest, ADMIN, (_DEADLINE,), _check_hottest, namespace=True, place=True, large=True),
    Verb(Purge, ADMIN, (_DEADLINE, _GENERATION), place=True),
    Verb(Release, ANYBODY, (_RELEASED,)),
    Verb(Share, WRITE, (), _check_share),
    Verb(Promise, WRITE, (_PROMISE,), timed=True),
    Verb(Withdraw, WRITE, timed=True),
    Verb(Expire, WRITE, (_TTL,), timed=True),
    Verb(Raise, READ | WRITE | ADMIN, (_GENERATION,), namespace=True),
    Verb(Noted, KNOWN, (_GENERATION,)),
)
"""Of every request its row."""

# ---- codec -----------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(reduce(or_, VERBS))
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(reduce(or_, Reply.__subclasses__()))

encode = _encoder.encode


def decode_request(header: bytes | bytearray | memoryview) -> Request:
    """-> the request in a header frame. Raises `WireError` when it is malformed or exceeds the protocol's limits."""
    try:
        request = _request_decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            ErrorCode.PROTOCOL,
            f"the header is not a request of protocol {PROTOCOL_VERSION}: {error}",
            _request_id(header),
        ) from None
    if not 0 <= request.id < 1 << 63:
        raise WireError(ErrorCode.PROTOCOL, f"request id {request.id} is outside 0 .. 2**63-1")
    verb = VERBS[type(request)]
    try:
        if isinstance(request, KeyedRequest):
            _check_keyed(request)
        _check_bounds(request, verb.bounds)
        if verb.check is not None:
            verb.check(request)
    except WireError as error:
        error.request_id = request.id
        raise
    return request


def agreed_protocol(hello: Hello) -> int:
    """-> the highest version that the sender of a HELLO and this release speak. Raises `WireError` if there is none."""
    newest = min(max(hello.protocol, hello.newest), PROTOCOL_VERSION)
    if newest < max(hello.protocol, OLDEST_PROTOCOL):
        theirs = _versions(hello.protocol, max(hello.protocol, hello.newest))
        ours = _versions(OLDEST_PROTOCOL, PROTOCOL_VERSION)
        raise WireError(
            ErrorCode.VERSION,
            f"the client speaks {theirs} of the protocol: this server speaks {ours}; "
            f"upgrade the {'server' if hello.protocol > PROTOCOL_VERSION else 'client'}",
            hello.id,
        )
    return newest


def _versions(oldest: int, newest: int) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


def _request_id(header: bytes | bytearray | memoryview) -> int:
    """-> the id in a malformed header, so that the sender learns which request failed; 0 when it cannot be read."""
    try:
        fields = msgspec.msgpack.decode(header, type=list[msgspec.Raw])
        value = msgspec.msgpack.decode(fields[1], type=int)
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError, RecursionError):
        return 0
    return value if 0 <= value < 1 << 63 else 0


def decode_reply(header: bytes | bytearray | memoryview) -> Reply:
    """-> the reply in a header frame. Raises `WireError` when the frame is not a reply."""
    try:
        return _reply_decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            ErrorCode.PROTOCOL, f"the header is not a reply of protocol {PROTOCOL_VERSION}: {error}"
        ) from None
