"""The list of engines in etcd. Each engine registers itself under a lease, and a proxy follows the list.

    /kvstore/NAME/engines/ID   an `EngineRecord` as JSON, until its engine leaves or no longer keeps the lease alive

`Registered` is an engine's own entry, which a thread maintains. `EngineList` follows all entries; its thread calls a
function after each change. Neither raises after its start, and failures of etcd never affect an engine's requests.
After a failure, an entry is written again as soon as etcd answers. `EngineList` keeps the last list while etcd does not
answer. Records are not trusted: a record that cannot be read, or has no usable address, is left out and logged once.

Needs the package requests, which the extra ``llm-kvstore[cluster]`` installs.
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

ENGINE_TTL_S: Final = 10  # a record is removed when its engine has not renewed the lease for this time
_TIMEOUT_S: Final = 2.0
_WATCH_S: Final = 30.0
_FOLDER: Final = "engines"
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class EngineRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """An engine's entry in the list. `weights`: the version of the weights, empty if there is none. Engines are paired
    only if their versions are the same. `events`, `replay`: the addresses at which a proxy reaches the engine's KV
    events. They are empty if the engine publishes none. `namespaces`, `generation`: as in `BlockNames`; they are not
    known before the engine's first step."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/?#]+$", max_length=1024)]
    roles: Annotated[tuple[Literal["prefill", "decode"], ...], msgspec.Meta(min_length=1, max_length=2)]
    model: _Text = ""
    weights: _Text = ""
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    pipeline_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    events: _Text = ""
    replay: _Text = ""
    namespaces: Annotated[str, msgspec.Meta(max_length=64)] = ""
    generation: Annotated[int, msgspec.Meta(ge=-1)] = -1


_read_record: Final = msgspec.json.Decoder(EngineRecord).decode


def _checked(record: EngineRecord) -> bytes:
    """Return the record as the bytes to write, after the same check that readers make. Raises
    `msgspec.ValidationError`."""
    value = msgspec.json.encode(record)
    _read_record(value)
    return value


def parse_engines_url(url: str) -> EtcdURL:
    """Parse etcd://HOST:PORT[,HOST:PORT...]/NAME. Raises `ValueError`."""
    parsed = parse_cluster_url(url)
    if not isinstance(parsed, EtcdURL):
        raise ValueError(f"{url!r}: expected etcd://HOST:PORT[,HOST:PORT...]/NAME; engines register in etcd only")
    return parsed


class Registered:
    """Keeps an engine's entry in the list while this object is open. Thread-safe. The constructor does not wait for
    etcd."""

    def __init__(
        self,
        url: str,
        name: str,
        record: EngineRecord,
        *,
        ttl_s: int = ENGINE_TTL_S,
        latest: Callable[[EngineRecord], EngineRecord] = lambda record: record,
    ) -> None:
        """`url`: the directory. `name`: the engine's name, which must be the same after a restart. `record`: the first
        record. `ttl_s`: the lease's time to live, in seconds. `latest`: a function that returns the present record,
        given the last one. A thread of this object calls it three times in `ttl_s`, and after each `update`. Raises
        `ValueError` for an unusable argument, and `DirectoryError` if requests is not installed."""
        if not is_name(name):
            raise ValueError(f"the engine's name is {name!r}; expected 1 to 64 letters, digits, '.', '_' and '-'")
        self.record = record
        self._latest = latest
        self._value = _checked(record)
        self._directory = EtcdDirectory(parse_engines_url(url), _TIMEOUT_S, _FOLDER)
        self._name = name
        self._ttl_s = ttl_s
        self._lease = 0
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # one entry for each call that must write to etcd
        self._withdrawn = False
        self._thread = threading.Thread(target=self._run, name="kvstore-engine-registration", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Have the thread get the latest record now and write it if it has changed. Does not wait for etcd."""
        self._news.put(None)

    def withdraw(self) -> None:
        """End the entry permanently. The thread removes it from etcd at once. This takes no lock, so a signal handler
        may call it."""
        self._withdrawn = True
        self._news.put(None)

    def close(self) -> None:
        """Withdraw the entry. This takes a few seconds at most, even if etcd does not answer."""
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
                    log.warning("kvstore: engine %s is not registered: %s; trying again", self._name, error)
                failing = True
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=self._ttl_s / 3)
        try:
            if self._lease:
                self._directory.withdraw(self._name, self._lease)
        except DirectoryError as error:
            log.info("kvstore: engine %s was not withdrawn: %s; its entry ends with its lease", self._name, error)

    def _now(self) -> bytes:
        """Return the present record as the bytes to write."""
        try:
            record = self._latest(self.record)
            if record != self.record:
                self._value, self.record = _checked(record), record
        except Exception:  # a defect must not end the registration
            log.exception("kvstore: the record of engine %s cannot be renewed; the last one is kept", self._name)
        return self._value


class EngineList:
    """Follows the list of engines. A thread of this object calls `changed` at the start and after each change, with all
    records by engine name. `changed` must not block for long."""

    def __init__(self, url: str, changed: Callable[[dict[str, EngineRecord]], None]) -> None:
        """Start to follow the list at `url`. Raises `ValueError` for a URL that cannot be used, and `DirectoryError` if
        requests is not installed."""
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
                    log.warning("kvstore: the list of engines cannot be read: %s; the last list is used", error)
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
