"""Inputs on which the bytes of a request's blocks depend, and which the engine's hash may not cover.

* **Media** (see `media_contents`): the hash covers their ids. If the places of several items overlap, it covers only
  the first of them.
* **Prompt embeddings**: the hash covers their bytes, block by block. It covers neither their type nor which places of
  the prompt use them. At every other place, the embedding of a token is used instead of the given row.
* **Further arguments of a pooling request** (`PoolingParams.extra_kwargs`), such as the types of its tokens: the model
  gets them, but the hash does not cover them.

Each input begins at some place of the prompt, and affects all blocks that end behind that place.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.utils import tensor_data

from kvstore_client.vllm.shared.media_contents import MediaContents, content_digest

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request


class RequestInputs:
    """The inputs of one request, as far as they are known at one time. Immutable."""

    def __init__(self, request: Request, media: MediaContents) -> None:
        self._seen = len(request.mm_features), media.version
        found = [*_embeddings(request), *(_item(feature, media) for feature in request.mm_features)]
        if arguments := _arguments(request):
            found.append((0, content_digest(arguments)))
        found.sort(key=lambda each: each[0])
        self._begins = [begin for begin, _ in found]
        self._digests: list[bytes | None] = []  # each covers all inputs up to a place; None if one of them is unknown
        digest: bytes | None = b""
        for begin, what in found:
            digest = None if digest is None or what is None else digest_of(digest, begin, what)
            self._digests.append(digest)

    def are_still(self, request: Request, media: MediaContents) -> bool:
        """Return whether this is still up to date. A session may get more inputs, and a content may become unknown."""
        return self._seen == (len(request.mm_features), media.version)

    def before(self, end: int) -> bytes | None:
        """Return a digest of all inputs that begin before token `end`. It is empty if there are no such inputs, and
        None if one of them is not known."""
        index = bisect_left(self._begins, end)
        return self._digests[index - 1] if index else b""


def has_inputs(request: Request) -> bool:
    """Return whether a request has inputs other than its tokens."""
    return bool(request.mm_features) or request.prompt_embeds is not None or bool(_arguments(request))


def key_of(block_hash: bytes, salt: bytes, inputs: bytes) -> bytes:
    """Return the key of a block in the store. It is as long as the block's hash. Without salt and inputs, it is equal
    to that hash.

    inputs: the digest from `RequestInputs.before` for the block's end.
    salt: further bytes that all keys of the request cover.
    """
    if not salt and not inputs:
        return block_hash
    key = digest_of(salt, inputs)
    return hashlib.blake2b(block_hash, digest_size=len(block_hash), key=key, person=b"kvstore-block").digest()


def digest_of(*parts: object) -> bytes:
    """Return a digest of 32 bytes for parts that are bytes, texts, numbers or None. It depends on the parts and on
    where each part ends."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        raw = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{type(part).__name__}:{len(raw)}:".encode())
        digest.update(raw)
    return digest.digest()


def embeddings_digest(request: Request, start: int, end: int) -> bytes:
    """Return a digest of the prompt's embeddings at the places from `start` to `end`; empty if it has no embeddings."""
    rows = request.prompt_embeds
    return b"" if rows is None else hashlib.sha256(tensor_data(rows[start:end])).digest()


def _item(feature: MultiModalFeatureSpec, media: MediaContents) -> tuple[int, bytes | None]:
    """Return where an item of a request begins, and a digest of the item, or None if its content is not known."""
    place, content = feature.mm_position, media.of(feature)
    if content is None:
        return place.offset, None
    # The mask says at which of the item's places the model puts the item. At the other places, the model uses tokens.
    mask = None if place.is_embed is None else np.asarray(place.is_embed, dtype=bool).tobytes()
    return place.offset, digest_of(feature.modality, feature.identifier, content, place.length, mask)


def _arguments(request: Request) -> dict[str, object]:
    params = request.pooling_params
    return (params.extra_kwargs or {}) if params is not None else {}


def _embeddings(request: Request) -> Iterator[tuple[int, bytes]]:
    """Yield the places where a prompt changes from tokens to embeddings or back, each with a digest of what begins
    there."""
    rows, mask = request.prompt_embeds, request.prompt_is_token_ids
    if rows is None:
        return
    if request.prompt_token_ids is None:
        kind: Sequence[tuple[int, str]] = [(0, "embeddings")]
    elif mask is None:
        kind = [(0, "both")]  # both are given, and the engine decides how to use them
    else:
        tokens = np.asarray(mask, dtype=bool)
        turns = [0, *(np.flatnonzero(tokens[1:] != tokens[:-1]) + 1).tolist()] if len(tokens) else []
        kind = [(turn, "tokens" if tokens[turn] else "embeddings") for turn in turns]
    for begin, what in kind:
        yield begin, digest_of(what, str(rows.dtype), rows.shape[-1])
