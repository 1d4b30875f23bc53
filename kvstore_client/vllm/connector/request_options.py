"""What a request may ask of the connector: ``"kvstore": {…}`` in its ``kv_transfer_params``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from kvstore.wire import MAX_PRIORITY, MAX_TTL_S
from kvstore_client.engine.guard import Counters
from kvstore_client.vllm.shared.store_options import parse_options

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

NAME: Final = "kvstore"
MAX_WAIT_S: Final = 300


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """load: whether blocks may be loaded for this request. save: whether its blocks are saved. max_load_tokens,
    max_save_tokens: at most so many, counted from where the engine's own cache ends, and from the prompt's beginning.
    priority, ttl_s: of the blocks that are stored for it, as `KVStoreClient.set` takes them. wait_s: how long at most
    the engine waits for a prompt that another one computes; then it computes what has not come. traceparent: to which
    trace the request belongs, for engines that write traces. describe: whether the answer's own ``kv_transfer_params``
    are to say how the engine names its blocks, see `BlockNames`."""

    load: bool = True
    save: bool = True
    max_load_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_save_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)] = 0
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)] | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] | None = None
    traceparent: str = ""
    describe: bool = False


_DEFAULTS: Final = RequestOptions()
_REFUSED: Final = RequestOptions(load=False, save=False)


def is_to_describe(request: Request) -> bool:
    """Whether the request asks how the engine names its blocks."""
    given = (request.kv_transfer_params or {}).get(NAME)
    return isinstance(given, Mapping) and given.get("describe") is True


def request_options(request: Request, counters: Counters) -> RequestOptions:
    """What the request asks for. If that is not valid, the request is computed without the store, which is logged and
    counted: nobody can be told otherwise, and nobody else's requests may suffer."""
    given = (request.kv_transfer_params or {}).get(NAME)
    if given is None:
        return _DEFAULTS
    try:
        if not isinstance(given, Mapping):
            raise ValueError(f"kv_transfer_params: {NAME} is {given!r}; expected an object of options")
        options: dict[str, Any] = dict(given)
        return parse_options(RequestOptions, options, f'kv_transfer_params, "{NAME}"')
    except ValueError as error:
        logger.warning("kvstore: request %s is computed without the store: %s", request.request_id, error)
        counters.add("refused_requests")
        return _REFUSED
