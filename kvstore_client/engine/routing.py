"""Tells a router how much of a prompt each engine has, and in which tier, so that the router can send each request to
an engine that has its prefix.

vLLM publishes KV events for its own cache and for the tiers of this project's connector (``medium`` ``GPU``, ``CPU``,
``STORAGE``). `Routes` receives them from many engines. A query gives a list of tokens, and everything else that
identifies the blocks (`block_index`). The store does not report its evictions, so a query also asks the store itself
which blocks it has. The events provide only the names of the blocks to ask for.

Needs pyzmq, which the extra ``llm-kvstore[routing]`` installs. vLLM also installs it.
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

from kvstore_client.engine.block_index import INDEX_MEMORY_BYTES, Index, PromptExtras

log = logging.getLogger(__name__)

_REPLAY_S: Final = 5.0  # time for an engine to answer a request for missed events
_CHECKED_S: Final = 1.0  # less time than an engine needs to restart
_ROUTE_POLL_S: Final = 0.05  # the pause between two checks for new events


class PrefixStore(Protocol):
    """The one method that `Routes` needs from a client of the store."""

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are stored."""


@dataclass(frozen=True)
class Found:
    """Where a prompt's blocks are. Tokens are counted from the prompt's beginning, in whole blocks.

    tokens: the number of leading tokens whose blocks at least one engine has reported.
    engines: the number of leading tokens without a gap, for each engine by name and for each of its tiers. The entry
        ``any`` counts the engine's tiers together.
    store: the number of leading tokens that the store has, None if it was not asked.
    """

    tokens: int
    engines: dict[str, dict[str, int]]
    store: int | None = None

    def best(self) -> str | None:
        """Return the engine that has the most tokens in its own tiers, or None if no engine has any."""
        have = {name: tiers.get("any", 0) for name, tiers in self.engines.items()}
        return max(have, key=lambda name: have[name]) if any(have.values()) else None


@dataclass
class _Engine:
    name: str
    live: Any  # sockets
    replay: Any
    model: str
    next: int = 0  # the number of the next batch
    last: bytes = b""  # a digest of the previous batch
    checked: float = float("-inf")  # when the engine was last seen to have that batch, by `time.monotonic`
    synced: bool = False


class Routes:
    """Receives the events of engines, and finds where the blocks of a prompt are. Thread-safe. A thread of its own
    receives the events.

    `stores`: clients of the store, one for each rank's namespace. A block counts if all of them have it. The keys are
    the block hashes of the events, so these must not be shortened. Set ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``.

    With ``head_shards`` or ``layer_parts``, and for models with several groups of layers, the store keeps blocks in
    slices. For N slices, use `SlicedStore(ClientStore(…), range(N))` of `kvstore_client.engine`, which asks for all
    of them.

    `tokenize`: a function that turns text into tokens. `memory_bytes`: the approximate memory for the index of the
    engines' blocks. The blocks that were reported or looked up longest ago are dropped first.
    """

    def __init__(
        self,
        stores: Sequence[PrefixStore] = (),
        tokenize: Callable[[str], Sequence[int]] | None = None,
        *,
        memory_bytes: int = INDEX_MEMORY_BYTES,
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
        """Receive an engine's events from its publisher at `events`, and request missed events at `replay`. Both are
        addresses in the engine's ``--kv-events-config``. Without `replay`, blocks that the engine stored earlier are
        not known. `model`: the model that the engine serves, if engines serve different ones; see `find`. Raises
        `ValueError` for an address that ZeroMQ cannot use, and for a name that exists already."""
        with self._lock:
            if name in self._engines:
                raise ValueError(f"an engine named {name!r} was added before; expected another name")
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
        """Note that an engine was restarted, so that its blocks are gone. `Routes` notices that by itself if the
        engine's event numbers start from 0 again. It does not notice if it misses the first of these events and cannot
        request them again."""
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
        """Return where the blocks of a prompt are. A prompt of text needs `tokenize`. `model`: include only engines
        that were added with this model; None includes all. `lora_name`, `cache_salt`, `media`: see `PromptExtras`.
        Blocks that were made with other values do not match. Raises the errors of the stores' clients."""
        if isinstance(prompt, str):
            if self._tokenize is None:
                raise ValueError("the prompt is text; expected token ids, or Routes(tokenize=...)")
            prompt = self._tokenize(prompt)
        keys = PromptExtras(lora_name, cache_salt, media)
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
                    except Exception:  # bad bytes of one engine must not end the thread for all engines
                        log.exception("kvstore: events of engine %s cannot be read; starting anew", engine.name)
                        self._begin_anew(engine)
            time.sleep(_ROUTE_POLL_S)

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
                    continue  # this batch came with a replay
                log.info("kvstore: engine %s numbers its events anew: it was restarted", engine.name)
                self._begin_anew(engine)
            if number > engine.next:
                self._catch_up(engine)
            if number > engine.next:  # the engine no longer has these batches, so what they removed is not known
                self._begin_anew(engine)
                engine.next = number
            self._take(engine, number, payload)

    def _begin_anew(self, engine: _Engine) -> None:
        self.index.forget(engine.name)
        engine.next, engine.last = 0, b""

    def _catch_up(self, engine: _Engine) -> None:
        """Request all batches from the next one on. Also request the last one that was processed, to check whether it
        is still the same."""
        if engine.replay is None:
            return
        if self._replay(engine) is False:
            log.info("kvstore: engine %s has other events under the same numbers: it was restarted", engine.name)
            self._begin_anew(engine)
            self._replay(engine)

    def _has_last(self, engine: _Engine) -> bool:
        """Return whether the engine still has the last batch that was processed. If not, the engine was restarted."""
        if engine.replay is not None and time.monotonic() - engine.checked > _CHECKED_S and self._replay(engine):
            engine.checked = time.monotonic()
        return time.monotonic() - engine.checked <= _CHECKED_S

    def _replay(self, engine: _Engine) -> bool | None:
        """Request and process all batches from the next one on. Return whether the last processed batch is
        unchanged, or None if the engine no longer has it."""
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
            if number > engine.next:  # the engine keeps only its newest batches
                self._begin_anew(engine)
                engine.next = number
            self._take(engine, number, payload)
        log.warning("kvstore: engine %s did not send the missed events again within %g s", engine.name, _REPLAY_S)
        return same

    def _take(self, engine: _Engine, number: int, payload: bytes) -> None:
        if number != engine.next:
            return  # this batch came with the replay
        engine.next, engine.last = engine.next + 1, xxhash.xxh3_128_digest(payload)
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            self.index.apply(engine.name, event)
