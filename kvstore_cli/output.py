"""The output and the exit status of commands.

| status | kind | meaning |
|---|---|---|
| 0 | | done |
| 1 | `unreachable` | a server cannot be reached or does not answer in time |
| 1 | `refused` | a server answers, but does not allow this to the token |
| 1 | `failed` | the command failed for another reason |
| 2 | `usage` | an option, an argument or a file is wrong, and nothing was done |
| 3 | `not_found` | no block has this key, or there is no such namespace |
| 4 | `damaged` | `verify` found damage |

Every failure prints one message on standard error. With --json, standard output is always one JSON document. If the
status is not 0, the document has `"error": {"kind": ..., "message": ...}`, in addition to any results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn, TypeAlias

import typer

from kvstore.exits import BAD_USAGE, FAILED, print_error

DEFAULT_ENDPOINT: Final = "127.0.0.1:7070"
NOT_FOUND: Final = 3
DAMAGED: Final = 4

Kind: TypeAlias = Literal["unreachable", "failed", "usage", "not_found", "damaged", "refused"]

_STATUS: Final[dict[Kind, int]] = {
    "unreachable": FAILED,
    "failed": FAILED,
    "usage": BAD_USAGE,
    "not_found": NOT_FOUND,
    "damaged": DAMAGED,
    "refused": FAILED,
}
HELP: Final = (
    "\b\n"
    "Exit status:\n"
    "  0  done\n"
    "  1  a server cannot be reached, refuses this, or the command failed\n"
    "  2  an option, an argument or a file is wrong\n"
    "  3  no block has this key (get), or no such namespace exists (purge, keys)\n"
    "  4  damage was found (verify)"
)


class CommandFailed(Exception):
    """Ends the command with this message and the status of its `kind`. `kvstore_cli.main` prints it."""

    def __init__(self, kind: Kind, message: str) -> None:
        if kind == "unreachable" and f"{DEFAULT_ENDPOINT}: Connection refused" in message:
            message += ". Start a server with kvstore-server, or name a running one with --endpoint HOST:PORT"
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message

    @property
    def status(self) -> int:
        return _STATUS[self.kind]

    @property
    def document(self) -> dict[str, Any]:
        """The failure in the form that --json prints."""
        return {"error": {"kind": self.kind, "message": self.message}}

    def print(self) -> None:
        """Print the message for people on standard error."""
        print_error(self.message)


def fail(kind: Kind, message: str) -> NoReturn:
    """End the command with a failure."""
    raise CommandFailed(kind, message)


def print_json(document: object, failure: CommandFailed | None = None) -> None:
    """Print a document as one line of JSON. With `failure`, the document also has its `error`."""
    import msgspec

    if failure is not None:
        document = msgspec.to_builtins(document) | failure.document
    print(msgspec.json.encode(document).decode())


def show(document: object, as_json: bool, people: Callable[[], object], failure: CommandFailed | None = None) -> None:
    """Print `document` as JSON, or call `people()` to print it for people. If there is a `failure`, end the command
    with its status afterwards."""
    if as_json:
        print_json(document, failure)
    else:
        people()
    if failure is not None:
        sys.stdout.flush()
        failure.print()
        raise typer.Exit(failure.status)


def example(*lines: str) -> str:
    """Return the end of a command's help, which has example calls."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def printable(text: str) -> str:
    """Return a text from another source, such as a model's name, without characters that control a terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
