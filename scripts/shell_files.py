"""Makes the files that accompany the commands on a system: manual pages, and completion for bash, zsh and fish.

    python scripts/shell_files.py man FOLDER           kvstore-server.1, kvstore.1, and a page for each subcommand
    python scripts/shell_files.py completion FOLDER    bash/kvstore, zsh/_kvstore, fish/kvstore.fish; and the server's

Like --help, all texts come from the commands themselves and from the settings, those of the installed package or, with
scripts/run.sh (`make man`), those of this checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from typer.main import get_command

from kvstore import __version__
from kvstore.node.cli import server_app
from kvstore.node.config import CONFIG_VARIABLE, ENVIRONMENT_PREFIX, ServerConfig
from kvstore.node.settings import describe
from kvstore_cli.main import app
from kvstore_cli.options import DEFAULT_ENDPOINT, ENDPOINT_VARIABLE

MODULES: Final = {"kvstore": "kvstore_cli", "kvstore-server": "kvstore"}
COMPLETION_FILES: Final = {"bash": "bash/{0}", "zsh": "zsh/_{0}", "fish": "fish/{0}.fish"}

# ---- roff ------------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Escape text for roff, so that it contains no requests, and its hyphens can be copied as hyphens."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = re.sub(r",(?=\S)", r",\\:", text)  # a line may break after the comma
    text = re.sub(r"[^\x00-\x7f]", lambda letter: f"\\[u{ord(letter[0]):04X}]", text)
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def section(title: str, *lines: str) -> Iterator[str]:
    yield f".SH {title}"
    yield from lines


def option(names: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield f"\\fB{escaped(names)}\\fR"
    yield escaped(text)


def example(lines: Sequence[str]) -> Iterator[str]:
    yield ".nf"
    yield from map(escaped, lines)
    yield ".fi"


def page(name: str, summary: str, body: Sequence[str]) -> str:
    title = name.replace(" ", "-")
    head = f'.TH {title.upper()} 1 "" "kvstore {__version__}" "kvstore"'
    # Lines are not justified, because they have long words.
    return "\n".join([head, ".ad l", ".nh", *section("NAME", f"{escaped(title)} \\- {escaped(summary)}"), *body, ""])


# ---- the commands ----------------------------------------------------------------------------------------------------


def paragraphs(text: str | None) -> list[str]:
    """Return the paragraphs of a help text. Those that keep their line breaks begin with a backspace character."""
    parts = re.split(r"\n\s*\n", (text or "").strip())
    return [part if part.startswith("\b") else " ".join(part.split()) for part in parts if part.strip()]


def described(text: str | None) -> Iterator[str]:
    for paragraph in paragraphs(text):
        yield ".PP"
        if paragraph.startswith("\b"):
            yield from example(paragraph.removeprefix("\b\n").splitlines())
        else:
            yield escaped(paragraph)


def records(command: Any, context: Any, kind: str) -> Iterator[tuple[str, str]]:
    """Yield names and help of the arguments or the options of a command, as its --help shows them."""
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if parameter.param_type_name == kind and record is not None:
            yield record


def command_page(name: str, command: Any) -> str:
    """The page of `kvstore` or of a subcommand."""
    summary, *more = paragraphs(command.help) or [""]
    context = command.make_context(name, [], resilient_parsing=True)
    commands = getattr(command, "commands", {})
    body = [*section("SYNOPSIS", escaped(" ".join([name, *command.collect_usage_pieces(context)])))]
    body += section("DESCRIPTION", *described("\n\n".join([summary, *more])))
    if commands:
        body += section("COMMANDS")
        for child, its in sorted(commands.items()):
            body += option(f"{name} {child}", (paragraphs(its.help) or [""])[0])
    parameters = [*records(command, context, "argument"), *records(command, context, "option")]
    body += section("OPTIONS", *(line for names, text in parameters for line in option(names, text)))
    for paragraph in paragraphs(command.epilog):
        title, *lines = paragraph.removeprefix("\b\n").splitlines()
        body += section(title.rstrip(":").upper(), *example([line.removeprefix("  ") for line in lines]))
    if name == "kvstore":
        body += section(
            "ENVIRONMENT", *option(ENDPOINT_VARIABLE, f"The server, without --endpoint. [default: {DEFAULT_ENDPOINT}]")
        )
    others = [f"{name} {child}" for child in sorted(commands)] or [name.rpartition(" ")[0]]
    body += section(
        "SEE ALSO", escaped(", ".join(f"{other.replace(' ', '-')}(1)" for other in [*others, "kvstore-server"]))
    )
    return page(name, summary.rstrip("."), body)


def pages(name: str, command: Any) -> Iterator[tuple[str, str]]:
    """Yield the file names and pages of a command and of all below it."""
    yield f"{name.replace(' ', '-')}.1", command_page(name, command)
    for child, its in getattr(command, "commands", {}).items():
        yield from pages(f"{name} {child}", its)


def server_page() -> str:
    command: Any = get_command(server_app)
    summary, *more = paragraphs(command.help)
    body = [*section("SYNOPSIS", escaped("kvstore-server [OPTIONS]"))]
    body += section("DESCRIPTION", *described("\n\n".join([summary, *more])))
    settings = {each.name: each for each in describe(ServerConfig)}
    title = ""
    for each in settings.values():
        if each.setting.section != title:
            title = each.setting.section
            body += section(f"{title.upper()} SETTINGS")
        if each.setting.file_only:
            text = f"In the file only. {each.setting.help} For example:"
            body += [
                *option(f"[[{each.name}]]", text),
                *example([f"[[{each.name}]]", *each.setting.example.splitlines()]),
            ]
        else:
            negative = f", {each.flag.replace('--', '--no-', 1)}" if each.kind is bool else f" {each.value}"
            body += option(f"{each.flag}{negative}", f"{each.setting.help} [default: {each.default_text}]")
    body += section("OTHER OPTIONS")
    context = command.make_context("kvstore-server", [], resilient_parsing=True)
    flags = {each.flag for each in settings.values()}
    for names, text in records(command, context, "option"):
        if not flags & set(re.findall(r"--[\w-]+", names)):
            body += option(names, text)
    body += section("EXIT STATUS")
    for status, meaning in (
        ("0", "SIGTERM or SIGINT ended it, or --check-config found no error."),
        ("1", "It could not start; the log says why."),
        ("2", "A setting is unknown or wrong, or does not fit the others or this machine."),
    ):
        body += option(status, meaning)
    body += section("SIGNALS")
    body += option(
        "SIGTERM, SIGINT",
        "Stop: drain if --drain-seconds is set, finish requests, write to disk what is only in memory. A second signal "
        "ends the draining or, if there is none, stops the server at once.",
    )
    body += section("ENVIRONMENT")
    body += option(CONFIG_VARIABLE, "The file of settings, if --config is not given.")
    body += option(f"{ENVIRONMENT_PREFIX}<NAME>", f"A setting: {ENVIRONMENT_PREFIX}LOG_LEVEL for --log-level.")
    body += option("NOTIFY_SOCKET, WATCHDOG_USEC", "Set by systemd for units of Type=notify.")
    body += section("FILES", *option("/etc/kvstore/server.toml", "The settings of the systemd unit."))
    body += section("SEE ALSO", escaped("kvstore(1), systemctl(1)"))
    return page("kvstore-server", summary.rstrip("."), body)


# ---- completion ------------------------------------------------------------------------------------------------------


def completion(command: str, shell: str) -> str:
    """Return the script that the command itself prints for a shell."""
    done = subprocess.run(
        [sys.executable, "-m", MODULES[command], "--show-completion", shell],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},  # use `shell`, not the caller's shell
        capture_output=True,
        text=True,
        check=True,
    )
    if shell != "zsh":
        return done.stdout
    # zsh reads the file when it first completes the command, as the body of the completing function. So the file must
    # also run the completion; otherwise the first TAB in every shell does nothing.
    function = f"_{command.replace('-', '_')}_completion"
    return f'{done.stdout.rstrip()}\n\n[[ $funcstack[1] != _{command} ]] || {function} "$@"\n'


def main(kind: str, folder: Path) -> None:
    files: dict[str, str] = {}
    if kind == "man":
        files = {**dict(pages("kvstore", get_command(app))), "kvstore-server.1": server_page()}
    elif kind == "completion":
        files = {
            place.format(command): completion(command, shell)
            for command in MODULES
            for shell, place in COMPLETION_FILES.items()
        }
    else:
        sys.exit(f"{kind}: expected man or completion, and a folder")
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
