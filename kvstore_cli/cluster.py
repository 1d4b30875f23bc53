"""`kvstore cluster` and `kvstore drain`: commands that show a cluster and take a node out of it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore_cli.options import (
    NAMESPACE_HELP,
    EndpointOption,
    JsonOption,
    KeyArgument,
    TimeoutOption,
    connected,
    endpoints_of,
    parse_key,
    parse_namespace,
)
from kvstore_cli.output import CommandFailed, example, fail, print_json, show

if TYPE_CHECKING:
    from kvstore.cluster.etcd import Drain, EtcdDirectory
    from kvstore_client import Location

STATUS_EVERY_S: Final = 0.25
BEGINS_S: Final = 30.0  # a node that has not begun to drain after this time will not begin

cluster_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Show a cluster.")


@cluster_app.command(
    epilog=example(
        "kvstore cluster status --endpoint etcd://etcd-1:2379/prod",
        "kvstore cluster status --endpoint etcd://etcd-1:2379/prod --watch",
    )
)
def status(
    endpoint: EndpointOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it live, until Ctrl-C.")] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600.0, help="Seconds between polls with --watch."),
    ] = 2.0,
    timeout: TimeoutOption = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Show the nodes, the epoch, load, balance and hit rate. The exit status is 1 if a shard does not answer.

    With --watch and --json, each line is a JSON document.
    """
    from kvstore_cli.cluster_status import cluster_status, print_status, watch_status

    with connected(endpoint, None, timeout, fail_open=True) as client:
        if not watch:
            found = cluster_status(client)
            show(found, as_json, lambda: print_status(found), found.failure)
            return
        with contextlib.suppress(KeyboardInterrupt):
            if not as_json:
                watch_status(lambda: cluster_status(client), interval)
            while True:
                found = cluster_status(client)
                print_json(found, found.failure)
                sys.stdout.flush()
                time.sleep(interval)


@cluster_app.command(
    epilog=example("kvstore cluster where 00112233445566778899aabbccddeeff --endpoint etcd://etcd-1:2379/prod")
)
def where(
    key: KeyArgument,
    endpoint: EndpointOption = None,
    replicas: Annotated[int, typer.Option(min=1, max=3, help="How many copies of each block your clients keep.")] = 1,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="JSON|@FILE",
            envvar="KVSTORE_NAMESPACE",
            help=f"Namespace of the block, to ask each shard for the block. {NAMESPACE_HELP}",
        ),
    ] = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Show where the block of a key belongs.

    Each line is one shard, in the order in which clients ask them. The owner comes first. With --replicas, the shards
    that keep the other copies follow. While nodes join or drain, the old owner, which may still have the block, comes
    after them. With --namespace, each line also says whether the shard has the block.
    """
    name = parse_key(key)
    parsed = parse_namespace(namespace) if namespace is not None else None
    from kvstore_client import NotAuthorized

    with connected(endpoint, parsed, timeout) as client:
        try:
            found = client.locate(name, replicas=replicas, ask=parsed is not None)
        except NotAuthorized:  # the token of an operator may not read; where the block belongs is known without asking
            found = client.locate(name, replicas=replicas, ask=False)
    show(found, as_json, lambda: _print_locations(found))


def _print_locations(locations: Sequence[Location]) -> None:
    """Print a line for each shard, in the order of `locations`."""
    for found in locations:
        zone = f"zone {found.zone}, " if found.zone else ""
        block = {None: "", True: ", block present", False: ", block absent"}[found.present]
        print(f"{found.role:<9}  {found.shard}  {found.endpoint}  {zone}{found.state}{block}")


def drain(
    node: Annotated[str, typer.Argument(help="The node's --node-id.")],
    endpoint: EndpointOption = None,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="SECONDS", min=0.0, max=86400.0, help="Move blocks for at most this long."),
    ] = 60.0,
    force: Annotated[
        bool, typer.Option("--force", help="Drain the node even if no other node can take blocks.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Move a node's blocks to the other nodes, and take the node out of the cluster.

    The hottest blocks are moved first. The server keeps running outside the cluster until it is stopped. After a
    restart it joins again. Any user who may write to the cluster's etcd may drain nodes; tokens do not matter.
    """
    from kvstore.cluster.etcd import Drain, EtcdDirectory
    from kvstore.cluster.members import DirectoryError
    from kvstore.cluster.url import parse_etcd_url

    urls = endpoints_of(endpoint)
    if len(urls) != 1 or not urls[0].startswith(("etcd://", "etcds://")):
        fail(
            "usage",
            f"--endpoint {' '.join(urls)}: expected one etcd://HOST:PORT/NAME or etcds://…, that of the node's cluster",
        )
    (url,) = urls
    try:
        parsed = parse_etcd_url(url)
    except ValueError as error:
        fail("usage", str(error))
    try:
        directory = EtcdDirectory(parsed, 2.0)
        members = {member.node: member for member in directory.membership().members}
        if node not in members:
            fail(
                "failed",
                f"{url} has no node {node!r}: it has {', '.join(map(repr, members)) or 'no nodes'}. A node that has "
                "left joins again when it is restarted",
            )
        if members[node].state == "draining":
            fail("failed", f"{node} is draining already")
        if not force and not any(other.is_new_owner for other in members.values() if other.node != node):
            fail(
                "failed",
                f"no other node can take the blocks of {node}. Start one, or stop this server instead of draining it, "
                "or give --force; nothing was done",
            )
        directory.write_drain(node, Drain(members[node].instance, seconds))
        done = _await_drain(directory, node, seconds, shown=not as_json)
        directory.end_drain(node)
        directory.close()
    except DirectoryError as error:
        fail("unreachable", str(error))
    stayed = f"{', '.join(done.left)} did not answer, so their blocks stayed on {node} and were not counted"
    show(
        {
            **{"node": node, "moved": done.moved, "present": done.present, "failed": done.failed, "total": done.total},
            "shards_left": done.left,
        },
        as_json,
        lambda: print(
            f"{node} has left the cluster. Of its {done.total} blocks, {done.moved} were moved, "
            f"{done.present} were already on their new nodes, {done.failed} failed, "
            f"{max(0, done.total - done.done)} were not moved in time."
        ),
        CommandFailed("failed", stayed) if done.left else None,
    )


def _await_drain(directory: EtcdDirectory, node: str, seconds: float, shown: bool) -> Drain:
    """Show the progress of a drain until it is done, and return its result. Ends the command if the node does not
    finish in time, or if it was restarted."""
    from kvstore_cli.progress import progress_bar

    ends_by = time.monotonic() + BEGINS_S
    begun = False
    with progress_bar(f"draining {node}", shown, stays=True) as progress:
        while True:
            found = directory.read_drain(node)
            if found is None:
                fail("failed", f"{node} was restarted and no longer knows of the drain: run the command again")
            progress(found.done, found.total if found.state == "done" else found.total or None)
            if found.state == "done":
                return found
            if found.state != "asked" and not begun:
                begun, ends_by = True, time.monotonic() + seconds + BEGINS_S
            if time.monotonic() > ends_by:
                fail(
                    "failed",
                    f"{node} began to drain but did not finish in time: look at its log"
                    if begun
                    else f"{node} did not begin to drain within {BEGINS_S:.0f} s: is it running?",
                )
            time.sleep(STATUS_EVERY_S)
