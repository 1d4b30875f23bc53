"""Who a connection is and what it uses: its HELLO and its login said so. Used by the loop's thread only."""

from __future__ import annotations

from typing import Final

from kvstore.auth.rights import Rights
from kvstore.shard.account import CHAINS, Account
from kvstore.shard.tenant import Tenant

MAX_REMEMBERED_BYTES: Final = 16 << 20  # while the shard buffers less, the keys that clients asked for are remembered


class Session:
    """Plain fields, because every message reads them. HELLO, logins and tenants set them."""

    def __init__(self, rights: Rights, account: Account) -> None:
        self.rights = rights
        self.login: tuple[str, str] | None = None  # the principal and the hash of the token with which it logged in
        self.logging_in = False  # its token is being checked: nothing more is read meanwhile
        self.tenant: Tenant | None = None  # whose limits count; None: nobody's
        self.namespace: bytes = b""  # canonical JSON, from HELLO; its tenant is the principal's
        self.namespace_id: bytes = b""
        self.knows_generations = False
        self.holds = False  # its client keeps copies of blocks, and is told when they are of no use any more
        self.noted = 0  # of which generation on its client holds copies
        self.client = ""  # its name, for logs
        self.replicas = 1  # copies that the client keeps of each block
        self.chain = b""  # the keys that the client asked for last: a SET usually continues them
        self._account = account

    def remember(self, keys: bytes) -> None:
        """Remember the keys of a request: they tell the place in the chain of blocks that the client sets next."""
        if self.chain.startswith(keys):  # a GET of the blocks that the look-up before it found
            return
        account = self._account
        account.give_back(CHAINS, len(self.chain))
        self.chain = keys if account.held_bytes + len(keys) <= MAX_REMEMBERED_BYTES else b""
        account.take(CHAINS, len(self.chain))

    def forget(self) -> None:
        """The connection has ended: what it asked for last is of no use any more."""
        self._account.give_back(CHAINS, len(self.chain))
        self.chain = b""
