"""The members of a cluster in etcd: one record per node, under a lease that the node keeps alive.

    /kvstore/NAME/nodes/ID     a `Member`, as JSON. Gone when its node withdraws or stops renewing its lease.
    /kvstore/NAME/drains/ID    a `Drain`, as JSON. An operator writes it as a request; the node adds its progress.
    /kvstore/NAME/engines/ID   an engine: see `kvstore_client.engine.directory`.

The server uses etcd's HTTP gateway (JSON over HTTP), so it needs no gRPC. A watch only wakes its caller, which then
reads all members again.

Any number of threads may use a directory at once. When an endpoint fails or does not answer, the next one is tried, and
the first one that answers is used from then on. So a call other than `wait_for_change` blocks for at most about the
timeout multiplied by the number of endpoints. After `close` all calls fail at once, including one that waits for a
change. Records in etcd are not trusted: a record that does not describe a member is ignored, and logged once.
"""

from __future__ import annotations

import base64
import logging
import os
import random
import re
import socket
import threading
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from kvstore.cluster.members import (
    DirectoryError,
    Member,
    MemberError,
    Membership,
    PackageMissing,
    decode_member,
    encode_member,
)
from kvstore.cluster.schemes import Scheme
from kvstore.cluster.url import EtcdURL, join_address, parse_etcd_url

log = logging.getLogger(__name__)

MAX_MEMBERS: Final = 4096
MAX_DRAIN_S: Final = 86_400
FOLLOW_TIMEOUT_S: Final = 1.0  # the timeout for one endpoint in processes that only follow the members
_ROOT: Final = "/kvstore"
_T = TypeVar("_T")


class Drain(msgspec.Struct, frozen=True):
    """A request to drain a node, with the node's progress. The node moves its hottest blocks to their next owners, and
    leaves."""

    instance: str  # the node's instance at the time of the request; after a restart the node ignores the request
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAIN_S)]  # how long the node may move blocks
    state: Literal["asked", "moving", "done"] = "asked"
    # These fields count copies, because a block of a namespace with replicas may need several copies.
    total: int = 0  # copies to make
    done: int = 0  # copies that are moved, present or failed so far
    moved: int = 0
    present: int = 0  # copies that existed already
    failed: int = 0
    left: list[str] = []  # shards of the node that did not answer, so that their blocks stayed


_drain_decoder = msgspec.json.Decoder(Drain)


