"""The options and arguments that several commands share, the code that parses them, and the client that they
describe."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

import typer

from kvstore_cli.output import DEFAULT_ENDPOINT, fail

if TYPE_CHECKING:
    from kvstore_client import KVStoreClient, Namespace

ENDPOINT_VARIABLE: Final = "KVSTORE_ENDPOINT"
NAMESPACE_VARIABLE: Final = "KVSTORE_NAMESPACE"
ID_DIGITS: Final = 12  # the number of digits shown of a namespace's id
_THREAD_POLL_S: Final = 0.02
_Record = TypeVar("_Record")

EndpointOption = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        "-e",
        metavar="ADDRESS",
        help="HOST:PORT (tls://HOST:PORT with TLS), repeated for several nodes, etcd[s]://HOST:PORT/NAME or "
        "dns://SERVICE:PORT. "
        f"[env var: {ENDPOINT_VARIABLE}; default: {DEFAULT_ENDPOINT}]",
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", min=0.001, max=600.0, help="The most seconds that a request may take."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, also for a failure.")]
NAMESPACE_HELP: Final = (
    'The namespace as JSON, e.g. \'{"model":"m","dtype":"bfloat16","block_tokens":16,"block_bytes":4096}\', '
    "or @FILE for a file that contains it."
)
NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-n", metavar="JSON|@FILE", envvar=NAMESPACE_VARIABLE, help=NAMESPACE_HELP)
]


def _bytes(given: str | int) -> int:
    from kvstore.sizes import parse_size

    text = str(given)  # a default is a number
    try:
        count = int(float(text)) if "e" in text.lower() and text.strip()[-1:].isdigit() else parse_size(text)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise typer.BadParameter(f"{text!r}: expected at least one byte: a number, or one with a unit, as 64KiB or 4GB")
    return count


def size_option(help: str, metavar: str = "SIZE") -> Any:
    """Return an option whose value is a number of bytes: ``65536``, ``64KiB`` as for the server's settings, or
    ``4e9``."""
    return typer.Option(metavar=metavar, parser=_bytes, help=help)


KeyArgument = Annotated[str, typer.Argument(help="Key in hexadecimal, 8 to 64 bytes.")]
KeysArgument = Annotated[list[str], typer.Argument(help="Keys in hexadecimal, 8 to 64 bytes each.")]


def takes(record: type[_Record]) -> Callable[[Callable[[_Record], None]], Callable[..., None]]:
    """Return a decorator for commands with many options. Each field of the dataclass `record` is an option, and the
    command gets all options as one record."""
    hints = get_type_hints(record, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(record)  # type: ignore[arg-type] # it is a dataclass
    ]

    def decorate(command: Callable[[_Record], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            command(record(**given))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = hints
        return run

    return decorate


def need_modules(command: str, *modules: str) -> None:
    """End the command unless it can import all of these modules, which come with the extra `serving`."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            fail(
                "failed",
                f"kvstore {command} needs {error.name}, which is not installed for this Python: {sys.executable} -m "
                f'pip install "llm-kvstore[serving]". In a checkout, make run ARGS="kvstore {command} …" needs no '
                "installation",
            )


def endpoints_of(endpoint: list[str] | None) -> list[str]:
    """Return the given addresses. If there are none, return those in the environment, or else the default."""
    return endpoint or [os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT]


def parse_key(key: str) -> bytes:
    """Return the key that is given as hexadecimal digits. Ends the command if the digits are invalid."""
    from kvstore.wire import MAX_KEY_BYTES, MIN_KEY_BYTES

    try:
        parsed = bytes.fromhex(key)
    except ValueError:
        fail("usage", f"key {key!r}: expected hexadecimal digits, two for each byte")
    if not MIN_KEY_BYTES <= len(parsed) <= MAX_KEY_BYTES:
        fail("usage", f"key {key!r} has {len(parsed)} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
    return parsed


def parse_namespace(given: str) -> Namespace:
    """Return the namespace that --namespace gives as JSON or as @FILE. Ends the command if it is invalid."""
    import msgspec

    from kvstore_client import Namespace

    text: str | bytes = given
    if given.startswith("@"):
        try:
            text = Path(given[1:]).read_bytes()
        except OSError as error:
            fail("usage", f"--namespace {given}: {error.strerror}")
    try:
        return msgspec.json.decode(text, type=Namespace)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "" if given.lstrip()[:1] in ("{", "@") else "; to read it from a file, give @FILE"
        fail("usage", f"--namespace: {error}{hint}")


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """End the command if the client raises an error in the body. The exit status fits the error."""
    from kvstore_client import BlockSizeMismatch, ConnectionLost, KeySizeMismatch, KVStoreError, NotAuthorized, Timeout

    try:
        yield
    except (BlockSizeMismatch, KeySizeMismatch) as error:
        fail("usage", str(error))
    except (ConnectionLost, Timeout) as error:
        fail("unreachable", str(error))
    except NotAuthorized as error:
        fail("refused", str(error))
    except KVStoreError as error:
        fail("failed", str(error))


@contextlib.contextmanager
def connected(
    endpoint: list[str] | None, namespace: Namespace | None, timeout: float, **options: Any
) -> Iterator[KVStoreClient]:
    """Yield a client of `endpoint` with these `options`. Any error of the client ends the command. `namespace`: None
    for commands that use no blocks."""
    from kvstore_client import KVStoreClient, KVStoreError, Namespace

    # The client's log is silenced, because the command itself prints the error.
    for name in ("kvstore", "kvstore_client"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    namespace = namespace or Namespace(model="kvstore-cli", dtype="uint8", block_tokens=1, block_bytes=1)
    with store_errors():
        try:
            client = KVStoreClient(endpoints_of(endpoint), namespace, timeout_s=timeout, **options)
        except KVStoreError:
            raise
        except (ValueError, ImportError) as error:
            fail("usage", str(error))
        with client:
            if options.get("fail_open"):  # with `fail_open`, the client itself waits only briefly for the directory
                _await_directory(client, timeout)
            yield client


_DIRECTORY_S: Final = 5.0  # how long a command waits for the members of a cluster


def _await_directory(client: KVStoreClient, timeout: float) -> None:
    """Wait until the client knows the members of its cluster, for at most `timeout` seconds."""
    deadline = time.monotonic() + min(timeout, _DIRECTORY_S)
    while client.directory_error and time.monotonic() < deadline:
        time.sleep(_THREAD_POLL_S)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the body in the same way as Ctrl-C, so that the body's clean-up runs."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
