"""`kvstore auth`: the principals of a server's ``--auth`` file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore_cli.options import JsonOption
from kvstore_cli.output import example, fail, show

if TYPE_CHECKING:
    from kvstore.auth.policy import Policy

auth_app = typer.Typer(no_args_is_help=True, help="Who may use a server: the principals of its --auth file.")

FileOption = Annotated[Path, typer.Option("--file", metavar="FILE", help="The server's --auth file.")]
NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the principal.")]


def _changed(change: Callable[..., str], *given: Any) -> str:
    from kvstore.auth.policy import AuthFileError

    try:
        return change(*given)
    except AuthFileError as error:
        fail("failed", str(error))
    except ValueError as error:
        fail("usage", str(error))


@auth_app.command(
    epilog=example("kvstore auth add --file auth.toml --name chat --tenant chat --verbs read,write --quota-bytes 8GiB")
)
def add(
    file: FileOption,
    name: NameOption,
    tenant: Annotated[
        str, typer.Option("--tenant", metavar="NAME|*", help="Tenant whose namespaces it uses; '*' for all tenants.")
    ],
    verbs: Annotated[
        str,
        typer.Option(
            "--verbs",
            metavar="VERB,...",
            help="What the principal may do: read, write, delete (blocks), admin (list, scrub, purge, config, info), "
            "monitor (info and metrics).",
        ),
    ],
    namespaces: Annotated[
        list[str] | None,
        typer.Option(
            "--namespaces", metavar="GLOB", help="Models that the principal may use; repeatable. [default: *]"
        ),
    ] = None,
    quota_bytes: Annotated[
        str | None,
        typer.Option("--quota-bytes", metavar="SIZE", help="The most memory that the tenant may use on a node."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Add a principal, and print its token. The token cannot be shown again, because the file keeps only a hash. Makes
    the file if there is none."""
    from kvstore.auth.editing import add as add_principal
    from kvstore.sizes import parse_size

    try:
        quota = parse_size(quota_bytes) if quota_bytes is not None else None
    except ValueError as error:
        fail("usage", f"--quota-bytes: {error}")
    wanted = [verb.strip() for verb in verbs.split(",") if verb.strip()]
    token = _changed(add_principal, file, name, tenant, wanted, namespaces or ["*"], quota)
    show({"name": name, "token": token}, as_json, lambda: print(token))


@auth_app.command(epilog=example("kvstore auth rotate --file auth.toml --name chat"))
def rotate(
    file: FileOption,
    name: NameOption,
    end_old: Annotated[bool, typer.Option("--end-old", help="End all other tokens of the principal at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Give a principal a new token, and print it. It cannot be shown again. The old token stays valid until the next
    rotation."""
    from kvstore.auth.editing import rotate as rotate_token

    token = _changed(rotate_token, file, name, end_old)
    show({"name": name, "token": token}, as_json, lambda: print(token))


@auth_app.command("list", epilog=example("kvstore auth list --file auth.toml"))
def list_(file: FileOption, as_json: JsonOption = False) -> None:
    """Show the principals, without tokens or hashes."""
    from kvstore.auth.policy import AuthFile, AuthFileError

    try:
        policy = AuthFile(file).policy
    except AuthFileError as error:
        fail("failed", str(error))
    rows = _rows(policy)
    show({"principals": rows}, as_json, lambda: _print(rows))


def _rows(policy: Policy) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "tenant": principal.rights.tenant,
            "verbs": principal.rights.verb_names,
            "namespaces": list(principal.rights.models),
            "tokens": len(principal.tokens),
        }
        for name, principal in sorted(policy.principals.items())
    ]


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    from kvstore_cli.plain_table import columns, print_table

    shown = columns(
        ("principal", itemgetter("name")),
        ("tenant", itemgetter("tenant")),
        ("verbs", itemgetter("verbs"), ",".join),
        ("namespaces", itemgetter("namespaces"), " ".join),
        ("tokens", itemgetter("tokens")),
    )
    print_table("", shown, rows)
