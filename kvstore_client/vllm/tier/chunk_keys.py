"""The keys of chunks in the store.

The engine's own key of a chunk consists of the hash of its last block and the number of its cache group. The store's
key is either the same, or a hash of the engine's key and of inputs that this key does not cover (see
`shared/request_inputs`).

A chunk's key alone does not show which pictures or embeddings it stands for. So the tier must know the request for
which a chunk is looked up, stored or loaded. The framework notifies a tier of each new request, but does not pass the
request itself. The tier takes it from the call stack, because the framework's calling function has it. A chunk of an
unknown request is shared only if the model takes nothing but tokens.

Everything here runs on the scheduler's thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from vllm.v1.request import Request

from kvstore_client.vllm.shared.media_contents import MediaContents
from kvstore_client.vllm.shared.request_inputs import RequestInputs, has_inputs, key_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

GENERATION_BYTES = 16


class _Known:
    """A request and what is known of its inputs. The framework's state of the request holds this object."""

    def __init__(self, request: Request, media: MediaContents) -> None:
        self.request = request
        self._media = media
        self._inputs = RequestInputs(request, media)

    @property
    def inputs(self) -> RequestInputs:
        while not self._inputs.are_still(self.request, self._media):
            self._inputs = RequestInputs(self.request, self._media)
        return self._inputs


class ChunkKeys:
    """Makes the keys of one engine's chunks. Not thread-safe."""

    def __init__(self, model: ModelConfig, *, trust_media_ids: bool) -> None:
        self._only_tokens = (
            model.multimodal_config is None and not model.enable_prompt_embeds and model.runner_type == "generate"
        )
        self._media = MediaContents(trust_ids=trust_media_ids)
        self._generation = b""
        self._sessions: WeakSet[_Known] = WeakSet()

    def note(self, context: ReqContext) -> None:
        """Note a new request. Call this from the method that the framework calls, because the request is taken from the
        call stack."""
        if self._only_tokens:
            return
        request = _request_of_the_caller(context.req_id)
        if request is not None:
            known = _Known(request, self._media)
            context.set_state(known)
            if request.resumable:
                self._sessions.add(known)

    def note_sessions(self) -> None:
        """Note the new inputs of requests that get more inputs while they run. Call this in every step."""
        for known in self._sessions:
            known.inputs  # noqa: B018

    def of(self, keys: Collection[OffloadKey], context: ReqContext) -> list[bytes | None]:
        """Return the store's key of each chunk of a request, or None for a chunk that cannot be shared."""
        return [self._of(key, context) for key in keys]

    def forget(self) -> bool:
        """From now on, make keys that differ from all earlier keys and from those of other engines. Return whether this
        was called for the first time."""
        first = not self._generation
        self._generation = os.urandom(GENERATION_BYTES)
        return first

    def _of(self, key: OffloadKey, context: ReqContext) -> bytes | None:
        if self._only_tokens:
            return key_of(key, self._generation, b"")
        known: _Known | None = context.get_state(_Known)
        if known is None:
            return None
        if not has_inputs(known.request):
            return key_of(key, self._generation, b"")
        end = context.get_offload_key_position(key)
        inputs = known.inputs.before(end) if end is not None else None
        return None if inputs is None else key_of(key, self._generation, inputs)


def shared(keys: Sequence[bytes | None]) -> list[bytes]:
    """Return only the keys of chunks that can be shared."""
    return [key for key in keys if key is not None]


def _request_of_the_caller(request_id: str) -> Request | None:
    """Find the request with this id on the stack of the calling thread. Return None if it is not there."""
    frame = sys._getframe()
    while frame is not None:
        for value in (frame.f_locals.get("request"), frame.f_locals.get("req")):
            if isinstance(value, Request) and value.request_id == request_id:
                return value
        frame = frame.f_back  # type: ignore[assignment]
    return None
