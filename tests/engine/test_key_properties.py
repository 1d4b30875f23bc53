"""Thousands of random requests, each compared with every other: two blocks have the same key exactly if the same things
decide their bytes.

The requests are objects of vLLM's own class, hashed by its own hasher. Most of them differ from another one in a single
property.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvstore_client.vllm.connector.block_keys import BlockKeys

BLOCK_TOKENS = 4
FAMILIES, MEMBERS = 150, 30  # 4 500 requests, 10 million pairs
LONGEST = 19
SEED = 7


@dataclass(frozen=True)
class Picture:
    offset: int
    length: int = 3
    name: str = "img-1"
    content: int = 0
    kind: str = "image"
    hole: int = -1  # a position in its range that belongs to a token


@dataclass(frozen=True)
class Asked:
    """A request, and the engine's relevant settings."""

    tokens: tuple[int, ...] = (1,) * 14
    salt: str = ""
    adapter: int = 0  # 0: none; else the content of its files
    fused: bool = False
    pictures: tuple[Picture, ...] = ()
    rows: tuple[int, ...] | None = None  # a prompt embedding for each position
    mask: tuple[bool, ...] = ()  # which positions are tokens; empty: none
    arguments: int = 0  # for the model of a pooling request; 0: none
    weights: str = ""
    trusts: bool = False

    def tokens_at(self, end: int) -> tuple[int, ...]:
        if self.rows is None:
            return self.tokens[:end]
        return tuple(token if kept else 0 for token, kept in zip(self.tokens, self.is_token, strict=True))[:end]

    @property
    def is_token(self) -> tuple[bool, ...]:
        return self.mask or (False,) * len(self.tokens)

    def meaning(self, end: int) -> Any:
        """Return everything that decides what is in a block that ends here."""
        pictures = tuple(
            (self.trusts, dataclasses.replace(each, content=0 if self.trusts else each.content))
            for each in sorted(self.pictures, key=lambda each: each.offset)
            if each.offset < end
        )
        adapter = (self.adapter, self.fused) if self.adapter else None
        rows = None if self.rows is None else (self.rows[:end], self.is_token[:end])
        return self.weights, adapter, self.salt, self.tokens_at(end), rows, pictures, self.arguments


def changed(asked: Asked, chooser: random.Random) -> Asked:
    """Return the request with one property changed, which may be the value of an earlier request."""
    size = len(asked.tokens)
    place = chooser.randrange(size)

    def at(values: tuple[Any, ...], value: object) -> tuple[Any, ...]:
        return (*values[:place], value, *values[place + 1 :])

    match chooser.choice(["tokens", "length", "salt", "adapter", "pictures", "pictures", "rows", "mask", "engine"]):
        case "tokens":
            return dataclasses.replace(asked, tokens=at(asked.tokens, chooser.randrange(3)))
        case "length":
            size = chooser.randrange(1, LONGEST)
            rows = None if asked.rows is None else (*asked.rows, *[0] * LONGEST)[:size]
            mask = (*asked.mask, *[True] * LONGEST)[:size] if asked.mask else ()
            pictures = tuple(each for each in asked.pictures if each.offset + each.length <= size)
            tokens = (*asked.tokens, *[1] * LONGEST)[:size]
            return _zeroed(dataclasses.replace(asked, tokens=tokens, rows=rows, mask=mask, pictures=pictures))
        case "salt":
            return dataclasses.replace(asked, salt=chooser.choice(["", "a", "b"]))
        case "adapter":
            return dataclasses.replace(asked, adapter=chooser.randrange(3), fused=chooser.random() < 0.3)
        case "pictures":
            if asked.pictures and chooser.random() < 0.7:
                index = chooser.randrange(len(asked.pictures))
                change: dict[str, Any] = chooser.choice(
                    [
                        {"content": chooser.randrange(3)},
                        {"name": chooser.choice(["img-1", "img-2"])},
                        {"kind": chooser.choice(["image", "video"])},
                        {"hole": chooser.randrange(-1, 3)},
                        {"offset": chooser.randrange(max(1, size - 3))},
                    ]
                )
                one = dataclasses.replace(asked.pictures[index], **change)
                kept = [*asked.pictures[:index], *asked.pictures[index + 1 :]]
            else:
                one = Picture(chooser.randrange(max(1, size - 3)), content=chooser.randrange(3))
                kept = list(asked.pictures[:2])
            if one.offset + one.length > size or any(each.offset == one.offset for each in kept):
                return asked
            return dataclasses.replace(asked, pictures=tuple(sorted([*kept, one], key=lambda each: each.offset)))
        case "rows":
            if asked.rows is None or chooser.random() < 0.2:
                rows = None if asked.rows is not None else tuple(chooser.randrange(3) for _ in range(size))
                return _zeroed(dataclasses.replace(asked, rows=rows, mask=()))
            return _zeroed(dataclasses.replace(asked, rows=at(asked.rows, chooser.randrange(3))))
        case "mask":
            if asked.rows is None:
                return asked
            return _zeroed(dataclasses.replace(asked, mask=at(asked.is_token, chooser.random() < 0.5)))
        case _:
            return dataclasses.replace(
                asked,
                weights=chooser.choice(["", "", "step-1", "step-2"]),
                trusts=chooser.random() < 0.3,
                arguments=chooser.choice([0, 0, 1, 2]),
            )


