"""The groups of a model's KV cache: layers that keep the same tokens share a group, and a request has blocks of each.

In a group of full attention a request has a block for all its tokens. In one with a sliding window it has blocks for
the window alone: in the place of those before it is the null block, which holds nothing. So of a prefix that is loaded,
every block is needed in the groups of full attention, and in the others those of the window at its end.

In a group of layers with states (Mamba, linear attention, short convolutions) a block has the states behind its last
token. Of a prefix the last block is needed alone, as with a window of one token before the next. The engine keeps few
of them: where a step of a prompt ended, and those that decoding passed. So the store has them at some places only,
which are asked for by themselves, and the engine says for each of them where it is; its table of blocks does not.

Blocks of all groups are of one size and lie in one cache, so they are blocks of one namespace. Where there is more
than one group, a block's key is the engine's hash and one byte more: the number of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import xxhash
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec, iter_layer_specs

from kvstore_client.engine.parts import GroupParts, part_keys

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

NULL_BLOCK: Final = 0
STATE_WINDOW: Final = 2  # tokens: the next one, and the one whose states it goes on from

# (blocks, groups): whether a block is there in a group
Presence = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Place:
    """A block of a request: the index in its chain, the group, and its number in the engine's cache."""

    index: int
    group: int
    block_id: int


