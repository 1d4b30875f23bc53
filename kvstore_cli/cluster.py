"""`kvstore cluster` and `kvstore drain`: looking at a cluster, and taking a node out of it."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.exits import BAD_USAGE, FAILED, fail
from kvstore_cli.shared import (
    EndpointOption,
    JsonOption,
    TimeoutOption,
    connected,
    endpoints_of,
    parse_keys,
    print_json,
    show,
)

if TYPE_CHECKING:
    from kvstore.cluster.etcd import Drain, EtcdDirectory

ASK_S: Final = 0.25
NOTICED_S: Final = 30.0  # a node that does not begin to drain by then will not

cluster_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at a cluster.")


@cluster_app.command()
def status(
    endpoint: EndpointOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it live, until interrupted.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between looks with --watch.")] = 2.0,
    timeout: TimeoutOption = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Show members, epoch, load, balance and hit rate. Status 1 when a shard does not answer.

    With --watch and --json: one document a line.
    """
    from kvstore_cli import cluster_tables as tables
    from kvstore_cli.cluster_status import cluster_status

    with connected(endpoint, None, timeout, fail_open=True) as client:
        if not watch:
            found = cluster_status(client)
            show(found, as_json, lambda: tables.print_status(found))
            if not found.ok:
                raise typer.Exit(FAILED)
            return
        with contextlib.suppress(KeyboardInterrupt):
            if not as_json:
                tables.watch_status(lambda: cluster_status(client), interval)
            while True:
                print_json(cluster_status(client))
                sys.stdout.flush()
                time.sleep(interval)


@cluster_app.command()
def where(
    key: Annotated[str, typer.Argument(help="Key in hexadecimal, 8 to 64 bytes.")],
    endpoint: EndpointOption = None,
    replicas: Annotated[int, typer.Option(min=1, max=3, help="Copies the namespace's clients keep.")] = 1,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", help="The namespace as JSON: ask the shards whether they have the block."),
    ] = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Say which shards own a key, in the order in which clients ask them."""
    from kvstore.wire import MAX_KEY_BYTES, MIN_KEY_BYTES
    from kvstore_cli import cluster_tables as tables
    from kvstore_cli.cluster_status import locate

    (name,) = parse_keys([key])
    if not MIN_KEY_BYTES <= len(name) <= MAX_KEY_BYTES:
        fail(f"key {key!r} has {len(name)} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}", BAD_USAGE)
    with connected(endpoint, namespace, timeout) as client:
        found = locate(client, name, replicas, ask=namespace is not None)
        show(found, as_json, lambda: tables.print_locations(found))


def drain(
    node: Annotated[str, typer.Argument(help="Its --node-id.")],
    endpoint: EndpointOption = None,
    seconds: Annotated[float, typer.Option(min=0.0, max=86400.0, help="Move blocks for so long at most.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Have a node of a cluster move its hottest blocks to the other nodes, and leave.

    The node goes on running, outside of the cluster, until it is stopped; started anew it joins again.
    """
    from kvstore.cluster.etcd import Drain, EtcdDirectory
    from kvstore.cluster.members import DirectoryError
    from kvstore.cluster.url import EtcdURL, parse_cluster_url

    urls = endpoints_of(endpoint)
    if len(urls) != 1 or not urls[0].startswith("etcd://"):
        fail(
            f"--endpoint {' '.join(urls)}: expected one etcd://HOST:PORT/NAME: a node is asked to drain in etcd, where "
            "it is registered",
            BAD_USAGE,
        )
    (url,) = urls
    try:
        parsed = parse_cluster_url(url)
    except ValueError as error:
        fail(str(error), BAD_USAGE)
    assert isinstance(parsed, EtcdURL)
    try:
        directory = EtcdDirectory(parsed, 2.0)
        members = {member.node: member for member in directory.membership().members}
        if node not in members:
            fail(f"{url} has no node {node!r}: it has {', '.join(map(repr, members)) or 'none'}", FAILED)
        if members[node].state == "draining":
            fail(f"{node} drains already", FAILED)
        directory.ask_drain(node, Drain(members[node].instance, seconds))
        done = _await_drain(directory, node, seconds, shown=not as_json)
        directory.end_drain(node)
        directory.close()
    except DirectoryError as error:
        fail(str(error), FAILED)
    show(
        {"node": node, "moved": done.moved, "present": done.present, "failed": done.failed, "total": done.total},
        as_json,
        lambda: print(
            f"{node} has left: {done.moved} blocks moved, {done.present} were with their next owners already, "
            f"{done.failed} failed, {max(0, done.total - done.done)} not moved in time"
        ),
    )


def _await_drain(directory: EtcdDirectory, node: str, seconds: float, shown: bool) -> Drain:
    """Show how far the node is until it is done."""
    from kvstore_cli import cluster_tables as tables

    ends_by = time.monotonic() + NOTICED_S
    begun = False
    with tables.draining(node, shown) as progress:
        while True:
            found = directory.read_drain(node)
            if found is None:
                fail(f"{node}: the request to drain is gone: the node has restarted", FAILED)
            progress(found.done, found.total if found.state == "done" else found.total or None)
            if found.state == "done":
                return found
            if found.state != "asked" and not begun:
                begun, ends_by = True, time.monotonic() + seconds + NOTICED_S
            if time.monotonic() > ends_by:
                fail(f"{node}: it has not {'ended' if begun else 'begun'} to drain in time; is it alive?", FAILED)
            time.sleep(ASK_S)
