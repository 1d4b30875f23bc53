"""The options an engine's operator sets: the JSON of a command line flag, read into one typed struct.

Only this module and the checks in ``identity`` may stop an engine, and only while it starts: a misspelt option that
is silently ignored costs its user a day. Everything after the start is a miss at worst.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args

import msgspec

from kvstore._cext import BlockIndex
from kvstore.sizes import parse_size
from kvstore.wire import MAX_DEADLINE_MS, MAX_REPLICAS

LONGEST_TIMEOUT_S = MAX_DEADLINE_MS // 1000
LEAST_STAGING_BYTES = 1 << 20
LONGEST_TENANT = 256
JSON_TYPES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list"}

T = TypeVar("T", bound=msgspec.Struct)


class Size(int):
    """Bytes, given as a whole number or as text with a unit: 68719476736 or "64GiB"."""


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine may say about the store it uses. Durations in seconds, sizes in bytes or as text ("64GiB").

    endpoint: as ``KVStoreClient`` takes it: one address, a list of nodes, or a cluster's URL.
    cpu_bytes: host memory of the CPU tier between the engine's cache and the store, for the whole engine: every rank
        has an equal share. 0 leaves the tier out.
    cpu_policy: which block of the CPU tier goes first, as the server's ``--policy``.
    staging_bytes: without a CPU tier, host memory of each rank for blocks on their way to and from the store. When
        the store is slower than the engine it fills, and the oldest blocks that wait in it are dropped.
    timeout_s: deadline of the transfer in of one request, after which its missing blocks are computed, and of every
        call that sends blocks out.
    lookup_timeout_s: how long a request waits to learn what the store has of it, before that counts as nothing.
    min_hit_tokens: what saves fewer tokens than this is not asked of the store.
    save_decode: save the blocks filled by generated tokens too, which are part of the next turn's prompt.
    tenant: blocks are shared only within one tenant.
    replicas: nodes of a cluster that hold a copy of each block, 1 to 3; the same in every engine that shares blocks.
    """

    endpoint: Annotated[str | list[str], msgspec.Meta(examples=["tcp://127.0.0.1:7070"])]
    cpu_bytes: Size = Size(0)
    cpu_policy: str = "default"
    staging_bytes: Size = Size(512 << 20)
    timeout_s: float = 5.0
    lookup_timeout_s: float = 1.0
    min_hit_tokens: int = 0
    save_decode: bool = True
    tenant: str = ""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = 1

    def __post_init__(self) -> None:
        addresses = [self.endpoint] if isinstance(self.endpoint, str) else self.endpoint
        if not addresses or not all("://" in address for address in addresses):
            raise ValueError(
                f"endpoint is {self.endpoint!r}; expected an address such as 'tcp://127.0.0.1:7070', "
                "a list of them, or a cluster's URL such as 'etcd://127.0.0.1:2379/NAME'"
            )
        if self.cpu_policy not in BlockIndex.POLICIES:
            raise ValueError(f"cpu_policy is {self.cpu_policy!r}; expected one of {', '.join(BlockIndex.POLICIES)}")
        if self.staging_bytes < LEAST_STAGING_BYTES:
            raise ValueError(
                f"staging_bytes is {self.staging_bytes}; expected at least 1MiB, room for a block of the model and "
                "better for hundreds: leave it out to have 512MiB"
            )
        for name in ("timeout_s", "lookup_timeout_s"):
            if not 0 < getattr(self, name) <= LONGEST_TIMEOUT_S:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected seconds, above 0 and at most {LONGEST_TIMEOUT_S}"
                )
        if self.min_hit_tokens < 0:
            raise ValueError(f"min_hit_tokens is {self.min_hit_tokens}; expected 0 or more tokens")
        if len(self.tenant) > LONGEST_TENANT:
            raise ValueError(
                f"tenant has {len(self.tenant)} characters; expected a name of at most {LONGEST_TENANT}, the same in "
                "every engine that shares blocks"
            )


def parse_config(extra_config: Mapping[str, Any]) -> ConnectorConfig:
    """Read ``kv_connector_extra_config``. Raises ValueError naming what was given and what is valid."""
    return parse_options(ConnectorConfig, extra_config, "kv_connector_extra_config")


def parse_options(kind: type[T], options: Mapping[str, Any], what: str) -> T:
    """``options`` as the struct ``kind``, whose fields are the valid options.

    Raises ValueError beginning with ``what``, for an option nobody knows (naming the nearest and all valid ones), one
    that is missing, one of the wrong type, and whatever ``kind`` itself refuses.
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
        pass  # says the same as the error below
    raise ValueError("expected a number of bytes, or text with a unit such as '64GiB'")


def _with_the_value(said: str, options: Mapping[str, Any]) -> str:
    """msgspec's words in JSON's terms and with the value that was given: it names only the place."""
    place = re.fullmatch(r"(.*) - at `\$\.(\w+).*`", said, re.DOTALL)
    if place is None:
        return said
    expectation, name = place.groups()
    for python_type, words in JSON_TYPES.items():
        expectation = re.sub(rf"\b{python_type}\b", words, expectation)
    expectation = expectation.replace("`", "").replace(" | ", " or ")
    return f"{name} is {options[name]!r}; {expectation[0].lower()}{expectation[1:]}"
