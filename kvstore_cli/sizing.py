"""Computes how much memory and network the contexts of a fleet's users need, without a server.

The computation follows what a server does. A server stores only full blocks. A namespace's blocks lie in whole segments
of a shard, and the end of a segment is lost if it is too small for a slot. If a shard's index needs more than
`INDEX_OVERHEAD_BYTES`, the rest is taken from the shard's memory. A hash spreads keys over shards, so some shards get
more than the mean. With tensor parallelism every rank has a namespace of its own, but ranks that hold the same bytes
(MLA, or fewer KV heads than ranks) share one.

`KNOWN_SHAPES` has the shapes from the models' own `config.json`. `tests/unit/test_size.py` compares them with
docs/vllm.md.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final

import msgspec

from kvstore.node.memory_limit import BESIDE_BYTES, SHARD_OVERHEAD_BYTES
from kvstore.sizes import spell_size
from kvstore.store.namespaces import INDEX_OVERHEAD_BYTES, SLOT_BYTES
from kvstore.wire import MAX_BLOCK_BYTES
from kvstore.wire.status import segment_slots
from kvstore_client.keys import DTYPES
from kvstore_serving.planning.model_config import KVShape, ModelConfigError, read_shape

KNOWN_SHAPES: Final = {
    "DeepSeek-R1": KVShape(61, 1, 576, once=True),
    "DeepSeek-V3": KVShape(61, 1, 576, once=True),
    "Llama-3.1-405B": KVShape(126, 8, 128),
    "Llama-3.1-70B": KVShape(80, 8, 128),
    "Llama-3.1-8B": KVShape(32, 8, 128),
    "Llama-3.2-1B": KVShape(16, 8, 64),
    "Llama-3.2-3B": KVShape(28, 8, 128),
    "Llama-3.3-70B": KVShape(80, 8, 128),
    "Mistral-7B": KVShape(32, 8, 128),
    "Mistral-Nemo": KVShape(40, 8, 128),
    "Mistral-Small-24B": KVShape(40, 8, 128),
    "Mixtral-8x7B": KVShape(32, 8, 128),
    "Qwen2.5-14B": KVShape(48, 8, 128),
    "Qwen2.5-32B": KVShape(64, 8, 128),
    "Qwen2.5-72B": KVShape(80, 8, 128),
    "Qwen2.5-7B": KVShape(28, 4, 128),
    "Qwen3-14B": KVShape(40, 8, 128),
    "Qwen3-235B-A22B": KVShape(94, 4, 128),
    "Qwen3-30B-A3B": KVShape(48, 4, 128),
    "Qwen3-32B": KVShape(64, 8, 128),
    "Qwen3-8B": KVShape(36, 8, 128),
    "gemma-3-27b": KVShape(62, 16, 128),
    "gpt-oss-120b": KVShape(36, 8, 64),
    "gpt-oss-20b": KVShape(24, 8, 64),
    "phi-4": KVShape(40, 10, 128),
}
# Suffixes of a model's name that do not change its shape, as in Llama-3.1-8B-Instruct, Mistral-7B-Instruct-v0.3 and
# Qwen3-32B-FP8.
_VARIANT: Final = re.compile(r"(-(instruct|it|chat|base|thinking|fp8|awq|gptq|int4|int8|v?\d[\d.]*))*")

LINKS_GBITS: Final = (10, 25, 100)
PAYLOAD: Final = 1448 / 1538  # a link's share for data: TCP with timestamps, Ethernet frames of 1500 bytes
MOST_BUSY: Final = 0.5  # the mean use of a link; half is left for peaks, as turns come at random times
SPREAD: Final = 4.0  # a shard has room for this many standard deviations above the mean
KEY_BYTES: Final = 33  # an engine's hash, plus a byte for the range of heads
SEGMENT_BYTES: Final = 32 << 20
MOST_BYTES: Final = 1 << 60
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


class SizeError(ValueError):
    """A value is wrong. The message names the option, the given value, the expected one, and what to do."""


class FleetSize(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet and its load, as the options of `kvstore size` give them."""

    context: int
    users: int
    shared_tokens: int = 0
    turns_per_hour: float | None = None
    new_tokens: int = 0
    ttft_s: float | None = None
    replicas: int = 1
    nodes: int = 1
    shards: int = 1
    block_tokens: int = 16
    tp: int = 1


