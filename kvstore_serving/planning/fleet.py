"""The resources for a placement: nodes with GPUs, the links between them, and the store.

Rates are in bytes a second. A price is the price of one GPU for an hour, in any currency, because only the ratios of
prices matter.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvstore_serving.planning.profile import Profile

Via = Literal["store", "direct"]


class NodePool(msgspec.Struct, frozen=True):
    """Nodes of one kind. `profile`: the profile of the engine on these nodes' GPUs."""

    profile: Profile
    nodes: int
    gpus_per_node: int
    price: float = 1.0

    @property
    def gpus(self) -> int:
        """The number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


class NetworkLinks(msgspec.Struct, frozen=True):
    """How blocks get from a prefill engine to a decode engine. `via`: either through the store or from GPU to GPU.

    node: the rate of each node's link to other nodes, in each direction
    inside: the rate between the GPUs of a node (used with `direct`)
    store: the rate of each store node's link, in each direction
    latency, read and write: the seconds of a transfer from or to the store, without the time for its bytes
    """

    via: Via = "store"
    node_bytes_per_s: float = 12.5e9
    inside_bytes_per_s: float = 200e9
    store_bytes_per_s: float = 10e9
    store_nodes: int = 1
    store_memory_bytes: int = 512 << 30
    store_read_latency_s: float = 0.0
    store_write_latency_s: float = 0.0
