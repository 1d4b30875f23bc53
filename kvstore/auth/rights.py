"""What a principal may do: verbs, a tenant, patterns of models. Plain data; any thread.

The verbs are a bit mask, as is what the row of a request needs (`wire.VERBS`): the check is one AND.
"""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass
from typing import Final

import msgspec

from kvstore import wire
from kvstore.wire import ErrorCode, WireError
from kvstore.wire.verbs import ANYBODY, KNOWN, RIGHTS

EVERY_TENANT: Final = "*"


@dataclass(frozen=True)
class Rights:
    """What one principal may do.

    tenant: whose namespaces it uses; `EVERY_TENANT`: those of all. models: patterns, one of which the namespace's model
    must match.
    """

    principal: str
    tenant: str
    verbs: int
    models: tuple[str, ...] = ("*",)

    @property
    def verb_names(self) -> list[str]:
        """The verbs, as the file names them."""
        return [name for name, bit in RIGHTS.items() if bit & self.verbs]

    def owns(self, tenant: str) -> bool:
        """Whether it may use namespaces of this tenant."""
        return self.tenant in (EVERY_TENANT, tenant)

    @property
    def owns_all(self) -> bool:
        """Whether it may use namespaces of every tenant and model."""
        return self.tenant == EVERY_TENANT and "*" in self.models

    def use(self, model: str) -> bool:
        """Whether it may use namespaces of this model."""
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)


ALL: Final = Rights("", EVERY_TENANT, -1)
"""Of everybody on a server without ``--auth``, and of the cluster's members."""

NONE: Final = Rights("", "", ANYBODY)
"""Of who has not logged in."""


def verbs_of(names: list[str]) -> int:
    """-> the bit mask of verbs by name. Raises `ValueError` for a name that is none."""
    mask = KNOWN | ANYBODY
    for name in names:
        if name not in RIGHTS:
            raise ValueError(f"verb {name!r}: expected one of {', '.join(RIGHTS)}")
        mask |= RIGHTS[name]
    return mask


def refuse(rights: Rights, request: wire.Request) -> WireError:
    """-> the error for a request that these rights do not include."""
    verb = wire.VERBS[type(request)]
    name = verb.name.upper()
    if rights is NONE:
        return WireError(
            ErrorCode.NOT_AUTHORIZED,
            f"{name}: this server wants a token first: give the client token=, or set KVSTORE_TOKEN or "
            "KVSTORE_TOKEN_FILE",
        )
    wanted = " or ".join(right for right, bit in RIGHTS.items() if bit & verb.right)
    return WireError(
        ErrorCode.NOT_AUTHORIZED,
        f"{name}: principal {rights.principal!r} may not: this needs the verb {wanted} in the server's --auth file",
    )


def own(canonical: bytes, rights: Rights) -> bytes:
    """-> the namespace, given as JSON that was checked, that a principal uses under this name: its tenant is the one
    that the credentials name.

    Raises `WireError` when the namespace names another tenant, or a model that the principal may not use.
    """
    if rights is ALL:
        return canonical
    try:
        namespace = msgspec.json.decode(canonical)
    except (msgspec.DecodeError, RecursionError) as error:  # in a member that the check has passed over
        raise WireError(ErrorCode.PROTOCOL, f"the namespace is not the JSON object expected: {error}") from None
    tenant = namespace.get("tenant", "")
    if not rights.use(namespace["model"]):
        raise WireError(
            ErrorCode.NOT_AUTHORIZED,
            f"principal {rights.principal!r} may not use the model of this namespace: its patterns are "
            f"{', '.join(rights.models)}",
        )
    if rights.tenant == EVERY_TENANT:
        return canonical
    if tenant not in ("", rights.tenant):
        raise WireError(
            ErrorCode.NOT_AUTHORIZED,
            f"the namespace names a tenant other than {rights.tenant!r}, the one of principal {rights.principal!r}: "
            "leave the tenant out",
        )
    namespace["tenant"] = rights.tenant
    try:
        owned = json.dumps(namespace, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise WireError(ErrorCode.PROTOCOL, f"the namespace is not the JSON object expected: {error}") from None
    if len(owned) > wire.MAX_NAMESPACE_BYTES:
        raise WireError(
            ErrorCode.LIMIT,
            f"a namespace of {len(owned)} bytes with its tenant: expected at most {wire.MAX_NAMESPACE_BYTES}",
        )
    return owned
