"""What a picture, a sound or a film of a request is, by content.

vLLM names each by an id: a hash of its content, or whatever the request calls it (``"uuid": "img-1"``,
``multi_modal_uuids``), and the one cannot be told from the other. It believes ids: its caches of processed inputs, of
encoded ones, and of blocks give one picture's data to any other of the same id. That ends with the process. Blocks of a
store do not, so here an id counts for nothing without the data that the engine computes with.

Inside of one engine ids still decide: a second picture of an id may get what was computed of the first. So an id that
has stood for two contents in this process, or for one that is not known, stands for none from then on. `MOST_IDS` are
remembered, those that were used last: more than vLLM's own caches hold.

The data are what the processor made, so what a request asks of it (``mm_processor_kwargs``) is covered. They are not
here if vLLM passes them to its workers through shared memory (``--mm-processor-cache-type shm``).
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
_SHARED_MEMORY: Final = "address"  # the field of an item that says where in shared memory the item is


class MediaContents:
    """The contents of one engine's media. Not thread-safe. Reads each item's data once, at about a GB/s.

    trust_ids: take ids for contents, as vLLM does.
    version: another number whenever what `of` said before may not hold any more.
    """

    def __init__(self, *, trust_ids: bool = False) -> None:
        self.trust_ids = trust_ids
        self.version = 0
        self._of_id: dict[bytes, bytes | None] = {}  # None: the id stands for no content. The last used is last
        self._of_item: dict[int, tuple[weakref.ref[MultiModalKwargsItem], bytes]] = {}  # by the item's `id`
        self._told = False

    def of(self, feature: MultiModalFeatureSpec) -> bytes | None:
        """The content of one of a request's media. None: it is not known for sure."""
        if self.trust_ids:
            return b"the id"
        name = hashlib.blake2b(_raw(feature.identifier), digest_size=ID_BYTES).digest()
        content = self._content(feature)
        if name in self._of_id:
            known = self._of_id.pop(name)
            if known != content and known is not None:
                self.version += 1
                logger.warning(
                    "kvstore: requests call different %s content %.80r, so from now on nothing that follows one of "
                    "that id is shared with other engines. Give each its own id, or none",
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
                "kvstore: the content of %s inputs is not to be seen in the scheduler's process, so nothing that "
                "follows one is shared with other engines. Set --mm-processor-cache-type lru; or, if every id means "
                "the same content in all engines for ever, the option trust_media_ids",
                feature.modality,
            )


def content_digest(value: object) -> bytes | None:
    """A digest of tensors, texts and numbers, nested in any way. None: it has something else, or cannot be read."""
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
    """The data are of a kind that cannot be read here."""


def _parts(value: object) -> Iterator[bytes | memoryview]:
    """All of a processed input as bytes from which it could be made again: no two have the same."""
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
    """A field's value; vLLM has it in an object that also says how to batch it."""
    return getattr(element, "data", element)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _head(kind: str, *sizes: object) -> bytes:
    return f"{kind}({','.join(map(str, sizes))})".encode()
