"""Which engine has how much of a prompt, and in which tier: for routers that send a request where its prefix is.

Engines publish KV events: vLLM does, for its own cache and for what this project's connector keeps (``medium`` ``GPU``,
``CPU``, ``STORAGE``). `Routes` listens to many engines and answers for a list of tokens. It needs no hash function:
an event carries a block's tokens and its parent, so a prompt is followed block by block. What the store has now the
store itself is asked, since it does not tell anybody what it evicts.

Needs pyzmq: the extra ``llm-kvstore[routing]``; vLLM brings it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import xxhash

log = logging.getLogger(__name__)

GPU: Final = "GPU"
_REPLAY_S: Final = 5.0  # for an engine to answer a request for what was missed
_LOOK_S: Final = 0.05  # between two looks at what has come
# What vLLM calls the groups of layers that keep every token; None: it does not say.
_WHOLE: Final = (None, "full_attention", "mla_attention")

Hash = bytes | int
# The block before, a digest of the tokens, and what else the block's hash covers (salt, adapter, images).
_Place = tuple[Hash | None, bytes, str]


class Store(Protocol):
    """What is asked of a client of the store."""

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are there."""


@dataclass(frozen=True)
class Found:
    """Where a prompt's blocks are. Tokens are counted from the prompt's beginning, in whole blocks.

    tokens: how many of them some engine, or the store, has. engines: by name and then by tier, how many an engine has
    without a gap, in this tier alone; under ``any``, in its tiers together. store: how many the store has; None: it was
    not asked.
    """

    tokens: int
    engines: dict[str, dict[str, int]]
    store: int | None = None

    def best(self) -> str | None:
        """The engine that has most in its own tiers; None if none has anything."""
        have = {name: tiers.get("any", 0) for name, tiers in self.engines.items()}
        return max(have, key=lambda name: have[name]) if any(have.values()) else None


@dataclass
class _Engine:
    name: str
    live: Any  # sockets
    replay: Any
    next: int = 0  # number of the next batch
    synced: bool = False


# What one tier of an engine has, by group of its layers. A block is there if all groups have it.
_Tier = dict[int, set[Hash]]


