"""The options of every command that connects to a store: `--token-file`, `--tls-ca`, `--tls-cert` and `--tls-key`.

They may stand before or after the command's name, and so may `--endpoint`. The options set environment variables that
every client in this process reads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvstore_cli.options import ENDPOINT_VARIABLE, EndpointOption

_CONNECTING: Final = {"endpoint", "store"}  # a command with one of these parameters connects


def _set(variable: str) -> Callable[[str | None], str | None]:
    def callback(value: str | None) -> str | None:
        if value is not None:
            os.environ[variable] = value
        return value

    return callback


def _option(name: str, variable: str, help: str) -> Any:
    help = f"{help} [env var: {variable}]"
    return typer.Option(name, metavar="FILE", expose_value=False, callback=_set(variable), help=help)


_Ca = _option(
    "--tls-ca", "KVSTORE_TLS_CA", "PEM file of the CA that signed the servers' certificates, or system: use TLS."
)
_Cert = _option("--tls-cert", "KVSTORE_TLS_CERT", "PEM file of this client's certificate, if servers ask for one.")
_Key = _option("--tls-key", "KVSTORE_TLS_KEY", "PEM file of its key.")


def _set_token_file(file: Path | None) -> Path | None:
    if file is not None:
        if not os.access(file, os.R_OK):
            why = "this user may not read it" if file.exists() else "no such file"
            raise typer.BadParameter(f"{file}: {why}: expected a file with the token")
        os.environ.pop("KVSTORE_TOKEN", None)  # the file named on the command line is meant
        os.environ["KVSTORE_TOKEN_FILE"] = str(file)
    return file


_TokenFile: Final[Any] = typer.Option(
    "--token-file",
    metavar="FILE",
    expose_value=False,
    callback=_set_token_file,
    help="File with the token, for servers that require one. [env vars: KVSTORE_TOKEN, KVSTORE_TOKEN_FILE]",
)

_app = typer.Typer(add_completion=False)


@_app.command()
def _options(
    token_file: Annotated[Path | None, _TokenFile] = None,
    tls_ca: Annotated[str | None, _Ca] = None,
    tls_cert: Annotated[str | None, _Cert] = None,
    tls_key: Annotated[str | None, _Key] = None,
) -> None:
    """Declare the options for `add_connection_options`."""


@functools.cache
def _parameters() -> list[Any]:
    return [each for each in typer.main.get_command(_app).params if each.name != "help"]


def set_endpoint(endpoint: EndpointOption) -> None:
    """Use these addresses in the command that follows, unless it has its own."""
    if endpoint:
        os.environ[ENDPOINT_VARIABLE] = ",".join(endpoint)


def add_connection_options(group: Any) -> None:
    """Add the options to the command line before the command's name, and to every command that connects."""
    group.params += _parameters()
    _add_below(group)


def _add_below(group: Any) -> None:
    for command in group.commands.values():
        if hasattr(command, "commands"):
            _add_below(command)
        elif _CONNECTING & {parameter.name for parameter in command.params}:
            command.params += _parameters()
