"""The options of ``kv_connector_extra_config`` for the connector."""

from __future__ import annotations

from kvstore._index import BlockIndex
from kvstore_client.engine.directory import parse_engines_url
from kvstore_client.engine.slices import MAX_SLICES
from kvstore_client.vllm.connector.request_options import MAX_WAIT_S
from kvstore_client.vllm.shared.store_options import ByteSize, StoreOptions

MIN_STAGING_BYTES = 1 << 20
DEFAULT_STAGING_BYTES = 512 << 20
# A step on a GPU fills more memory than the default. Each step saves only the blocks for which there is room, and
# blocks that are left when their request ends are dropped. Blocks that wait to be sent may take half of the room, and
# the next steps need the other half.
STAGED_STEPS = 4
MOST_STAGED_STEPS_BYTES = 4 << 30
# Each slice needs a request of its own to each shard.
MAX_LAYER_PARTS = 16


class ConnectorOptions(StoreOptions, frozen=True, kw_only=True):
    """The options that an operator may set in addition to `StoreOptions`. Sizes are either numbers of bytes or text
    with a unit ("64GiB").

    cpu_bytes: the host memory of the CPU tier between the engine's cache and the store. It is for the whole engine, and
        every rank has an equal share. 0 means no CPU tier.
    cpu_policy: the eviction policy of the CPU tier, with the same values as the server's ``--policy``.
    staging_bytes: the host memory of each rank for blocks on their way to and from the store, if there is no CPU tier.
        If the store is slower than the engine, this memory fills, and the blocks that have waited longest are dropped.
        The default is 512 MiB. With the default, an engine on a GPU uses more; see `staging`.
    min_hit_tokens: the size of the smallest hit that is loaded, in tokens. The store is not asked about shorter
        prompts.
    always_load: whether to load all blocks that the store has, even if the engine would compute them sooner according
        to the measured rates.
    head_shards: the number of ranges of heads in which blocks are kept, so that engines of different tensor parallelism
        can share them. It must be the largest --tensor-parallel-size of these engines, a multiple of the size of each
        engine, and equal in all of them. With 0, the heads of each rank are kept together and shared only with engines
        of the same size.
    layer_parts: the number of layer slices in which blocks are kept. A slice is sent as soon as it is computed, and
        read as soon as it is stored, so a prompt is handed over sooner. It must be equal in all engines that share
        blocks, and a divisor of the number of layers of each rank. With 0, blocks are kept whole.
    single_flight_s: if several engines get the same prompt at the same time, only the first one computes it. The others
        wait for its blocks for at most this many seconds, and then compute those that have not come. Set it in all
        these engines. With 0, each engine computes the prompt.
    engines: the directory in which this engine registers itself for `kvstore proxy`: etcd://HOST:PORT/NAME.
    engine_url: the URL at which a proxy reaches this engine's API, such as http://gpu-7:8000. Set it together with
        `engines`.
    trace_file: the file for the spans of each request, which `kvstore trace` reads. Each engine needs its own file. If
        it is empty, no spans are written.
    save_decode: whether to save the blocks that generated tokens fill, too. They are part of the next prompt of a
        conversation.
    """

    cpu_bytes: ByteSize = ByteSize(0)
    cpu_policy: str = "default"
    staging_bytes: ByteSize = ByteSize(DEFAULT_STAGING_BYTES)
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
                f"staging_bytes is {self.staging_bytes}; expected at least 1MiB, with room for at least one block of "
                "the model and preferably for hundreds. Leave the option out for the default of 512MiB"
            )
        if not 0 <= self.head_shards <= MAX_SLICES:
            raise ValueError(
                f"head_shards is {self.head_shards}; expected the largest --tensor-parallel-size of the engines that "
                f"share blocks, at most {MAX_SLICES}, or 0"
            )
        if not 0 <= self.layer_parts <= MAX_LAYER_PARTS:
            raise ValueError(
                f"layer_parts is {self.layer_parts}; expected a divisor of the model's layers, at most "
                f"{MAX_LAYER_PARTS}, or 0 for whole blocks"
            )
        if not 0 <= self.single_flight_s <= MAX_WAIT_S:
            raise ValueError(
                f"single_flight_s is {self.single_flight_s}; expected a number of seconds from 0 (no wait) to "
                f"{MAX_WAIT_S}"
            )
        if bool(self.engines) != bool(self.engine_url):
            raise ValueError(
                f"engines is {self.engines!r} and engine_url is {self.engine_url!r}; expected both or neither: the "
                "directory in which the engine registers, and the URL at which a proxy reaches the engine"
            )
        if self.engines:
            parse_engines_url(self.engines)
        if self.min_hit_tokens < 0:
            raise ValueError(f"min_hit_tokens is {self.min_hit_tokens}; expected 0 or more tokens")

    def staging(self, step_bytes: int, on_gpu: bool) -> int:
        """Return the host memory of a rank for blocks on their way, in bytes. On a GPU with the default
        `staging_bytes`, there is room for `STAGED_STEPS` steps, up to 4 GiB. `step_bytes`: the size of the blocks that
        a full step fills. `on_gpu`: whether the rank has a GPU."""
        if not on_gpu or self.staging_bytes != DEFAULT_STAGING_BYTES:
            return self.staging_bytes
        return max(self.staging_bytes, min(STAGED_STEPS * step_bytes, MOST_STAGED_STEPS_BYTES))
