"""`kvstore verify`: checks the blocks on disk. It reads the folder of a stopped server, or lets the shards of a running
server check."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.sizes import format_size
from kvstore_cli.options import ENDPOINT_VARIABLE, EndpointOption, JsonOption, TimeoutOption, connected
from kvstore_cli.output import CommandFailed, fail, show

if TYPE_CHECKING:
    from kvstore.disk.encryption import DiskKey
    from kvstore.disk.verify import VerifyReport
    from kvstore_cli.scrub import ScrubReport

MAX_SHOWN: Final = 20  # the most damaged blocks and segments that are listed; --json lists all


def verify(
    path: Annotated[
        Path | None,
        typer.Argument(help="Folder of the disk tier, as given to --disk, of a server that is stopped."),
    ] = None,
    disk_key_file: Annotated[
        str | None, typer.Option("--disk-key-file", metavar="FILE", help="Key of an encrypted folder.")
    ] = None,
    disk_key_command: Annotated[
        str | None, typer.Option("--disk-key-command", metavar="COMMAND", help="Command that prints the key.")
    ] = None,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Check every block on disk against its checksum. The exit status is 4 if there is damage.

    With PATH, the command reads the folder of a stopped server and changes nothing in it. With --endpoint, the shards
    of a running server check their own blocks and drop the damaged blocks.
    """
    if path is not None and endpoint:
        fail(
            "usage", "PATH and --endpoint were given; expected PATH of a stopped server or --endpoint of a running one"
        )
    if path is not None:
        _verify_folder(path, _key(disk_key_file, disk_key_command), as_json)
    elif disk_key_file is not None or disk_key_command is not None:
        fail(
            "usage", "a key was given without PATH: expected the folder of a stopped server. A running one has its key"
        )
    elif endpoint or ENDPOINT_VARIABLE in os.environ:
        _verify_store(endpoint, timeout, as_json)
    else:
        fail("usage", "expected PATH, the folder of a stopped server, or --endpoint of a running one")


def _key(file: str | None, command: str | None) -> DiskKey | None:
    if file is None and command is None:
        return None
    from kvstore.disk.encryption import read_key

    try:
        return read_key(file, command)
    except ValueError as error:
        fail("usage", str(error))


def _verify_folder(path: Path, key: DiskKey | None, as_json: bool) -> None:
    from kvstore.disk.format import DiskFormatError
    from kvstore.disk.verify import verify as verify_folder
    from kvstore_cli.progress import progress_bar

    try:
        with progress_bar("checking", shown=not as_json, unit="bytes") as progress:
            report = verify_folder(path, progress, key)
    except DiskFormatError as error:
        fail("usage", str(error))
    failure = None if report.ok else CommandFailed("damaged", f"{path}: damage was found")
    show(report, as_json, lambda: print_verified(report), failure)


def _verify_store(endpoint: list[str] | None, timeout: float, as_json: bool) -> None:
    from kvstore_cli.progress import progress_bar
    from kvstore_cli.scrub import NoDiskTier
    from kvstore_cli.scrub import verify as verify_store

    with connected(endpoint, None, timeout) as client:
        try:
            with progress_bar("checking", shown=not as_json) as progress:
                report = verify_store(client, progress)
        except NoDiskTier as error:
            fail("usage", str(error))
    damaged = sum(shard.damaged for shard in report.shards)
    failure = None
    if damaged:
        failure = CommandFailed("damaged", f"damaged blocks were found and dropped: {damaged}")
    elif not report.ok:
        incomplete = [f"{shard.shard}: {shard.failure}" for shard in report.shards if shard.failure]
        failure = CommandFailed("failed", f"the check is not complete: {'; '.join(incomplete)}")
    show(report, as_json, lambda: print_scrubbed(report), failure)


def print_verified(report: VerifyReport) -> None:
    """Print the result for a folder."""
    from kvstore_cli.plain_table import columns, print_table

    if report.damaged:
        named = {**{name: name for name in ("shard", "model", "key", "segment")}, "slot": "place", "why": "reason"}
        shown = columns(*((heading, value, "", True) for heading, value in named.items()))
        print_table("Damaged blocks", shown, report.damaged[:MAX_SHOWN])
        if len(report.damaged) > MAX_SHOWN:
            print(f"... and {len(report.damaged) - MAX_SHOWN} more: --json names them all")
    for missing in report.missing_segments[:MAX_SHOWN]:
        print(
            f"shard {missing.shard}: segment {missing.segment} with {missing.blocks} blocks cannot be used: "
            f"{missing.reason}",
        )
    if len(report.missing_segments) > MAX_SHOWN:
        print(f"... and {len(report.missing_segments) - MAX_SHOWN} more segments: --json names them all")
    for sentence in report.index_damage:
        print(sentence)
    if report.bad_entries:
        print(f"{report.bad_entries} entries of the index are damaged")
    print(
        f"{report.blocks} blocks ({format_size(report.bytes)}) on {report.shards} shard(s) checked, "
        f"{len(report.damaged)} damaged, {sum(missing.blocks for missing in report.missing_segments)} without a segment"
        + (f", {report.expired_blocks} expired and not checked" if report.expired_blocks else "")
    )
    if not report.ok:
        print("nothing was changed: the server that uses this folder next counts damaged blocks as misses")


def print_scrubbed(report: ScrubReport) -> None:
    """Print the results of running shards."""
    for shard in report.shards:
        print(
            f"shard {shard.shard}: {shard.blocks} blocks ({format_size(shard.bytes)}) checked, {shard.damaged} damaged"
            + (f"; not complete: {shard.failure}" if shard.failure else ""),
        )
    if any(shard.damaged for shard in report.shards):
        print("the server has dropped the damaged blocks: they are misses now; its log names some of them")
