"""A client with one IPv6 address has its whole /64: all connections of a /64 count as those of one address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.auth.editing import add
from kvstore.networks import network_of
from kvstore.wire import ShardAddress
from kvstore_client import KVStoreClient
from tests.attack.crowd import DOOR, NO_PLACE, OF_ADDRESS
from tests.support.harness import HELLO, PROTOCOL, RawClient, Server, blocks_of, make_keys, make_namespace, pack
from tests.support.harness import shard_info as info_of
from tests.support.network import NONLOCAL_BIND, Network, need, unavailable

BLOCK_BYTES = 4096
ATTACKER = "2001:db8:0:1::"
LOGINS_OF_ONE = 128  # half of the 256 logins that may wait: the other half is left for others


@pytest.fixture
def network() -> Iterator[Network]:
    need(unavailable() or ("" if NONLOCAL_BIND.exists() else "no IPv6 here"))
    with Network() as network:
        network.add("host")
        network.own("host", "2001:db8::/32")
        yield network


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:0:1:ffff::7", "2001:db8:0:1::/64"),
        ("2001:db8:0:1::", "2001:db8:0:1::/64"),
        ("::1", "::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("user 0 of this host", "user 0 of this host"),
    ],
)
def test_the_network_of_an_address_is_known(address: str, network: str) -> None:
    assert network_of(address) == network


def test_a_network_of_strangers_takes_only_one_addresss_share(network: Network, tmp_path: Path) -> None:
    """The whole /64 of the strangers gets the places of one address. Other clients that log in are served, even from
    that /64."""
    file = tmp_path / "auth.toml"
    token = add(file, "chat", "a", ["read", "write", "monitor"])
    flags = ("--auth", str(file), "--memory", "64MiB", "--host", "::")
    server = Server(tmp_path / "log", *flags, prefix=network.command("host"))
    address = ShardAddress("", "2001:db8::1", server.port, 1.0)
    namespace, keys = make_namespace(BLOCK_BYTES, "m"), make_keys(8)
    try:
        with network.inside("host"), server.unharmed(), ExitStack() as stack:
            for number in range(OF_ADDRESS + 4 * DOOR):
                stranger = RawClient(address, handshake=False, source=f"{ATTACKER}{number + 1:x}")
                stack.enter_context(stranger)
            # The system uses this address from the attacker's /64, which is as good as any other.
            with KVStoreClient(f"[{ATTACKER}1]:{server.port}", namespace, token=token, shared_memory=False) as client:
                assert client.set(keys, blocks_of(keys, BLOCK_BYTES)).error == 0
                assert client.get(keys).hit == len(keys)
                assert info_of(client).connections <= OF_ADDRESS + DOOR + 1
    finally:
        server.kill()


def test_a_guessing_network_leaves_others_half_of_the_waiting_logins(network: Network, tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    token = add(file, "chat", "a", ["read", "write"])
    server = Server(
        tmp_path / "log",
        *("--auth", str(file), "--memory", "64MiB", "--host", "::"),
        prefix=network.command("host"),
    )
    address = ShardAddress("", "2001:db8::1", server.port, 1.0)
    namespace = make_namespace(BLOCK_BYTES, "m")
    try:
        with network.inside("host"), server.unharmed(), ExitStack() as stack:
            guessers = [
                stack.enter_context(RawClient(address, source=f"{ATTACKER}{number + 1:x}"))
                for number in range(LOGINS_OF_ONE + 32)
            ]
            for guesser in guessers:
                guesser.send(pack(HELLO, 1, PROTOCOL, namespace.canonical(), "guess", b"kvs_chat." + b"A" * 43))
            with KVStoreClient(f"127.0.0.1:{server.port}", namespace, token=token, timeout_s=10.0) as client:
                assert not client.contains(make_keys(1)).any()
            # The last ones are refused at once, and the first ones after a second.
            assert any(guesser.reply()[0][2] == NO_PLACE for guesser in reversed(guessers))
    finally:
        server.kill()