class BlockGroups:
    """The groups of one engine. Used by one thread.

    count: how many there are. whole: how many keep all tokens. windows: whether one does not. last: one that keeps
    fewest. states: the numbers of those with states. tables: of the others.
    decoded_states: whether states are saved that decoding passes, too.
    """

    def __init__(
        self,
        windows: Sequence[int],
        block_tokens: int,
        states: Collection[int] = (),
        *,
        decoded_states: bool = True,
    ) -> None:
        """windows: of each group, in tokens; 0: it keeps all. states: which of them have states."""
        windows = [STATE_WINDOW if group in states else window for group, window in enumerate(windows)]
        self.count = len(windows)
        self.states = sorted(states)
        self.tables = [group for group in range(self.count) if group not in states]
        self.decoded_states = decoded_states
        self.windows = any(windows)
        self.whole = sum(not window for window in windows)
        self.last = min(range(self.count), key=lambda group: windows[group] or float("inf"))
        self._windows = windows
        self._block_tokens = block_tokens
        self._keys: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig, block_tokens: int) -> BlockGroups:
        """Those of an engine that `check_engine` accepts."""
        windows, states, ahead = [], [], 0
        for number, group in enumerate(kv_cache_config.kv_cache_groups):
            specs = iter_layer_specs(group.kv_cache_spec)
            kept = [_kept(spec) for spec in specs if isinstance(spec, SlidingWindowSpec)]
            windows.append(max(kept) if len(kept) == len(specs) else 0)
            for spec in specs:
                if isinstance(spec, MambaSpec):
                    states.append(number)
                    ahead += spec.num_speculative_blocks
        # With drafts, the states behind a block depend on which of them were accepted.
        return cls(windows, block_tokens, set(states), decoded_states=not ahead)

    @property
    def recompute_whole(self) -> bool:
        """Whether a request must be computed from its beginning if one of its blocks is missing: what is before that
        block is not all there, or the engine cannot tell whose block it is."""
        return self.windows or self.count > 1

    # Keys.

    def keys(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys of blocks in all groups, block by block."""
        return part_keys(keys, range(self.count)) if self.count > 1 else keys

    def names_to_last_states(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of all that a request needs to go on behind the last of these blocks: of the groups without states
        all, and then the states."""
        names, count = self.keys(keys), self.count
        tables = [names[at + group] for at in range(0, len(names), count) for group in self.tables]
        return [*tables, *(names[-count + group] for group in self.states if names)]

    def of_chain(self, key: bytes) -> bytes:
        """The key in its chain of one of the `keys`."""
        return key[:-1] if self.count > 1 else key

    def keys_of(self, request: Request, chain: Sequence[bytes]) -> Sequence[bytes]:
        """`keys` of a request's chain, of which those that are known are not made again."""
        if self.count == 1:
            return chain
        known = self._keys.setdefault(request, [])
        done = len(known) // self.count
        if done > len(chain) or (done and known[-1][:-1] != chain[done - 1]):  # vLLM took tokens back, or new weights
            known.clear()
            done = 0
        known += self.keys(chain[done:])
        return known

    def key_at(self, keys: Sequence[bytes], place: Place) -> bytes:
        """Of the keys of `keys`, that of one block."""
        return keys[place.index * self.count + place.group]

    def parent_at(self, keys: Sequence[bytes], place: Place) -> bytes | None:
        """And that of the block it follows in its chain; states follow the block of tokens behind which they are. None:
        it is the first."""
        if place.group in self.states:
            return keys[place.index * self.count + self.tables[0]] if self.tables else None
        return keys[(place.index - 1) * self.count + place.group] if place.index else None

    def in_group(self, keys: Sequence[bytes], group: int) -> Sequence[bytes]:
        """Of the keys of `keys`, those of one group."""
        return keys[group :: self.count] if self.count > 1 else keys

    @property
    def parts(self) -> GroupParts | None:
        """The groups as the store is asked for them; None: all of each block."""
        return GroupParts(self.tables, self.states) if self.states else None

    # What is there.

    def presence(self, there: npt.NDArray[np.bool_]) -> Presence:
        """By block and group; `there`: by the keys of `keys`."""
        return there.reshape(-1, self.count)

    def stored(self, blocks: int, local: int, run: int, states: Collection[int]) -> Presence:
        """Of so many blocks that follow `local` others, those of a chain of which the store has the first `run`, and
        the states behind so many leading blocks each."""
        present = np.zeros((blocks, self.count), dtype=np.bool_)
        present[: max(0, run - local), self.tables] = True
        ends = [end - local - 1 for end in states if local < end <= min(run, local + blocks)]
        if ends and self.states:
            present[np.ix_(ends, self.states)] = True
        return present

    def run(self, present: Presence, local: int) -> int:
        """How many of these blocks, which follow `local` others, can be loaded: the longest run that is there in all
        groups of full attention, and in the others within the window at its end."""
        full = [group for group, window in enumerate(self._windows) if not window]
        whole = np.asarray(present[:, full].all(axis=1))
        run = len(whole) if whole.all() else int(whole.argmin())
        if not self.windows:
            return run
        ends = np.arange(1, run + 1)
        fits = np.ones(run, dtype=np.bool_)
        for group, window in enumerate(self._windows):
            if window:
                gaps = np.where(present[:run, group], -1, np.arange(run))
                start = np.maximum.accumulate(gaps) + 1 if run else gaps  # of the run that ends there
                fits &= start <= np.maximum(
                    0, self._first_needed(ends + local, window) - local
                )  # the engine has others
        return int(np.flatnonzero(fits)[-1]) + 1 if fits.any() else 0

    def needed(self, present: Presence, local: int, run: int) -> npt.NDArray[np.bool_]:
        """Of the first `run` of these blocks, whether all that a load of that run needs is there."""
        there = np.ones(run, dtype=np.bool_)
        for group, window in enumerate(self._windows):
            first = int(self._first_needed(np.array(local + run), window)) - local if window else 0
            there[max(0, first) :] &= present[max(0, first) : run, group]
        return there

    def _first_needed(self, ends: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
        """The first block that a prefix needs that ends behind so many blocks."""
        first: npt.NDArray[np.int64] = np.maximum(0, ends * self._block_tokens - window + 1) // self._block_tokens
        return first

    # A request's blocks in the engine's cache.

    def places(self, block_ids: Sequence[Sequence[int]], indices: Iterable[int]) -> Iterator[Place]:
        """Blocks of a request, whose numbers are `block_ids` by group, as far as it has them."""
        for index in indices:
            for group, ids in enumerate(block_ids):
                if ids[index] != NULL_BLOCK:
                    yield Place(index, group, ids[index])

    def complete(self, block_ids: Sequence[Sequence[int]], index: int) -> bool:
        """Whether a request has this block in all groups without states."""
        return all(block_ids[group][index] != NULL_BLOCK for group in self.tables)

    def in_tables(self, block_ids: Sequence[Sequence[int]], indices: Iterable[int]) -> Iterator[Place]:
        """`places` in the groups without states, whose blocks are where the request's table of blocks says."""
        return (place for place in self.places(block_ids, indices) if place.group in self.tables)

    def table_blocks(self, block_ids: Sequence[Sequence[int]], at_most: int) -> int:
        """How many blocks the request has in each of these groups, `at_most` so many."""
        return min(at_most, *(len(block_ids[group]) for group in self.tables)) if self.tables else at_most


def _kept(spec: SlidingWindowSpec) -> int:
    """How many tokens the engine keeps of a window, at least 1."""
    return max(1, int(spec.sliding_window) + int(spec.extra_retained_tokens))


def groups_digest(kv_cache_config: KVCacheConfig) -> str:
    """The number of groups, and a digest of which layers are in which; empty for one group."""
    groups = [",".join(sorted(group.layer_names)) for group in kv_cache_config.kv_cache_groups]
    return f"{len(groups)}-{xxhash.xxh3_64_hexdigest('/'.join(groups).encode())}" if len(groups) > 1 else ""
