"""The options and arguments that commands of `kvstore` share, their parsing, and a client made from them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

import typer

from kvstore_cli.output import fail

if TYPE_CHECKING:
    from kvstore_client import KVStoreClient, Namespace

ENDPOINT_VARIABLE: Final = "KVSTORE_ENDPOINT"
DEFAULT_ENDPOINT: Final = "127.0.0.1:7070"
_LOOK_S: Final = 0.02
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
    float, typer.Option("--timeout", metavar="SECONDS", min=0.001, max=600.0, help="Seconds a request may take.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, also for a failure.")]
NAMESPACE_HELP: Final = (
    'The namespace as JSON, e.g. \'{"model":"m","dtype":"bfloat16","block_tokens":16,"block_bytes":4096}\', '
    "or @FILE that holds it."
)
NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-n", metavar="JSON|@FILE", envvar="KVSTORE_NAMESPACE", help=NAMESPACE_HELP)
]
KeyArgument = Annotated[str, typer.Argument(help="Key in hexadecimal, 8 to 64 bytes.")]
KeysArgument = Annotated[list[str], typer.Argument(help="Keys in hexadecimal, 8 to 64 bytes each.")]


def takes(record: type[_Record]) -> Callable[[Callable[[_Record], None]], Callable[..., None]]:
    """-> a decorator of commands with many options: each field of this dataclass is one, and the command gets them as
    one record."""
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
    """End the command unless it can import all of these, which come with the extra `serving`."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = f"kvstore {command} needs {error.name}, which is not here"
            fail("failed", f'{missing}: pip install "llm-kvstore[serving]"')


def endpoints_of(endpoint: list[str] | None) -> list[str]:
    """The addresses that were given, else the one in the environment, else the default."""
    return endpoint or [os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT]


def parse_key(key: str) -> bytes:
    """The key that hexadecimal digits stand for. Ends the command if it is invalid."""
    from kvstore.wire import MAX_KEY_BYTES, MIN_KEY_BYTES

    try:
        parsed = bytes.fromhex(key)
    except ValueError:
        fail("usage", f"key {key!r}: expected hexadecimal digits, two for each byte")
    if not MIN_KEY_BYTES <= len(parsed) <= MAX_KEY_BYTES:
        fail("usage", f"key {key!r} has {len(parsed)} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
    return parsed


def parse_namespace(given: str) -> Namespace:
    """The namespace given by --namespace: JSON, or @FILE. Ends the command if it is invalid."""
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
    """End the command when the client raises in the body, with the status that fits the error."""
    from kvstore_client import BlockSizeMismatch, ConnectionLost, KeySizeMismatch, KVStoreError, Timeout

    try:
        yield
    except (BlockSizeMismatch, KeySizeMismatch) as error:
        fail("usage", str(error))
    except (ConnectionLost, Timeout) as error:
        fail("unreachable", str(error))
    except KVStoreError as error:
        fail("failed", str(error))


@contextlib.contextmanager
def connected(
    endpoint: list[str] | None, namespace: Namespace | None, timeout: float, **options: Any
) -> Iterator[KVStoreClient]:
    """A client of `endpoint`, with `options`. Any error of the client ends the command. `namespace` None: for commands
    that look at no blocks."""
    from kvstore_client import KVStoreClient, KVStoreError, Namespace

    # The command itself prints the error, once, so the client's log is silenced.
    for name in ("kvstore", "kvstore_client"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    namespace = namespace or Namespace(model="kvstore-cli", dtype="uint8", block_tokens=1, block_bytes=1)
    with store_errors():
        try:
            client = KVStoreClient(endpoints_of(endpoint), namespace, timeout_s=timeout, **options)
        except KVStoreError:
            raise
        except ValueError as error:
            fail("usage", str(error))
        with client:
            if options.get("fail_open"):  # such a client does not wait for its directory for long: engines cannot
                _await_directory(client, timeout)
            yield client


def _await_directory(client: KVStoreClient, timeout: float) -> None:
    """Wait until the client knows the members of its cluster, for so many seconds at most."""
    deadline = time.monotonic() + timeout
    while client.directory_error and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
