"""`--tls-ca`, `--tls-cert` and `--tls-key`, which every command that connects to a store takes.

They set the variables that every client in this process reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

_CONNECTING: Final = {"endpoint", "store"}  # parameters of the commands that connect


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

_app = typer.Typer(add_completion=False)


@_app.command()
def _options(
    tls_ca: Annotated[str | None, _Ca] = None,
    tls_cert: Annotated[str | None, _Cert] = None,
    tls_key: Annotated[str | None, _Key] = None,
) -> None:
    """Has the options, to be taken from here."""


def add_tls_options(command: Any) -> None:
    """Add the options to a command that connects, and to those below it."""
    for below in getattr(command, "commands", {}).values():
        add_tls_options(below)
    if _CONNECTING & {parameter.name for parameter in command.params}:
        command.params += [each for each in typer.main.get_command(_app).params if each.name != "help"]
