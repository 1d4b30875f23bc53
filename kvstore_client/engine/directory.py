"""Which engines there are: each registers itself in etcd under a lease, and a proxy follows the list.

    /kvstore/NAME/engines/ID   an `EngineRecord`, as JSON; gone when its engine leaves, or stops keeping its lease alive

`Registered` is an engine's own entry, kept by a thread; `EngineList` follows all of them, with a thread that calls
back. Neither raises after its start, and etcd's failures never reach an engine's requests: an entry is written again as
soon as etcd answers, and a follower keeps the last list while it does not. Records are not trusted: one that cannot be
read, or names no usable address, is left out and logged once.

Needs requests: the extra ``llm-kvstore[cluster]``.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Final, Literal

import msgspec

from kvstore.cluster.etcd import EtcdDirectory
from kvstore.cluster.members import DirectoryError
from kvstore.cluster.schemes import parse_cluster_url
from kvstore.cluster.url import EtcdURL, is_name

log = logging.getLogger(__name__)

TTL_S: Final = 10  # without news of an engine, until its record is gone
_TIMEOUT_S: Final = 2.0
_WATCH_S: Final = 30.0
_FOLDER: Final = "engines"
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class EngineRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """An engine. `weights`: their version, empty if there is none; engines are paired only if it is the same.
    `events`, `replay`: the addresses of its KV events as a proxy reaches them, empty if it publishes none.
    `namespaces`, `generation`: see `BlockNames`; not known before the engine's first step."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/?#]+$", max_length=1024)]
    roles: Annotated[tuple[Literal["prefill", "decode"], ...], msgspec.Meta(min_length=1, max_length=2)]
    model: _Text = ""
    weights: _Text = ""
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    events: _Text = ""
    replay: _Text = ""
    namespaces: Annotated[str, msgspec.Meta(max_length=64)] = ""
    generation: Annotated[int, msgspec.Meta(ge=-1)] = -1


_read_record: Final = msgspec.json.Decoder(EngineRecord).decode


def _checked(record: EngineRecord) -> bytes:
    """-> what is written, once it was checked as a reader will check it. Raises `msgspec.ValidationError`."""
    value = msgspec.json.encode(record)
    _read_record(value)
    return value


def parse_engines_url(url: str) -> EtcdURL:
    """-> etcd://HOST:PORT[,HOST:PORT...]/NAME. Raises `ValueError`."""
    parsed = parse_cluster_url(url)
    if not isinstance(parsed, EtcdURL):
        raise ValueError(f"{url!r}: expected etcd://HOST:PORT[,HOST:PORT...]/NAME; engines register in etcd only")
    return parsed


class Registered:
    """An engine's entry, while this object is open. Thread-safe. The constructor does not wait for etcd."""

    def __init__(
        self,
        url: str,
        name: str,
        record: EngineRecord,
        *,
        ttl_s: int = TTL_S,
        latest: Callable[[EngineRecord], EngineRecord] = lambda record: record,
    ) -> None:
        """`url`: of the directory. `name`: of the engine, the same after a restart. `latest`: makes the present record
        from the last one; called in a thread of this object, three times in `ttl_s`, and by `update`. Raises
        `ValueError` for what cannot be used, `DirectoryError` if requests is not installed."""
        if not is_name(name):
            raise ValueError(f"the engine's name is {name!r}; expected 1 to 64 letters, digits, '.', '_' and '-'")
        self.record = record
        self._latest = latest
        self._value = _checked(record)
        self._directory = EtcdDirectory(parse_engines_url(url), _TIMEOUT_S, _FOLDER)
        self._name = name
        self._ttl_s = ttl_s
        self._lease = 0
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # there is something to tell etcd
        self._withdrawn = False
        self._thread = threading.Thread(target=self._run, name="kvstore-engine-registration", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Something has changed: ask for the latest record now. Does not wait for etcd."""
        self._news.put(None)

    def withdraw(self) -> None:
        """End the entry, for good: the thread tells etcd at once. Takes no lock, so a signal handler may call it."""
        self._withdrawn = True
        self._news.put(None)

    def close(self) -> None:
        """Withdraw the entry. Takes some seconds at most, also without etcd."""
        self.withdraw()
        self._thread.join(4 * _TIMEOUT_S)
        self._directory.close()

    def __enter__(self) -> Registered:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        failing = False
        written = b""
        while not self._withdrawn:
            value = self._now()
            try:
                if not self._lease or not self._directory.keep_alive(self._lease):
                    self._lease, written = self._directory.grant(self._ttl_s), b""
                if written != value:
                    self._directory.put_record(self._name, value, self._lease)
                    written = value
                failing = False
            except DirectoryError as error:
                if not failing:
                    log.warning("kvstore: engine %s is not registered: %s; tried again", self._name, error)
                failing = True
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=self._ttl_s / 3)
        try:
            if self._lease:
                self._directory.withdraw(self._name, self._lease)
        except DirectoryError as error:
            log.info("kvstore: engine %s was not withdrawn: %s; its lease ends by itself", self._name, error)

    def _now(self) -> bytes:
        """-> what is to be written."""
        try:
            record = self._latest(self.record)
            if record != self.record:
                self._value, self.record = _checked(record), record
        except Exception:  # a defect must not end the registration
            log.exception("kvstore: engine %s: the last record counts", self._name)
        return self._value


class EngineList:
    """Follows the engines. `changed` is called in a thread of this object with all of them, by name: at first, and
    after each change. It must not block for long."""

    def __init__(self, url: str, changed: Callable[[dict[str, EngineRecord]], None]) -> None:
        """Raises `ValueError` for a URL that cannot be used, `DirectoryError` if requests is not installed."""
        self._directory = EtcdDirectory(parse_engines_url(url), _TIMEOUT_S, _FOLDER)
        self._changed = changed
        self._complained: dict[str, bytes] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-engine-list", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; `changed` is not called any more."""
        self._end.set()
        self._directory.close()
        self._thread.join(4 * _TIMEOUT_S)

    def _run(self) -> None:
        known: dict[str, EngineRecord] | None = None
        failing = False
        while not self._end.is_set():
            try:
                epoch, records = self._directory.records()
                engines = self._read(records)
                if engines != known:
                    self._changed(engines)
                    known = engines
                failing = False
                self._directory.wait_for_change(epoch, _WATCH_S)
            except DirectoryError as error:
                if not failing and not self._end.is_set():
                    log.warning("kvstore: the list of engines: %s; the last one counts", error)
                failing = True
                self._end.wait(1.0)

    def _read(self, records: dict[str, bytes]) -> dict[str, EngineRecord]:
        engines = {}
        for name, value in records.items():
            try:
                engines[name] = _read_record(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if self._complained.get(name) != value:
                    log.warning("kvstore: the record of engine %r is left out: %s", name, error)
                self._complained[name] = value
        return engines
