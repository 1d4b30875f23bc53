"""`kvstore purge`: empties a namespace or the whole store. It says what it will remove, and asks, before it does so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore_cli.options import (
    NAMESPACE_HELP,
    EndpointOption,
    JsonOption,
    TimeoutOption,
    connected,
    parse_namespace,
)
from kvstore_cli.output import fail, printable, show

if TYPE_CHECKING:
    from kvstore.wire import NamespaceInfo, ShardInfo

SHOWN: Final = 10  # most namespaces that are named before the question


def purge(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="JSON|@FILE", help=f"Empty this one. {NAMESPACE_HELP}")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Empty all namespaces.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Remove all blocks of a namespace, or of the store.

    Says first how much there is, and asks. Where there is no terminal to ask on, --yes is needed. Engines compute again
    what they find missing.
    """
    import msgspec

    from kvstore_cli.progress import progress_bar

    if (namespace is None) != everything:
        fail("usage", "expected either --namespace JSON, to empty one namespace, or --all, to empty the store")
    wanted = parse_namespace(namespace) if namespace is not None else None
    with connected(endpoint, wanted, timeout) as client:
        shards = client.info().shards
        tenant = shards[0].tenant if shards else ""
        wanted_id = None
        if wanted is not None:
            wanted = client.namespace  # with the mark of a block secret
            if tenant:  # the server keeps it under the tenant that the token names
                wanted = msgspec.structs.replace(wanted, tenant=tenant)
            wanted_id = wanted.id
        contents = _contents(shards, wanted_id)
        if contents and not yes:
            _ask(contents, as_json)
        removed = 0
        if contents:
            with progress_bar("removing", shown=not as_json) as progress:
                removed = client.purge(all_namespaces=everything)
                progress(removed, removed)
    show(
        {"namespaces": len(contents), "blocks": removed},
        as_json,
        lambda: print(f"{removed} blocks of {len(contents)} namespace(s) removed"),
    )


class _Content:
    """The content of a namespace, summed over all shards."""

    def __init__(self, parts: Sequence[NamespaceInfo]) -> None:
        import msgspec

        self.id = parts[0].id
        self.model = str(msgspec.json.decode(parts[0].namespace).get("model", ""))
        self.blocks = sum(part.blocks for part in parts)
        self.disk_blocks = sum(part.disk_blocks for part in parts)
        self.bytes = self.blocks * parts[0].block_bytes
        self.disk_bytes = self.disk_blocks * parts[0].block_bytes


def _contents(shards: Sequence[ShardInfo], wanted_id: str | None) -> list[_Content]:
    """The namespaces that hold blocks; only the one with `wanted_id`, if that is given."""
    by_id: dict[str, list[NamespaceInfo]] = {}
    for shard in shards:
        for part in shard.namespaces:
            if wanted_id in (None, part.id) and (part.blocks or part.disk_blocks):
                by_id.setdefault(part.id, []).append(part)
    return [_Content(parts) for _, parts in sorted(by_id.items())]


def _ask(contents: Sequence[_Content], as_json: bool) -> None:
    """Say what would be removed. Ends the command unless somebody at a terminal confirms."""
    from kvstore.sizes import format_size

    blocks, size = sum(content.blocks for content in contents), sum(content.bytes for content in contents)
    disk_blocks, disk_size = sum(some.disk_blocks for some in contents), sum(some.disk_bytes for some in contents)
    summary = f"{blocks} blocks ({format_size(size)}) in memory, {disk_blocks} ({format_size(disk_size)}) on disk"
    summary = f"{len(contents)} namespace(s) with {summary}"
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("usage", f"this would remove {summary}: give --yes to do it; nothing was removed")
    print(f"This removes {summary}:")
    for content in contents[:SHOWN]:
        print(f"  {content.id[:12]}  {printable(content.model)}  {format_size(content.bytes)} in memory")
    if len(contents) > SHOWN:
        print(f"  and {len(contents) - SHOWN} more")
    if not typer.confirm("Remove them?"):
        fail("failed", "nothing was removed")
