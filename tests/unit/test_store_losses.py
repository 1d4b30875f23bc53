"""What the proxy concludes from what a store's shards say of themselves."""

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
    """Looks at a store, ten seconds apart."""

    def __init__(self) -> None:
        self.losses = StoreLosses()
        self.now = 1000.0

    def __call__(self, *shards: Any) -> str:
        """-> what this look shows to be lost: "all", "older" than an earlier look, "nothing"."""
        self.now += 10
        before = self.losses.since
        # Their uptime is given as if they had been looked at first.
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
        (shard(namespace(100), uptime_s=90.0), "restarted"),  # a container's processes have the same number
        (shard(namespace(0, created=100)), "emptied"),
        (shard(), "emptied"),
    ],
)
def test_a_shard_that_lost_everything(look: Looks, after: Any, why: str) -> None:
    other = shard(namespace(100), number=1)
    assert look(shard(namespace(100)), other) == "nothing"
    assert look(after, other) == "all" and why in look.losses.why
    assert look(after, other) == "nothing"


def test_a_purge_is_known_by_its_generation(look: Looks) -> None:
    """Also of a store that had nothing, or has as much again."""
    before = zeros(ShardInfo, node="n", pid=7, uptime_s=100.0, namespaces=[namespace(100)], generation=1)
    after = msgspec.structs.replace(before, generation=2)
    assert look(before) == "nothing" and look.losses.purged_at == 0
    assert look(after) == "all" and "purged" in look.losses.why
    assert look.losses.purged_at == look.losses.since
    assert look(after) == "nothing"


def test_a_shard_that_does_not_answer_once_is_slow_and_twice_gone(look: Looks) -> None:
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
def test_what_evicts_a_tenth_is_not_believed_to_keep_what_was_there_before(look: Looks, after: NamespaceInfo) -> None:
    assert look(shard(namespace(100))) == "nothing"
    assert look(shard(after)) == "all"
    assert look.losses.why == "", "it is no event that anybody must know of"


def test_slow_eviction_ends_belief_slowly(look: Looks) -> None:
    found = []
    for evicted in range(0, 40, 4):
        found.append(look(shard(namespace(100, created=100 + evicted, evicted=evicted))))
    assert found == ["nothing"] * 3 + ["older"] * 7
    # The three looks of the last tenth: what was there before the first of them is not believed in.
    assert look.losses.since == look.now + 0.1 - 20


def test_any_namespace_and_any_shard_may_lose_what_a_prompt_needs(look: Looks) -> None:
    big, small = namespace(1000), namespace(50, "small")
    assert look(shard(big), shard(small, big, number=1)) == "nothing"
    assert look(shard(big), shard(namespace(0, "small", created=50), big, number=1)) == "nothing", "5 %"
    assert look(shard(big), shard(namespace(850, created=1000), number=1)) == "all"


def test_what_leaves_memory_for_the_disk_is_not_lost(look: Looks) -> None:
    disk = zeros(DiskInfo, directory="/d")
    assert look(shard(namespace(100, disk_blocks=100), disk=disk)) == "nothing"
    assert look(shard(namespace(10, created=100, evicted=90, disk_blocks=100), disk=disk)) == "nothing"
    assert look(shard(namespace(0, created=100, evicted=100, disk_blocks=100), disk=disk)) == "nothing"
    assert look(shard(namespace(0, evicted=100, disk_blocks=100, disk_evicted=30), disk=disk)) == "all"
