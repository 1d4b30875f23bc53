"""Options that an engine's operator writes as JSON, read into a typed struct.

A wrong option stops the engine while it starts: silently ignoring a misspelt option would cost the operator a day.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args

import msgspec

from kvstore.plugins import TRANSPORTS
from kvstore.secret_files import read_secret
from kvstore.sizes import parse_size
from kvstore.wire import MAX_DEADLINE_MS, MAX_REPLICAS
from kvstore_client._links.credentials import Credentials
from kvstore_client._links.lanes import MAX_CONNECTIONS
from kvstore_client.client import DEFAULT_CONNECTIONS, transport_name
from kvstore_client.endpoints import parse_endpoints, with_tls
from kvstore_client.engine.client_store import ClientOptions

MAX_TIMEOUT_S = MAX_DEADLINE_MS // 1000
MAX_TENANT = 256  # characters
JSON_TYPES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list"}

T = TypeVar("T", bound=msgspec.Struct)


class Size(int):
    """Bytes, given as a whole number or as text with a unit: 68719476736 or "64GiB"."""


_THIS_HOST: Final = ("localhost", "127.0.0.1", "::1")


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that the connector and the tier have in common. Durations in seconds.

    endpoint: as ``KVStoreClient`` takes it: one address, a list of nodes, or the URL of a cluster.
    timeout_s: the deadline of a request's load, after which its missing blocks are computed, and of every other call
        that moves blocks.
    lookup_timeout_s: how long a request waits for the store to say what it has. After that it counts as a miss.
    tenant: blocks are shared only within one tenant.
    weights_version: the operator's name for the weights that the engine starts with. Blocks are shared only among
        engines that give the same. Where the weights cannot be looked at, it promises that they never change.
    replicas: how many nodes of a cluster hold a copy of each block, 1 to 3. Equal in all engines that share blocks.
    connections: to each shard that is not on this host. Large reads are spread over them.
    token: what ``kvstore auth add`` printed, for a store with ``--auth``. vLLM logs its options, so rather give
        `token_file`, or the variables ``KVSTORE_TOKEN`` or ``KVSTORE_TOKEN_FILE``, which count when both are empty.
    token_file: the path of a file with the token. A new token in it is used from the next connection on.
    transport: read blocks with this transport from servers that allow it (``--transport``); empty: none.
    nixl: the same as ``"transport": "nixl"``, which servers allow with ``--nixl``.
    block_secret_file: a file with the secret that blocks' MACs are made and checked with (`KVStoreClient`'s
        ``block_secret``). Only engines with the same secret share blocks. Empty: as the environment says.
    tls_ca, tls_cert, tls_key: PEM files for connections with TLS, as ``KVStoreClient`` takes them.
    local: the address of a server on the engine's host, which is asked before `endpoint` and holds copies of what is
        set and found there; empty: none.
    trust_media_ids: take the id that a request gives a picture, a sound or a film for its content, as vLLM does. Only
        if an id means the same content in all engines of the tenant for ever. Equal in all that share blocks.
    """

    endpoint: Annotated[str | list[str], msgspec.Meta(examples=["tcp://127.0.0.1:7070"])]
    timeout_s: float = 5.0
    lookup_timeout_s: float = 1.0
    tenant: str = ""
    weights_version: str = ""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = 1
    connections: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONNECTIONS)] = DEFAULT_CONNECTIONS
    transport: str = ""
    nixl: bool = False
    token: str = ""
    token_file: str = ""
    block_secret_file: str = ""
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    local: str = ""
    trust_media_ids: bool = False

    def __post_init__(self) -> None:
        with_tls(parse_endpoints(self.endpoint), self.tls_ca, self.tls_cert, self.tls_key)  # the client's own check
        client = self.client  # the engine stops at once when the secret's file cannot be read
        if client.transport is not None:
            TRANSPORTS.find(client.transport)
        if self.local:
            local, store = parse_endpoints(self.local), parse_endpoints(self.endpoint)
            if len(local.nodes) != 1 or local.nodes == store.nodes:
                raise ValueError(
                    f"local is {self.local!r}; expected the address of one server on this host, other than endpoint. A "
                    "server on this host that is the only store is the endpoint itself"
                )
        if self.token and self.token_file:
            raise ValueError("token and token_file are both given; expected one of them")
        Credentials(client.token)  # the client's own check
        for name in ("timeout_s", "lookup_timeout_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected seconds, above 0 and at most {MAX_TIMEOUT_S}"
                )
        for name in ("tenant", "weights_version"):
            if len(getattr(self, name)) > MAX_TENANT:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} characters; expected a name of at most {MAX_TENANT}, the "
                    "same in every engine that shares blocks"
                )

    @property
    def client(self) -> ClientOptions:
        """What the clients of `endpoint` and `local` are given. Reads `block_secret_file`; raises ValueError if it
        cannot."""
        secret = read_secret(self.block_secret_file, "block_secret_file") if self.block_secret_file else None
        return ClientOptions(
            replicas=self.replicas,
            connections=self.connections,
            transport=transport_name(self.nixl, self.transport or None),
            token=Path(self.token_file) if self.token_file else self.token or None,
            block_secret=secret,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )

    @property
    def store_on_host(self) -> bool:
        """Whether blocks are set in a server on this host, as far as the addresses tell."""
        nodes = parse_endpoints(self.endpoint).nodes
        return bool(self.local) or (bool(nodes) and all(host.lower() in _THIS_HOST for host, _ in nodes))


_converting = threading.Lock()  # msgspec crashes when two threads are the first to use a type at the same time


def parse_options(kind: type[T], options: Mapping[str, Any], what: str) -> T:
    """``options`` as the struct ``kind``, whose fields are the valid options.

    Raises ValueError for an unknown option (naming the nearest valid one and all valid ones), a missing option, an
    option of the wrong type, and any value that ``kind`` itself refuses. The message begins with ``what``, the place
    where the options stand.
    """
    valid = kind.__struct_fields__
    if unknown := [name for name in options if name not in valid]:
        close = difflib.get_close_matches(str(unknown[0]), valid, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"{what}: unknown option {unknown[0]!r}{hint} Valid options: {', '.join(valid)}")
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in options:
            examples = [meta.examples[0] for meta in get_args(field.type)[1:] if meta.examples]
            example = f", for example {field.name}={examples[0]!r}" if examples else ""
            raise ValueError(f"{what}: {field.name} is missing; it must be given{example}")
    try:
        with _converting:
            return msgspec.convert(dict(options), kind, dec_hook=_read_size)
    except msgspec.ValidationError as error:
        raise ValueError(f"{what}: {_with_the_value(str(error), options)}") from None


def _read_size(kind: type, given: object) -> Size:
    if kind is not Size:
        raise NotImplementedError(f"options of type {kind}")
    try:
        if isinstance(given, str):
            return Size(parse_size(given))
        if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
            return Size(given)
    except ValueError:
        pass  # the error below says the same
    raise ValueError("expected a number of bytes, or text with a unit such as '64GiB'")


def _with_the_value(said: str, options: Mapping[str, Any]) -> str:
    """msgspec's message in JSON's terms, with the given value added: msgspec names only the place."""
    place = re.fullmatch(r"(.*) - at `\$\.(\w+).*`", said, re.DOTALL)
    if place is None:
        return said
    expectation, name = place.groups()
    for python_type, words in JSON_TYPES.items():
        expectation = re.sub(rf"\b{python_type}\b", words, expectation)
    expectation = expectation.replace("`", "").replace(" | ", " or ")
    return f"{name} is {options[name]!r}; {expectation[0].lower()}{expectation[1:]}"
