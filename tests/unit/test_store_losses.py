"""What the proxy concludes from the reports of a store's shards."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.wire.status import DiskInfo, NamespaceInfo, ShardInfo
from kvstore_serving.proxy.store_losses import StoreLosses
from tests.support.info import zeros


def namespace(blocks: int, id: str = "n", **fields: Any) -> NamespaceInfo:
    found = zeros(NamespaceInfo, id=id, blocks=blocks, **{"created": blocks, **fields})
    assert isinstance(found, NamespaceInfo)
    return found


def shard(*namespaces: NamespaceInfo, number: int = 0, pid: int = 7, uptime_s: float = 100.0, **more: Any) -> Any:
    return zeros(ShardInfo, node="n", shard=number, pid=pid, uptime_s=uptime_s, namespaces=list(namespaces), **more)


class Looks:
    """Gives samples of a store, ten seconds apart, to `StoreLosses`."""

    def __init__(self) -> None:
        self.losses = StoreLosses()
        self.now = 1000.0

    def __call__(self, *shards: Any) -> str:
        """Give this sample. Returns what it shows to be lost: "all" blocks, blocks "older" than an earlier sample, or
        "nothing"."""
        self.now += 10
        before = self.losses.since
        # The uptime in the arguments is that at the first sample.
        aged = [msgspec.structs.replace(each, uptime_s=each.uptime_s + self.now - 1010) for each in shards]
        self.losses.look(aged, self.now, self.now + 0.1)
        if self.losses.since == before:
            return "nothing"
        return "all" if self.losses.since == self.now + 0.1 else "older"


@pytest.fixture
def look() -> Looks:
    return Looks()


def test_a_store_that_grows_has_lost_nothing(look: Looks) -> None:
    assert [look(shard(namespace(blocks))) for blocks in (0, 10, 10, 500)] == ["nothing"] * 4
    assert look(shard(namespace(500), namespace(3, "other"))) == "nothing"


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (shard(namespace(100), pid=8, uptime_s=-5.0), "restarted"),
        (shard(namespace(100), uptime_s=90.0), "restarted"),  # in a container, the new process may have the same id
        (shard(namespace(0, created=100)), "emptied"),
        (shard(), "emptied"),
    ],
)
def test_a_restarted_shard_has_lost_everything(look: Looks, after: Any, why: str) -> None:
    other = shard(namespace(100), number=1)
    assert look(shard(namespace(100)), other) == "nothing"
    assert look(after, other) == "all" and why in look.losses.why
    assert look(after, other) == "nothing"


def test_a_purge_is_known_by_its_generation(look: Looks) -> None:
    """A purge is recognised even if the store had no blocks, or has as many as before again."""
    before = zeros(ShardInfo, node="n", pid=7, uptime_s=100.0, namespaces=[namespace(100)], generation=1)
    after = msgspec.structs.replace(before, generation=2)
    assert look(before) == "nothing" and look.losses.purged_at == 0
    assert look(after) == "all" and "purged" in look.losses.why
    assert look.losses.purged_at == look.losses.since
    assert look(after) == "nothing"


def test_one_missing_answer_makes_a_shard_slow_and_two_lost(look: Looks) -> None:
    both = shard(namespace(100)), shard(namespace(100), number=1)
    assert look(*both) == "nothing"
    assert look(both[0]) == "nothing"
    assert look(*both) == "nothing"
    assert [look(both[0]) for _ in range(3)] == ["nothing", "all", "nothing"]
    assert "n/1 has gone" in look.losses.why
    assert look(*both) == "nothing", "one that joins"


@pytest.mark.parametrize(
    "after",
    [
        namespace(80, created=100, evicted=20),
        namespace(100, created=120, evicted=20),
        namespace(80, created=100),  # deleted or expired
    ],
)
def test_after_evicting_a_tenth_older_prompts_are_not_expected(look: Looks, after: NamespaceInfo) -> None:
    assert look(shard(namespace(100))) == "nothing"
    assert look(shard(after)) == "all"
    assert look.losses.why == "", "it is no event that anybody must know of"


def test_slow_eviction_ends_expectations_slowly(look: Looks) -> None:
    found = []
    for evicted in range(0, 40, 4):
        found.append(look(shard(namespace(100, created=100 + evicted, evicted=evicted))))
    assert found == ["nothing"] * 3 + ["older"] * 7
    # The three samples of the last tenth: blocks that were stored before the first of them are not expected to be
    # there.
    assert look.losses.since == look.now + 0.1 - 20


def test_a_loss_in_any_namespace_or_shard_counts(look: Looks) -> None:
    big, small = namespace(1000), namespace(50, "small")
    assert look(shard(big), shard(small, big, number=1)) == "nothing"
    assert look(shard(big), shard(namespace(0, "small", created=50), big, number=1)) == "nothing", "5 %"
    assert look(shard(big), shard(namespace(850, created=1000), number=1)) == "all"


def test_blocks_moved_from_memory_to_disk_are_not_lost(look: Looks) -> None:
    disk = zeros(DiskInfo, directory="/d")
    assert look(shard(namespace(100, disk_blocks=100), disk=disk)) == "nothing"
    assert look(shard(namespace(10, created=100, evicted=90, disk_blocks=100), disk=disk)) == "nothing"
    assert look(shard(namespace(0, created=100, evicted=100, disk_blocks=100), disk=disk)) == "nothing"
    assert look(shard(namespace(0, evicted=100, disk_blocks=100, disk_evicted=30), disk=disk)) == "all"