class Index:
    """The blocks of many engines, from their events. Thread-safe.

    Of an engine whose layers are in several groups, those count that keep every token. Of the others, such as sliding
    windows, an engine has what it needs at the end of a prefix, or computes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: dict[_Place, Hash] = {}
        self._places: dict[Hash, _Place] = {}
        self._holders: dict[Hash, int] = {}  # how many tiers of engines have it
        self._engines: dict[str, dict[str, _Tier]] = {}  # by name and medium
        self._block_tokens: set[int] = set()  # sizes of blocks that were told of

    def apply(self, engine: str, event: dict[str, Any]) -> None:
        """Take in an event of vLLM, as its msgpack decodes. Unknown kinds are ignored: later versions may have more."""
        kind, medium, group = event.get("type"), event.get("medium") or GPU, event.get("group_idx") or 0
        if event.get("kv_cache_spec_kind") not in _WHOLE:
            return
        with self._lock:
            tiers = self._engines.setdefault(engine, {})
            if kind == "BlockStored":
                self._store(tiers.setdefault(medium, {}).setdefault(group, set()), event)
            elif kind == "BlockRemoved":
                self._remove(tiers.get(medium, {}).get(group, set()), event["block_hashes"])
            elif kind == "AllBlocksCleared":  # of the engine's own cache
                for blocks in tiers.get(GPU, {}).values():
                    self._remove(blocks, list(blocks))

    def _store(self, blocks: set[Hash], event: dict[str, Any]) -> None:
        size, parent, extras = event["block_size"], event["parent_block_hash"], event.get("extra_keys")
        tokens = np.asarray(event["token_ids"], dtype=np.int64)
        for number, block_hash in enumerate(event["block_hashes"]):
            extra = extras[number] if extras else None
            place = (parent, _digest(tokens[number * size : (number + 1) * size]), repr(extra) if extra else "")
            if block_hash not in blocks:
                blocks.add(block_hash)
                self._holders[block_hash] = self._holders.get(block_hash, 0) + 1
                if block_hash not in self._places:
                    self._places[block_hash] = place
                    self._children[place] = block_hash
                    self._block_tokens.add(size)
            parent = block_hash

    def _remove(self, blocks: set[Hash], hashes: Sequence[Hash]) -> None:
        for block_hash in hashes:
            if block_hash not in blocks:
                continue
            blocks.discard(block_hash)
            self._holders[block_hash] -= 1
            if not self._holders[block_hash]:
                del self._holders[block_hash]
                place = self._places.pop(block_hash)
                if self._children.get(place) == block_hash:
                    del self._children[place]

    def forget(self, engine: str) -> None:
        """The engine has gone, or what it has is not known any more."""
        with self._lock:
            for tier in self._engines.pop(engine, {}).values():
                for blocks in tier.values():
                    self._remove(blocks, list(blocks))

    def chain(self, token_ids: Sequence[int]) -> tuple[list[Hash], int]:
        """-> the hashes of the prompt's leading blocks that somebody has, and the tokens of a block."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        with self._lock:
            longest: tuple[list[Hash], int] = ([], next(iter(self._block_tokens), 1))
            for size in self._block_tokens:
                hashes: list[Hash] = []
                parent: Hash | None = None
                for start in range(0, len(tokens) - size + 1, size):
                    found = self._children.get((parent, _digest(tokens[start : start + size]), ""))
                    if found is None:
                        break
                    hashes.append(found)
                    parent = found
                if len(hashes) * size > len(longest[0]) * longest[1]:
                    longest = hashes, size
            return longest

    def runs(self, hashes: Sequence[Hash]) -> dict[str, dict[str, int]]:
        """-> by engine and tier, how many leading ones of these blocks it has; ``any``: in all tiers together."""
        with self._lock:
            return {
                engine: {
                    **{medium: _leading(hashes, [tier]) for medium, tier in tiers.items()},
                    "any": _leading(hashes, [tier for medium, tier in tiers.items() if medium != "STORAGE"]),
                }
                for engine, tiers in self._engines.items()
            }

    @property
    def blocks(self) -> int:
        """Distinct blocks that somebody has."""
        return len(self._places)


