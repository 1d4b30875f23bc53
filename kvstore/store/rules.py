"""Settings of namespaces that an operator chooses by rules for their model."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvstore.wire import MAX_PRIORITY, MAX_TTL_S


class NamespaceRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the namespaces whose model matches a pattern; the first rule that matches counts."""

    match: str  # a pattern with * ? [seq], as in a shell
    ttl_seconds: Annotated[int, msgspec.Meta(ge=0, le=MAX_TTL_S)] = 0
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)] = 0  # the minimum priority of a block
