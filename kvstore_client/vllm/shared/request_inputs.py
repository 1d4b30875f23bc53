"""What decides the bytes of a request's blocks and is not, or not for sure, in the engine's hash of them.

* **Media** (see `media_contents`): the hash has ids, and of items whose places overlap only the first.
* **Prompt embeddings**: the hash has their bytes, block by block. It has neither their type nor which places of the
  prompt take them: at each of the others the embedding of a token is taken, and the row given for it is not used.
* **Further arguments of a pooling request** (`PoolingParams.extra_kwargs`), such as the types of its tokens: the model
  gets them, and the hash has none of them.

Each begins at some place of the prompt and counts for all blocks that end behind it.
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
    """What is known of one request's inputs now. Immutable."""

    def __init__(self, request: Request, media: MediaContents) -> None:
        self._seen = len(request.mm_features), media.version
        found = [*_embeddings(request), *(_item(feature, media) for feature in request.mm_features)]
        if arguments := _arguments(request):
            found.append((0, content_digest(arguments)))
        found.sort(key=lambda each: each[0])
        self._begins = [begin for begin, _ in found]
        self._digests: list[bytes | None] = []  # of all that begins up to there; None: some of it is not known
        digest: bytes | None = b""
        for begin, what in found:
            digest = None if digest is None or what is None else digest_of(digest, begin, what)
            self._digests.append(digest)

    def are_still(self, request: Request, media: MediaContents) -> bool:
        """Whether this holds: a session gets further inputs, and contents may turn out not to be known."""
        return self._seen == (len(request.mm_features), media.version)

    def before(self, end: int) -> bytes | None:
        """A digest of all inputs that begin before token `end`; empty if there are none. None: they are not known."""
        index = bisect_left(self._begins, end)
        return self._digests[index - 1] if index else b""


def has_inputs(request: Request) -> bool:
    """Whether there is more to a request than its tokens."""
    return bool(request.mm_features) or request.prompt_embeds is not None or bool(_arguments(request))


def key_of(block_hash: bytes, salt: bytes, inputs: bytes) -> bytes:
    """The key of a block in the store, as long as its hash, and the hash itself if there is nothing to add.

    inputs: what `RequestInputs.before` says of the block's end. salt: what all keys of its request cover beside that.
    """
    if not salt and not inputs:
        return block_hash
    key = digest_of(salt, inputs)
    return hashlib.blake2b(block_hash, digest_size=len(block_hash), key=key, person=b"kvstore-block").digest()


def digest_of(*parts: object) -> bytes:
    """A digest of bytes, texts, numbers and None, of 32 bytes. Other parts, or other borders of them, have another."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        raw = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{type(part).__name__}:{len(raw)}:".encode())
        digest.update(raw)
    return digest.digest()


def embeddings_digest(request: Request, start: int, end: int) -> bytes:
    """A digest of the prompt's embeddings at these places; empty if it has none."""
    rows = request.prompt_embeds
    return b"" if rows is None else hashlib.sha256(tensor_data(rows[start:end])).digest()


def _item(feature: MultiModalFeatureSpec, media: MediaContents) -> tuple[int, bytes | None]:
    """Where an item of a request begins, and what it is."""
    place, content = feature.mm_position, media.of(feature)
    if content is None:
        return place.offset, None
    # Of its places, the model puts the item at those of the mask, and takes tokens at the others.
    mask = None if place.is_embed is None else np.asarray(place.is_embed, dtype=bool).tobytes()
    return place.offset, digest_of(feature.modality, feature.identifier, content, place.length, mask)


def _arguments(request: Request) -> dict[str, object]:
    params = request.pooling_params
    return (params.extra_kwargs or {}) if params is not None else {}


def _embeddings(request: Request) -> Iterator[tuple[int, bytes]]:
    """The places where a prompt goes over from tokens to embeddings, or back."""
    rows, mask = request.prompt_embeds, request.prompt_is_token_ids
    if rows is None:
        return
    if request.prompt_token_ids is None:
        kind: Sequence[tuple[int, str]] = [(0, "embeddings")]
    elif mask is None:
        kind = [(0, "both")]  # what the engine makes of that is its own affair
    else:
        tokens = np.asarray(mask, dtype=bool)
        turns = [0, *(np.flatnonzero(tokens[1:] != tokens[:-1]) + 1).tolist()] if len(tokens) else []
        kind = [(turn, "tokens" if tokens[turn] else "embeddings") for turn in turns]
    for begin, what in kind:
        yield begin, digest_of(what, str(rows.dtype), rows.shape[-1])
