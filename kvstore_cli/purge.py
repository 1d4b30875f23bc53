"""`kvstore purge`: removes all blocks of some namespaces, from the store and from the engines that hold copies.

It first shows what it will remove, and asks for confirmation. If some shards do not answer, the other shards are
emptied anyway. The command then fails and names the shards that did not answer. Run it again when these shards are
back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore_cli.namespaces import (
    SHOWN,
    Content,
    check_id,
    contents_of,
    id_of,
    matching,
    named,
    no_such_namespace,
    of_id,
)
from kvstore_cli.options import (
    NAMESPACE_HELP,
    EndpointOption,
    JsonOption,
    TimeoutOption,
    connected,
    parse_namespace,
)
from kvstore_cli.output import CommandFailed, fail, show

if TYPE_CHECKING:
    from kvstore.wire import PurgeReply
    from kvstore_client import KVStoreClient
    from kvstore_client.results import ShardStatus


def purge(
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", metavar="JSON|@FILE", help=f"Empty this namespace. {NAMESPACE_HELP}"),
    ] = None,
    namespace_id: Annotated[
        str | None,
        typer.Option(
            "--namespace-id", metavar="HEX", help="Empty the namespace whose id (`kvstore info`) begins with HEX."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="GLOB", help="Empty the namespaces of matching models, such as 'Qwen/*'."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Empty all namespaces.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Remove all blocks of some namespaces, or of the store, and every copy that engines hold of them.

    It first shows how much will be removed, and asks for confirmation. Without a terminal, --yes is needed. Engines
    drop their copies, also in their GPUs, and compute the blocks again when they need them. Blocks that engines are
    sending are refused. The exit status is 3 if there is no such namespace.
    """
    if [namespace is None, namespace_id is None, model is None, not everything].count(False) != 1:
        fail(
            "usage",
            "expected one of --namespace JSON, --namespace-id HEX and --model GLOB to empty some namespaces, or --all "
            "to empty the store",
        )
    prefix = check_id(namespace_id) if namespace_id is not None else ""
    if model is not None and not model.strip():
        fail("usage", "--model is empty: expected a pattern such as 'Qwen/*'; for all models give --all")
    wanted = parse_namespace(namespace) if namespace is not None else None
    with connected(endpoint, wanted, timeout, fail_open=True) as client:
        shards = client.shards()
        _check_reached(client, shards)
        states = [shard.info for shard in shards if shard.info is not None]
        infos = [info for state in states for info in state.namespaces]
        chosen = of_id(infos, id_of(client, states)) if wanted is not None else matching(infos, model, prefix)
        contents = contents_of(chosen)
        if prefix and len(contents) > 1:
            fail("usage", f"--namespace-id {namespace_id}: not unique, it fits {named(contents)}: give more digits")
        if (contents or not everything) and not yes:
            _ask(contents, as_json)
        replies = _purge(client, wanted is None, model or "", prefix, as_json)
        report = _Report(contents, shards, replies)
        if not (everything or chosen or report.told):  # an empty namespace is listed for a few more seconds
            if report.left:
                fail(
                    "unreachable",
                    f"the shards that answer have no such namespace. {_addresses(report.left)} did not answer and may "
                    "have its blocks: run this again when they are back",
                )
            fail("not_found", no_such_namespace(infos))
        show(report.document, as_json, report.print, report.failure)


def _check_reached(client: KVStoreClient, shards: Sequence[ShardStatus]) -> None:
    """End the command unless at least one shard answers."""
    from kvstore_client import NotAuthorized

    if any(shard.info is not None for shard in shards):
        return
    try:
        client.info()  # raises an error if the shards refuse the request
    except NotAuthorized as error:
        fail("refused", f"purge needs a token with the verb admin: {error}")
    why = "; ".join(dict.fromkeys(shard.error for shard in shards)) or client.directory_error or "no shard is known"
    fail("unreachable", f"{why}; nothing was removed")


def _purge(client: KVStoreClient, every: bool, model: str, prefix: str, as_json: bool) -> dict[str, PurgeReply]:
    from kvstore_cli.progress import progress_bar

    with progress_bar("removing", shown=not as_json) as progress:
        replies = client.purge_shards(all_namespaces=every, model=model, id_prefix=prefix)
        removed = sum(reply.purged for reply in replies.values())
        progress(removed, removed)
    return replies


def _addresses(shards: Sequence[ShardStatus]) -> str:
    return ", ".join(shard.endpoint for shard in shards)


class _Report:
    """The result of a purge."""

    def __init__(
        self, contents: Sequence[Content], shards: Sequence[ShardStatus], replies: dict[str, PurgeReply]
    ) -> None:
        self._contents = contents
        self._removed = sum(reply.purged for reply in replies.values())
        self.left = [shard for shard in shards if shard.name not in replies]
        # Each engine has a connection to every shard.
        self.told = max((reply.told for reply in replies.values()), default=0)
        self._silent = sorted({address for reply in replies.values() for address in reply.silent})
        self._heard = self.told - max((len(reply.silent) for reply in replies.values()), default=0)

    @property
    def document(self) -> dict[str, Any]:
        """Return the report in the form that --json prints."""
        holders = {"clients": {"told": self.told, "silent": self._silent}} if self.told else {}
        left = {"shards_left": [shard.name for shard in self.left]} if self.left else {}
        return {"namespaces": len(self._contents), "blocks": self._removed, **holders, **left}

    def print(self) -> None:
        """Print the report for people."""
        print(f"{self._removed} blocks of {len(self._contents)} namespace(s) removed")
        if self.told:
            print(f"{self._heard} of {self.told} clients with copies of blocks have dropped them")

    @property
    def failure(self) -> CommandFailed | None:
        """The failure that says what is left to do. It is None if nothing is left."""
        problems = []
        if self.left:
            problems.append(f"{_addresses(self.left)} did not answer and may have older blocks")
        if self._silent:
            problems.append(f"{', '.join(self._silent)} did not say that they have dropped their copies")
        if not problems:
            return None
        kind: Final = "unreachable" if self.left else "failed"
        return CommandFailed(kind, f"{'; '.join(problems)}: run this again when they are back, or end them")


def _ask(contents: Sequence[Content], as_json: bool) -> None:
    """Show what would be removed, and ask for confirmation. Ends the command unless a user at a terminal confirms."""
    from kvstore.sizes import format_size

    blocks, size = sum(content.blocks for content in contents), sum(content.bytes for content in contents)
    disk_blocks, disk_size = sum(some.disk_blocks for some in contents), sum(some.disk_bytes for some in contents)
    summary = f"{blocks} blocks ({format_size(size)}) in memory, {disk_blocks} ({format_size(disk_size)}) on disk"
    summary = f"{len(contents)} namespace(s) with {summary}"
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("usage", f"this would remove {summary}: give --yes to do it; nothing was removed")
    print(f"This removes {summary}, and the copies that engines hold:")
    for content in contents[:SHOWN]:
        print(f"  {content.id[:12]}  {content.title}  {format_size(content.bytes)} in memory")
    if len(contents) > SHOWN:
        print(f"  and {len(contents) - SHOWN} more")
    if not typer.confirm("Remove them?"):
        fail("failed", "nothing was removed")
