"""The output and the exit status of commands.

| status | kind | meaning |
|---|---|---|
| 0 | | done |
| 1 | `unreachable`, `failed` | a server cannot be reached or does not answer in time; anything else that went wrong |
| 2 | `usage` | an option, an argument or a file is wrong: nothing was done |
| 3 | `not_found` | no block has this key; there is no such namespace |
| 4 | `damaged` | `verify` found damage |

Every failure prints one message on standard error. With --json, standard output is always one JSON document. If the
status is not 0, the document has `"error": {"kind": ..., "message": ...}`, beside any results there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn, TypeAlias

import typer

from kvstore.exits import BAD_USAGE, FAILED, print_error

NOT_FOUND: Final = 3
DAMAGED: Final = 4

Kind: TypeAlias = Literal["unreachable", "failed", "usage", "not_found", "damaged"]

_STATUS: Final[dict[Kind, int]] = {
    "unreachable": FAILED,
    "failed": FAILED,
    "usage": BAD_USAGE,
    "not_found": NOT_FOUND,
    "damaged": DAMAGED,
}
HELP: Final = (
    "\b\n"
    "Exit status:\n"
    "  0  done\n"
    "  1  a server cannot be reached, or the command failed\n"
    "  2  an option, an argument or a file is wrong\n"
    "  3  no block has this key (get), or there is no such namespace (purge)\n"
    "  4  damage was found (verify)"
)


class CommandFailed(Exception):
    """Ends the command with this message and the status of its `kind`. `kvstore_cli.main` prints it."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message

    @property
    def status(self) -> int:
        return _STATUS[self.kind]

    @property
    def document(self) -> dict[str, Any]:
        """The failure as --json prints it."""
        return {"error": {"kind": self.kind, "message": self.message}}

    def print(self) -> None:
        """Print the message for people, on standard error."""
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
    """Print `document` as JSON, or call `people()` to print it. With `failure`, then end the command with its
    status."""
    if as_json:
        print_json(document, failure)
    else:
        people()
    if failure is not None:
        sys.stdout.flush()
        failure.print()
        raise typer.Exit(failure.status)


def example(*lines: str) -> str:
    """The end of a command's help: example calls."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def printable(text: str) -> str:
    """A text that somebody else chose, such as a model's name, without what would control a terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
