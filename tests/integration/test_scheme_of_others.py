"""A cluster whose members are found by another package: here in a file, with `file:///FOLDER/members.json`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore.cluster.members import Member
from kvstore.wire import ShardAddress
from kvstore_client import KVStoreClient, Namespace
from kvstore_client.endpoints import parse_endpoints
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys, wait_until
from tests.support.packages import install

PLUGIN = """
import threading
from pathlib import Path
from typing import NamedTuple
import msgspec
from kvstore.cluster.members import DirectoryError, Member, Membership
from kvstore.cluster.schemes import Scheme

class FileURL(NamedTuple):
    path: str
    certificate_name: str = ""
    def __str__(self):
        return "file://" + self.path

def parse(url):
    path = url.removeprefix("file://")
    if not path.startswith("/"):
        raise ValueError(f"{url!r}: expected file:///PATH")
    return FileURL(path)

class FileDirectory:
    def __init__(self, url, tls):
        self.url, self.closed, self.epoch, self.text = url, threading.Event(), 0, b""
    def membership(self):
        try:
            text = Path(self.url.path).read_bytes()
        except OSError as error:
            raise DirectoryError(f"{self.url}: {error}") from None
        self.epoch += text != self.text
        self.text = text
        return Membership(self.epoch, msgspec.json.decode(text, type=list[Member]))
    def wait_for_change(self, after_epoch, timeout_s):
        self.closed.wait(0.05)
        return True
    def close(self):
        self.closed.set()

SCHEME = Scheme(parse, FileDirectory)
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch, tmp_path / "site", "members_in_files", PLUGIN, {"kvstore.schemes/file": "SCHEME"})
    yield
    sys.modules.pop("members_in_files", None)


def member(server: Server) -> Member:
    host, port = server.endpoint.removeprefix("tcp://").rsplit(":", 1)
    with KVStoreClient(server.endpoint, Namespace(model="m", dtype="uint8", block_tokens=1, block_bytes=1)) as client:
        (shard,) = client.info().shards
    return Member(shard.node, "serving", [ShardAddress(shard.name, host, int(port), 1.0)])


def test_a_client_finds_shards_through_another_packages_directory(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    first, second = start_server(), start_server()
    file = tmp_path / "members.json"

    def list_members(*servers: Server) -> None:
        written = file.with_suffix(".new")
        written.write_bytes(msgspec.json.encode([member(server) for server in servers]))
        written.replace(file)

    list_members(first)
    keys = make_keys(200)
    with KVStoreClient(f"file://{file}", new_namespace(64), timeout_s=5) as client:
        assert client.set(keys, blocks_of(keys, 64)).created == 200
        assert client.get(keys).blocks == blocks_of(keys, 64) and len(client.shards()) == 1
        list_members(first, second)
        wait_until(lambda: len(client.shards()) == 2)
        assert client.set(keys, blocks_of(keys, 64)).created > 0, "the new shard owns some of them"


def test_its_urls_are_checked_like_built_in_ones(tmp_path: Path) -> None:
    assert parse_endpoints("file:///a/b").cluster == "file:///a/b"
    with pytest.raises(ValueError, match="'file://a': expected file:///PATH"):
        parse_endpoints("file://a")
    with pytest.raises(ValueError, match="must be the only endpoint"):
        parse_endpoints(["a:1", "file:///a"])
    with pytest.raises(ValueError, match="schemes of clusters are dns, etcd, etcds, file"):
        parse_endpoints("http://a:1")