class EtcdDirectory:
    """The records of one cluster. Its methods raise `DirectoryError` and no other error.

    `timeout_s`: how many seconds an endpoint may take to connect, and after that to answer.
    """

    def __init__(self, url: EtcdURL, timeout_s: float, folder: str = "nodes") -> None:
        """`folder`: the folder of the records. Only records in ``nodes`` are members."""
        try:
            import requests

            from kvstore.cluster.etcd_access import EtcdAccess
        except ImportError as error:
            raise PackageMissing(
                f"{url} needs the package requests ({error}); install it with: pip install 'llm-kvstore[cluster]'"
            ) from None
        self.url = url
        self.timeout_s = timeout_s
        self._failures = (requests.RequestException, OSError, ValueError, KeyError, TypeError)
        self._access = EtcdAccess(url)
        self._endpoints = [self._access.endpoint(join_address(*each)) for each in url.endpoints]
        self._at = random.randrange(len(self._endpoints))  # so that not all clients use the first endpoint
        self._nodes = f"{_ROOT}/{url.name}/{folder}/"
        self._drains = f"{_ROOT}/{url.name}/drains/"
        self._lock = threading.Lock()
        self._closed = False
        self._watching: Any = None  # the response that `wait_for_change` is reading
        self._pid = os.getpid()
        self._complained: dict[str, str] = {}  # for each node, the revision of its invalid record that was logged
        self._odd_drain: object = None  # the revision of the last invalid drain request that was logged

    # ---- members ---------------------------------------------------------------------------------------------------

    def membership(self) -> Membership:
        """Return all current members. The epoch is etcd's revision."""
        answer = self._post("/kv/range", **_prefix(self._nodes), limit=MAX_MEMBERS, sort_target="CREATE")
        return self._understand(lambda: self._read_members(answer))

    def wait_for_change(self, after_epoch: int, timeout_s: float) -> bool:
        """Block until members change after `after_epoch`. Return False if nothing changes within `timeout_s`.

        Only one thread at a time may call this.
        """
        import requests

        body: Any = {"create_request": {**_prefix(self._nodes), "start_revision": after_epoch + 1}}
        at = self._at
        endpoint = self._endpoints[at]
        timeouts = self.timeout_s, max(timeout_s, 0.01)
        try:
            with self._access.post(endpoint, "/watch", body, stream=True, timeout=timeouts) as answer:
                answer.raise_for_status()
                with self._lock:
                    self._watching = answer
                    if self._closed:
                        raise DirectoryError(f"{self.url}: this directory is closed")
                return _next_event(answer)
        except requests.Timeout:
            return False
        except self._failures as error:
            # requests reports a read timeout here as a ConnectionError.
            if "timed out" in str(error).lower():
                return False
            self._at = (at + 1) % len(self._endpoints)
            raise DirectoryError(f"{self.url}: {endpoint.address}: {_reason(error)}") from None
        finally:
            with self._lock:
                self._watching = None

    def read_member(self, node: str) -> Member | None:
        """Return the member that a node's record describes, or None if the record is missing or not valid."""
        answer = self._post("/kv/range", key=_encode(self._nodes + node))
        return self._understand(lambda: next(map(self._read_member, answer.get("kvs", [])), None))

    def records(self) -> tuple[int, dict[str, bytes]]:
        """Return the epoch, and the bytes of all records by their names."""
        answer = self._post("/kv/range", **_prefix(self._nodes), limit=MAX_MEMBERS)

        def read() -> tuple[int, dict[str, bytes]]:
            found = {
                _decode(record["key"]).decode(errors="replace").removeprefix(self._nodes): _decode(
                    record.get("value", "")
                )
                for record in answer.get("kvs", [])
            }
            return int(answer["header"]["revision"]), found

        return self._understand(read)

    def put_record(self, name: str, value: bytes, lease: int) -> None:
        """Write a record under a lease. It replaces any other record of this name."""
        self._post("/kv/put", key=_encode(self._nodes + name), value=_encode(value), lease=lease)

    # ---- a node's own record ---------------------------------------------------------------------------------------

    def grant(self, ttl_s: int) -> int:
        """Make a new lease. Return its id."""
        answer = self._post("/lease/grant", TTL=ttl_s, ID=0)
        return self._understand(lambda: int(answer["ID"]))

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease. Return False if the lease has ended."""
        answer = self._post("/lease/keepalive", ID=lease)
        return self._understand(lambda: int(answer["result"].get("TTL", 0)) > 0)

    def register(self, member: Member, lease: int, replace: bool = False) -> bool:
        """Write the record of a node under its lease. Return False if the record belongs to another lease and is
        unchanged.

        `replace`: write the record even if it belongs to another lease.
        """
        key = _encode(self._nodes + member.node)
        put = {"request_put": {"key": key, "value": _encode(encode_member(member)), "lease": lease}}
        mine = {"key": key, "target": "LEASE", "lease": lease}
        nobodys = {"key": key, "target": "CREATE", "create_revision": 0}
        for condition in ([],) if replace else ([mine], [nobodys]):
            answer = self._post("/kv/txn", compare=condition, success=[put])
            if self._understand(lambda answer=answer: bool(answer.get("succeeded", False))):  # type: ignore[misc]
                return True
        return False

    def withdraw(self, node: str, lease: int) -> None:
        """Revoke the lease. This deletes the node's record if it still belongs to this lease."""
        self._post("/lease/revoke", ID=lease)
        log.debug("%s: node %s has revoked its lease", self.url, node)

    # ---- drains ----------------------------------------------------------------------------------------------------

    def read_drain(self, node: str) -> Drain | None:
        """Return the request to drain a node, with the node's progress, or None if there is none."""
        answer = self._post("/kv/range", key=_encode(self._drains + node))
        record = self._understand(lambda: answer["kvs"][0] if "kvs" in answer else None)
        if record is None:
            return None
        try:
            return _drain_decoder.decode(self._understand(lambda: _decode(record.get("value", ""))))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if record.get("mod_revision") != self._odd_drain:
                log.warning("%s: ignoring the request to drain node %r: cannot read it: %s", self.url, node, error)
            self._odd_drain = record.get("mod_revision")
            return None

    def write_drain(self, node: str, drain: Drain) -> None:
        """Request that a node drain. The node checks for a request every second. The node itself calls this method to
        write its progress."""
        self._post("/kv/put", key=_encode(self._drains + node), value=_encode(msgspec.json.encode(drain)))

    def end_drain(self, node: str) -> None:
        """Remove the request to drain a node."""
        self._post("/kv/deleterange", key=_encode(self._drains + node))

    def close(self) -> None:
        """Close the connections, and wake the thread that waits for a change."""
        with self._lock:
            self._closed = True
            if self._watching is not None and os.getpid() == self._pid:  # after a fork, the watch is the parent's
                _interrupt(self._watching)
        for endpoint in self._endpoints:
            endpoint.session.close()

    # ---- requests --------------------------------------------------------------------------------------------------

    def _post(self, path: str, **body: object) -> Any:
        """Return the answer of the first endpoint that answers."""
        reasons = []
        for _ in self._endpoints:
            if self._closed:
                raise DirectoryError(f"{self.url}: this directory is closed")
            at = self._at
            endpoint = self._endpoints[at]
            try:
                response = self._access.post(endpoint, path, body, timeout=self.timeout_s)
                if not response.ok:
                    raise ValueError(f"etcd answered with HTTP status {response.status_code}: {response.text}")
                answer = response.json()
                if "error" in answer:  # streaming methods report errors with status 200
                    raise ValueError(f"etcd answered with an error: {answer['error']}")
                return answer
            except self._failures as error:
                self._at = (at + 1) % len(self._endpoints)
                reasons.append(f"{endpoint.address}: {_reason(error)}")
        raise DirectoryError(f"{self.url}: {'; '.join(reasons)}")

    def _understand(self, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise DirectoryError(
                f"{self.url}: the answer is not one that etcd gives ({error!r}); does another program listen there?"
            ) from None

    def _read_members(self, answer: Any) -> Membership:
        members: dict[str, Member] = {}
        shards: set[str] = set()
        complained: dict[str, str] = {}
        for record in answer.get("kvs", []):  # oldest first: of two nodes with the same shard, the older keeps it
            member = self._read_member(record, complained, shards)
            if member is not None:
                members[member.node] = member
                shards.update(shard.name for shard in member.shards)
        self._complained = complained
        return Membership(int(answer["header"]["revision"]), [members[node] for node in sorted(members)])

    def _read_member(
        self, record: Any, complained: dict[str, str] | None = None, shards: set[str] | frozenset[str] = frozenset()
    ) -> Member | None:
        node = _decode(record["key"]).decode(errors="replace").removeprefix(self._nodes)
        try:
            member = decode_member(_decode(record.get("value", "")))
            if member.node != node:
                raise MemberError(f"it describes the node {member.node!r}")
            if twice := sorted(shard.name for shard in member.shards if shard.name in shards):
                raise MemberError(f"another member has a shard of the same name: {twice[0]!r}")
        except MemberError as error:
            revision = str(record.get("mod_revision", ""))
            if self._complained.get(node) != revision:
                log.warning("%s: ignoring the record of node %r: %s", self.url, node, error)
            if complained is not None:
                complained[node] = revision
            return None
        return member


def _next_event(answer: Any) -> bool:
    """Read a watch until it reports a change or must be restarted. In both cases the members must be read again."""
    for line in answer.iter_lines(chunk_size=None):
        result = msgspec.json.decode(line)["result"]
        if "events" in result or "canceled" in result or "error" in result:
            return True
    raise OSError("the watch ended")


def _interrupt(answer: Any) -> None:
    """Wake the thread that reads `answer`. Closing `answer` would leave the thread in recv."""
    connection = getattr(answer.raw, "connection", None)
    sock = getattr(connection, "sock", None)
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the watch had ended already")


def _reason(error: Exception) -> str:
    """Return the innermost cause of an error in one line, without the text that requests and urllib3 add."""
    text = str(error)
    if found := re.search(r"certificate verify failed: ([^(\"']+)", text):
        return f"its certificate cannot be verified ({found[1].strip()}): give the CA that signed it (?ca=FILE)"
    if re.search(r"certificate required|alert bad certificate|EOF occurred in violation", text, re.IGNORECASE):
        return "it ends the TLS handshake: it may ask for a certificate (?cert=FILE&key=FILE)"
    for known in ("Connection refused", "timed out", "No route to host", "Name or service not known"):
        if known.lower() in text.lower():
            return known.lower()
    return " ".join(text.split())[:200] or type(error).__name__


def _prefix(prefix: str) -> dict[str, str]:
    """Return the range of all keys that begin with `prefix`, which must end with a slash."""
    return {"key": _encode(prefix), "range_end": _encode(prefix[:-1] + "0")}


def _encode(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


ETCD_CLUSTERS: Final = Scheme(parse_etcd_url, lambda url, _: EtcdDirectory(url, FOLLOW_TIMEOUT_S))
