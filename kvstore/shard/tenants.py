"""Each tenant's use of a shard, and the limits that the file of ``--auth`` gives it.

A limit applies to the node, and each shard enforces its part of the limit. The limit of connections applies to each
shard, because each client has a connection to every shard. `kvstore/store/quotas.py` limits memory and disk. The
other limits are applied here. A request beyond a limit is refused at once, with an error that names the limit and its
value. Requests and bytes are counted in buckets that hold the amount for one second. A request is refused while a
bucket is empty. A request that is accepted may overdraw its bucket.

Used by the loop's thread only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvstore.auth.audit import Audit
from kvstore.auth.policy import Limits, Policy
from kvstore.auth.rights import EVERY_TENANT, Rights
from kvstore.shard.account import TENANT, LimitReached
from kvstore.shard.peer import Peer
from kvstore.shard.tenant import CONNECTION_COUNT, PINNED, Tenant
from kvstore.store.namespace import NamespaceStore
from kvstore.store.quotas import Quota
from kvstore.wire import ErrorCode, TenantInfo

COUNT_PINS_S: Final = 0.1  # the shortest time between two counts of a namespace's pins


class Tenants:
    """All tenants of one shard."""

    def __init__(self, policy: Policy, shards: int, segment_bytes: int, disk_segment_bytes: int, audit: Audit) -> None:
        self._policy = policy
        self._shards = shards
        self._segment_bytes = segment_bytes
        self._disk_segment_bytes = disk_segment_bytes
        self._audit = audit
        self._tenants: dict[str, Tenant] = {}
        self._changed: dict[str, Limits] = {}  # by tenant: limits whose `memory` is not that of the policy

    def take_policy(self, policy: Policy) -> list[str]:
        """Apply a new policy. Return the tenants whose quota of memory was changed with `set_quota` and is now that of
        the policy again, because the policy has another one than before."""
        former, self._policy = self._policy, policy
        for tenant in self._tenants.values():
            tenant.set_limits(policy.limits_of(tenant.name), self._shards)
        reset = []
        for name, changed in list(self._changed.items()):
            limits, quota = policy.limits_of(name), changed.memory
            gone = name not in policy.tenant_names or limits.memory != former.limits_of(name).memory
            if gone or (quota is not None and quota < limits.memory_guaranteed):
                del self._changed[name]
                reset.append(name)
            else:
                self._changed[name] = dataclasses.replace(limits, memory=quota)
        return reset

    @property
    def names(self) -> set[str]:
        """The tenants that the policy names."""
        return self._policy.tenant_names

    @property
    def least_quota(self) -> int:
        """The smallest useful quota of memory of a node, in bytes: one segment in each shard."""
        return self._segment_bytes * self._shards

    def limits_of(self, name: str, changed: bool = True) -> Limits:
        """Return the limits of a tenant on the node, either those in force or, without `changed`, the policy's."""
        limits = self._changed.get(name) if changed else None
        return self._policy.limits_of(name) if limits is None else limits

    def set_quota(self, name: str, memory: int | None) -> None:
        """Change a tenant's quota of memory on the node, in bytes; None means no limit. It stays until the policy has
        another quota for the tenant than now."""
        limits = self._policy.limits_of(name)
        self._changed.pop(name, None)
        if memory != limits.memory:
            self._changed[name] = dataclasses.replace(limits, memory=memory)

    def enter(self, peer: Peer, now: float) -> None:
        """Count a connection that has logged in. Raises `LimitReached` if its tenant already has its maximum of
        connections."""
        name = peer.session.rights.tenant
        if peer.session.tenant is not None and peer.session.tenant.name == name:
            return
        self.leave(peer)
        if name == EVERY_TENANT:
            return
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, now)
            tenant.set_limits(self._policy.limits_of(name), self._shards)
        most = tenant.limits.connections
        if most is not None and tenant.connections >= most:
            raise self.refusal(tenant, CONNECTION_COUNT, peer, ErrorCode.NO_PLACE)
        tenant.connections += 1
        peer.session.tenant = tenant

    @staticmethod
    def leave(peer: Peer) -> None:
        """Stop counting a connection that has ended or that logs in as another principal."""
        if peer.session.tenant is not None:
            peer.session.tenant.connections -= 1
            peer.session.tenant = None

    def check_request(self, tenant: Tenant, peer: Peer, now: float) -> None:
        """Count a request. Raises `LimitReached` if its tenant has no requests or bytes left."""
        limit = tenant.check_request(now)
        if limit:
            raise self.refusal(tenant, limit, peer)

    def refusal(self, tenant: Tenant, limit: str, peer: Peer, code: ErrorCode = ErrorCode.LIMIT) -> LimitReached:
        """Count a refusal by a limit, and return the error to raise."""
        tenant.refused[limit] = tenant.refused.get(limit, 0) + 1
        self._audit.record(
            "quota", tenant=tenant.name, limit=limit, principal=peer.session.rights.principal, address=peer.address
        )
        given = getattr(self._policy.limits_of(tenant.name), limit)
        per = "a node, and this shard has its part of them" if limit != CONNECTION_COUNT else "a shard"
        return LimitReached(
            TENANT,
            f"tenant {tenant.name!r} is at its limit of {limit} = {given} for {per}; ask its operator, or try again "
            "later",
            code=code,
        )

    def pinnable(
        self, peer: Peer, namespace: NamespaceStore, count: int, namespaces: Iterable[NamespaceStore], now: float
    ) -> int:
        """Return how many of `count` more blocks a connection's tenant may pin. If not all of them, a refusal is
        counted."""
        tenant = peer.session.tenant
        if tenant is None or tenant.limits.pinned is None:
            return count
        pinned = 0
        for each in namespaces:
            if each.tenant == tenant.name:
                if now - each.pins_counted_at > COUNT_PINS_S:
                    each.count_pins(now)
                pinned += each.pins * each.block_bytes
        allowed = max(0, tenant.limits.pinned - pinned) // namespace.block_bytes
        if allowed < count:
            self.refusal(tenant, PINNED, peer)  # the client gets no error: it only sees unpinned blocks being evicted
        return min(count, allowed)

    def memory_quota(self, name: str) -> Quota:
        """Return a tenant's quota of this shard's memory."""
        limits = self.limits_of(name)
        return Quota(
            guaranteed=limits.memory_guaranteed // self._shards // self._segment_bytes,
            most=self._segments(limits.memory, self._segment_bytes),
            transient=self._segments(limits.transient, self._segment_bytes),
        )

    def disk_quota(self, name: str) -> Quota:
        """Return a tenant's quota of this shard's part of the disk."""
        return Quota(most=self._segments(self._policy.limits_of(name).disk, self._disk_segment_bytes))

    def _segments(self, nbytes: int | None, segment_bytes: int) -> int | None:
        return None if nbytes is None else nbytes // self._shards // segment_bytes

    def info(self, namespaces: Iterable[NamespaceStore], rights: Rights) -> list[TenantInfo]:
        """Return the current use of the tenants whose namespaces a principal with these rights may use."""
        memory, disk = Counter[str](), Counter[str]()
        for namespace in namespaces:
            memory[namespace.tenant] += namespace.memory.nbytes
            disk[namespace.tenant] += namespace.disk.nbytes if namespace.disk is not None else 0
        names = {*memory, *self._tenants, *self._policy.tenants}
        return [self._info_of(name, memory[name], disk[name]) for name in sorted(names) if rights.owns(name)]

    def _info_of(self, name: str, memory_bytes: int, disk_bytes: int) -> TenantInfo:
        limits, tenant = self.limits_of(name), self._tenants.get(name)
        return TenantInfo(
            tenant=name,
            memory_bytes=memory_bytes,
            memory_guaranteed_bytes=limits.memory_guaranteed // self._shards,
            memory_limit_bytes=-1 if limits.memory is None else limits.memory // self._shards,
            disk_bytes=disk_bytes,
            disk_limit_bytes=-1 if limits.disk is None else limits.disk // self._shards,
            connections=tenant.connections if tenant is not None else 0,
            refused=tenant.refused if tenant is not None else {},
        )
