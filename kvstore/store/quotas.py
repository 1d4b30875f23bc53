"""Quotas of tenants: whose namespaces give up room when a tier is full.

A tenant is *entitled* to its guaranteed segments and to an equal part of the segments that are guaranteed to no tenant.
While there is room, each tenant may take it, up to its maximum. When there is no room, a tenant beyond its entitlement
evicts its own blocks, so a tenant that floods the store harms only itself. A tenant within its entitlement takes the
room of tenants that are beyond their entitlement. Among the namespaces that may have to give up room, the least
recently used segment is given back, as without quotas.

All amounts are segments of one tier of one shard. Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class Quota:
    """The segments that one tenant may take of a tier."""

    guaranteed: int = 0
    most: int | None = None
    transient: int | None = None  # the most segments for transient blocks


class Held(Protocol):
    """The part of a tier that a namespace holds."""

    tenant: str
    segments: dict[int, int]
    transient: set[int]


HeldT = TypeVar("HeldT", bound=Held)


class Quotas:
    """The quotas of one tier. `quota_of`: a function that returns the quota of a tenant."""

    def __init__(self, quota_of: Callable[[str], Quota]) -> None:
        self._quota_of = quota_of

    def may_take(self, growing: Held, members: Iterable[Held], transient: bool = False) -> bool:
        """Return whether a namespace's tenant may have one more segment, if one is free."""
        tenant = growing.tenant
        quota = self._quota_of(tenant)
        if quota.most is not None and _used(members)[tenant] >= quota.most:
            return False
        if not transient or quota.transient is None:
            return True
        return sum(len(member.transient) for member in members if member.tenant == tenant) < quota.transient

    def beyond(self, members: Sequence[HeldT]) -> list[list[HeldT]]:
        """Return the tenants that hold more segments than their maximum, because it was lowered: for each of them, its
        namespaces."""
        beyond = []
        for tenant, count in _used(members).items():
            most = self._quota_of(tenant).most
            if most is not None and count > most:
                beyond.append([member for member in members if member.tenant == tenant])
        return beyond

    def victims(self, growing: HeldT, members: Sequence[HeldT], total: int) -> tuple[list[HeldT], bool]:
        """Return the namespaces that may have to give up a segment for `growing`, and whether recency decides. If
        recency decides, a namespace gives up only blocks that were used less recently than the blocks of `growing`.
        `total`: the number of segments in the tier."""
        used = _used(members)
        tenant = growing.tenant
        quotas = {each: self._quota_of(each) for each in {*(name for name, count in used.items() if count), tenant}}
        shared = max(0, total - sum(quota.guaranteed for quota in quotas.values())) // len(quotas)

        def entitled(name: str) -> int:
            quota = quotas[name]
            whole = max(1, quota.guaranteed + shared)
            return whole if quota.most is None else min(whole, quota.most)

        own = [member for member in members if member.tenant == tenant and member is not growing]
        if used[tenant] + 1 > entitled(tenant):
            return own, True
        over = {name for name in quotas if name != tenant and used[name] > entitled(name)}
        if not over and not used[tenant]:  # there are more tenants than segments
            over = {name for name in quotas if name != tenant and used[name] > quotas[name].guaranteed}
        if not over:
            return own, True
        return [member for member in members if member.tenant in over], False


def _used(members: Iterable[Held]) -> Counter[str]:
    used: Counter[str] = Counter()
    for member in members:
        used[member.tenant] += len(member.segments)
    return used
