"""`kvstore clients`: the connections of every shard, or their sums by address, client or tenant."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import typer

from kvstore.wire import ConnectedClient
from kvstore_cli.options import ID_DIGITS, EndpointOption, JsonOption, TimeoutOption, connected
from kvstore_cli.output import show

SHOWN_ROWS: Final = 50  # without --limit, for people
_MOST_NAME: Final = 64  # characters of a name that are shown; servers cut names, too


class ListBy(enum.Enum):
    """What a row of `kvstore clients` shows."""

    CONNECTION = "connection"
    ADDRESS = "address"
    CLIENT = "client"
    TENANT = "tenant"


class ListedClient(msgspec.Struct, frozen=True):
    """One connection, and its shard."""

    shard: str  # NODE/NUMBER
    client: ConnectedClient

    @property
    def host(self) -> str:
        """The address without the port; at the Unix socket, the user."""
        return self.client.address.rpartition(":")[0]

    @property
    def document(self) -> dict[str, Any]:
        """The connection in the form that --json prints."""
        return {"shard": self.shard, **msgspec.structs.asdict(self.client)}


class ClientGroup(msgspec.Struct, frozen=True):
    """The sums of some connections. `client` and `tenant` are empty if the connections are not grouped by them."""

    client: str
    tenant: str
    address: str  # without ports; empty if the connections are grouped by tenant
    connections: int
    idle_s: float  # since one of them last sent something
    requests: int
    bytes_in: int
    bytes_out: int
    waiting_bytes: int


_Cells: TypeAlias = Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], str]]]
"""By heading: the value of a row by which rows are sorted, and its text."""


def _name(text: str) -> str:
    return text[:_MOST_NAME]


def _seconds(seconds: float) -> str:
    from kvstore_cli.info_summary import duration

    return duration(seconds)


def _size(count: int) -> str:
    from kvstore.sizes import format_size

    return format_size(count)


def _namespace(row: ListedClient) -> str:
    return f"{_name(row.client.model)} {row.client.namespace[:ID_DIGITS]}".strip()


_CONNECTIONS: Final[_Cells] = {
    "client": (lambda row: row.client.client, _name),
    "address": (lambda row: row.client.address, _name),
    "shard": (lambda row: row.shard, str),
    "principal": (lambda row: row.client.principal, _name),
    "tenant": (lambda row: row.client.tenant, _name),
    "namespace": (_namespace, str),
    "via": (lambda row: row.client.transport, _name),
    "age": (lambda row: row.client.age_s, _seconds),
    "idle": (lambda row: row.client.idle_s, _seconds),
    "requests": (lambda row: row.client.requests, str),
    "received": (lambda row: row.client.bytes_in, _size),
    "sent": (lambda row: row.client.bytes_out, _size),
    "waiting": (lambda row: row.client.waiting_bytes, _size),
}
_GROUPS: Final[_Cells] = {
    "client": (lambda row: row.client, _name),
    "tenant": (lambda row: row.tenant, lambda name: _name(name) or "-"),
    "address": (lambda row: row.address, _name),
    "connections": (lambda row: row.connections, str),
    "idle": (lambda row: row.idle_s, _seconds),
    "requests": (lambda row: row.requests, str),
    "received": (lambda row: row.bytes_in, _size),
    "sent": (lambda row: row.bytes_out, _size),
    "waiting": (lambda row: row.waiting_bytes, _size),
}
_GROUP_NAMES: Final = {
    ListBy.ADDRESS: ("address",),
    ListBy.CLIENT: ("client", "address"),
    ListBy.TENANT: ("tenant",),
}
_NAME_COLUMNS: Final = {"client", "tenant", "address", "shard", "principal", "namespace", "via"}  # sorted from a to z
# The columns that a narrow terminal leaves out, in this order.
_LEFT_OUT_FIRST: Final = ("principal", "tenant", "age", "shard", "namespace", "via", "waiting", "idle")


class ShownClients(msgspec.Struct, frozen=True):
    """What `kvstore clients` shows: either connections or groups of them, in the order of the table."""

    by: str
    clients: Sequence[ListedClient]
    groups: Sequence[ClientGroup]
    left_out: int  # the number of rows beyond --limit

    @property
    def document(self) -> dict[str, Any]:
        """The result in the form that --json prints."""
        rows = {"groups": self.groups} if self.groups or self.by != ListBy.CONNECTION.value else {}
        return {"by": self.by, "clients": [row.document for row in self.clients], **rows, "left_out": self.left_out}


def clients(
    by: Annotated[ListBy, typer.Option("--by", help="What each row shows.")] = ListBy.CONNECTION,
    sort: Annotated[
        str | None,
        typer.Option(
            *("--sort", "-s"),
            metavar="COLUMN",
            autocompletion=lambda: list(_CONNECTIONS),
            help="Column to sort by: names from a to z, the largest numbers first. "
            "[default: the bytes received and sent]",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help=f"The most rows. [default: {SHOWN_ROWS}; with --json, all rows]"
        ),
    ] = None,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Show the connections of every shard: the client, its traffic, and what waits to be sent to it.

    With logins, the command needs the verb monitor or admin, and shows the connections of the token's tenant. A client
    has at least one connection to each shard; --by adds them up. If some shards do not answer, the others are shown,
    and the exit status is 1.
    """
    from kvstore_cli.store_state import store_state

    columns = _columns(by)
    if sort is not None and sort not in columns:
        raise typer.BadParameter(
            f"--sort {sort!r} is not one of {', '.join(map(repr, columns))}, the columns of --by {by.value}."
        )
    with connected(endpoint, None, timeout, fail_open=True) as client:
        by_shard = client.clients()
        state = store_state(client)
    names = state.names
    rows = [ListedClient(names.get(shard, shard), row) for shard, found in by_shard.items() for row in found]
    found = listed(rows, by, sort, limit or (None if as_json else SHOWN_ROWS))
    document = {**found.document, "silent": state.silent}
    show(document, as_json, lambda: print_clients(found), state.failure)


