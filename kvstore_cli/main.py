"""`kvstore`: look at and use a running store. Exit status 0: fine, 1: failed, 2: bad usage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstore import __version__
from kvstore.exits import BAD_USAGE, FAILED, fail
from kvstore_cli.cluster import cluster_app, drain
from kvstore_cli.shared import (
    EndpointOption,
    JsonOption,
    KeysArgument,
    NamespaceOption,
    TimeoutOption,
    connected,
    endpoints_of,
    errors,
    parse_keys,
    print_json,
    show,
)


def _show_version(value: bool) -> None:
    if value:
        print(f"kvstore {__version__}")
        raise typer.Exit(0)


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]

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
    from kvstore_cli import tables

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
    from kvstore_cli import tables
    from kvstore_cli.bench import Bench

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
    from kvstore.disk.format import DiskFormatError
    from kvstore.disk.verify import verify as verify_folder
    from kvstore_cli import tables

    try:
        with tables.verifying(of_bytes=True, shown=not as_json) as progress:
            report = verify_folder(path, progress)
    except DiskFormatError as error:
        fail(str(error), BAD_USAGE)
    show(report, as_json, lambda: tables.print_verified(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _verify_store(endpoint: list[str] | None, timeout: float, as_json: bool) -> None:
    from kvstore_cli import tables
    from kvstore_cli.scrub import verify as verify_store

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
