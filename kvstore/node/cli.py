"""The command line of `kvstore-server`, made from the settings. The exit status is 0 for success, 1 for failure and 2
for bad usage."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore import __version__
from kvstore.exits import BAD_USAGE, FAILED, print_error
from kvstore.logs import configure
from kvstore.node import fitting, memory_limit
from kvstore.node.config import CONFIG_VARIABLE, ENVIRONMENT_PREFIX, ServerConfig, read
from kvstore.node.settings import Described, describe

log = logging.getLogger("kvstore.server")

HEADING = (
    f"Settings of kvstore-server {__version__}: kvstore-server --config THIS_FILE. Every key is also a flag "
    f"(--log-level) and a variable ({ENVIRONMENT_PREFIX}LOG_LEVEL). A flag wins over a variable, a variable over this "
    "file."
)

_CONFIG_HELP = f"TOML file with the settings below. [default: the file that {CONFIG_VARIABLE} names]"
_ACTIONS = (
    (
        "check_config",
        "Check the settings, and this machine for the ports, folders, users and space that they need; print all "
        "problems, and exit. Nothing is started or changed.",
    ),
    ("print_config", "Print the settings in effect as a TOML file that says where each comes from, and exit."),
)


def _show_version(value: bool) -> None:
    if value:
        print(f"kvstore-server {__version__}")
        raise typer.Exit(0)


def _option(described: Described) -> Any:
    """Return the flag of a setting. The flag's value is text, which `read` parses like the text of a variable, so that
    the errors are the same."""
    switch = described.kind is bool
    return Annotated[
        bool | None if switch else str | None,
        typer.Option(
            f"{described.flag}/{described.flag.replace('--', '--no-', 1)}" if switch else described.flag,
            metavar=None if switch else described.value,
            help=f"{described.setting.help} [default: {described.default_text}]",
            show_default=False,
            autocompletion=(lambda: list(described.setting.choices)) if described.setting.choices else None,
        ),
    ]


def _parameters() -> list[inspect.Parameter]:
    """Return the flags in the order of the help: first the settings, then the other actions of the command."""
    settings = [each for each in describe(ServerConfig) if not each.setting.file_only]
    options: list[tuple[str, Any, bool | None]] = [
        ("config", Annotated[Path | None, typer.Option(metavar="FILE", help=_CONFIG_HELP)], None)
    ]
    options += [(each.name, _option(each), None) for each in settings]
    options += [
        (name, Annotated[bool, typer.Option(f"--{name.replace('_', '-')}", help=text)], False)
        for name, text in _ACTIONS
    ]
    version = typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    options.append(("version", Annotated[bool, version], False))
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in options
    ]


def _serve(**given: Any) -> None:
    """Serve KV blocks over ZeroMQ TCP until SIGTERM or SIGINT.

    Every setting can also come from a TOML file (--config) and from the environment, as KVSTORE_SERVER_<NAME>.
    """
    flags = {name: value for name, value in given.items() if name in ServerConfig.__struct_fields__}
    config, sources = read(given["config"], os.environ, flags)
    sources.add(fitting.misfits(config))
    if given["check_config"]:
        from kvstore.node import checking

        sources.add(checking.misfits(config))
    elif not given["print_config"]:
        sources.add(memory_limit.misfits(config))
    for problem in sources.problems:
        print_error(problem)
    if sources.problems:
        raise typer.Exit(BAD_USAGE)
    if given["print_config"]:
        from kvstore.node.settings_file import effective

        print(effective(config, HEADING, sources.source), end="")
    elif given["check_config"]:
        from kvstore.node import checking

        print("the settings are valid", *checking.made_at_start(config), sep="; ")
    else:
        _run(config)


def _run(config: ServerConfig) -> None:
    from kvstore.node.children import StartError
    from kvstore.node.supervisor import Supervisor

    configure(config.log_level, "supervisor", config.log_format)
    try:
        status = Supervisor(config).run()
    except StartError as error:
        log.error("the server cannot start: %s", error)
        raise typer.Exit(FAILED) from None
    raise typer.Exit(status)


_serve.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
server_app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
server_app.command(context_settings={"help_option_names": ["-h", "--help"]})(_serve)


def server_main() -> None:
    """Entry point of `kvstore-server`."""
    server_app(prog_name="kvstore-server")
