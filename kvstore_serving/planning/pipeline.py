"""The KV pipeline in closed form: how much of a decode engine's KV cache can live in another memory.

A decoding step reads all KV once, layer by layer. After a layer's attention is computed, the layer's KV may move to a
lender's memory. It must be back before the next step reads that layer. In one step, the link moves the share alpha of
the M bytes of KV. Meanwhile the engine reads all M bytes from its own memory and computes everything else (T_other).
For a part of this time (T_overlap), no copy runs:

    alpha M / B_link + T_overlap <= M / B_memory + T_other
    alpha <= B_link / B_memory + B_link (T_other - T_overlap) / M

The first term is the ratio of the bandwidths. The second term is large if there is little KV compared with the weights.
KV only grows at its end, so only one token of each sequence must be sent out in a step, and nearly all traffic is
inward.

Copies that take memory bandwidth from computing make a step longer. Computing loses the share `lost_share` of the time
for which copies run:

    T_step = M / B_memory + T_other + lost_share alpha M / B_link

In the longer step the link can move more. With both effects, alpha is the value above divided by 1 - lost_share.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

BUFFERS: Final = 2  # layers whose KV is in buffers: the layer being read, and the next layer


class Hardware(NamedTuple):
    """The hardware of a decode engine.

    link_bytes_per_s: the rate of the link from the lender
    memory_bytes_per_s: the rate at which the engine reads its own memory
    other_s: the time for the rest of a step, mostly for reading the weights
    overhead_s: the time of a step in which no copy runs
    layers: the number of layers; if given, two buffers of one layer each count as resident
    lost_share: the share of the copies' time that computing loses; from 0 to less than 1
    """

    link_bytes_per_s: float
    memory_bytes_per_s: float
    other_s: float
    overhead_s: float
    layers: int | None = None
    lost_share: float = 0.0


class PipelinePlan(msgspec.Struct, frozen=True):
    """How much KV can live elsewhere, and what that gains.

    alpha: the largest share of the KV cache that can live elsewhere without making steps wait for copies
    alpha_bandwidth: only the first term of alpha
    capacity_gain: the factor by which more tokens fit the engine's memory; None if all KV may leave
    lender_bytes: the part of all KV that the lender holds
    resident_bytes: the part of the KV that stays, plus the buffers
    step_s, step_alone_s: the time of a step with and without the pipeline; they differ only if copies slow computing
    link_share: the share of a step's time for which the link sends
    knee_bytes_per_s: the lowest bandwidth of the link with which all KV may leave
    """

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
    """Return the most bytes of KV for which the part that must stay, with the buffers, fits `resident_bytes` of the
    engine's memory. Returns None if there is no limit.

    Of M bytes in all, (1 - alpha) M + 2 M / layers stay, and alpha falls as M grows:

        M (1 - B / B_memory + 2 / layers) = resident_bytes + B (T_other - T_overlap),  B = B_link / (1 - lost_share)
    """
    moved = on.link_bytes_per_s / (1 - on.lost_share)  # for each second of a step without copies
    shrinking = 1 - moved / on.memory_bytes_per_s + (BUFFERS / on.layers if on.layers else 0.0)
    if shrinking <= 0:
        return None
    return max(resident_bytes, (resident_bytes + moved * (on.other_s - on.overhead_s)) / shrinking)


def plan_pipeline(kv_bytes: float, on: Hardware) -> PipelinePlan:
    """Return how much KV may leave. `kv_bytes`: the bytes of all KV that a step reads."""
    alone_s = kv_bytes / on.memory_bytes_per_s + on.other_s
    room_s = (alone_s - on.overhead_s) / (1 - on.lost_share)  # the time for copies in a step that copies fill
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
