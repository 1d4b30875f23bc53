"""Checks the files of principals and of the audit log when a node starts, and makes the cookies that members show to
each other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore.auth.audit import Audit
from kvstore.auth.policy import AuthFile, AuthFileError, Policy, member_cookie
from kvstore.cluster.members import Member
from kvstore.node.children import StartError
from kvstore.node.config import ServerConfig
from kvstore.sizes import spell_size


def check_access(config: ServerConfig) -> str:
    """Check the file of principals and the file of the audit log. Return the secret of the cluster's members. If the
    secret is empty, the members' records contain their cookies. Raises `StartError`."""
    try:
        Audit(config.audit or "").close()
    except OSError as error:
        raise StartError(f"audit log {config.audit}: {error.strerror}") from None
    return member_secret(config)


def member_secret(config: ServerConfig) -> str:
    """Check the file of principals, if there is one. Return the secret of the cluster's members, like `check_access`.
    Raises `StartError`."""
    if config.auth is None:
        return ""
    try:
        policy = AuthFile(config.auth).policy
    except AuthFileError as error:
        raise StartError(f"--auth: {error}") from None
    _check_quotas(policy, config)
    secret = policy.member_secret
    if config.cluster is not None and not secret:
        raise StartError(
            f"--auth: {config.auth} has no member_secret, which the members of a cluster need to log in to each other. "
            'Expected a line member_secret = "RANDOM" before all tables, the same on every node'
        )
    return secret


def _check_quotas(policy: Policy, config: ServerConfig) -> None:
    guaranteed = sum(limits.memory_guaranteed for limits in policy.tenants.values())
    if guaranteed > config.memory:
        raise StartError(
            f"--auth: the tenants are guaranteed {spell_size(guaranteed)} together, but --memory is {config.memory}: "
            "expected guarantees of at most --memory"
        )
    for name, limits in policy.tenants.items():
        if limits.memory is not None and limits.memory // config.shards < config.segment:
            raise StartError(
                f"--auth: tenant {name!r}: memory = {spell_size(limits.memory)} gives it less than one segment of "
                f"{config.segment} in each of {config.shards} shard(s): expected at least "
                f"{spell_size(int(config.segment) * config.shards)}, or a smaller --segment"
            )


def with_cookies(members: Sequence[Member], secret: str) -> Sequence[Member]:
    """Return the members with the cookies that other members show to them. If there is a secret, the cookies are
    computed here and are not in the records."""
    if not secret:
        return members
    return [
        msgspec.structs.replace(
            member, cookie=member_cookie(secret, member.node, member.shards[0].host, member.shards[0].port)
        )
        for member in members
    ]
