"""The keys of a request's blocks in the store: the one place where they are made.

A key must cover all that decides its block's bytes and that one namespace leaves open (`rank_namespace` says what
that is). It is the engine's own hash of the block where that covers it, and otherwise a hash of that hash and of the
rest. What cannot be known has no key: from there on a request's blocks are neither loaded, saved nor promised.

What a request is made of (every field of vLLM's classes for it is in ``tests/engine/test_key_fields.py``):

====================== ========================================================================================
A key made here is as long as the hash it is made from, since all keys of one namespace have one length.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
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
    """salt: added to the keys of its blocks. stamp: the path, and names, sizes and times of the files when they were
    read; None if they could not be read."""

    salt: bytes
    stamp: tuple[str, tuple[tuple[str, int, int], ...]] | None


@dataclass
class _Named:
    """The keys made so far for one request, and the hash that the last of them was made from. salt: what all of them
    cover beside hashes and inputs; empty: nothing."""

    salt: bytes
    inputs: RequestInputs
    keys: list[bytes] = field(default_factory=list)
    last_hash: bytes = b""


class BlockKeys:
    """The keys of requests' blocks. Used by the scheduler's thread only. The first request of an adapter reads the
    adapter's files, at most about a megabyte of each, and a request with media reads their data; a request of tokens
    costs nothing until ``name_weights``."""

    def __init__(self, block_tokens: int, *, trust_media_ids: bool = False, adapter_settings: str = "") -> None:
        """adapter_settings: what the engine makes of every LoRA adapter, as `model_identity` says it."""
        self._block_tokens = block_tokens
        self._adapter_settings = adapter_settings
        self._media = MediaContents(trust_ids=trust_media_ids)
        self._weights = ""
        self._adapters: dict[int, _Adapter] = {}
        self._named: WeakKeyDictionary[Request, _Named] = WeakKeyDictionary()
        self._sessions: WeakSet[Request] = WeakSet()

    def note(self, request: Request) -> None:
        """Take in what the engine is about to compute with. Every request must be noted when it comes, whatever becomes
        of it: what others get of the engine's caches may be its."""
        if request.resumable:
            self._sessions.add(request)
        if has_inputs(request):
            self._known(request)

    def note_sessions(self) -> None:
        """The same for requests that get further inputs while they run; to be called in every step."""
        for request in self._sessions:
            if has_inputs(request):
                self._known(request)

    def of(self, request: Request) -> Sequence[bytes]:
        """One key for each of ``request.block_hashes``, in their order, up to the first block that cannot be shared.
        Valid until the request grows."""
        hashes: Sequence[bytes] = request.block_hashes
        if request.lora_request is None and not self._weights and not has_inputs(request):
            return hashes
        named = self._known(request)
        done = len(named.keys)
        if done > len(hashes) or (done and hashes[done - 1] != named.last_hash):  # vLLM took tokens back
            named.keys, done = [], 0
        for index in range(done, len(hashes)):
            inputs = named.inputs.before((index + 1) * self._block_tokens)
            if inputs is None:
                break
            named.keys.append(key_of(hashes[index], named.salt, inputs))
        named.last_hash = hashes[len(named.keys) - 1] if named.keys else b""
        return named.keys

    def tail(self, request: Request) -> bytes | None:
        """The key of the block that the end of a prompt fills in part: a hash of the key before it and of what is in
        it. None: there is no such block, or it cannot be shared."""
        end = request.num_prompt_tokens
        whole, rest = divmod(end, self._block_tokens)
        keys = self.of(request)
        if not rest or not 0 < whole <= len(keys):
            return None
        start, parent = whole * self._block_tokens, keys[whole - 1]
        inputs = self._known(request).inputs.before(end) if has_inputs(request) else b""
        if inputs is None:
            return None
        # At the places of embeddings there are no tokens, but zeros.
        tokens = np.array(request.all_token_ids[start:end], dtype="<i8").tobytes()
        rows = embeddings_digest(request, start, end)
        salt = digest_of(inputs, rows)[: hashlib.blake2b.SALT_SIZE] if inputs or rows else b""
        return hashlib.blake2b(
            tokens, digest_size=len(parent), key=parent[:64], salt=salt, person=b"kvstore-tail"
        ).digest()

    def name_weights(self, name: str) -> None:
        """From now on all keys cover this name of the weights, too. Empty: none."""
        self._weights = name
        self._named.clear()

    def adapter(self, request: Request) -> str:
        """A digest of the content of the request's LoRA adapter, and of what the engine makes of it; empty: none."""
        return self._salt(request.lora_request).hex() if request.lora_request is not None else ""

    def _known(self, request: Request) -> _Named:
        named = self._named.get(request)
        if named is None:
            named = _Named(self._salt(request.lora_request), RequestInputs(request, self._media))
        while not named.inputs.are_still(request, self._media):  # two items of one request may call for that, too
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


def _adapter_files(path: str) -> list[Path]:
    """An adapter's weights and configuration. Never downloads: for an adapter named by its hub name, no files."""
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
