"""The keys of a request's blocks in the store: the engine's block hashes, or salted ones where those are not enough.

Two things change a block's bytes without changing its hash:

* **a LoRA adapter**: the hash covers its name and path, but "/adapters/sql" may hold other weights on another machine,
  or tomorrow. So the key here also covers the adapter's content. If the adapter's files cannot be read, or change
  after the engine may have loaded them, its blocks get keys that only this engine has.
* **new weights in a running engine** (reinforcement learning). vLLM then resets the connector's cache. From then on
  all blocks get keys that only this engine has, so that neither older blocks nor those of other engines are found.

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
from weakref import WeakKeyDictionary

from kvstore_client.vllm.shared.fingerprint import WEIGHT_SUFFIXES, files_fingerprint

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

SALT_BYTES = 16
ADAPTER_CONFIG = "adapter_config.json"


@dataclass
class _Adapter:
    """salt: added to the keys of its blocks. stamp: names, sizes and times of the files when they were read; None if
    they could not be read."""

    salt: bytes
    stamp: tuple[tuple[str, int, int], ...] | None


@dataclass
class _Named:
    """The keys made so far for one request, and the hash that the last of them was made from."""

    salt: bytes
    keys: list[bytes] = field(default_factory=list)
    last_hash: bytes = b""


class BlockKeys:
    """The keys of requests' blocks. Used by the scheduler's thread only. The first request of an adapter reads the
    adapter's files, at most about a megabyte of each; a request without adapter costs nothing until ``forget``."""

    def __init__(self) -> None:
        self._generation = b""
        self._adapters: dict[int, _Adapter] = {}
        self._named: WeakKeyDictionary[Request, _Named] = WeakKeyDictionary()

    def of(self, request: Request) -> Sequence[bytes]:
        """One key for each of ``request.block_hashes``, in their order. Valid until the request grows."""
        hashes: Sequence[bytes] = request.block_hashes
        if request.lora_request is None and not self._generation:
            return hashes
        named = self._named.get(request)
        if named is None:
            named = self._named[request] = _Named(self._salt(request.lora_request))
        done = len(named.keys)
        if done > len(hashes) or (done and hashes[done - 1] != named.last_hash):  # vLLM took tokens back
            named.keys, done = [], 0
        named.keys += [
            hashlib.blake2b(block_hash, digest_size=len(block_hash), key=named.salt).digest()
            for block_hash in hashes[done:]
        ]
        named.last_hash = hashes[-1] if hashes else b""
        return named.keys

    def forget(self) -> None:
        """From now on, no key equals a key made earlier or in another engine."""
        self._generation = os.urandom(SALT_BYTES)
        self._adapters.clear()
        self._named.clear()

    def _salt(self, lora: LoRARequest | None) -> bytes:
        return self._generation + (self._adapter_salt(lora) if lora is not None else b"")

    def _adapter_salt(self, lora: LoRARequest) -> bytes:
        known = self._adapters.get(lora.lora_int_id)
        files = _adapter_files(lora.lora_path)
        stamp = _stamp(files)
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


def _stamp(files: Sequence[Path]) -> tuple[tuple[str, int, int], ...] | None:
    try:
        return tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files) or None
    except OSError:
        return None


def _content(files: Sequence[Path]) -> bytes | None:
    try:
        return files_fingerprint(files).encode()
    except OSError:
        return None
