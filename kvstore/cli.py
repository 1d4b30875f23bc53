"""Command lines: `kvstore-server` and `kvstore`. Exit status 0: fine, 1: failed, 2: bad usage."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstore import __version__
from kvstore.cli_cluster import cluster_app, drain
from kvstore.cli_shared import (
    BAD_USAGE,
    FAILED,
    EndpointOption,
    JsonOption,
    KeysArgument,
    NamespaceOption,
    TimeoutOption,
    connected,
    endpoints_of,
    errors,
    fail,
    parse_keys,
    print_json,
    show,
)
from kvstore.config import ConfigError, load
from kvstore.logs import LEVELS, configure


def _show_version(value: bool) -> None:
    if value:
        print(f"kvstore {__version__}")
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
        str | None, typer.Option(help="What is evicted first: default, lru or s3fifo. [default: default]")
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
    from kvstore.server import StartError, Supervisor

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


# ---- kvstore -------------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


app.add_typer(cluster_app, name="cluster")
app.command()(drain)


@app.callback()
def _main(version: VersionOption = False) -> None:
    """Look at and use a running kvstore server."""


@app.command()
def ping(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Say whether all shards answer, and how fast."""
    with connected(endpoint, None, timeout) as client:
        seconds = client.ping()
        shards = len(client.info().shards)
        show(
            {"ok": True, "shards": shards, "seconds": seconds},
            as_json,
            lambda: print(f"{shards} shard(s) answered in {seconds * 1000:.2f} ms"),
        )


@app.command()
def info(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Show shards, both tiers and namespaces."""
    from kvstore import tables

    with connected(endpoint, None, timeout) as client:
        shards = client.info().shards
        show({"shards": shards}, as_json, lambda: tables.print_info(shards))


@app.command()
def contains(
    keys: KeysArgument,
    namespace: NamespaceOption,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Say which keys are present."""
    names = parse_keys(keys)
    with connected(endpoint, namespace, timeout) as client:
        present = client.contains(names).tolist()
        show(
            {"present": dict(zip(keys, present, strict=True))},
            as_json,
            lambda: [print(f"{key}  {'present' if hit else 'absent'}") for key, hit in zip(keys, present, strict=True)],
        )


@app.command()
def get(
    key: Annotated[str, typer.Argument(help="Key in hexadecimal.")],
    namespace: NamespaceOption,
    output: Annotated[Path | None, typer.Option(help="File to write the block to; standard output without it.")] = None,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Write one block to a file. A miss is status 1."""
    names = parse_keys([key])
    with connected(endpoint, namespace, timeout) as client:
        block = client.get(names).blocks[0]
        if block is None:
            fail(f"no block has key {key} in this namespace", FAILED)
        if output is None and not as_json:
            sys.stdout.buffer.write(block)
            return
        if output is not None:
            output.write_bytes(block)
        show(
            {"key": key, "bytes": len(block), "output": str(output) if output else None},
            as_json,
            lambda: print(f"{len(block)} bytes written to {output}"),
        )


@app.command("set")
def set_(
    key: Annotated[str, typer.Argument(help="Key in hexadecimal.")],
    file: Annotated[Path, typer.Argument(help="File that holds the block: exactly block_bytes long.")],
    namespace: NamespaceOption,
    force: Annotated[bool, typer.Option("--force", help="Replace a block that is there.")] = False,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Store one block from a file."""
    names = parse_keys([key])
    try:
        block = file.read_bytes()
    except OSError as error:
        fail(f"{file}: {error.strerror}", BAD_USAGE)
    with connected(endpoint, namespace, timeout) as client:
        result = client.set(names, [block], force=force, deferred=False)
        show(
            result._asdict(),
            as_json,
            lambda: print("created" if result.created else "replaced" if result.forced else "existed already"),
        )
        if result.error:
            fail("the block was not stored: no room for it", FAILED)


@app.command()
def delete(
    keys: KeysArgument,
    namespace: NamespaceOption,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Remove blocks."""
    names = parse_keys(keys)
    with connected(endpoint, namespace, timeout) as client:
        deleted = client.delete(names)
        show({"deleted": deleted}, as_json, lambda: print(f"{deleted} of {len(keys)} deleted"))


@app.command()
def flush(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Wait until every shard has placed what was sent to it before."""
    with connected(endpoint, None, timeout) as client:
        client.flush()
        show({"ok": True}, as_json, lambda: print("flushed"))


@app.command()
def bench(
    endpoint: EndpointOption = None,
    block_bytes: Annotated[int, typer.Option(min=1, help="Size of a block.")] = 917_504,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks a round.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Blocks a call.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each operation, interleaved.")] = 7,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Measure a running server: GB/s, blocks/s and latency of set, get_into, stream_get, contains, match_prefix.

    Uses a namespace of its own and deletes its blocks afterwards. The server's memory must hold one round.
    """
    from kvstore import tables
    from kvstore_client.bench import Bench

    with errors():
        measured = Bench(endpoints_of(endpoint), block_bytes, blocks, batch, rounds, timeout).run(progress=not as_json)
        if as_json:
            print_json(measured)
        else:
            tables.print_bench(measured)


@app.command()
def verify(
    path: Annotated[
        Path | None, typer.Argument(help="Folder of the disk tier, as given to --disk, of a server that is stopped.")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option("--endpoint", help="tcp://HOST:PORT of a server that runs; repeat for several nodes."),
    ] = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Check every block on disk against its checksum. Damage found is status 1.

    With PATH the folder of a stopped server is read, and nothing in it is changed. With --endpoint the shards of a
    running one check their own; they drop what is damaged.
    """
    if (path is None) == (not endpoint):
        fail("expected either PATH, of a server that is stopped, or --endpoint, of one that runs", BAD_USAGE)
    if path is not None:
        _verify_folder(path, as_json)
    else:
        _verify_store(endpoint, timeout, as_json)


def _verify_folder(path: Path, as_json: bool) -> None:
    from kvstore import tables
    from kvstore.disk.format import DiskFormatError
    from kvstore.disk.verify import verify as verify_folder

    try:
        with tables.verifying(of_bytes=True, shown=not as_json) as progress:
            report = verify_folder(path, progress)
    except DiskFormatError as error:
        fail(str(error), BAD_USAGE)
    show(report, as_json, lambda: tables.print_verified(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _verify_store(endpoint: list[str] | None, timeout: float, as_json: bool) -> None:
    from kvstore import tables
    from kvstore_client.verify import verify as verify_store

    with connected(endpoint, None, timeout) as client:
        with tables.verifying(of_bytes=False, shown=not as_json) as progress:
            report = verify_store(client, progress)
        show(report, as_json, lambda: tables.print_scrubbed(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def main() -> None:
    """Entry point of `kvstore`."""
    app(prog_name="kvstore")


if __name__ == "__main__":
    main()
