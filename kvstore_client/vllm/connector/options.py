"""The options of ``kv_connector_extra_config`` for the connector."""

from __future__ import annotations

from kvstore._index import BlockIndex
from kvstore_client.engine.directory import parse_engines_url
from kvstore_client.engine.parts import MAX_PARTS
from kvstore_client.vllm.connector.request_options import MAX_WAIT_S
from kvstore_client.vllm.shared.store_options import Size, StoreOptions

MIN_STAGING_BYTES = 1 << 20
DEFAULT_STAGING_BYTES = 512 << 20
# A step of a GPU fills more than that, and each step saves only as many blocks as there is room for: what is left when
# the request ends is dropped. Half of the room may wait to be sent while the next steps need theirs.
STAGED_STEPS = 4
MOST_STAGED_STEPS_BYTES = 4 << 30
# Each part is a request of its own to each shard, and a thread of its own where blocks are waited for.
MAX_LAYER_PARTS = 16


class ConnectorOptions(StoreOptions, frozen=True, kw_only=True):
    """What an operator may set beside `StoreOptions`. Sizes in bytes, or as text with a unit ("64GiB").

    cpu_bytes: host memory of the CPU tier between the engine's cache and the store, for the whole engine: every rank
        has an equal share. 0: no CPU tier.
    cpu_policy: which block of the CPU tier is evicted first, as the server's ``--policy``.
    staging_bytes: without a CPU tier, the host memory of each rank for blocks on their way to and from the store. When
        the store is slower than the engine, this memory fills, and the blocks that have waited longest are dropped. On
        a GPU, 512 MiB, the default, stands for more: see `staging`.
    min_hit_tokens: the store is not asked for prompts shorter than this, and shorter hits are not loaded.
    always_load: load what the store has, even if computing it is sooner, as far as both have been measured.
    head_shards: keep blocks as ranges of heads, so that engines of different tensor parallelism share them: the largest
        --tensor-parallel-size of these engines, which that of each must divide. Equal in all of them. 0: whole parts
        of ranks, shared with engines of the same size only.
    layer_parts: keep blocks as so many parts of layers, which are sent as soon as they are computed, and read as they
        come: a prompt that is handed over is there sooner. Equal in all engines that share blocks; a divisor of the
        layers of each rank. 0: whole blocks.
    single_flight_s: of engines that get the same prompt at once, the first computes it; the others wait for its blocks
        for so many seconds at most, and then compute what has not come. Set it in all of them. 0: each computes.
    engines: the directory in which this engine registers itself for `kvstore proxy`: etcd://HOST:PORT/NAME.
    engine_url: with `engines`: where a proxy reaches this engine's API, such as http://gpu-7:8000.
    trace_file: a file for the times of each request's parts, for `kvstore trace`; its own for each engine. Empty: none.
    save_decode: also save the blocks that generated tokens fill. They are part of the next turn's prompt.
    """

    cpu_bytes: Size = Size(0)
    cpu_policy: str = "default"
    staging_bytes: Size = Size(DEFAULT_STAGING_BYTES)
    min_hit_tokens: int = 0
    always_load: bool = False
    head_shards: int = 0
    layer_parts: int = 0
    single_flight_s: float = 0.0
    save_decode: bool = True
    engines: str = ""
    engine_url: str = ""
    trace_file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpu_policy not in BlockIndex.POLICIES:
            raise ValueError(f"cpu_policy is {self.cpu_policy!r}; expected one of {', '.join(BlockIndex.POLICIES)}")
        if self.staging_bytes < MIN_STAGING_BYTES:
            raise ValueError(
                f"staging_bytes is {self.staging_bytes}; expected at least 1MiB: room for one block of the model, and "
                "better for hundreds. Leave the option out to have 512MiB"
            )
        if not 0 <= self.head_shards <= MAX_PARTS:
            raise ValueError(
                f"head_shards is {self.head_shards}; expected the largest --tensor-parallel-size of the engines that "
                f"share blocks, at most {MAX_PARTS}, or 0"
            )
        if not 0 <= self.layer_parts <= MAX_LAYER_PARTS:
            raise ValueError(
                f"layer_parts is {self.layer_parts}; expected a divisor of the model's layers, at most "
                f"{MAX_LAYER_PARTS}, or 0: whole blocks"
            )
        if not 0 <= self.single_flight_s <= MAX_WAIT_S:
            raise ValueError(
                f"single_flight_s is {self.single_flight_s}; expected seconds, at most {MAX_WAIT_S}, or 0: do not wait"
            )
        if bool(self.engines) != bool(self.engine_url):
            raise ValueError(
                f"engines is {self.engines!r} and engine_url is {self.engine_url!r}; expected both or none: the "
                "directory in which the engine registers, and where a proxy reaches it"
            )
        if self.engines:
            parse_engines_url(self.engines)
        if self.min_hit_tokens < 0:
            raise ValueError(f"min_hit_tokens is {self.min_hit_tokens}; expected 0 or more tokens")

    def staging(self, step_bytes: int, on_gpu: bool) -> int:
        """The host memory for blocks on their way, in bytes, of a rank on which a full step fills `step_bytes` of the
        cache. On a GPU whose operator has set nothing else, room for `STAGED_STEPS` of them, up to 4 GiB."""
        if not on_gpu or self.staging_bytes != DEFAULT_STAGING_BYTES:
            return self.staging_bytes
        return max(self.staging_bytes, min(STAGED_STEPS * step_bytes, MOST_STAGED_STEPS_BYTES))
