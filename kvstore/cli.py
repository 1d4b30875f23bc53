"""Command lines: `kvstore-server` and `kvstore`. Exit status 0: fine, 1: failed, 2: bad usage."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer

from kvstore import __version__
from kvstore.config import ConfigError, load
from kvstore.logs import LEVELS, configure

if TYPE_CHECKING:
    from kvstore_client import KVStoreClient

FAILED = 1
BAD_USAGE = 2


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(status)


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
    }
    try:
        settings = load(config, os.environ, flags)
    except ConfigError as error:
        _fail(str(error), BAD_USAGE)
    configure(settings.log_level, "supervisor")
    try:
        status = Supervisor(settings).run()
    except StartError as error:
        _fail(str(error), FAILED)
    raise typer.Exit(status)


def server_main() -> None:
    """Entry point of `kvstore-server`."""
    server_app(prog_name="kvstore-server")


# ---- kvstore -------------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

EndpointOption = Annotated[
    list[str] | None,
    typer.Option("--endpoint", help="tcp://HOST:PORT; repeat for several nodes. [default: tcp://127.0.0.1:7070]"),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.001, max=600.0, help="Seconds a request may take.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace",
        help='The namespace as JSON, e.g. \'{"model":"m","dtype":"bfloat16","block_tokens":16,"block_bytes":4096}\'.',
    ),
]
KeysArgument = Annotated[list[str], typer.Argument(help="Keys in hexadecimal, 8 to 64 bytes each.")]


@app.callback()
def _main(version: VersionOption = False) -> None:
    """Look at and use a running kvstore server."""


@app.command()
def ping(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Say whether all shards answer, and how fast."""
    with _session(endpoint, None, timeout) as session:
        seconds = session.client.ping()
        shards = len(session.client.info().shards)
        session.show(
            {"ok": True, "shards": shards, "seconds": seconds},
            as_json,
            lambda: print(f"{shards} shard(s) answered in {seconds * 1000:.2f} ms"),
        )


@app.command()
def info(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Show shards, both tiers and namespaces."""
    from kvstore import tables

    with _session(endpoint, None, timeout) as session:
        shards = session.client.info().shards
        session.show({"shards": shards}, as_json, lambda: tables.print_info(shards))


@app.command()
def contains(
    keys: KeysArgument,
    namespace: NamespaceOption,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Say which keys are present."""
    names = _parse_keys(keys)
    with _session(endpoint, namespace, timeout) as session:
        present = session.client.contains(names).tolist()
        session.show(
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
    names = _parse_keys([key])
    with _session(endpoint, namespace, timeout) as session:
        block = session.client.get(names).blocks[0]
        if block is None:
            _fail(f"no block has key {key} in this namespace", FAILED)
        if output is None and not as_json:
            sys.stdout.buffer.write(block)
            return
        if output is not None:
            output.write_bytes(block)
        session.show(
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
    names = _parse_keys([key])
    try:
        block = file.read_bytes()
    except OSError as error:
        _fail(f"{file}: {error.strerror}", BAD_USAGE)
    with _session(endpoint, namespace, timeout) as session:
        result = session.client.set(names, [block], force=force, deferred=False)
        session.show(
            result._asdict(),
            as_json,
            lambda: print("created" if result.created else "replaced" if result.forced else "existed already"),
        )
        if result.error:
            _fail("the block was not stored: no room for it", FAILED)


@app.command()
def delete(
    keys: KeysArgument,
    namespace: NamespaceOption,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Remove blocks."""
    names = _parse_keys(keys)
    with _session(endpoint, namespace, timeout) as session:
        deleted = session.client.delete(names)
        session.show({"deleted": deleted}, as_json, lambda: print(f"{deleted} of {len(keys)} deleted"))


@app.command()
def flush(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Wait until every shard has placed what was sent to it before."""
    with _session(endpoint, None, timeout) as session:
        session.client.flush()
        session.show({"ok": True}, as_json, lambda: print("flushed"))


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

    with _errors():
        measured = Bench(_endpoints(endpoint), block_bytes, blocks, batch, rounds, timeout).run(progress=not as_json)
        if as_json:
            _print_json(measured)
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
        _fail("expected either PATH, of a server that is stopped, or --endpoint, of one that runs", BAD_USAGE)
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
        _fail(str(error), BAD_USAGE)
    _Session.show(report, as_json, lambda: tables.print_verified(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _verify_store(endpoint: list[str] | None, timeout: float, as_json: bool) -> None:
    from kvstore import tables
    from kvstore_client.verify import verify as verify_store

    with _session(endpoint, None, timeout) as session:
        with tables.verifying(of_bytes=False, shown=not as_json) as progress:
            report = verify_store(session.client, progress)
        session.show(report, as_json, lambda: tables.print_scrubbed(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def main() -> None:
    """Entry point of `kvstore`."""
    app(prog_name="kvstore")


# ---- what the commands share ---------------------------------------------------------------------------------------


def _endpoints(endpoint: list[str] | None) -> list[str]:
    return endpoint or ["tcp://127.0.0.1:7070"]


def _parse_keys(keys: list[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(key) for key in keys]
    except ValueError:
        wrong = next(key for key in keys if not _is_hex(key))
        _fail(f"key {wrong!r}: expected hexadecimal digits, two a byte", BAD_USAGE)


def _is_hex(text: str) -> bool:
    try:
        bytes.fromhex(text)
    except ValueError:
        return False
    return True


def _print_json(document: object) -> None:
    import msgspec

    print(msgspec.json.encode(document).decode())


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Exit 1 with the message for what the store says, 2 for what the user gave."""
    from kvstore_client import BlockSizeMismatch, KVStoreError

    try:
        yield
    except BlockSizeMismatch as error:
        _fail(str(error), BAD_USAGE)
    except KVStoreError as error:
        _fail(str(error), FAILED)
    except (TypeError, ValueError) as error:
        _fail(str(error), BAD_USAGE)


class _Session(NamedTuple):
    client: KVStoreClient

    @staticmethod
    def show(document: object, as_json: bool, people: Callable[[], object]) -> None:
        if as_json:
            _print_json(document)
        else:
            people()


@contextlib.contextmanager
def _session(endpoint: list[str] | None, namespace: str | None, timeout: float) -> Iterator[_Session]:
    from kvstore_client import KVStoreClient, Namespace

    with _errors():
        import msgspec

        if namespace is None:
            found = Namespace(model="kvstore-cli", dtype="none", block_tokens=1, block_bytes=1)
        else:
            try:
                found = msgspec.json.decode(namespace, type=Namespace)
            except msgspec.DecodeError as error:
                _fail(f"--namespace: {error}", BAD_USAGE)
        with KVStoreClient(_endpoints(endpoint), found, timeout_s=timeout) as client:
            yield _Session(client)


if __name__ == "__main__":
    main()