def _digest(tokens: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
    return xxhash.xxh3_128_digest(tokens.tobytes())


def _leading(hashes: Sequence[Hash], tiers: Sequence[_Tier]) -> int:
    """How many leading ones of these blocks are in one of the tiers, in each group."""
    groups = {group for tier in tiers for group in tier}
    by_group = [[tier[group] for tier in tiers if group in tier] for group in groups]
    if not by_group:
        return 0
    there = (all(any(each in some for some in sets) for sets in by_group) for each in hashes)
    return next((number for number, present in enumerate(there) if not present), len(hashes))


class Routes:
    """Listens to engines, and says where a prompt is. Thread-safe; a thread of its own listens.

    `stores`: clients of the store, one for each rank's namespace; a block counts if all of them have it. They are asked
    with the hashes that the events carry, which must be whole: ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``. Where the
    store has blocks in parts, `kvstore_client.engine.parts.PartsStore(client, range(N))` asks for all N of them:
    engines with ``head_shards`` or ``layer_parts``, and models of N groups of layers. `tokenize`: makes tokens of text.
    """

    def __init__(self, stores: Sequence[Store] = (), tokenize: Callable[[str], Sequence[int]] | None = None) -> None:
        import zmq

        self.index = Index()
        self._stores = stores
        self._tokenize = tokenize
        self._zmq = zmq
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._engines: dict[str, _Engine] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-routes", daemon=True)
        self._thread.start()

    def add(self, name: str, events: str, replay: str = "") -> None:
        """Listen to an engine's publisher at ``events``, and ask for what was missed at ``replay``: the addresses of
        its ``--kv-events-config``. Without ``replay``, what an engine had before is not known. Raises `ValueError` for
        an address that ZeroMQ cannot use, and a name that is there."""
        with self._lock:
            if name in self._engines:
                raise ValueError(f"engine {name!r} was added before; expected another name")
            live = self._connected(self._zmq.SUB, events)
            try:
                again = self._connected(self._zmq.DEALER, replay) if replay else None
            except ValueError:
                live.close(0)
                raise
            live.subscribe(b"")
            self._engines[name] = _Engine(name, live, again)

    def _connected(self, kind: int, address: str) -> Any:
        made = self._context.socket(kind)
        try:
            made.connect(address)
        except (self._zmq.ZMQError, ValueError) as error:
            made.close(0)
            raise ValueError(f"the address {address!r} cannot be used: {error}; expected tcp://HOST:PORT") from None
        return made

    def remove(self, name: str) -> None:
        """Forget an engine."""
        with self._lock:
            engine = self._engines.pop(name, None)
            if engine is not None:
                engine.live.close(0)
                if engine.replay is not None:
                    engine.replay.close(0)
        self.index.forget(name)

    def find(self, prompt: Sequence[int] | str) -> Found:
        """Where the blocks of a prompt are. Text needs `tokenize`. Raises what the stores' clients raise."""
        if isinstance(prompt, str):
            if self._tokenize is None:
                raise ValueError("a prompt of text; expected token ids, or Routes(tokenize=...)")
            prompt = self._tokenize(prompt)
        hashes, size = self.index.chain(prompt)
        runs = self.index.runs(hashes)
        engines = {name: {tier: run * size for tier, run in tiers.items()} for name, tiers in runs.items()}
        stored = None
        if self._stores and all(isinstance(each, bytes) for each in hashes):
            keys = [each for each in hashes if isinstance(each, bytes)]
            stored = min(store.match_prefix(keys) for store in self._stores) * size if keys else 0
        return Found(len(hashes) * size, engines, stored)

    def close(self) -> None:
        """End the thread and the connections."""
        self._closed = True
        self._thread.join()
        for name in list(self._engines):
            self.remove(name)
        self._context.destroy(linger=0)

    def __enter__(self) -> Routes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- listening -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                engines = list(self._engines.values())
                for engine in engines:
                    try:
                        self._listen(engine)
                    except Exception:  # what an engine sends must not end the thread that hears the others
                        log.exception("kvstore: events of engine %s cannot be read: it is heard anew", engine.name)
                        self._begin_anew(engine)
            time.sleep(_LOOK_S)

    def _listen(self, engine: _Engine) -> None:
        if not engine.synced:
            engine.synced = True
            if engine.replay is not None:
                self._catch_up(engine)
        while engine.live.poll(0):
            _, sequence, payload = engine.live.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number < engine.next:  # the engine was restarted
                log.info("kvstore: engine %s counts its events anew: it was restarted", engine.name)
                self._begin_anew(engine)
            if number > engine.next:
                self._catch_up(engine)
            if number > engine.next:  # nobody has them any more: what the engine removed meanwhile is not known
                self._begin_anew(engine)
                engine.next = number
            self._take(engine, number, payload)

    def _begin_anew(self, engine: _Engine) -> None:
        self.index.forget(engine.name)
        engine.next = 0

    def _catch_up(self, engine: _Engine) -> None:
        """Ask the engine for all batches from the next one on."""
        if engine.replay is None:
            return
        engine.replay.send_multipart([b"", engine.next.to_bytes(8, "big")])
        deadline = time.monotonic() + _REPLAY_S
        while engine.replay.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            *_, sequence, payload = engine.replay.recv_multipart()
            if not payload:
                return
            number = int.from_bytes(sequence, "big", signed=True)
            if number > engine.next:  # the engine keeps its newest batches only
                self._begin_anew(engine)
                engine.next = number
            self._take(engine, number, payload)
        log.warning("kvstore: engine %s did not say which events were missed within %g s", engine.name, _REPLAY_S)

    def _take(self, engine: _Engine, number: int, payload: bytes) -> None:
        if number != engine.next:
            return  # it came with the replay
        engine.next += 1
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            self.index.apply(engine.name, event)
