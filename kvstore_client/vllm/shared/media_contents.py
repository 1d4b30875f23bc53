"""Identifies a picture, a sound or a film of a request by its content.

vLLM names each of these items by an id. The id is either a hash of the content, or the name that the request gives the
item (``"uuid": "img-1"``, ``multi_modal_uuids``). The two kinds of ids look alike. vLLM trusts ids. Its caches of
processed inputs, of encoded inputs, and of blocks give one picture's data to any other picture with the same id. These
caches end with the process. Blocks in the store last longer, so here an id counts only together with the data that the
engine uses.

Inside one engine, ids still decide: a second picture with the same id may get the results of the first. So once an id
has had two different contents in this process, or a content that is not known, the id no longer identifies any content.
The `MOST_IDS` ids that were used last are remembered, which is more than vLLM's own caches hold.

The data are those that the processor made, so a request's options for the processor (``mm_processor_kwargs``) are
covered. The data are missing here if vLLM passes them to its workers through shared memory
(``--mm-processor-cache-type shm``).
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

logger = logging.getLogger(f"vllm.{__name__}")

MOST_IDS: Final = 1 << 18
ID_BYTES: Final = 16
_SHARED_MEMORY: Final = "address"  # the field with the address of an item's data in shared memory


class MediaContents:
    """Identifies the contents of one engine's media. Not thread-safe. It reads each item's data once, at about 1 GB/s.

    trust_ids: whether to use an id in place of the content, as vLLM does.
    version: a number that changes whenever earlier results of `of` may no longer hold.
    """

    def __init__(self, *, trust_ids: bool = False) -> None:
        self.trust_ids = trust_ids
        self.version = 0
        self._of_id: dict[bytes, bytes | None] = {}  # most recently used last; None: the id identifies no content
        self._of_item: dict[int, tuple[weakref.ref[MultiModalKwargsItem], bytes]] = {}  # by the item's `id`
        self._told = False

    def of(self, feature: MultiModalFeatureSpec) -> bytes | None:
        """Return the content of one item of a request's media, or None if the content is not known for certain."""
        if self.trust_ids:
            return b"the id"
        name = hashlib.blake2b(_raw(feature.identifier), digest_size=ID_BYTES).digest()
        content = self._content(feature)
        if name in self._of_id:
            known = self._of_id.pop(name)
            if known != content and known is not None:
                self.version += 1
                logger.warning(
                    "kvstore: requests use one id for different %s content, %.80r, so from now on no block after "
                    "content with this id is shared with other engines. Give each content its own id, or none",
                    feature.modality,
                    feature.identifier,
                )
            content = content if known == content else None
        elif len(self._of_id) >= MOST_IDS:
            del self._of_id[next(iter(self._of_id))]
        self._of_id[name] = content
        return content

    def _content(self, feature: MultiModalFeatureSpec) -> bytes | None:
        item = feature.data
        if item is None:
            self._tell_unknown(feature)
            return None
        known = self._of_item.get(id(item))
        if known is not None and known[0]() is item:
            return known[1]
        content = content_digest(item)
        if content is None:
            self._tell_unknown(feature)
            return None
        key, contents = id(item), self._of_item
        contents[key] = (weakref.ref(item, lambda _item: contents.pop(key, None)), content)
        return content

    def _tell_unknown(self, feature: MultiModalFeatureSpec) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "kvstore: the content of %s inputs is not available in the scheduler's process, so no block "
                "after one is shared with other engines. Set --mm-processor-cache-type lru. If each id always means "
                "the same content in all engines, you can set the option trust_media_ids instead",
                feature.modality,
            )


def content_digest(value: object) -> bytes | None:
    """Return a digest of tensors, texts and numbers, which may be nested in any way. Return None if the value contains
    anything else or cannot be read."""
    digest = hashlib.sha256()
    try:
        for part in _parts(value):
            digest.update(part)
    except _UnknownError:
        return None
    except Exception:
        logger.warning("kvstore: the content of %s could not be read", type(value).__name__, exc_info=True)
        return None
    return digest.digest()


class _UnknownError(Exception):
    """Raised for data of a type that this module cannot read."""


def _parts(value: object) -> Iterator[bytes | memoryview]:
    """Yield a processed input as bytes from which it could be made again. So two different inputs never have the same
    bytes."""
    if isinstance(value, torch.Tensor):
        if not value.is_cpu or value.layout != torch.strided:
            raise _UnknownError
        yield _head("tensor", value.dtype, *value.shape)
        yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise _UnknownError
        yield _head("array", value.dtype.str, *value.shape)
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, list | tuple):
        yield _head("list", len(value))
        for each in value:
            yield from _parts(each)
    elif isinstance(value, Mapping):
        if not value or _SHARED_MEMORY in value:
            raise _UnknownError
        yield _head("fields", len(value))
        for name in sorted(value):
            yield from _parts(name)
            yield from _parts(_data_of(value[name]))
    elif isinstance(value, str | bytes):
        raw = _raw(value) if isinstance(value, str) else value
        yield _head(type(value).__name__, len(raw))
        yield raw
    elif isinstance(value, bool | int | float):
        yield _head(type(value).__name__, repr(value))
    else:
        raise _UnknownError


def _data_of(element: Any) -> object:
    """Return a field's value. vLLM keeps the value in an object that also says how to batch it."""
    return getattr(element, "data", element)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _head(kind: str, *sizes: object) -> bytes:
    return f"{kind}({','.join(map(str, sizes))})".encode()
