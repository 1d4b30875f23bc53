"""The KV pipeline in closed form: how much of a decode engine's KV cache can live in another memory.

A step of decoding reads all KV once, layer by layer. After a layer's attention its KV may leave for a lender's memory,
if it is back before the layer's turn in the next step: the link moves the share alpha of M bytes while the engine reads
all M bytes from its own memory, computes everything else (T_other), and loses T_overlap to starting the copies:

    alpha M / B_link + T_overlap <= M / B_memory + T_other
    alpha <= B_link / B_memory + B_link (T_other - T_overlap) / M

The first term alone is the ratio of the bandwidths. The second one is the larger, where little KV is beside a lot of
weights. KV only grows at its end, so what leaves is one token of each sequence a step: traffic is inward.

Copies that take memory bandwidth from computing make a step longer: of the time that they run, `lost_share` is lost,

    T_step = M / B_memory + T_other + lost_share alpha M / B_link

and in that longer step the link moves more. With both, alpha is the above, divided by 1 - lost_share.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

BUFFERS: Final = 2  # layers whose KV is in buffers: the one that is read, and the one that comes


class Hardware(NamedTuple):
    """link_bytes_per_s: from the lender. memory_bytes_per_s: the engine's own. other_s: the rest of a step, weights
    above all. overhead_s: time of a step in which no copy runs. layers: count the two buffers of a layer each as
    resident. lost_share: of the time that copies run, how much computing loses, 0 to less than 1."""

    link_bytes_per_s: float
    memory_bytes_per_s: float
    other_s: float
    overhead_s: float
    layers: int | None = None
    lost_share: float = 0.0


class PipelinePlan(msgspec.Struct, frozen=True):
    """`alpha`: the largest share of the KV cache that can live elsewhere without a step that waits for copies;
    `alpha_bandwidth`: its first term alone. `capacity_gain`: so many times as many tokens fit the engine's memory; None
    if all may leave. `lender_bytes`: what the lender holds, of `kv_bytes` in all; `resident_bytes`: what stays, with
    the buffers.
    `step_s`: a step with the pipeline; `step_alone_s`: without: shorter only if copies take time from computing.
    `link_share`: of the step, how long the link sends. `knee_bytes_per_s`: the bandwidth of the link from which on
    everything may leave."""

    alpha: float
    alpha_bandwidth: float
    capacity_gain: float | None
    lender_bytes: float
    resident_bytes: float
    step_s: float
    step_alone_s: float
    link_share: float
    knee_bytes_per_s: float | None


def largest_kv(resident_bytes: float, on: Hardware) -> float | None:
    """-> the most KV, in bytes, of which enough may leave that the rest, and the buffers, fit `resident_bytes` of the
    engine's memory; None: without bound.

    Of M bytes in all, (1 - alpha) M + 2 M / layers stay, and alpha falls as M grows:
    M (1 - B / B_memory + 2 / layers) = resident_bytes + B (T_other - T_overlap),  B = B_link / (1 - lost_share)
    """
    moved = on.link_bytes_per_s / (1 - on.lost_share)  # in a second of a step without copies
    shrinking = 1 - moved / on.memory_bytes_per_s + (BUFFERS / on.layers if on.layers else 0.0)
    if shrinking <= 0:
        return None
    return max(resident_bytes, (resident_bytes + moved * (on.other_s - on.overhead_s)) / shrinking)


def plan_pipeline(kv_bytes: float, on: Hardware) -> PipelinePlan:
    """-> how much may leave. kv_bytes: KV that a step reads, in all."""
    alone_s = kv_bytes / on.memory_bytes_per_s + on.other_s
    room_s = (alone_s - on.overhead_s) / (1 - on.lost_share)  # for copies, in a step that they fill
    alpha = min(1.0, max(0.0, on.link_bytes_per_s * room_s / kv_bytes))
    buffers = BUFFERS * kv_bytes / on.layers if on.layers and alpha else 0.0
    resident = min(kv_bytes, (1 - alpha) * kv_bytes + buffers)
    copies_s = alpha * kv_bytes / on.link_bytes_per_s
    step_s = alone_s + on.lost_share * copies_s
    return PipelinePlan(
        alpha=alpha,
        alpha_bandwidth=min(1.0, on.link_bytes_per_s / on.memory_bytes_per_s),
        capacity_gain=kv_bytes / resident if resident else None,
        lender_bytes=alpha * kv_bytes,
        resident_bytes=resident,
        step_s=step_s,
        step_alone_s=alone_s,
        link_share=copies_s / step_s,
        knee_bytes_per_s=kv_bytes / room_s if room_s > 0 else None,
    )
