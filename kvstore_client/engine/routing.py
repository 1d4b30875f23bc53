"""Which engine has how much of a prompt, and in which tier: for routers that send a request where its prefix is.

Engines publish KV events: vLLM does, for its own cache and for what this project's connector keeps (``medium`` ``GPU``,
``CPU``, ``STORAGE``). `Routes` listens to many engines and answers for a list of tokens, and what else decides their
blocks: `block_index`. What the store has now the store itself is asked, since it does not tell anybody what it evicts;
what engines say that they have put there is kept only to know what to ask for.

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
import xxhash

from kvstore_client.engine.block_index import MEMORY_BYTES, BlockKeys, Index

log = logging.getLogger(__name__)

_REPLAY_S: Final = 5.0  # for an engine to answer a request for what was missed
_CHECKED_S: Final = 1.0  # is less than an engine needs to start again
_LOOK_S: Final = 0.05  # between two looks at what has come


class PrefixStore(Protocol):
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
    model: str
    next: int = 0  # number of the next batch
    last: bytes = b""  # a digest of the batch before
    checked: float = float("-inf")  # when it had that batch still, of `time.monotonic`
    synced: bool = False


class Routes:
    """Listens to engines, and says where a prompt is. Thread-safe; a thread of its own listens.

    `stores`: clients of the store, one for each rank's namespace; a block counts if all of them have it. They are asked
    with the hashes that the events carry, which must be whole: ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``. Where the
    store has blocks in parts, `SlicedStore(ClientStore(…), range(N))` of `kvstore_client.engine` asks for all N:
    engines with ``head_shards`` or ``layer_parts``, and models of N groups of layers. `tokenize`: makes tokens of text.
    `memory_bytes`: for what engines have, about; what was heard of or asked for longest ago goes first.
    """

    def __init__(
        self,
        stores: Sequence[PrefixStore] = (),
        tokenize: Callable[[str], Sequence[int]] | None = None,
        *,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        import zmq

        self.index = Index(memory_bytes, storage=bool(stores))
        self._stores = stores
        self._tokenize = tokenize
        self._zmq = zmq
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._engines: dict[str, _Engine] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-routes", daemon=True)
        self._thread.start()

    def add(self, name: str, events: str, replay: str = "", *, model: str = "") -> None:
        """Listen to an engine's publisher at ``events``, and ask for what was missed at ``replay``: the addresses of
        its ``--kv-events-config``. Without ``replay``, what an engine had before is not known. ``model``: what it
        serves, for `find`, where engines serve several. Raises `ValueError` for an address that ZeroMQ cannot use, and
        a name that is there."""
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
            self._engines[name] = _Engine(name, live, again, model)

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

    def restarted(self, name: str) -> None:
        """An engine was started anew: what it had is gone. `Routes` finds that out by itself if the engine's events
        count from 0 again, but not if it misses their beginning and cannot ask for it."""
        with self._lock:
            engine = self._engines.get(name)
            if engine is not None:
                self._begin_anew(engine)
                engine.synced = False

    def find(
        self,
        prompt: Sequence[int] | str,
        *,
        model: str | None = None,
        lora_name: str = "",
        cache_salt: str = "",
        media: Sequence[tuple[str, int, int]] = (),
    ) -> Found:
        """Where the blocks of a prompt are. Text needs `tokenize`. `model`: of engines that were added with this one;
        None: of all. `lora_name`, `cache_salt` and `media`: what the request has beside its tokens (`BlockKeys`);
        blocks that were made for others are not followed. Raises what the stores' clients raise."""
        if isinstance(prompt, str):
            if self._tokenize is None:
                raise ValueError("a prompt of text; expected token ids, or Routes(tokenize=...)")
            prompt = self._tokenize(prompt)
        keys = BlockKeys(lora_name, cache_salt, media)
        with self._lock:
            others = {each.name for each in self._engines.values() if model is not None and each.model != model}
        engines: dict[str, dict[str, int]] = {}
        longest: tuple[list[bytes | int], int] = ([], 1)
        for name in self.index.engines:
            if name in others:
                continue
            hashes, size = self.index.chain(prompt, keys, name)
            runs = self.index.runs(hashes, name).get(name, {})
            engines[name] = {tier: run * size for tier, run in runs.items()}
            if len(hashes) * size > len(longest[0]) * longest[1]:
                longest = hashes, size
        hashes, size = longest
        stored = None
        if self._stores and all(isinstance(each, bytes) for each in hashes):
            names = [each for each in hashes if isinstance(each, bytes)]
            stored = min(store.match_prefix(names) for store in self._stores) * size if names else 0
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
            if number < engine.next:
                if self._has_last(engine):
                    continue  # it came with a replay
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
        engine.next, engine.last = 0, b""

    def _catch_up(self, engine: _Engine) -> None:
        """Ask the engine for all batches from the next one on; and for the last one, to see that it is the same."""
        if engine.replay is None:
            return
        if self._replay(engine) is False:
            log.info("kvstore: the events of engine %s are not those of before: it was restarted", engine.name)
            self._begin_anew(engine)
            self._replay(engine)

    def _has_last(self, engine: _Engine) -> bool:
        """Whether the last batch that was taken is the engine's still: else it was restarted."""
        if engine.replay is not None and time.monotonic() - engine.checked > _CHECKED_S and self._replay(engine):
            engine.checked = time.monotonic()
        return time.monotonic() - engine.checked <= _CHECKED_S

    def _replay(self, engine: _Engine) -> bool | None:
        """Take all batches from the next one on. -> whether the one before is the same as it was; None: it is not
        kept."""
        engine.replay.send_multipart([b"", max(0, engine.next - 1).to_bytes(8, "big")])
        deadline, same = time.monotonic() + _REPLAY_S, None
        while engine.replay.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            *_, sequence, payload = engine.replay.recv_multipart()
            if not payload:
                return same
            number = int.from_bytes(sequence, "big", signed=True)
            if same is None and number == engine.next - 1:
                same = xxhash.xxh3_128_digest(payload) == engine.last
            if same is False:
                continue
            if number > engine.next:  # the engine keeps its newest batches only
                self._begin_anew(engine)
                engine.next = number
            self._take(engine, number, payload)
        log.warning("kvstore: engine %s did not say which events were missed within %g s", engine.name, _REPLAY_S)
        return same

    def _take(self, engine: _Engine, number: int, payload: bytes) -> None:
        if number != engine.next:
            return  # it came with the replay
        engine.next, engine.last = engine.next + 1, xxhash.xxh3_128_digest(payload)
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            self.index.apply(engine.name, event)
