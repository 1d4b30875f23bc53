"""What an operator sets for namespaces by their model."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvstore.wire import MAX_PRIORITY, MAX_TTL_S

MAX_TTL_SECONDS: Final = MAX_TTL_S


class NamespaceRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the namespaces whose model matches a pattern; the first rule that matches counts."""

    match: str  # as a shell's: * ? [seq]
    ttl_seconds: Annotated[int, msgspec.Meta(ge=0, le=MAX_TTL_SECONDS)] = 0
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)] = 0  # at least that of each block
