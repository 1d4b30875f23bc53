"""Prompts made from hash ids: the same id gives the same tokens, so prompts share exactly what their ids share.

A trace gives each block of a prompt (mostly 512 tokens) a hash id that stands for the block and all blocks before it.
The tokens themselves are not public. So each token is made here as a hash (splitmix64) of the run's seed, the id and
the token's place in the block. Any process with the same seed makes the same tokens. Two ids give different tokens,
except with a probability that is negligible for longer blocks. If a prompt ends within a block, it has the first tokens
of the last id.

Prompts are encoded piece by piece into the bytes that are sent. A prompt of 128k tokens takes milliseconds, so code
that encodes prompts while answers arrive must let other tasks run between the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

HASHED_TOKENS: Final = 512  # tokens for each hash id, in Mooncake's traces and in synthetic loads
_HALF: Final = np.uint64(32)
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_PIECE_TOKENS: Final = 512  # the least number of a prompt's tokens in one piece
# In many vocabularies the first ids have special meanings, such as "end of text" or "unknown".
_SPECIAL_TOKENS: Final = 100

Api: TypeAlias = "Literal['completions', 'chat']"

# Words that are, together with the space before them, one token in the usual vocabularies.
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
    """Makes prompts of tokens from `vocabulary`. `seed`: with another seed, the same ids give other tokens.

    Raises `ValueError` for a vocabulary with fewer than 16 tokens. Safe to share between threads.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        if vocabulary < 16:
            raise ValueError(
                f"a vocabulary of {vocabulary} tokens is too small: expected the model's size, at least 16"
            )
        self._low, self._high = min(_SPECIAL_TOKENS, vocabulary // 4), vocabulary
        self._seed = np.random.SeedSequence(seed).generate_state(1, np.uint64)

    def tokens(self, hash_id: int, count: int = HASHED_TOKENS) -> list[int]:
        """Return the first `count` tokens that a hash id stands for."""
        return self._draw([hash_id], count)

    def encoded(
        self, hash_ids: Sequence[int], count: int, api: Api, block_tokens: int = HASHED_TOKENS
    ) -> Iterator[bytes]:
        """Yield the JSON of a prompt of `count` tokens in pieces. It is an array of token ids, or a string for chat."""
        yield b"[" if api == "completions" else b'"'
        separator = b"," if api == "completions" else b" "
        blocks = -(-_PIECE_TOKENS // block_tokens)
        for first in range(0, len(hash_ids), blocks):
            tokens = self._draw(hash_ids[first : first + blocks], block_tokens)[: count - first * block_tokens]
            piece = msgspec.json.encode(tokens)[1:-1] if api == "completions" else _words(tokens)
            yield separator + piece if first else piece
        yield b"]" if api == "completions" else b'"'

    def _draw(self, hash_ids: Sequence[int], block_tokens: int) -> list[int]:
        """Return the tokens of blocks, one after another."""
        blocks = _mixed(np.array(hash_ids, dtype=np.uint64) + self._seed)
        bits = _mixed(blocks[:, None] + np.arange(1, block_tokens + 1, dtype=np.uint64) * _STEP)
        # The upper 32 bits choose a place in the vocabulary. This needs no division, and no token is more likely than
        # another.
        drawn = self._low + ((bits >> _HALF) * np.uint64(self._high - self._low) >> _HALF).astype(np.int64)
        tokens: list[int] = drawn.ravel().tolist()
        return tokens


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finalizer of splitmix64 (Steele, Lea and Flood 2014) of each value. Every bit depends on all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _words(tokens: list[int]) -> bytes:
    return " ".join([WORDS[token % len(WORDS)] for token in tokens]).encode()
