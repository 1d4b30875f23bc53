"""The groups of a model's KV cache. Layers that keep the same tokens are in one group, and a request has blocks in each
group.

In a group with full attention, a request has blocks for all its tokens. In a group with a sliding window, it has blocks
only for the window; the null block, which has no content, stands in place of earlier blocks. So a load of a prefix
needs every block in the groups with full attention. In the other groups, it needs only the blocks of the window at the
prefix's end.

In a group of layers with states (Mamba, linear attention, short convolutions), a block has the states after its last
token. A prefix needs only its last block in this group, as if the group had a window of two tokens: the next token and
the token before it. The engine keeps states only where a step of a prompt ended and where decoding passed the end of a
block. So the store has a state for only some of the blocks, and states are looked up separately. The engine's table of
blocks does not show where a state is, so the engine reports the block of each state.

Blocks of all groups have the same size and are in one cache, so they belong to one namespace. If there are several
groups, a block's key is the engine's hash followed by one byte, the number of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import xxhash
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from kvstore_client.engine.slices import GroupSlices, slice_keys
from kvstore_client.vllm.shared.releases import layer_specs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

NULL_BLOCK: Final = 0
STATE_WINDOW: Final = 2  # the next token, and the token before it, whose states the next token needs

# An array of shape (blocks, groups), which says whether each block is available in each group.
Presence = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GroupBlock:
    """A block of a request: its index in the chain, its group, and its number in the engine's cache."""

    index: int
    group: int
    block_id: int


