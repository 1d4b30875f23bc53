"""The queue of blocks that wait to be sent. In random use, it keeps the invariants that users can observe."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from kvstore_client.engine.waiting_blocks import WaitingBlocks


class Waiting(NamedTuple):
    key: bytes
    parent: bytes | None
    token: int


def chain(name: str, blocks: int, first: int = 0) -> list[Waiting]:
    """Return the blocks of one prompt; with `first`, only those after the first `first` blocks."""
    keys = [f"{name}{number}".encode() for number in range(first + blocks)]
    parents = [None, *keys[:-1]]
    return [Waiting(key, parent, 0) for key, parent in zip(keys, parents, strict=True)][first:]


def keys(blocks: list[Waiting]) -> list[str]:
    return [each.key.decode() for each in blocks]


def test_the_oldest_prompt_goes_first_including_its_later_blocks() -> None:
    queue: WaitingBlocks[Waiting] = WaitingBlocks(10)
    for each in [*chain("a", 2), *chain("b", 2), *chain("a", 1, first=2)]:
        assert queue.add(each)
    assert len(queue) == 5 and keys(queue.take(4)) == ["a0", "a1", "a2", "b0"]
    assert keys(queue.take(4)) == ["b1"] and not queue and queue.take(1) == []


def test_when_too_many_wait_the_oldest_prompts_ends_are_cut() -> None:
    queue: WaitingBlocks[Waiting] = WaitingBlocks(10)
    for each in [*chain("a", 3), *chain("b", 3)]:
        queue.add(each)
    assert keys(queue.cut(2)) == ["a2", "a1"]
    assert keys(queue.cut(2)) == ["a0", "b2"]
    assert keys(queue.take(5)) == ["b0", "b1"] and queue.cut(1) == []


def test_followers_of_a_cut_block_are_refused_until_it_is_back() -> None:
    queue: WaitingBlocks[Waiting] = WaitingBlocks(10)
    for each in chain("a", 3):
        queue.add(each)
    queue.cut(1)
    assert [queue.add(each) for each in chain("a", 2, first=3)] == [False, False]
    assert [queue.add(each) for each in chain("a", 5)] == [True] * 5, "another request computed it"
    assert keys(queue.take(9)) == ["a0", "a1", "a0", "a1", "a2", "a3", "a4"]
    assert not queue._chain_of


def test_cuts_are_forgotten_once_there_is_room() -> None:
    """Followers of a cut block are accepted again when there is room, because another engine may have stored the block
    meanwhile."""
    queue: WaitingBlocks[Waiting] = WaitingBlocks(10)
    for each in chain("a", 3):
        queue.add(each)
    queue.cut(2)
    queue.take(1)
    assert all(queue.add(each) for each in chain("a", 1, first=3))


def test_a_block_queued_twice_or_stored_otherwise_can_have_followers() -> None:
    queue: WaitingBlocks[Waiting] = WaitingBlocks(10)
    for each in [*chain("a", 3), *chain("a", 3)]:
        queue.add(each)
    assert keys(queue.cut(2)) == ["a2", "a1"]
    assert queue.add(chain("a", 4)[-1]), "its parent waits once more"
    queue.cut(1)
    assert keys(queue.cut(4)) == ["a3", "a2", "a1", "a0"]
    queue.add(chain("b", 1)[0])
    assert not queue.add(chain("a", 1, first=1)[0])
    queue.went(b"a0")
    assert queue.add(chain("a", 1, first=1)[0])


def test_blocks_can_be_removed_from_the_middle() -> None:
    queue: WaitingBlocks[Waiting] = WaitingBlocks(10)
    for number, each in enumerate([*chain("a", 3), *chain("b", 1)]):
        queue.add(each._replace(token=number))
    assert keys(queue.remove(lambda token: token in (1, 3))) == ["a1", "b0"]
    assert len(queue) == 2 and keys(queue.take(9)) == ["a0", "a2"]


@pytest.mark.parametrize("seed", range(20))
def test_each_block_leaves_once_and_none_is_sent_behind_a_cut(seed: int) -> None:
    rng = random.Random(seed)
    queue: WaitingBlocks[Waiting] = WaitingBlocks(remember=10_000)
    token, inside = 0, set()
    cut: set[bytes] = set()
    lengths = dict.fromkeys("abcdef", 0)
    for _ in range(2000):
        action = rng.random()
        if action < 0.6:
            name = rng.choice(list(lengths))
            block = Waiting(f"{name}{lengths[name]}".encode(), f"{name}{lengths[name] - 1}".encode(), token)
            lengths[name] += 1
            taken = queue.add(block)
            assert taken is (block.parent not in cut)
            if taken:
                inside.add(token)
            else:
                cut.add(block.key)
            token += 1
            left: list[Waiting] = []
        elif action < 0.75:
            left = queue.take(rng.randrange(5))
            assert all(each.parent not in cut for each in left)
            if not queue:
                cut.clear()
        elif action < 0.9:
            left = queue.cut(rng.randrange(5))
            cut.update(each.key for each in left)
        else:
            odd = rng.randrange(7)
            left = queue.remove(set(range(odd, token, 7)).__contains__)
        for each in left:
            inside.remove(each.token)
        assert len(queue) == len(inside)


def test_the_memory_of_cut_blocks_is_bounded() -> None:
    queue: WaitingBlocks[Waiting] = WaitingBlocks(remember=3)
    for each in chain("a", 100):
        queue.add(each)
    queue.cut(100)
    assert len(queue._cut) == 3 and not queue._chains and not queue._chain_of
