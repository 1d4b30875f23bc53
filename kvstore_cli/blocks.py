"""`kvstore keys`, `contains`, `get`, `set` and `delete`: commands for the blocks of a namespace."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from kvstore.wire import MAX_HOTTEST_KEYS, MAX_READS
from kvstore_cli.namespaces import check_id, contents_of, id_of, matching, named, no_such_namespace, of_id
from kvstore_cli.options import (
    NAMESPACE_HELP,
    NAMESPACE_VARIABLE,
    EndpointOption,
    JsonOption,
    KeyArgument,
    KeysArgument,
    NamespaceOption,
    TimeoutOption,
    connected,
    parse_key,
    parse_namespace,
)
from kvstore_cli.output import CommandFailed, fail, printable, show

if TYPE_CHECKING:
    from kvstore.wire import NamespaceInfo
    from kvstore_cli.store_state import StoreState
    from kvstore_client import Namespace

STANDARD_INPUT: Final = Path("-")


class HotKey(msgspec.Struct, frozen=True):
    """A recently used key. `rank`: its place in the list of a shard, from 1; the best one if several shards have it."""

    rank: int
    key: str  # in hexadecimal
    shards: Sequence[str]  # NODE/NUMBER


class HotKeys(msgspec.Struct, frozen=True):
    """The most recently used keys of a namespace."""

    keys: Sequence[HotKey]
    block_bytes: int


def keys(
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", metavar="JSON|@FILE", help=f"{NAMESPACE_HELP} [env var: {NAMESPACE_VARIABLE}]"
        ),
    ] = None,
    namespace_id: Annotated[
        str | None,
        typer.Option(
            "--namespace-id", metavar="HEX", help="The namespace whose id (`kvstore info`) begins with HEX, instead."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="GLOB", help="The model's namespace, such as 'Qwen/*', instead.")
    ] = None,
    hottest: Annotated[
        int, typer.Option("--hottest", metavar="N", min=1, max=MAX_HOTTEST_KEYS, help="How many keys to show.")
    ] = 20,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Show the most recently used keys of a namespace, in memory and on disk.

    The use of a block counts for the earlier blocks of its chain, too, so they come before it. Shards do not report
    times of use, but each has a list with the last used key first. The command shows the first key of every shard, then
    the second ones, and so on. With logins, it needs the verb admin. If some shards do not answer, the others are
    shown, and the exit status is 1. It is 3 if there is no such namespace.
    """
    from kvstore_cli.store_state import store_state

    if namespace is None and namespace_id is None and model is None:
        namespace = os.environ.get(NAMESPACE_VARIABLE)
    if [namespace is None, namespace_id is None, model is None].count(False) != 1:
        fail("usage", "expected one of --namespace JSON, --namespace-id HEX and --model GLOB")
    prefix = check_id(namespace_id) if namespace_id is not None else ""
    wanted = parse_namespace(namespace) if namespace is not None else None
    with connected(endpoint, wanted, timeout, fail_open=True) as client:
        by_shard = client.hottest(count=hottest) if wanted is not None else {}
        state = store_state(client)
        if wanted is not None:
            _check_there(state, of_id(state.namespaces, id_of(client, state.shards)))
    if wanted is None:
        wanted = _only(state, matching(state.namespaces, model, prefix))
        with connected(endpoint, wanted, timeout, fail_open=True) as client:
            by_shard = client.hottest(count=hottest)
    found = HotKeys(merged(by_shard, state.names)[:hottest], wanted.block_bytes)
    document = {**msgspec.to_builtins(found), "silent": state.silent}
    show(document, as_json, lambda: print_keys(found), state.failure)


def _check_there(state: StoreState, chosen: Sequence[NamespaceInfo]) -> None:
    """End the command if no shard has the chosen namespace."""
    if not chosen and state.failure is not None:
        fail("unreachable", f"the shards that answer have no such namespace; {state.failure.message}")
    if not chosen:
        fail("not_found", no_such_namespace(state.namespaces))


def _only(state: StoreState, chosen: Sequence[NamespaceInfo]) -> Namespace:
    """Return the chosen namespace, which may be a tenant's. Ends the command unless it is exactly one."""
    _check_there(state, chosen)
    if len({info.id for info in chosen}) > 1:
        fits = named(contents_of(chosen))
        fail("usage", f"several namespaces fit: {fits}: expected one, so give its --namespace-id")
    return parse_namespace(chosen[0].namespace)


