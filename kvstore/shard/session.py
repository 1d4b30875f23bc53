"""What a connection's HELLO and login have said about its client. Used by the loop's thread only."""

from __future__ import annotations

from typing import Final

from kvstore.auth.rights import Rights
from kvstore.shard.account import CHAINS, Account
from kvstore.shard.tenant import Tenant

MAX_REMEMBERED_BYTES: Final = 16 << 20  # keys of last requests are kept only while clients hold less memory than this


class Session:
    """Plain fields, because every message reads them. HELLO, logins and tenants set their values."""

    def __init__(self, rights: Rights, account: Account) -> None:
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
