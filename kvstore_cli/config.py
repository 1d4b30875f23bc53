"""`kvstore config`: shows and changes settings of running servers, until they are restarted.

A change goes to all shards. If some shards do not answer or refuse it, the others are changed anyway. The command then
fails and names the shards that may be unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvstore_cli.options import EndpointOption, JsonOption, TimeoutOption, connected
from kvstore_cli.output import CommandFailed, example, fail, printable, show

if TYPE_CHECKING:
    from kvstore_client import KVStoreClient, ShardSettings

config_app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Settings of running servers, which can be changed until a restart.",
)


class UnchangedShard(msgspec.Struct, frozen=True):
    """A shard that did not answer, or that refused the request."""

    shard: str  # HOST:PORT
    reason: str
    name: str  # NODE/NUMBER, if a shard that answers has named it


class SettingRow(msgspec.Struct, frozen=True):
    """A value of a setting, and the shards that have it."""

    name: str
    value: str
    configured: str
    expected: str
    shards: list[str]  # HOST:PORT


class SettingRows(msgspec.Struct, frozen=True):
    """What `config get` shows. There are several rows for a setting only if the shards differ."""

    settings: list[SettingRow]
    shards_left: list[UnchangedShard]


class ChangedShard(msgspec.Struct, frozen=True):
    """A shard that has the new value."""

    shard: str  # HOST:PORT
    before: str


class SettingChanged(msgspec.Struct, frozen=True):
    """What `config set` shows. `keep`: where to write the value so that it outlives a restart."""

    name: str
    value: str
    configured: str
    keep: str
    shards: list[ChangedShard]
    shards_left: list[UnchangedShard]


@config_app.command(
    epilog=example("kvstore config get --endpoint cache-1:7070", "kvstore config get 'quota-bytes.*' --json")
)
def get(
    pattern: Annotated[
        str, typer.Argument(metavar="[PATTERN]", help="Show only settings with matching names, such as 'quota-*'.")
    ] = "*",
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Show the settings that can be changed while a server runs, with the values in force and the configured ones.

    If shards differ, a line for each value names the shards. If some shards do not answer, the others are shown, and
    the exit status is 1.
    """
    answers = _answers(endpoint, timeout, lambda client: client.config_get())
    rows = setting_rows(answers)
    chosen = msgspec.structs.replace(rows, settings=[row for row in rows.settings if fnmatchcase(row.name, pattern)])
    if not chosen.settings:
        names = ", ".join(dict.fromkeys(row.name for row in rows.settings))
        fail("usage", f"no setting matches {pattern!r}: the settings are {names}")
    show(chosen, as_json, lambda: print_settings(chosen), _failure(answers, "not shown", "are shown"))


@config_app.command(
    "set",
    epilog=example(
        "kvstore config set log-level debug --endpoint cache-1:7070",
        "kvstore config set scrub-mbps 100",
        "kvstore config set quota-bytes.chat 16GiB",
    ),
)
def set_(
    name: Annotated[str, typer.Argument(help="Name of a setting that `kvstore config get` shows.")],
    value: Annotated[str, typer.Argument(help="The new value.")],
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Change a setting of all shards until their servers are restarted.

    A shard that the server itself restarts, for example after a crash, keeps the new value. The command says where to
    write the value so that it outlives a restart of the server. If some shards do not answer, the others are changed,
    and the exit status is 1.
    """
    if not name:
        fail("usage", "NAME is empty: expected the name of a setting that `kvstore config get` shows")
    answers = _answers(endpoint, timeout, lambda client: client.config_set(name, value))
    changed = setting_changed(answers)
    failure = _failure(answers, "may be unchanged", f"have {name} {changed.value}")
    show(changed, as_json, lambda: print_changed(changed), failure)


def _answers(
    endpoint: list[str] | None, timeout: float, request: Callable[[KVStoreClient], list[ShardSettings]]
) -> list[ShardSettings]:
    """Return the answers of all shards. Ends the command unless at least one shard has done what was requested."""
    with connected(endpoint, None, timeout, fail_open=True) as client:
        answers = request(client)
        errors = [answer.error for answer in answers if answer.error is not None]
        if len(errors) == len(answers):
            from kvstore_client import SettingRefused

            refused = [error for error in errors if isinstance(error, SettingRefused)]
            if len(refused) == len(errors):
                fail("usage", f"{refused[0]}; nothing was changed")
            raise next((error for error in errors if error not in refused), errors[0])
    return answers


def setting_rows(answers: Sequence[ShardSettings]) -> SettingRows:
    """Return the settings in the order of the answers, with the shards that have each value."""
    rows: dict[tuple[str, str, str], SettingRow] = {}
    order: dict[str, None] = {}
    for answer in answers:
        for setting in answer.settings:
            order[setting.name] = None
            key = setting.name, setting.value, setting.configured
            if key not in rows:
                rows[key] = SettingRow(*key, setting.expected, [])
            rows[key].shards.append(_address(answer))
    places = {name: at for at, name in enumerate(order)}
    return SettingRows(sorted(rows.values(), key=lambda row: places[row.name]), _left(answers))


def setting_changed(answers: Sequence[ShardSettings]) -> SettingChanged:
    """Return what a change of a setting has done. At least one shard has changed it."""
    done = [answer for answer in answers if answer.error is None]
    setting = done[0].settings[0]
    shards = [ChangedShard(_address(answer), answer.before) for answer in done]
    return SettingChanged(setting.name, setting.value, setting.configured, setting.keep, shards, _left(answers))


def print_settings(rows: SettingRows) -> None:
    """Print the settings for people."""
    from kvstore_cli.plain_table import columns, print_table

    every = {shard for row in rows.settings for shard in row.shards}
    shown = columns(
        ("setting", "name"),
        ("value", "value", "", True),
        ("configured", "configured", "", True),
        ("expected", "expected", "", True),
    )
    if any(len(row.shards) < len(every) for row in rows.settings):
        shown += columns(("shards", lambda row: ", ".join(row.shards), "", True))
    print_table("", shown, rows.settings)


def print_changed(changed: SettingChanged) -> None:
    """Print for people what was changed."""
    before = " or ".join(dict.fromkeys(shard.before for shard in changed.shards))
    print(
        printable(f"{changed.name} is {changed.value} now, and was {before}, in {len(changed.shards)} shard(s)"),
    )
    if changed.value != changed.configured:
        print(printable(f"This lasts until the server is restarted. To keep it, write {changed.keep}"))


def _left(answers: Sequence[ShardSettings]) -> list[UnchangedShard]:
    return [
        UnchangedShard(_address(answer), str(answer.error), answer.name)
        for answer in answers
        if answer.error is not None
    ]


def _address(answer: ShardSettings) -> str:
    return answer.endpoint.partition("://")[2]


def _failure(answers: Sequence[ShardSettings], what: str, others: str) -> CommandFailed | None:
    left = _left(answers)
    if not left:
        return None
    shards = "; ".join(
        f"{each.shard} ({each.name}) {what}: {each.reason.removeprefix(f'{each.shard}: ')}" for each in left
    )
    done = len(answers) - len(left)
    return CommandFailed(
        "unreachable", f"{shards}. The other {done} of {len(answers)} shards {others}. Run this again when all answer"
    )
