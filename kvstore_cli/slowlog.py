"""`kvstore slowlog`: the last requests that took long in each shard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from kvstore.wire import SlowRequest
from kvstore_cli.options import ID_DIGITS, EndpointOption, JsonOption, TimeoutOption, connected
from kvstore_cli.output import show

SHOWN_REQUESTS: Final = 20  # without --limit, for people
_MOST_TEXT: Final = 64  # characters of a name that are shown; servers cut names, too
# The columns that a narrow terminal leaves out, in this order.
_LOG_LEFT_OUT_FIRST: Final = (
    "principal",
    "tenant",
    "namespace",
    "shard",
    "client",
    "total",
    "bytes",
    "address",
    "keys",
)


class ListedRequest(msgspec.Struct, frozen=True):
    """One slow request, and its shard."""

    shard: str  # NODE/NUMBER
    request: SlowRequest

    @property
    def document(self) -> dict[str, Any]:
        """The request in the form that --json prints."""
        return {"shard": self.shard, **msgspec.structs.asdict(self.request)}


class SlowLog(msgspec.Struct, frozen=True):
    """What `kvstore slowlog` shows: the last request first."""

    limits_ms: Sequence[int]  # the different values of slowlog_ms of the shards, the lowest first; 0: off
    requests: Sequence[ListedRequest]
    left_out: int  # the number of requests beyond --limit


def slowlog(
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help=f"The most requests. [default: {SHOWN_REQUESTS}; with --json, all]"
        ),
    ] = None,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Show the last requests that took long in the shards, which part of a shard took the time, and the client.

    A shard keeps 128 requests that took at least slowlog_ms, a setting of the server. The time that a client takes to
    send or read blocks does not count. With logins, the command needs the verb monitor or admin, and shows the requests
    of the token's tenant. If some shards do not answer, the others are shown, and the exit status is 1.
    """
    from kvstore_cli.store_state import store_state

    with connected(endpoint, None, timeout, fail_open=True) as client:
        by_shard = client.slow_requests()
        state = store_state(client)
    names = state.names
    rows = [ListedRequest(names.get(shard, shard), row) for shard, reply in by_shard.items() for row in reply.requests]
    rows.sort(key=lambda row: row.request.at, reverse=True)
    shown = rows[: limit or (None if as_json else SHOWN_REQUESTS)]
    found = SlowLog(sorted({reply.limit_ms for reply in by_shard.values()}), shown, len(rows) - len(shown))
    document = {
        "limits_ms": found.limits_ms,
        "requests": [row.document for row in shown],
        "left_out": found.left_out,
        "silent": state.silent,
    }
    show(document, as_json, lambda: print_slow_requests(found), state.failure)


def _cells(row: ListedRequest) -> dict[str, str]:
    from kvstore.sizes import format_size

    request = row.request
    namespace = f"{request.model[:_MOST_TEXT]} {request.namespace[:ID_DIGITS]}".strip()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(0.0, min(request.at, 1e11)))),
        "verb": request.verb[:_MOST_TEXT],
        "keys": str(request.keys),
        "bytes": format_size(request.bytes) if request.bytes else "-",
        "took": f"{request.seconds * 1e3:.0f} ms",
        "total": f"{request.total_s * 1e3:.0f} ms",
        "slowest stage": f"{request.stage[:_MOST_TEXT]} {request.stage_s * 1e3:.0f} ms",
        "client": request.client[:_MOST_TEXT],
        "address": request.address[:_MOST_TEXT],
        "shard": row.shard,
        "principal": request.principal[:_MOST_TEXT],
        "tenant": request.tenant[:_MOST_TEXT],
        "namespace": namespace,
    }


def print_slow_requests(found: SlowLog) -> None:
    """Print the requests. Columns that are empty in every row are left out, and so are some on a narrow terminal."""
    from kvstore_cli.plain_table import print_fitting

    limits = " or ".join(f"{limit} ms" for limit in found.limits_ms if limit)
    if found.requests:
        rows = [_cells(row) for row in found.requests]
        print_fitting({heading: [row[heading] for row in rows] for heading in rows[0]}, _LOG_LEFT_OUT_FIRST)
    elif limits:
        print(f"No request has taken {limits} since the shards started.")
    if found.left_out:
        print(f"{found.left_out} more requests; --limit N shows more")
    if 0 in found.limits_ms:
        print(
            "The slow log of some shards is off: slowlog_ms is 0."
            if limits
            else "The slow log is off: slowlog_ms is 0."
        )
