"""A connection's client: its address, and what its HELLO and login have said. Used by the loop's thread only."""

from __future__ import annotations

from typing import Final

from kvstore import wire
from kvstore.auth.rights import EVERY_TENANT, Rights
from kvstore.shard.account import CHAINS, Account
from kvstore.shard.tenant import Tenant
from kvstore.wire import MAX_SHOWN_MODEL, MAX_SHOWN_NAME

MAX_REMEMBERED_BYTES: Final = 16 << 20  # keys of last requests are kept only while clients hold less memory than this


class Session:
    """Plain fields, because every message reads them. HELLO, logins and tenants set their values."""

    def __init__(self, rights: Rights, account: Account, address: str) -> None:
        self.address = address  # HOST:PORT; at the Unix socket, the user and the process id
        self.rights = rights
        self.login: tuple[str, str] | None = None  # the principal that has logged in, and the hash of its token
        self.logging_in = False  # the token is being checked, and nothing more is read until then
        self.tenant: Tenant | None = None  # the tenant whose limits apply; None: no limits
        self.namespace: bytes = b""  # canonical JSON, from HELLO; the tenant in it is the principal's
        self.namespace_id: bytes = b""
        self.knows_generations = False
        self.holds = False  # the client keeps copies of blocks, and is informed when they are outdated
        self.noted = 0  # the generation of the copies that the client holds
        self.client = ""  # the client's name, for logs
        self.replicas = 1  # the number of copies that the client keeps of each block
        self.chain = b""  # the keys of the client's last request, which a SET usually continues
        self._account = account

    def shown(self) -> tuple[str, str, str]:
        """Return what people see of the namespace: its id in hexadecimal, the beginning of its model, and its tenant.
        Without a namespace, the tenant is the principal's."""
        if self.namespace:
            header = wire.decode_namespace(self.namespace)
            return self.namespace_id.hex(), header.model[:MAX_SHOWN_MODEL], header.tenant[:MAX_SHOWN_NAME]
        own = self.rights.tenant if self.rights.tenant != EVERY_TENANT else ""
        return "", "", own[:MAX_SHOWN_NAME]

    def remember(self, keys: bytes) -> None:
        """Remember the keys of a request, because they show where in the chain the client's next SET belongs."""
        if self.chain.startswith(keys):  # this is a GET of blocks that a look-up has just found
            return
        account = self._account
        account.give_back(CHAINS, len(self.chain))
        self.chain = keys if account.held_bytes + len(keys) <= MAX_REMEMBERED_BYTES else b""
        account.take(CHAINS, len(self.chain))

    def forget(self) -> None:
        """Forget the keys of the last request, because the connection has ended."""
        self._account.give_back(CHAINS, len(self.chain))
        self.chain = b""


def may_see(rights: Rights, tenant: str, model: str) -> bool:
    """Return whether a principal with these `rights` may see what another client does.

    tenant: the tenant of that client's rights.
    model: the shown part of its namespace's model; empty without a namespace. A model that may have been cut is not
        compared with patterns.
    """
    if not rights.owns(tenant):
        return False
    return not model or "*" in rights.models or (len(model) < MAX_SHOWN_MODEL and rights.use(model))
