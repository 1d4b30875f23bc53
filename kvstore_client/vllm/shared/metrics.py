"""The metrics of the connector and of the tier: their names and what the numbers mean.

Although the metrics are not vLLM's, they are named ``vllm:kvstore_…``. When a process makes a second engine, vLLM
removes all names that begin with ``vllm:`` from the registry. A metric with another name would be registered twice,
which is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

METRIC_PREFIX: Final = "vllm:kvstore_"


class Metric(NamedTuple):
    """A metric on the engine's metrics page: its name without the prefix, and what the number means."""

    name: str
    meaning: str
    label: str = ""  # the name of its label, if it has one in addition to the engine's own


class LabelledCounter(NamedTuple):
    """The metric to which a counter is added, and the value of the metric's label."""

    metric: Metric
    label_value: str = ""


HIT_TOKENS: Final = Metric(
    "hit_tokens_total", "Prompt tokens loaded instead of computed, by the tier that had them.", "tier"
)
TRANSFER_BLOCKS: Final = Metric("transfer_blocks_total", "Blocks moved between host memory and the store.", "direction")
TRANSFER_BYTES: Final = Metric("transfer_bytes_total", "Bytes moved between host memory and the store.", "direction")
TRANSFER_SECONDS: Final = Metric(
    "transfer_seconds_total", "Time spent in calls that moved blocks, summed over threads and ranks.", "direction"
)
SWAP_BLOCKS: Final = Metric(
    "swap_blocks_total", "Blocks moved between the engine's cache and host memory.", "direction"
)
SWAP_BYTES: Final = Metric("swap_bytes_total", "Bytes moved between the engine's cache and host memory.", "direction")
SWAP_SECONDS: Final = Metric(
    "swap_seconds_total", "Time spent moving blocks between the engine's cache and host memory.", "direction"
)

HAND_OVERS: Final = Metric("hand_overs_total", "Requests handed over between engines, by this engine's side.", "side")
HAND_OVER_SECONDS: Final = Metric(
    "hand_over_seconds_total",
    "Time of handed-over requests: until their prompt was promised, and then until it was loaded (decode side); "
    "from the end of the prefill until the store had the blocks (prefill side).",
    "phase",
)

COUNTERS: Final[Mapping[str, LabelledCounter]] = {
    "hit_tokens_cpu": LabelledCounter(HIT_TOKENS, "cpu"),
    "hit_tokens_store": LabelledCounter(HIT_TOKENS, "store"),
    "transfer_in_blocks": LabelledCounter(TRANSFER_BLOCKS, "in"),
    "transfer_out_blocks": LabelledCounter(TRANSFER_BLOCKS, "out"),
    "transfer_in_bytes": LabelledCounter(TRANSFER_BYTES, "in"),
    "transfer_out_bytes": LabelledCounter(TRANSFER_BYTES, "out"),
    "transfer_in_seconds": LabelledCounter(TRANSFER_SECONDS, "in"),
    "transfer_out_seconds": LabelledCounter(TRANSFER_SECONDS, "out"),
    "swap_in_blocks": LabelledCounter(SWAP_BLOCKS, "in"),
    "swap_out_blocks": LabelledCounter(SWAP_BLOCKS, "out"),
    "swap_in_bytes": LabelledCounter(SWAP_BYTES, "in"),
    "swap_out_bytes": LabelledCounter(SWAP_BYTES, "out"),
    "swap_in_seconds": LabelledCounter(SWAP_SECONDS, "in"),
    "swap_out_seconds": LabelledCounter(SWAP_SECONDS, "out"),
    "present_blocks": LabelledCounter(Metric("present_blocks_total", "Blocks not sent because the store had them.")),
    "dropped_blocks": LabelledCounter(
        Metric("dropped_blocks_total", "Blocks not sent because too many waited, or one before them was not.")
    ),
    "unsaved_blocks": LabelledCounter(
        Metric("unsaved_blocks_total", "Blocks the store did not take, or could not be asked to.")
    ),
    "missed_blocks": LabelledCounter(
        Metric("missed_blocks_total", "Blocks the store had when asked and did not deliver.")
    ),
    "unkept_blocks": LabelledCounter(
        Metric("unkept_blocks_total", "Blocks that another engine promised and that did not come.")
    ),
    "hand_overs_in": LabelledCounter(HAND_OVERS, "decode"),
    "hand_overs_out": LabelledCounter(HAND_OVERS, "prefill"),
    "unpromised_requests": LabelledCounter(
        Metric("unpromised_requests_total", "Handed-over requests whose prompt no engine promised in time.")
    ),
    "hand_over_seconds_promise": LabelledCounter(HAND_OVER_SECONDS, "promise"),
    "hand_over_seconds_load": LabelledCounter(HAND_OVER_SECONDS, "load"),
    "hand_over_seconds_send": LabelledCounter(HAND_OVER_SECONDS, "send"),
    "checksum_errors": LabelledCounter(
        Metric("checksum_errors_total", "Blocks that arrived damaged; each counts as missed.")
    ),
    "lookups": LabelledCounter(Metric("lookups_total", "Questions to the store how much it has of a prompt.")),
    "lookup_timeouts": LabelledCounter(
        Metric("lookup_timeouts_total", "Lookups not answered in lookup_timeout_s, which count as nothing found.")
    ),
    "skipped_lookups": LabelledCounter(
        Metric("skipped_lookups_total", "Lookups given up in line behind too many, the oldest of which was overdue.")
    ),
    "failed_loads": LabelledCounter(
        Metric("failed_loads_total", "Requests that computed what a load should have brought.")
    ),
    "declined_tokens": LabelledCounter(
        Metric("declined_tokens_total", "Prompt tokens computed although the store had them: it would have been later.")
    ),
    "refused_requests": LabelledCounter(
        Metric("refused_requests_total", "Requests computed without the store because of what they asked of it.")
    ),
    "failed_calls": LabelledCounter(Metric("failed_calls_total", "Calls of the store that failed, each one a miss.")),
    "defects": LabelledCounter(
        Metric("defects_total", "Errors of the connector itself, treated as misses. Please report them.")
    ),
}

# A gauge may have several sources. The metric is the sum of their last values; for `LARGEST`, it is the largest value.
GAUGES: Final[Mapping[str, Metric]] = {
    "waiting_blocks": Metric("waiting_blocks", "Blocks that are computed and wait to be sent to the store."),
    "oldest_waiting_seconds": Metric(
        "oldest_waiting_seconds", "How long before the last step the oldest block that waits to be sent was computed."
    ),
}
LARGEST: Final = frozenset({"oldest_waiting_seconds"})

# Histograms get one number for each request. The buckets reach from a delay that no user notices to the longest
# deadline.
HISTOGRAMS: Final[Mapping[str, Metric]] = {
    "held_back_seconds": Metric(
        "held_back_seconds",
        "How much later a request began than without kvstore: it waited for the store without success.",
    ),
}
SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
