"""Makes the keys of a request's blocks in the store. No other module makes such keys.

A key must cover everything that determines its block's bytes, except what the namespace names already (see
`rank_namespace`). If the engine's own hash of the block covers all of this, the key is that hash. Otherwise the key is
a hash of that hash and of the rest. A block with an unknown input has no key. That block and all later blocks of the
request are neither loaded, saved nor promised.

For a request with a LoRA adapter, the engine's hashes cover the adapter's name and path, which each engine chooses
itself. The keys are made from hashes without them, and cover the content of the adapter's files.

``tests/engine/test_key_fields.py`` lists every field of vLLM's classes for a request. For each field, it says whether
the field affects the content of a block, and where the keys cover it.

A key has the same length as the hash from which it is made, because all keys of a namespace must have the same length.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from kvstore_client.vllm.shared.fingerprint import WEIGHT_SUFFIXES, files_fingerprint
from kvstore_client.vllm.shared.media_contents import MediaContents
from kvstore_client.vllm.shared.request_inputs import RequestInputs, digest_of, embeddings_digest, has_inputs, key_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

SALT_BYTES = 16
ADAPTER_CONFIG = "adapter_config.json"


@dataclass
class _Adapter:
    """`salt`: bytes that are included in the keys of the adapter's blocks. `stamp`: the path, and the names, sizes and
    times of the files when they were read. It is None if they could not be read."""

    salt: bytes
    stamp: tuple[str, tuple[tuple[str, int, int], ...]] | None


@dataclass
class _Named:
    """The keys made so far for one request.

    last_hash: the request's own hash of the last of these blocks.
    salt: bytes that all keys cover in addition to hashes and inputs, empty if there are none.
    bare_hashes: for a request with a LoRA adapter, its hashes without the adapter's name and path.
    """

    salt: bytes
    inputs: RequestInputs
    keys: list[bytes] = field(default_factory=list)
    last_hash: bytes = b""
    bare_hashes: list[bytes] = field(default_factory=list)


class _WithoutAdapter:
    """What vLLM's hasher needs of a request, without the request's LoRA adapter."""

    lora_request = None

    def __init__(self, request: Request, block_hashes: list[bytes]) -> None:
        self._request = request
        self.block_hashes = block_hashes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class BlockKeys:
    """Makes the keys of requests' blocks. Only the scheduler's thread may use it. For the first request of an adapter,
    it reads at most about 1 MB of each of the adapter's files. For a request with media, it reads the data of the
    media. For a request with only tokens, it has nothing to do before `name_weights` is called."""

    def __init__(self, block_tokens: int, *, trust_media_ids: bool = False, adapter_settings: str = "") -> None:
        """`block_tokens`: the number of tokens of a block. `trust_media_ids`: whether identifiers of media are trusted.
        `adapter_settings`: the settings with which the engine loads every LoRA adapter, as
        `model_identity.adapter_settings` returns them."""
        self._block_tokens = block_tokens
        self._adapter_settings = adapter_settings
        self._media = MediaContents(trust_ids=trust_media_ids)
        self._weights = ""
        self._adapters: dict[int, _Adapter] = {}
        self._named: WeakKeyDictionary[Request, _Named] = WeakKeyDictionary()
        self._sessions: WeakSet[Request] = WeakSet()

    def note(self, request: Request) -> None:
        """Note the inputs of a request before the engine computes with them. Every request must be noted when it comes,
        because other requests may get its blocks from the engine's caches, whatever happens to the request."""
        if request.resumable:
            self._sessions.add(request)
        if has_inputs(request):
            self._known(request)

    def note_sessions(self) -> None:
        """Do the same as `note` for requests that get further inputs while they run. Call this in every step."""
        for request in self._sessions:
            if has_inputs(request):
                self._known(request)

    def of(self, request: Request) -> Sequence[bytes]:
        """Return one key for each of `request.block_hashes`, in the same order, up to the first block that cannot be
        shared. The result is valid until the request gets more tokens."""
        hashes: Sequence[bytes] = request.block_hashes
        if request.lora_request is None and not self._weights and not has_inputs(request):
            return hashes
        named = self._known(request)
        done = len(named.keys)
        if done > len(hashes) or (done and hashes[done - 1] != named.last_hash):  # vLLM removed tokens
            named.keys, named.bare_hashes, done = [], [], 0
        bare_hashes = hashes if request.lora_request is None else _bare_hashes(request, named.bare_hashes)
        for index in range(done, len(hashes)):
            inputs = named.inputs.before((index + 1) * self._block_tokens)
            if inputs is None:
                break
            named.keys.append(key_of(bare_hashes[index], named.salt, inputs))
        named.last_hash = hashes[len(named.keys) - 1] if named.keys else b""
        return named.keys

    def tail(self, request: Request) -> bytes | None:
        """Return the key of the last block of a prompt if the prompt fills it only in part. The key is a hash of the
        previous block's key and of the block's content. Return None if there is no such block, or if it cannot be
        shared."""
        end = request.num_prompt_tokens
        whole, rest = divmod(end, self._block_tokens)
        keys = self.of(request)
        if not rest or not 0 < whole <= len(keys):
            return None
        start, parent = whole * self._block_tokens, keys[whole - 1]
        inputs = self._known(request).inputs.before(end) if has_inputs(request) else b""
        if inputs is None:
            return None
        # The positions of embeddings have zeros instead of tokens.
        tokens = np.array(request.all_token_ids[start:end], dtype="<i8").tobytes()
        rows = embeddings_digest(request, start, end)
        salt = digest_of(inputs, rows)[: hashlib.blake2b.SALT_SIZE] if inputs or rows else b""
        return hashlib.blake2b(
            tokens, digest_size=len(parent), key=parent[:64], salt=salt, person=b"kvstore-tail"
        ).digest()

    def name_weights(self, name: str) -> None:
        """Include this name of the weights in all keys from now on. An empty name is not included."""
        self._weights = name
        self._named.clear()

    def adapter(self, request: Request) -> str:
        """Return a digest of the content of the request's LoRA adapter and of how the engine loads it. It is empty if
        the request has no adapter."""
        return self._salt(request.lora_request).hex() if request.lora_request is not None else ""

    def _known(self, request: Request) -> _Named:
        named = self._named.get(request)
        if named is None:
            named = _Named(self._salt(request.lora_request), RequestInputs(request, self._media))
        while not named.inputs.are_still(request, self._media):  # repeats if two items of the request share an id
            named = _Named(named.salt, RequestInputs(request, self._media))
        self._named[request] = named
        return named

    def _salt(self, lora: LoRARequest | None) -> bytes:
        if lora is None and not self._weights:
            return b""
        adapter: tuple[object, ...] = ()
        if lora is not None:
            adapter = self._adapter_salt(lora), lora.is_3d_lora_weight, self._adapter_settings
        return digest_of(self._weights, *adapter)

    def _adapter_salt(self, lora: LoRARequest) -> bytes:
        known = self._adapters.get(lora.lora_int_id)
        files = _adapter_files(lora.lora_path)
        stamp = _stamp(lora.lora_path, files)
        if known is None or (lora.load_inplace and known.stamp != stamp):  # the engine loads it, perhaps again
            content = _content(files) if stamp else None
            known = _Adapter(content or os.urandom(SALT_BYTES), stamp)
            if content is None:
                logger.warning(
                    "kvstore: the files of LoRA adapter %r cannot be read at %r, so its blocks are not shared with "
                    "other engines. Give the adapter's local folder as its path",
                    lora.lora_name,
                    lora.lora_path,
                )
        elif known.stamp != stamp:
            logger.warning(
                "kvstore: the files of LoRA adapter %r changed after it was loaded, so its blocks are not shared with "
                "other engines. Load the adapter again, under a new id",
                lora.lora_name,
            )
            known = _Adapter(os.urandom(SALT_BYTES), stamp)
        self._adapters[lora.lora_int_id] = known
        return known.salt


def _bare_hashes(request: Request, known: list[bytes]) -> list[bytes]:
    """Add to `known` what it lacks of the request's hashes without its adapter, and return it."""
    if (hasher := request._block_hasher) is not None:  # otherwise the request has no hashes at all
        known.extend(hasher(_WithoutAdapter(request, known)))
        del known[len(request.block_hashes) :]  # of tokens that vLLM has not hashed yet, or removes
    return known


def _adapter_files(path: str) -> list[Path]:
    """Return the files of an adapter's weights and configuration. The result is empty for an adapter with a hub name,
    because nothing is downloaded."""
    folder = Path(path).expanduser()
    try:
        return sorted(
            file for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES or file.name == ADAPTER_CONFIG
        )
    except OSError:
        return []


def _stamp(path: str, files: Sequence[Path]) -> tuple[str, tuple[tuple[str, int, int], ...]] | None:
    try:
        found = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError:
        return None
    return (path, found) if found else None


def _content(files: Sequence[Path]) -> bytes | None:
    try:
        return files_fingerprint(files).encode()
    except OSError:
        return None
