"""`kvstore-server`: its command line. Exit status 0: fine, 1: failed, 2: bad usage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvstore import __version__
from kvstore.exits import BAD_USAGE, FAILED, fail
from kvstore.logs import LEVELS, configure
from kvstore.node.config import ConfigError, load


def _show_version(value: bool) -> None:
    if value:
        print(f"kvstore-server {__version__}")
        raise typer.Exit(0)


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]

server_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@server_app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings below; flags win.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[
        int | None,
        typer.Option(help="First port, one a shard from there; 0 picks free ones. [default: 7070]"),
    ] = None,
    shards: Annotated[int | None, typer.Option(help="Shard processes. [default: 1]")] = None,
    memory: Annotated[str | None, typer.Option(help="Block memory of all shards together. [default: 4GiB]")] = None,
    segment: Annotated[
        str | None, typer.Option(help="Unit in which memory goes to namespaces. [default: 32MiB]")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help=f"{', '.join(LEVELS)}. [default: info]")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics over HTTP there; 0 picks a free port. [default: off]")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="What is evicted first: default or lru. [default: default]")
    ] = None,
    ttl_seconds: Annotated[
        int | None, typer.Option(help="Blocks expire so long after they were set; 0: never. [default: 0]")
    ] = None,
    disk: Annotated[str | None, typer.Option(help="Folder of the disk tier. [default: no disk tier]")] = None,
    disk_size: Annotated[
        str | None, typer.Option(help="What all shards together may take on disk. [default: 50GiB]")
    ] = None,
    disk_write: Annotated[
        str | None, typer.Option(help="Which blocks are written to disk: all, reused or evicted. [default: all]")
    ] = None,
    warm_start: Annotated[
        bool | None,
        typer.Option(help="At start, bring the hottest blocks from disk to memory. [default: --warm-start]"),
    ] = None,
    scrub_mbps: Annotated[
        int | None, typer.Option(help="Check blocks on disk in the background, in MB/s; 0: never. [default: 0]")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="etcd://HOST:PORT[,HOST:PORT...]/NAME to be a member of. [default: no cluster]")
    ] = None,
    node_id: Annotated[
        str | None, typer.Option(help="The node's id, the same after a restart. [default: the host name]")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Host where a cluster's clients reach this node. [default: --host]")
    ] = None,
    zone: Annotated[str | None, typer.Option(help="What fails together: copies go to other zones. [default: none]")] = (
        None
    ),
    drain_seconds: Annotated[
        int | None,
        typer.Option(help="At SIGTERM, move the hottest blocks to other nodes for so long at most. [default: 0]"),
    ] = None,
    grace_seconds: Annotated[
        int | None, typer.Option(help="How long a new node is also filled from old owners. [default: 300]")
    ] = None,
    lease_seconds: Annotated[
        int | None, typer.Option(help="A node that is silent for so long is taken for dead. [default: 2]")
    ] = None,
    version: VersionOption = False,
) -> None:
    """Serve KV blocks over ZeroMQ TCP until SIGTERM or SIGINT.

    Every setting can also come from the environment, as KVSTORE_SERVER_<NAME>.
    """
    from kvstore.node.supervisor import StartError, Supervisor

    flags = {
        "host": host,
        "port": port,
        "shards": shards,
        "memory": memory,
        "segment": segment,
        "log_level": log_level,
        "metrics_port": metrics_port,
        "policy": policy,
        "ttl_seconds": ttl_seconds,
        "disk": disk,
        "disk_size": disk_size,
        "disk_write": disk_write,
        "warm_start": warm_start,
        "scrub_mbps": scrub_mbps,
        "cluster": cluster,
        "node_id": node_id,
        "advertise": advertise,
        "zone": zone,
        "drain_seconds": drain_seconds,
        "grace_seconds": grace_seconds,
        "lease_seconds": lease_seconds,
    }
    try:
        settings = load(config, os.environ, flags)
    except ConfigError as error:
        fail(str(error), BAD_USAGE)
    configure(settings.log_level, "supervisor")
    try:
        status = Supervisor(settings).run()
    except StartError as error:
        fail(str(error), FAILED)
    raise typer.Exit(status)


def server_main() -> None:
    """Entry point of `kvstore-server`."""
    server_app(prog_name="kvstore-server")
