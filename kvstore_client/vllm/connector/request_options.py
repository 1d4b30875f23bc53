"""The options that a request gives to the connector, as ``"kvstore": {…}`` in its ``kv_transfer_params``."""

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

OPTIONS_NAME: Final = "kvstore"
MAX_WAIT_S: Final = 300


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one request.

    load: whether blocks may be loaded for this request.
    save: whether blocks of this request may be saved.
    max_load_tokens: the largest number of tokens to load, counted from the end of the prefix in the engine's own cache.
    max_save_tokens: the largest number of tokens to save, counted from the prompt's beginning.
    priority, ttl_s: the priority and the time to live of the blocks that are stored for this request, as in
        `KVStoreClient.set`.
    wait_s: the longest time that the engine waits for a prompt that another engine computes, in seconds. After that, it
        computes the blocks that have not come.
    traceparent: the trace of the request, for engines that write traces.
    describe: whether ``kv_transfer_params`` of the answer says how the engine names its blocks; see `BlockNames`.
    """

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
_REFUSED_OPTIONS: Final = RequestOptions(load=False, save=False)


def is_to_describe(request: Request) -> bool:
    """Return whether the request asks how the engine names its blocks."""
    given = (request.kv_transfer_params or {}).get(OPTIONS_NAME)
    return isinstance(given, Mapping) and given.get("describe") is True


def request_options(request: Request, counters: Counters) -> RequestOptions:
    """Return the request's options. If they are not valid, return options with which the request is computed without
    the store. This is logged and counted, because the sender cannot be informed and other requests must not be
    affected."""
    given = (request.kv_transfer_params or {}).get(OPTIONS_NAME)
    if given is None:
        return _DEFAULTS
    try:
        if not isinstance(given, Mapping):
            raise ValueError(f"kv_transfer_params: {OPTIONS_NAME} is {given!r}; expected an object of options")
        options: dict[str, Any] = dict(given)
        return parse_options(RequestOptions, options, f'kv_transfer_params, "{OPTIONS_NAME}"')
    except ValueError as error:
        logger.warning("kvstore: request %s is computed without the store: %s", request.request_id, error)
        counters.add("refused_requests")
        return _REFUSED_OPTIONS
