"""The rights of a principal: its verbs, its tenant, and patterns of models. Plain data; thread-safe.

The verbs are a bit mask. The row of a request in `wire.VERBS` has a bit mask of the verbs that the request needs. So
the check is one AND.
"""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass
from typing import Final

import msgspec

from kvstore import wire
from kvstore.wire import ErrorCode, WireError
from kvstore.wire.verbs import ANYBODY, LOGGED_IN, RIGHTS

EVERY_TENANT: Final = "*"


@dataclass(frozen=True)
class Rights:
    """The rights of one principal.

    `tenant`: the tenant whose namespaces the principal uses; `EVERY_TENANT` for the namespaces of all tenants.
    `models`: patterns. A namespace's model must match at least one of them.
    """

    principal: str
    tenant: str
    verbs: int
    models: tuple[str, ...] = ("*",)

    @property
    def verb_names(self) -> list[str]:
        """The names of the verbs, as the file has them."""
        return [name for name, bit in RIGHTS.items() if bit & self.verbs]

    def owns(self, tenant: str) -> bool:
        """Return whether the principal may use namespaces of this tenant."""
        return self.tenant in (EVERY_TENANT, tenant)

    @property
    def owns_all(self) -> bool:
        """Whether the principal may use namespaces of every tenant and model."""
        return self.tenant == EVERY_TENANT and "*" in self.models

    def use(self, model: str) -> bool:
        """Return whether the principal may use namespaces of this model."""
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)


ALL: Final = Rights("", EVERY_TENANT, -1)
"""The rights of every client of a server without ``--auth``, and of the cluster's members."""

NONE: Final = Rights("", "", ANYBODY)
"""The rights of a client that has not logged in."""


def verbs_of(names: list[str]) -> int:
    """Return the bit mask of verbs by name. Raises `ValueError` for an unknown name."""
    mask = LOGGED_IN | ANYBODY
    for name in names:
        if name not in RIGHTS:
            raise ValueError(f"verb {name!r}: expected one of {', '.join(RIGHTS)}")
        mask |= RIGHTS[name]
    return mask


def refuse(rights: Rights, request: wire.Request) -> WireError:
    """Return the error for a request that these rights do not include."""
    verb = wire.VERBS[type(request)]
    name = verb.name.upper()
    if rights is NONE:
        return WireError(
            ErrorCode.NOT_AUTHORIZED,
            f"{name}: this server wants a token first: set KVSTORE_TOKEN_FILE or KVSTORE_TOKEN, or give a command "
            "--token-file and a Python client token=",
        )
    wanted = " or ".join(right for right, bit in RIGHTS.items() if bit & verb.right)
    return WireError(
        ErrorCode.NOT_AUTHORIZED,
        f"{name}: principal {rights.principal!r} may not: this needs the verb {wanted} in the server's --auth file",
    )


def refuse_to_owner_of_some(rights: Rights, request: wire.Request) -> WireError:
    """Return the error for a request that concerns all tenants and models, while these rights include only some."""
    return WireError(
        ErrorCode.NOT_AUTHORIZED,
        f"{wire.VERBS[type(request)].name.upper()}: principal {rights.principal!r} may not, because this concerns all "
        f"tenants and models: this needs a principal with tenant = '{EVERY_TENANT}' and namespaces = ['*'] in the "
        "server's --auth file",
    )


def own(canonical: bytes, rights: Rights) -> bytes:
    """Return a namespace's canonical JSON with the tenant of the principal that uses it.

    `canonical`: the JSON of the namespace, which was checked. Raises `WireError` when the namespace names another
    tenant, or a model that the principal may not use.
    """
    if rights is ALL:
        return canonical
    try:
        namespace = msgspec.json.decode(canonical)
    except (msgspec.DecodeError, RecursionError) as error:  # the error is in a member that the check skips
        raise WireError(ErrorCode.PROTOCOL, f"the namespace is not the expected JSON object: {error}") from None
    tenant = namespace.get("tenant", "")
    if not rights.use(namespace["model"]):
        raise WireError(
            ErrorCode.NOT_AUTHORIZED,
            f"principal {rights.principal!r} may not use the model of this namespace: the principal's patterns are "
            f"{', '.join(rights.models)}",
        )
    if rights.tenant == EVERY_TENANT:
        return canonical
    if tenant not in ("", rights.tenant):
        raise WireError(
            ErrorCode.NOT_AUTHORIZED,
            f"the namespace names a tenant other than {rights.tenant!r}, which is the tenant of principal "
            f"{rights.principal!r}: leave the tenant out",
        )
    namespace["tenant"] = rights.tenant
    try:
        owned = json.dumps(namespace, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise WireError(ErrorCode.PROTOCOL, f"the namespace is not the expected JSON object: {error}") from None
    if len(owned) > wire.MAX_NAMESPACE_BYTES:
        raise WireError(
            ErrorCode.LIMIT,
            f"the namespace has {len(owned)} bytes with its tenant: expected at most {wire.MAX_NAMESPACE_BYTES}",
        )
    return owned