class LinkSpeed(msgspec.Struct, frozen=True):
    """The slowest link that is fast enough for each host."""

    gbits: int
    context_s: float  # the time to load one context while nothing else uses the link
    read_share: float  # the mean share of a node's link that reads use
    write_share: float


class Network(msgspec.Struct, frozen=True):
    """Rates in bytes a second. A rate is None if an option that it needs was not given."""

    read_bytes_per_s: float | None  # the mean rate from all nodes together
    write_bytes_per_s: float | None  # the mean rate to all nodes together, with every copy
    context_bytes_per_s: float | None  # the rate at which one context is loaded within the TTFT
    link: LinkSpeed | None  # None if there is no rate to choose by, or the fastest link is too slow


class Sizing(msgspec.Struct, frozen=True):
    """What the contexts need. Sizes include all layers and all ranks, unless a name says otherwise."""

    model: str
    layers: int
    kv_heads: int
    head_size: int
    dtype: str
    once: bool  # whether a token has one latent vector (MLA) instead of a key and a value
    token_bytes: int
    block_tokens: int
    block_bytes: int
    parts: int  # parts of a block, one for each rank with different heads; each has a namespace
    part_bytes: int
    context_blocks: int
    context_bytes: int
    blocks: int  # blocks in all contexts, counting one copy
    blocks_bytes: int
    replicas: int
    nodes: int
    shards: int  # on each node
    segment_bytes: int
    memory_bytes: int  # on each node: the value of --memory
    resident_bytes: int  # on each node: the most memory that its shards use
    limit_bytes: int  # on each node: for a container or MemoryMax
    command: str  # the command that starts a node
    network: Network


def find_shape(given: str) -> tuple[str, KVShape]:
    """Return the name and shape of a model. `given`: a name in `KNOWN_SHAPES`, a config.json, or a folder with one.
    Raises `SizeError`."""
    path = Path(given)
    if path.is_dir():
        path /= "config.json"
    if path.is_file() or given.endswith(".json") or given.startswith(("/", "./", "../", "~")):
        try:
            return given, read_shape(path.expanduser())
        except ModelConfigError as error:
            raise SizeError(f"--model {error}; or give --layers, --kv-heads and --head-size") from error
    name = given.rpartition("/")[2].lower().removeprefix("meta-")
    for known in sorted(KNOWN_SHAPES, key=len, reverse=True):
        if name.startswith(known.lower()) and _VARIANT.fullmatch(name, len(known)):
            return known, KNOWN_SHAPES[known]
    raise SizeError(
        f"--model {given!r}: expected a model's config.json, a folder with one, or one of {', '.join(KNOWN_SHAPES)}; "
        "for another model give --layers, --kv-heads and --head-size"
    )


