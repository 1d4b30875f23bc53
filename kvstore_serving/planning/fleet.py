"""What there is to place engines on: nodes with GPUs, the links between them, and the store.

Rates are bytes a second. Prices are of a GPU for an hour, in any currency: only their ratios count.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvstore_serving.planning.profile import Profile

Via = Literal["store", "direct"]


class Pool(msgspec.Struct, frozen=True):
    """Nodes of one kind. `profile`: of the engine on their GPUs."""

    profile: Profile
    nodes: int
    gpus_per_node: int
    price: float = 1.0

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.nodes * self.gpus_per_node


class Links(msgspec.Struct, frozen=True):
    """How blocks get from a prefill engine to a decode engine. `via`: through the store, or from GPU to GPU.

    node: of each node, in each direction, to other nodes; inside: between the GPUs of a node (used with `direct`);
    store: of each node of the store, in each direction; and the latency of a transfer from it (read) and to it (write),
    which takes that long and then its bytes' time."""

    via: Via = "store"
    node_bytes_per_s: float = 12.5e9
    inside_bytes_per_s: float = 200e9
    store_bytes_per_s: float = 10e9
    store_nodes: int = 1
    store_memory_bytes: int = 512 << 30
    store_read_latency_s: float = 0.0
    store_write_latency_s: float = 0.0