def _zeroed(asked: Asked) -> Asked:
    """Set the rows of positions with tokens to zero, because they are not used."""
    if asked.rows is None:
        return asked
    rows = (0 if kept else row for row, kept in zip(asked.rows, asked.is_token, strict=True))
    return dataclasses.replace(asked, rows=tuple(rows))


def requests(chooser: random.Random) -> Iterator[Asked]:
    for _ in range(FAMILIES):
        asked = Asked(tokens=tuple(chooser.randrange(3) for _ in range(chooser.randrange(4, LONGEST))))
        for _ in range(MEMBERS):
            yield asked
            asked = changed(asked, chooser)


class Engines:
    """Makes vLLM's requests and their keys from descriptions."""

    def __init__(self, folder: Path) -> None:
        init_none_hash(sha256)
        self._folder = folder
        self._adapters = 0
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def engine(self, asked: Asked) -> BlockKeys:
        """Return an engine that has computed nothing yet."""
        keys = BlockKeys(BLOCK_TOKENS, trust_media_ids=asked.trusts)
        keys.name_weights(asked.weights)
        return keys

    def request(self, asked: Asked) -> Request:
        pooling = PoolingParams(task="classify", extra_kwargs={"types": asked.arguments}) if asked.arguments else None
        rows = None
        if asked.rows is not None:
            rows = torch.tensor(asked.rows, dtype=torch.float32).reshape(-1, 1).repeat(1, 2)
        only_rows = rows is not None and not asked.mask
        return Request(
            "request",
            None if only_rows else list(asked.tokens),
            None if pooling else SamplingParams(),
            pooling,
            prompt_embeds=rows,
            prompt_is_token_ids=list(asked.mask) or None if rows is not None else None,
            mm_features=[self._feature(each) for each in asked.pictures],
            lora_request=self._adapter(asked) if asked.adapter else None,
            cache_salt=asked.salt or None,
            block_hasher=self._hasher,
        )

    def _feature(self, picture: Picture) -> MultiModalFeatureSpec:
        mask = None
        if picture.hole >= 0:
            mask = torch.ones(picture.length, dtype=torch.bool)
            mask[picture.hole] = False
        pixels = MultiModalFieldElem(torch.full((2, 2), float(picture.content)), MultiModalBatchedField())
        return MultiModalFeatureSpec(
            MultiModalKwargsItem({"pixels": pixels}),
            picture.kind,
            picture.name,
            PlaceholderRange(picture.offset, picture.length, mask),
        )

    def _adapter(self, asked: Asked) -> LoRARequest:
        """Return the adapter. Equal files have several names and paths here, and different files the same, as they may
        have on different machines."""
        self._adapters += 1
        folder = self._folder / f"sql-{self._adapters % 2}"
        content = str(asked.adapter).encode()
        file = folder / "adapter_model.safetensors"
        if not file.exists() or file.read_bytes() != content:
            folder.mkdir(exist_ok=True)
            file.write_bytes(content)
        return LoRARequest(f"sql-{self._adapters % 3}", 1, str(folder), is_3d_lora_weight=asked.fused)


def keys_of(keys: BlockKeys, request: Request) -> list[tuple[int, bytes]]:
    """Return the end of each block that can be shared, and its key."""
    found = [((index + 1) * BLOCK_TOKENS, key) for index, key in enumerate(keys.of(request))]
    tail = keys.tail(request)
    return [*found, *([(request.num_prompt_tokens, tail)] if tail is not None else [])]


def test_blocks_have_one_key_exactly_if_they_mean_the_same(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    meanings: dict[bytes, tuple[Any, Asked]] = {}
    keys: dict[Any, tuple[bytes, Asked]] = {}
    for asked in requests(random.Random(SEED)):
        found = keys_of(engines.engine(asked), engines.request(asked))
        names = [each.name for each in asked.pictures]
        if asked.trusts or len({(each.name, each.content) for each in asked.pictures}) == len(set(names)):
            assert len(found) == -(-len(asked.tokens) // BLOCK_TOKENS) or len(asked.tokens) < BLOCK_TOKENS
        for end, key in found:
            meaning = asked.meaning(end)
            known, other = meanings.setdefault(key, (meaning, asked))
            assert known == meaning, f"one key for what differs: {asked} and {other}, up to token {end}"
            same, other = keys.setdefault(meaning, (key, asked))
            assert same == key, f"two keys for the same: {asked} and {other}, up to token {end}"
    assert len(meanings) > 5000


def test_a_used_engines_keys_are_the_same_unless_it_mixed_contents(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    past: dict[tuple[str, bool], BlockKeys] = {}
    contents: dict[tuple[str, bool], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    cut = 0
    for number, each_asked in enumerate(requests(random.Random(SEED + 1))):
        if number >= FAMILIES * MEMBERS // 2:
            break
        family = number // MEMBERS  # the ids of its media are unique
        pictures = tuple(dataclasses.replace(each, name=f"{each.name}-{family}") for each in each_asked.pictures)
        asked = dataclasses.replace(each_asked, adapter=0, pictures=pictures)
        which = asked.weights, asked.trusts
        fresh = keys_of(engines.engine(asked), engines.request(asked))
        keys = past.setdefault(which, engines.engine(asked))
        found = keys_of(keys, engines.request(asked))
        seen = contents[which]
        for each in asked.pictures:
            seen[each.name].add(each.content)
        mixed = [] if asked.trusts else [each.offset for each in asked.pictures if len(seen[each.name]) > 1]
        assert found == [(end, key) for end, key in fresh if end <= min(mixed, default=LONGEST)]
        cut += bool(mixed)
    assert cut > 100