def size(model: str, shape: KVShape, fleet: FleetSize) -> Sizing:
    """Return what the contexts of this fleet's users need. Raises `SizeError`."""
    _check(shape, fleet)
    token_bytes = shape.bytes_per_token
    parts = 1 if shape.once else min(fleet.tp, shape.kv_heads)
    block_bytes = token_bytes * fleet.block_tokens
    part_bytes = block_bytes // parts
    if part_bytes > MAX_BLOCK_BYTES:
        raise SizeError(
            f"--block-tokens {fleet.block_tokens}: a block would have {part_bytes} bytes; expected at most "
            f"{MAX_BLOCK_BYTES}: choose fewer tokens"
        )
    shared = fleet.shared_tokens // fleet.block_tokens
    each = fleet.context // fleet.block_tokens
    blocks = shared + fleet.users * (each - shared)
    context_bytes = each * block_bytes
    if blocks * block_bytes * fleet.replicas > MOST_BYTES:
        raise SizeError(
            f"--users {fleet.users} with --context {fleet.context}: the blocks would have "
            f"{blocks * block_bytes:.2g} bytes; expected less than 1 EiB: check both options"
        )
    segment = max(SEGMENT_BYTES, -(-part_bytes // SEGMENT_BYTES) * SEGMENT_BYTES)
    memory = fleet.shards * shard_bytes(blocks, parts, part_bytes, segment, fleet)
    unit = _GIB if memory >= _GIB else _MIB
    memory = -(-memory // unit) * unit
    resident = memory + fleet.shards * SHARD_OVERHEAD_BYTES
    words = ["kvstore-server", "--memory", spell_size(memory)]
    words += ["--shards", str(fleet.shards)] if fleet.shards > 1 else []
    words += ["--segment", spell_size(segment)] if segment > SEGMENT_BYTES else []
    return Sizing(
        model=model,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=shape.dtype,
        once=shape.once,
        token_bytes=token_bytes,
        block_tokens=fleet.block_tokens,
        block_bytes=block_bytes,
        parts=parts,
        part_bytes=part_bytes,
        context_blocks=each,
        context_bytes=context_bytes,
        blocks=blocks,
        blocks_bytes=blocks * block_bytes,
        replicas=fleet.replicas,
        nodes=fleet.nodes,
        shards=fleet.shards,
        segment_bytes=segment,
        memory_bytes=memory,
        resident_bytes=resident,
        limit_bytes=resident + BESIDE_BYTES,
        command=" ".join(words),
        network=_network(context_bytes, token_bytes, fleet),
    )


def shard_bytes(blocks: int, parts: int, part_bytes: int, segment: int, fleet: FleetSize) -> int:
    """Return the memory that one shard needs for its share of the copies of `blocks` blocks. Each block has a part in
    each of `parts` namespaces."""
    places = fleet.nodes * fleet.shards
    mean = blocks * fleet.replicas / places
    # If every shard gets every block, all shards get the same number.
    uneven = 0.0 if places == fleet.replicas else SPREAD * math.sqrt(mean)
    most = min(blocks, math.ceil(mean + uneven))
    slots = segment_slots(segment, part_bytes)
    segments = -(-most // slots)
    index = parts * segments * slots * (KEY_BYTES + SLOT_BYTES)
    return parts * segments * segment + max(0, index - INDEX_OVERHEAD_BYTES)


def _network(context_bytes: int, token_bytes: int, fleet: FleetSize) -> Network:
    turns = None if fleet.turns_per_hour is None else fleet.users * fleet.turns_per_hour / 3600
    read = None if turns is None else turns * context_bytes
    write = None if turns is None else turns * fleet.new_tokens * token_bytes * fleet.replicas
    context = None if fleet.ttft_s is None else context_bytes / fleet.ttft_s
    link = None
    for gbits in LINKS_GBITS if turns is not None or context is not None else ():
        rate = gbits * 1e9 / 8 * PAYLOAD
        shares = ((read or 0.0) / fleet.nodes / rate, (write or 0.0) / fleet.nodes / rate)
        if link is None and (context or 0.0) <= rate and max(shares) <= MOST_BUSY:
            link = LinkSpeed(gbits, context_bytes / rate, *shares)
    return Network(read, write, context, link)


def _check(shape: KVShape, fleet: FleetSize) -> None:
    if shape.dtype not in DTYPES:
        raise SizeError(f"--dtype {shape.dtype!r}: expected one of {', '.join(DTYPES)}")
    if fleet.context < fleet.block_tokens:
        raise SizeError(
            f"--context {fleet.context}: expected at least one block of {fleet.block_tokens} tokens, because only full "
            "blocks are stored; raise --context, or lower --block-tokens"
        )
    if fleet.shared_tokens > fleet.context:
        raise SizeError(
            f"--shared-tokens {fleet.shared_tokens}: expected at most --context {fleet.context}, because each "
            "context begins with them; raise --context"
        )
    if fleet.replicas > fleet.nodes:
        raise SizeError(
            f"--replicas {fleet.replicas}: expected at most --nodes {fleet.nodes}, because each copy needs a node of "
            "its own; raise --nodes"
        )
    heads = shape.kv_heads
    if not shape.once and fleet.tp % heads and heads % fleet.tp:
        raise SizeError(
            f"--tp {fleet.tp}: expected a divisor or a multiple of {heads}, the number of the model's KV heads"
        )
    if fleet.new_tokens and fleet.turns_per_hour is None:
        raise SizeError(f"--new-tokens {fleet.new_tokens}: expected --turns-per-hour, too, to compute the writes")
