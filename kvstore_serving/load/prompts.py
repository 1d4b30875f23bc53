"""Prompts made from hash ids: the same id gives the same 512 tokens, so prompts share exactly what their ids share.

A trace names each 512 tokens of a prompt, and all before them, by a hash id. The tokens themselves are not public, so
they are drawn here at random, from the id and the run's seed: any process with that seed draws the same ones. Two ids
give different tokens, except by a chance that vanishes with the length. The last tokens of a prompt are the beginning
of its last id's.

Prompts are encoded as they go on the wire, piece by piece: one of 128k tokens takes milliseconds, and whoever encodes
it while answers arrive has to give way between the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

HASHED_TOKENS: Final = 512  # tokens a hash id stands for, in Mooncake's traces
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
        self._seed = seed

    def tokens(self, hash_id: int, count: int = HASHED_TOKENS) -> list[int]:
        """-> the first `count` tokens that a hash id stands for."""
        drawn: list[int] = self._draw(hash_id)[:count].tolist()
        return drawn

    def encoded(self, hash_ids: Sequence[int], count: int, api: Api) -> Iterator[bytes]:
        """The JSON of a prompt of `count` tokens, in pieces: an array of token ids, or for chat a string."""
        yield b"[" if api == "completions" else b'"'
        separator = b"," if api == "completions" else b" "
        for position, hash_id in enumerate(hash_ids):
            tokens = self.tokens(hash_id, count - position * HASHED_TOKENS)
            piece = msgspec.json.encode(tokens)[1:-1] if api == "completions" else _words(tokens)
            yield separator + piece if position else piece
        yield b"]" if api == "completions" else b'"'

    def _draw(self, hash_id: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        generator = np.random.Generator(np.random.SFC64([self._seed, hash_id]))
        return generator.integers(self._low, self._high, HASHED_TOKENS)


def _words(tokens: list[int]) -> bytes:
    return " ".join([WORDS[token % len(WORDS)] for token in tokens]).encode()