def merged(by_shard: Mapping[str, Sequence[bytes]], names: Mapping[str, str]) -> list[HotKey]:
    """Return the keys of all shards' lists by their rank. `names`: the names of shards for people."""
    ranks: dict[bytes, int] = {}
    shards: dict[bytes, list[str]] = {}
    for shard in sorted(by_shard, key=lambda shard: names.get(shard, shard)):
        for rank, key in enumerate(by_shard[shard], 1):
            ranks[key] = min(rank, ranks.get(key, rank))
            shards.setdefault(key, []).append(names.get(shard, shard))
    order = sorted(ranks, key=lambda key: (ranks[key], shards[key]))
    return [HotKey(ranks[key], key.hex(), shards[key]) for key in order]


def print_keys(found: HotKeys) -> None:
    """Print the keys, one a line."""
    if not found.keys:
        print("The namespace has no blocks.")
    for row in found.keys:
        print(f"{row.rank:>6}  {row.key}  {printable(', '.join(row.shards))}")


def contains(
    keys: KeysArgument,
    namespace: NamespaceOption,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Show which keys have a block."""
    names = [parse_key(key) for key in keys]
    with connected(endpoint, parse_namespace(namespace), timeout) as client:
        present = client.contains(names).tolist()
    show(
        {"present": dict(zip(keys, present, strict=True))},
        as_json,
        lambda: [print(f"{key}  {'present' if hit else 'absent'}") for key, hit in zip(keys, present, strict=True)],
    )


def get(
    key: KeyArgument,
    namespace: NamespaceOption,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write the block to. [default: standard output]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write the block even to a terminal.")] = False,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Write one block to a file or to standard output. The exit status is 3 for a miss.

    With --json, the block itself is written only if --output is given.
    """
    if output is None and not as_json and not force and sys.stdout.isatty():
        fail("usage", "a block is binary and standard output is a terminal: give --output FILE, a pipe, or --force")
    name = parse_key(key)
    with connected(endpoint, parse_namespace(namespace), timeout) as client:
        block = client.get([name]).blocks[0]
        if block is None:
            fail("not_found", f"no block has key {key} in this namespace")
        if output is None and not as_json:
            sys.stdout.buffer.write(block)
            return
        if output is not None:
            try:
                output.write_bytes(block)
            except OSError as error:
                fail("usage", f"--output {output}: {error.strerror}; expected a file that can be written")
        show(
            {"key": key, "bytes": len(block), "output": str(output) if output else None},
            as_json,
            lambda: print(f"{len(block)} bytes written to {output}"),
        )


def set_(
    key: KeyArgument,
    file: Annotated[
        Path,
        typer.Argument(help="File with the block, exactly block_bytes long; - is standard input."),
    ],
    namespace: NamespaceOption,
    force: Annotated[bool, typer.Option("--force", help="Replace a block that exists.")] = False,
    reads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_READS, help="Drop the block after this many reads."),
    ] = None,
    ttl: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Drop the block after this time. [default with --reads: 60]"),
    ] = None,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Store one block from a file or from standard input."""
    if reads and force:
        fail("usage", "--reads and --force were given; expected only one: a transient block never replaces another")
    name, parsed = parse_key(key), parse_namespace(namespace)
    block = _read_block(file, parsed.block_bytes)
    with connected(endpoint, parsed, timeout) as client:
        result = client.set([name], [block], force=force, deferred=False, reads=reads, ttl_s=ttl)
    show(
        result._asdict(),
        as_json,
        lambda: print("created" * result.created + "replaced" * result.forced + "existed already" * result.existed),
        CommandFailed("failed", "the block was not stored: the server has no room for it") if result.error else None,
    )


def _read_block(file: Path, block_bytes: int) -> bytes:
    """Return the content of `file`. Ends the command unless it has exactly `block_bytes` bytes."""
    try:
        if file == STANDARD_INPUT:
            name, block, size = "standard input", sys.stdin.buffer.read(block_bytes + 1), None
        else:
            with file.open("rb") as opened:
                name, block, size = str(file), opened.read(block_bytes + 1), os.fstat(opened.fileno()).st_size
    except OSError as error:
        fail("usage", f"{file}: {error.strerror}")
    if len(block) != block_bytes:
        has = f"more than {block_bytes}" if len(block) > block_bytes and not size else str(size or len(block))
        fail("usage", f"{name} has {has} bytes: expected {block_bytes}, the namespace's block_bytes")
    return block


def delete(
    keys: KeysArgument,
    namespace: NamespaceOption,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Remove blocks."""
    names = [parse_key(key) for key in keys]
    with connected(endpoint, parse_namespace(namespace), timeout) as client:
        deleted = client.delete(names)
    show({"deleted": deleted}, as_json, lambda: print(f"{deleted} of {len(keys)} deleted"))
