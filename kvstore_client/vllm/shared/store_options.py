"""Reads the options that an engine's operator writes as JSON into a typed struct.

A wrong option stops the engine while it starts, because a misspelt option that is silently ignored would cost the
operator a day.
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
from kvstore_client._links.lanes import MAX_LANES
from kvstore_client.client import DEFAULT_CONNECTIONS, transport_name
from kvstore_client.endpoints import parse_endpoints, with_tls
from kvstore_client.engine.client_store import ClientOptions

MAX_STORE_TIMEOUT_S = MAX_DEADLINE_MS // 1000
MAX_TENANT = 256  # characters
JSON_TYPES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list"}

T = TypeVar("T", bound=msgspec.Struct)


class ByteSize(int):
    """A size in bytes, which is given as a whole number or as text with a unit, such as 68719476736 or "64GiB"."""


_THIS_HOST: Final = ("localhost", "127.0.0.1", "::1")


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that the connector and the tier have in common. Durations are in seconds.

    endpoint: the store, as for ``KVStoreClient``: one address, a list of nodes, or the URL of a cluster.
    timeout_s: the deadline of a request's load, after which the missing blocks are computed. It is also the deadline of
        every other call that moves blocks.
    lookup_timeout_s: how long a request waits for the store's answer to a lookup. After that, the lookup counts as a
        miss.
    tenant: the tenant of the blocks. Blocks are shared only within one tenant.
    weights_version: the operator's name for the weights that the engine starts with. Blocks are shared only among
        engines with the same name. If the weights cannot be read, the name promises that they never change.
    replicas: the number of nodes of a cluster that hold a copy of each block, 1 to 3. It must be equal in all engines
        that share blocks.
    connections: the number of connections to each shard that is not on this host. Large reads are spread over them.
    token: the token that ``kvstore auth add`` printed, for a store with ``--auth``. vLLM logs its options, so it is
        better to set `token_file` or an environment variable. If both options are empty, ``KVSTORE_TOKEN`` or
        ``KVSTORE_TOKEN_FILE`` is used.
    token_file: the path of a file with the token. If the file gets a new token, the next connection uses it.
    transport: the transport for reads from servers that allow it (``--transport``). Empty means none.
    nixl: the same as ``"transport": "nixl"``, which servers allow with ``--nixl``.
    block_secret_file: the path of a file with the secret that makes and checks the blocks' MACs (``block_secret`` of
        `KVStoreClient`). Only engines with the same secret share blocks. If the path is empty, the environment's
        secret is used.
    tls_ca, tls_cert, tls_key: PEM files for connections with TLS, as for ``KVStoreClient``.
    local: the address of a server on the engine's host, or empty. This server is asked before `endpoint`, and holds
        copies of the blocks that the engine sets at `endpoint` or finds there.
    trust_media_ids: whether to identify pictures, sounds and films by the ids that requests give them, as vLLM does,
        instead of by their contents. Set it only if an id means the same content for ever in all engines of the tenant.
        It must be equal in all engines that share blocks.
    """

    endpoint: Annotated[str | list[str], msgspec.Meta(examples=["tcp://127.0.0.1:7070"])]
    timeout_s: float = 5.0
    lookup_timeout_s: float = 1.0
    tenant: str = ""
    weights_version: str = ""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = 1
    connections: Annotated[int, msgspec.Meta(ge=1, le=MAX_LANES)] = DEFAULT_CONNECTIONS
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
        client = self.client  # stops the engine now if the secret's file cannot be read
        if client.transport is not None:
            TRANSPORTS.find(client.transport)
        if self.local:
            local, store = parse_endpoints(self.local), parse_endpoints(self.endpoint)
            if len(local.nodes) != 1 or local.nodes == store.nodes:
                raise ValueError(
                    f"local is {self.local!r}; expected the address of one server on this host that is not the "
                    "endpoint. If the only server is on this host, set only endpoint"
                )
        if self.token and self.token_file:
            raise ValueError("token and token_file are both given; expected one of them")
        Credentials(client.token)  # the client's own check
        for name in ("timeout_s", "lookup_timeout_s"):
            if not 0 < getattr(self, name) <= MAX_STORE_TIMEOUT_S:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected a number of seconds, above 0 and at most "
                    f"{MAX_STORE_TIMEOUT_S}"
                )
        for name in ("tenant", "weights_version"):
            if len(getattr(self, name)) > MAX_TENANT:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} characters; expected a name of at most {MAX_TENANT} "
                    "characters, which is the same in every engine that shares blocks"
                )

    @property
    def client(self) -> ClientOptions:
        """The options of the clients of `endpoint` and `local`. This reads `block_secret_file`, and raises ValueError
        if the file cannot be read."""
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
        """Whether the addresses show that blocks are set on a server on this host."""
        nodes = parse_endpoints(self.endpoint).nodes
        return bool(self.local) or (bool(nodes) and all(host.lower() in _THIS_HOST for host, _ in nodes))


_converting = threading.Lock()  # because msgspec crashes if two threads use a type for the first time at once


def parse_options(kind: type[T], options: Mapping[str, Any], what: str) -> T:
    """Return ``options`` as the struct ``kind``, whose fields are the valid options.

    Raises ValueError for a missing option, for an option of the wrong type, and for any value that ``kind`` itself
    refuses. Also raises it for an unknown option; the message then names the nearest valid option and all valid ones.
    The message begins with ``what``, the place where the options are written.
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


def _read_size(kind: type, given: object) -> ByteSize:
    if kind is not ByteSize:
        raise NotImplementedError(f"options of type {kind} are not supported")
    try:
        if isinstance(given, str):
            return ByteSize(parse_size(given))
        if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
            return ByteSize(given)
    except ValueError:
        pass  # the error below says the same
    raise ValueError("expected a number of bytes, or text with a unit such as '64GiB'")


def _with_the_value(said: str, options: Mapping[str, Any]) -> str:
    """Return msgspec's message in JSON's terms, and add the given value, because msgspec names only its place."""
    place = re.fullmatch(r"(.*) - at `\$\.(\w+).*`", said, re.DOTALL)
    if place is None:
        return said
    expectation, name = place.groups()
    for python_type, words in JSON_TYPES.items():
        expectation = re.sub(rf"\b{python_type}\b", words, expectation)
    expectation = expectation.replace("`", "").replace(" | ", " or ")
    return f"{name} is {options[name]!r}; {expectation[0].lower()}{expectation[1:]}"
