"""Prompts made from hash ids: the same id gives the same tokens, so prompts share exactly what their ids share.

A trace names each block of a prompt, 512 tokens mostly, and all before it, by a hash id. The tokens themselves are not
public, so each is a hash (splitmix64) of the run's seed, the id and its place in the block: any process with that seed
makes the same ones. Two ids give different tokens, except by a chance that vanishes with the length. The last tokens of
a prompt are the beginning of its last id's.

Prompts are encoded as they go on the wire, piece by piece: one of 128k tokens takes milliseconds, and whoever encodes
it while answers arrive has to give way between the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

HASHED_TOKENS: Final = 512  # tokens a hash id stands for, in Mooncake's traces and in synthetic loads
_HALF: Final = np.uint64(32)
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_PIECE_TOKENS: Final = 512  # of a prompt, at least, in one piece
# The first ids of many vocabularies mean "end of text", "unknown" and the like.
_SPECIAL_TOKENS: Final = 100

Api: TypeAlias = "Literal['completions', 'chat']"

# Words that are one token in the usual vocabularies, with the space before them.
_WORDS: Final = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my now "
    "over such our man me even most made after also well must where much through back years way down should "
    "because long each just state people those too how little good world make very year still see work life own "
    "get here being day old great right"
)
WORDS: Final = _WORDS.split()


class Prompts:
    """Makes prompts of tokens from `vocabulary`. `seed`: another one gives other tokens for the same ids.

    Raises `ValueError` for a vocabulary with fewer than 16 tokens. Safe to share between threads.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        if vocabulary < 16:
            raise ValueError(f"a vocabulary of {vocabulary} tokens: expected at least 16, the model's own size is best")
        self._low, self._high = min(_SPECIAL_TOKENS, vocabulary // 4), vocabulary
        self._seed = np.random.SeedSequence(seed).generate_state(1, np.uint64)

    def tokens(self, hash_id: int, count: int = HASHED_TOKENS) -> list[int]:
        """-> the first `count` tokens that a hash id stands for."""
        return self._draw([hash_id], count)

    def encoded(
        self, hash_ids: Sequence[int], count: int, api: Api, block_tokens: int = HASHED_TOKENS
    ) -> Iterator[bytes]:
        """The JSON of a prompt of `count` tokens, in pieces: an array of token ids, or for chat a string."""
        yield b"[" if api == "completions" else b'"'
        separator = b"," if api == "completions" else b" "
        blocks = -(-_PIECE_TOKENS // block_tokens)
        for first in range(0, len(hash_ids), blocks):
            tokens = self._draw(hash_ids[first : first + blocks], block_tokens)[: count - first * block_tokens]
            piece = msgspec.json.encode(tokens)[1:-1] if api == "completions" else _words(tokens)
            yield separator + piece if first else piece
        yield b"]" if api == "completions" else b'"'

    def _draw(self, hash_ids: Sequence[int], block_tokens: int) -> list[int]:
        """-> the tokens of blocks, one after another."""
        blocks = _mixed(np.array(hash_ids, dtype=np.uint64) + self._seed)
        bits = _mixed(blocks[:, None] + np.arange(1, block_tokens + 1, dtype=np.uint64) * _STEP)
        # The upper 32 bits as a fraction of the vocabulary: no division, and no token is more likely than another.
        drawn = self._low + ((bits >> _HALF) * np.uint64(self._high - self._low) >> _HALF).astype(np.int64)
        tokens: list[int] = drawn.ravel().tolist()
        return tokens


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every bit depends on all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _words(tokens: list[int]) -> bytes:
    return " ".join([WORDS[token % len(WORDS)] for token in tokens]).encode()