class BlockGroups:
    """The groups of one engine. Not thread-safe.

    count: the number of groups.
    whole: the number of groups that keep all tokens.
    windows: whether at least one group does not keep all tokens.
    last: the number of a group that keeps the fewest tokens.
    states: the numbers of the groups with states.
    tables: the numbers of the other groups.
    decoded_states: whether states after generated tokens are saved, too.
    """

    def __init__(
        self,
        windows: Sequence[int],
        block_tokens: int,
        states: Collection[int] = (),
        *,
        decoded_states: bool = True,
    ) -> None:
        """`windows`: the window of each group in tokens, or 0 for a group that keeps all tokens. `states`: the numbers
        of the groups with states. `decoded_states`: see the attribute of this name."""
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
        """Return the groups of an engine, which `check_engine` must have accepted."""
        windows, states, ahead = [], [], 0
        for number, group in enumerate(kv_cache_config.kv_cache_groups):
            specs = layer_specs(group.kv_cache_spec)
            kept = [_kept(spec) for spec in specs if isinstance(spec, SlidingWindowSpec)]
            windows.append(max(kept) if len(kept) == len(specs) else 0)
            for spec in specs:
                if isinstance(spec, MambaSpec):
                    states.append(number)
                    ahead += spec.num_speculative_blocks
        # With draft tokens, the states after a block depend on which draft tokens were accepted.
        return cls(windows, block_tokens, set(states), decoded_states=not ahead)

    @property
    def recompute_whole(self) -> bool:
        """Whether a request must be computed from its beginning if one of its blocks is missing. This is necessary if
        blocks before the missing one may not be in the cache, or if the engine cannot tell to which request the block
        belongs."""
        return self.windows or self.count > 1

    # Keys.

    def keys(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the keys of blocks in all groups, in the order of the blocks."""
        return slice_keys(keys, range(self.count)) if self.count > 1 else keys

    def names_to_last_states(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that a request needs in order to continue after the last of these blocks. These are the keys
        of all blocks in the groups without states, followed by those of the last states."""
        names, count = self.keys(keys), self.count
        tables = [names[at + group] for at in range(0, len(names), count) for group in self.tables]
        return [*tables, *(names[-count + group] for group in self.states if names)]

    def of_chain(self, key: bytes) -> bytes:
        """For a key that `keys` returned, return the key of the chain from which it was made."""
        return key[:-1] if self.count > 1 else key

    def keys_of(self, request: Request, chain: Sequence[bytes]) -> Sequence[bytes]:
        """Return the same as `keys` for a request's chain. Keys that were made by an earlier call are reused."""
        if self.count == 1:
            return chain
        known = self._keys.setdefault(request, [])
        done = len(known) // self.count
        if done > len(chain) or (done and known[-1][:-1] != chain[done - 1]):  # tokens were removed, or weights changed
            known.clear()
            done = 0
        known += self.keys(chain[done:])
        return known

    def key_at(self, keys: Sequence[bytes], place: GroupBlock) -> bytes:
        """Return the key of one block. `keys` are the request's keys in all groups."""
        return keys[place.index * self.count + place.group]

    def parent_at(self, keys: Sequence[bytes], place: GroupBlock) -> bytes | None:
        """Return the key of the block before this one in its chain, or None if it is the first. For a block of states,
        return the key of the block of tokens that ends at the same token."""
        if place.group in self.states:
            return keys[place.index * self.count + self.tables[0]] if self.tables else None
        return keys[(place.index - 1) * self.count + place.group] if place.index else None

    def in_group(self, keys: Sequence[bytes], group: int) -> Sequence[bytes]:
        """Return the keys of one group. `keys` are the request's keys in all groups."""
        return keys[group :: self.count] if self.count > 1 else keys

    @property
    def slices(self) -> GroupSlices | None:
        """The groups that a lookup in the store must name, or None if it needs all groups of each block."""
        return GroupSlices(self.tables, self.states) if self.states else None

    # Which blocks are available.

    def presence(self, there: npt.NDArray[np.bool_]) -> Presence:
        """Return `there`, which is in the order of `keys`, as an array of shape (blocks, groups)."""
        return there.reshape(-1, self.count)

    def stored(self, blocks: int, local: int, run: int, states: Collection[int]) -> Presence:
        """Return the presence of `blocks` blocks that follow `local` other blocks, given that the store has the first
        `run` blocks of the chain. `states`: the numbers N for which the store has the states after the first N
        blocks."""
        present = np.zeros((blocks, self.count), dtype=np.bool_)
        present[: max(0, run - local), self.tables] = True
        ends = [end - local - 1 for end in states if local < end <= min(run, local + blocks)]
        if ends and self.states:
            present[np.ix_(ends, self.states)] = True
        return present

    def run(self, present: Presence, local: int) -> int:
        """Return how many of these blocks, which follow `local` other blocks, can be loaded. The result is the length
        of the longest run whose blocks are available in all groups with full attention. In the other groups, only the
        blocks in the window at the run's end must be available."""
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
                start = np.maximum.accumulate(gaps) + 1 if run else gaps  # the start of the run that ends at each block
                fits &= start <= np.maximum(
                    0, self._first_needed(ends + local, window) - local
                )  # the engine itself has earlier blocks
        return int(np.flatnonzero(fits)[-1]) + 1 if fits.any() else 0

    def needed(self, present: Presence, local: int, run: int) -> npt.NDArray[np.bool_]:
        """Return, for each of the first `run` blocks, whether it is available in every group where a load of these
        `run` blocks needs it."""
        there = np.ones(run, dtype=np.bool_)
        for group, window in enumerate(self._windows):
            first = int(self._first_needed(np.array(local + run), window)) - local if window else 0
            there[max(0, first) :] &= present[max(0, first) : run, group]
        return there

    def _first_needed(self, ends: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
        """Return the index of the first block that a prefix of `ends` blocks needs in a group with this window."""
        first: npt.NDArray[np.int64] = np.maximum(0, ends * self._block_tokens - window + 1) // self._block_tokens
        return first

    # A request's blocks in the engine's cache.

    def places(self, block_ids: Sequence[Sequence[int]], indices: Iterable[int]) -> Iterator[GroupBlock]:
        """Yield the blocks that a request has at these indices. `block_ids` has the numbers of the request's blocks, by
        group."""
        for index in indices:
            for group, ids in enumerate(block_ids):
                if ids[index] != NULL_BLOCK:
                    yield GroupBlock(index, group, ids[index])

    def complete(self, block_ids: Sequence[Sequence[int]], index: int) -> bool:
        """Return whether a request has this block in all groups without states."""
        return all(block_ids[group][index] != NULL_BLOCK for group in self.tables)

    def in_tables(self, block_ids: Sequence[Sequence[int]], indices: Iterable[int]) -> Iterator[GroupBlock]:
        """Yield the same as `places`, but only for the groups without states. Only these groups have their blocks in
        the request's table of blocks."""
        return (place for place in self.places(block_ids, indices) if place.group in self.tables)

    def table_blocks(self, block_ids: Sequence[Sequence[int]], at_most: int) -> int:
        """Return how many blocks the request has in each of the groups without states, but at most `at_most`."""
        return min(at_most, *(len(block_ids[group]) for group in self.tables)) if self.tables else at_most


def _kept(spec: SlidingWindowSpec) -> int:
    """Return how many tokens of a window the engine keeps, at least 1."""
    return max(1, int(spec.sliding_window) + int(spec.extra_retained_tokens))


def groups_digest(kv_cache_config: KVCacheConfig) -> str:
    """Return the number of groups and a digest of the layers in each group. The result is empty for a single group."""
    groups = [",".join(sorted(group.layer_names)) for group in kv_cache_config.kv_cache_groups]
    return f"{len(groups)}-{xxhash.xxh3_64_hexdigest('/'.join(groups).encode())}" if len(groups) > 1 else ""