def _columns(by: ListBy) -> _Cells:
    if by is ListBy.CONNECTION:
        return _CONNECTIONS
    names = _GROUP_NAMES[by]
    return {heading: cell for heading, cell in _GROUPS.items() if heading in names or heading not in _NAME_COLUMNS}


def listed(rows: Iterable[ListedClient], by: ListBy, sort: str | None, limit: int | None) -> ShownClients:
    """Return the first `limit` rows, or groups of rows, in the order of the column `sort`. None: all rows; the order of
    their bytes received and sent."""
    if by is ListBy.CONNECTION:
        found = list(rows)
        found.sort(key=lambda row: row.client.bytes_in + row.client.bytes_out, reverse=True)
        _sort(found, _CONNECTIONS, sort)
        return ShownClients(by.value, found[:limit], [], len(found) - len(found[:limit]))
    groups = _grouped(rows, by)
    groups.sort(key=lambda group: group.bytes_in + group.bytes_out, reverse=True)
    _sort(groups, _GROUPS, sort)
    return ShownClients(by.value, [], groups[:limit], len(groups) - len(groups[:limit]))


def _sort(rows: list[Any], columns: _Cells, column: str | None) -> None:
    if column is not None:
        rows.sort(key=columns[column][0], reverse=column not in _NAME_COLUMNS)


def _grouped(rows: Iterable[ListedClient], by: ListBy) -> list[ClientGroup]:
    def key(row: ListedClient) -> tuple[str, str, str]:
        """Clients on different hosts may have the same name, because it has only the process id."""
        if by is ListBy.TENANT:
            return "", row.client.tenant, ""
        return row.client.client if by is ListBy.CLIENT else "", "", row.host

    groups = []
    for names, same in groupby(sorted(rows, key=key), key):
        each = [row.client for row in same]
        groups.append(
            ClientGroup(
                *names,
                connections=len(each),
                idle_s=min(row.idle_s for row in each),
                requests=sum(row.requests for row in each),
                bytes_in=sum(row.bytes_in for row in each),
                bytes_out=sum(row.bytes_out for row in each),
                waiting_bytes=sum(row.waiting_bytes for row in each),
            )
        )
    return groups


def print_clients(found: ShownClients) -> None:
    """Print the connections or groups. Columns that are empty in every row are left out, and so are some columns on a
    narrow terminal."""
    from kvstore_cli.plain_table import print_fitting

    rows: Sequence[object] = found.clients or found.groups
    if not rows:
        print("No connections.")
        return
    columns = _columns(ListBy(found.by))
    print_fitting(
        {heading: [text(value(row)) for row in rows] for heading, (value, text) in columns.items()}, _LEFT_OUT_FIRST
    )
    if found.left_out:
        print(f"{found.left_out} more rows; --limit N shows more")
