"""What the commands of `kvstore` share: options, exit statuses, a client for as long as a command runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.exits import BAD_USAGE, FAILED, fail

if TYPE_CHECKING:
    from kvstore_client import KVStoreClient

EndpointOption = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        help="tcp://HOST:PORT, repeated for several nodes, etcd://HOST:PORT/NAME or dns://SERVICE:PORT. "
        "[default: tcp://127.0.0.1:7070]",
    ),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.001, max=600.0, help="Seconds a request may take.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace",
        help='The namespace as JSON, e.g. \'{"model":"m","dtype":"bfloat16","block_tokens":16,"block_bytes":4096}\'.',
    ),
]
KeysArgument = Annotated[list[str], typer.Argument(help="Keys in hexadecimal, 8 to 64 bytes each.")]


def endpoints_of(endpoint: list[str] | None) -> list[str]:
    return endpoint or ["tcp://127.0.0.1:7070"]


def parse_keys(keys: list[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(key) for key in keys]
    except ValueError:
        wrong = next(key for key in keys if not _is_hex(key))
        fail(f"key {wrong!r}: expected hexadecimal digits, two a byte", BAD_USAGE)


def _is_hex(text: str) -> bool:
    try:
        bytes.fromhex(text)
    except ValueError:
        return False
    return True


def print_json(document: object) -> None:
    import msgspec

    print(msgspec.json.encode(document).decode())


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Exit 1 with the message for what the store says, 2 for what the user gave."""
    from kvstore_client import BlockSizeMismatch, KeySizeMismatch, KVStoreError

    try:
        yield
    except (BlockSizeMismatch, KeySizeMismatch) as error:
        fail(str(error), BAD_USAGE)
    except KVStoreError as error:
        fail(str(error), FAILED)
    except (TypeError, ValueError) as error:
        fail(str(error), BAD_USAGE)


def show(document: object, as_json: bool, people: Callable[[], object]) -> None:
    """Print `document` as JSON, or what `people()` prints."""
    if as_json:
        print_json(document)
    else:
        people()


@contextlib.contextmanager
def connected(
    endpoint: list[str] | None, namespace: str | None, timeout: float, **options: Any
) -> Iterator[KVStoreClient]:
    """A client of `endpoint` and `namespace` (JSON), with `options`; what goes wrong ends the command."""
    from kvstore_client import KVStoreClient, Namespace

    with errors():
        import msgspec

        if namespace is None:
            found = Namespace(model="kvstore-cli", dtype="none", block_tokens=1, block_bytes=1)
        else:
            try:
                found = msgspec.json.decode(namespace, type=Namespace)
            except msgspec.DecodeError as error:
                fail(f"--namespace: {error}", BAD_USAGE)
        with KVStoreClient(endpoints_of(endpoint), found, timeout_s=timeout, **options) as client:
            yield client
