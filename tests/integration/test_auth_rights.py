"""What a login permits: exactly the requests for the principal's verbs, in its token's tenant, for its models."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient, NotAuthorized
from tests.support import harness
from tests.support.harness import (
    ERROR,
    HELLO,
    PROTOCOL,
    RawClient,
    blocks_of,
    make_keys,
    make_namespace,
    pack,
    put,
    set_frames,
    sums_of,
)
from tests.support.logins import (
    BLOCK_BYTES,
    EVERYTHING,
    KEYED,
    KEYS,
    NOT_AUTHORIZED,
    PATHS,
    Guarded,
    connect,
    connect_when_known,
    log_in,
)

SCRUB, EXPIRE = 12, 19


def requests() -> dict[str, tuple[set[str], list[bytes]]]:
    """Return, for each kind of request, the principals that may send it, and its frames."""
    keys = b"".join(KEYS)
    blocks = blocks_of(KEYS, BLOCK_BYTES)

    def keyed(tag: int, *more: object) -> list[bytes]:
        return [pack(tag, 7, *KEYED, *more), keys]

    return {
        "PING": ({*EVERYTHING, "none"}, [pack(harness.PING, 7, 1000)]),
        "SYNC": ({*EVERYTHING}, [pack(harness.SYNC, 7, 1000)]),
        "INFO": ({"admin", "monitor"}, [pack(harness.INFO, 7, 1000)]),
        "GET": ({"read"}, keyed(harness.GET)),
        "CONTAINS": ({"read"}, keyed(harness.CONTAINS)),
        "MATCH_PREFIX": ({"read"}, keyed(harness.MATCH_PREFIX)),
        "SET": ({"write"}, set_frames(7, KEYS, blocks)),
        "SET with force": ({"write"}, set_frames(7, KEYS, blocks, force=True)),
        "PROMISE": ({"write"}, keyed(harness.PROMISE, 1000)),
        "WITHDRAW": ({"write"}, keyed(harness.WITHDRAW)),
        "EXPIRE": ({"write"}, keyed(EXPIRE, 100.0)),
        "DELETE": ({"delete"}, keyed(harness.DELETE)),
        "DELETE of damaged blocks": ({"delete", "read"}, keyed(harness.DELETE, True)),
        "SCRUB": ({"admin"}, [pack(SCRUB, 7, 1000)]),
        "HOTTEST": ({"admin"}, [pack(harness.HOTTEST, 7, 1000, 0, 10)]),
        "PURGE": ({"admin"}, [pack(harness.PURGE, 7, 1000)]),
        "PURGE of all": ({"admin"}, [pack(harness.PURGE, 7, 1000, True)]),
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("principal", ["none", *EVERYTHING, "all"])
def test_only_requests_of_a_principals_verbs_are_allowed(guarded: Guarded, path: str, principal: str) -> None:
    canonical = make_namespace(BLOCK_BYTES, "matrix").canonical()
    with connect(guarded, path) as raw:
        if principal != "none":
            assert log_in(raw, canonical, guarded.tokens[principal])[0] == harness.WELCOME
        for name, (allowed, frames) in requests().items():
            if principal == "none":
                with connect(guarded, path) as fresh:
                    reply = fresh.ask(*frames)
            else:
                reply = raw.ask(*frames)
            passes = principal in allowed or (principal == "all" and allowed - {"none"})
            if passes:
                assert reply[0] != ERROR and reply[1] == 7, (name, reply)
            else:
                assert reply[:3] == [ERROR, 7, NOT_AUTHORIZED], (name, reply)


def test_a_forbidden_set_is_read_to_its_end(guarded: Guarded) -> None:
    """A SET of a read-only principal is refused after its header. The server still reads the rest, and the connection
    stays open."""
    blocks = blocks_of(KEYS, BLOCK_BYTES)
    with RawClient(guarded.server) as raw:
        canonical = make_namespace(BLOCK_BYTES, "matrix").canonical()
        log_in(raw, canonical, guarded.tokens["read"])
        raw.send(*set_frames(3, KEYS, blocks, sums_of(blocks)))
        assert raw.reply()[0][:3] == [ERROR, 3, NOT_AUTHORIZED]
        assert raw.ask(pack(harness.PING, 4, 1000))[0] == harness.PONG


def test_a_tenant_cannot_name_read_or_remove_anothers_blocks(guarded: Guarded) -> None:
    namespace = make_namespace(BLOCK_BYTES, "shared name")
    keys = make_keys(4, 100)
    server = guarded.server
    with KVStoreClient(server.endpoint, namespace, token=guarded.tokens["all"]) as a:
        assert a.set(keys, blocks_of(keys, BLOCK_BYTES)).created == 4
        with KVStoreClient(server.endpoint, namespace, token=guarded.tokens["other"]) as b:
            assert b.get(keys).hit == 0
            assert b.set(keys, blocks_of(keys, BLOCK_BYTES, version=1)).created == 4
            assert b.delete(keys) == 4
            b.purge(all_namespaces=True)
            assert [shard.namespaces for shard in b.info().shards] == [[]] or all(
                json.loads(each.namespace)["tenant"] == "b" for shard in b.info().shards for each in shard.namespaces
            )
        assert a.get(keys).blocks == blocks_of(keys, BLOCK_BYTES)
        names = [json.loads(each.namespace)["tenant"] for each in a.info().shards[0].namespaces]
        assert set(names) == {"a"}
    # A tenant's own name gives the same namespace as no name; another tenant's is refused.
    with KVStoreClient(
        server.endpoint, msgspec.structs.replace(namespace, tenant="a"), token=guarded.tokens["all"]
    ) as a:
        assert a.get(keys).hit == 4
    with pytest.raises(NotAuthorized, match="names a tenant other than 'b'"):
        KVStoreClient(server.endpoint, msgspec.structs.replace(namespace, tenant="a"), token=guarded.tokens["other"])


def test_a_principal_uses_only_models_of_its_patterns(guarded: Guarded) -> None:
    token = guarded.tokens["patterns"]
    with pytest.raises(NotAuthorized, match=r"may not use the model of .*: the principal's patterns are Qwen/\*"):
        KVStoreClient(guarded.server.endpoint, make_namespace(BLOCK_BYTES, "meta/l"), token=token)


def test_model_patterns_apply_to_lists_and_purges_of_all(guarded: Guarded) -> None:
    token = add(guarded.file, "qwen", "a", ["admin"], ["Qwen/*"])
    namespaces = [make_namespace(BLOCK_BYTES, "Qwen/q"), make_namespace(BLOCK_BYTES, "meta/l")]
    endpoint = guarded.server.endpoint
    for namespace in namespaces:
        with KVStoreClient(endpoint, namespace, token=guarded.tokens["all"]) as client:
            put(client, KEYS)
    guarded.tokens["qwen"] = token
    with connect_when_known(guarded, namespaces[0], token) as admin:
        models = {json.loads(each.namespace)["model"] for each in admin.info().shards[0].namespaces}
        assert models == {"Qwen/q"}
        assert admin.purge(all_namespaces=True) == 2
    with KVStoreClient(endpoint, namespaces[1], token=guarded.tokens["all"]) as client:
        assert client.contains(KEYS).all()


def test_an_operator_of_all_tenants_sees_and_purges_each(guarded: Guarded) -> None:
    namespace = make_namespace(BLOCK_BYTES, "to be purged")
    keys = make_keys(2, 200)
    server = guarded.server
    with KVStoreClient(server.endpoint, namespace, token=guarded.tokens["all"]) as a:
        a.set(keys, blocks_of(keys, BLOCK_BYTES))
        owned = msgspec.structs.replace(namespace, tenant="a")
        with KVStoreClient(server.endpoint, owned, token=guarded.tokens["operator"]) as operator:
            assert owned.id in {each.id for each in operator.info().shards[0].namespaces}
            with pytest.raises(NotAuthorized, match="needs the verb read"):
                operator.get(keys)
            assert operator.purge() == 2
        assert a.get(keys).hit == 0


def test_a_failed_hello_leaves_no_rights_in_the_earlier_namespace(guarded: Guarded) -> None:
    namespace = make_namespace(BLOCK_BYTES, "kept")
    with KVStoreClient(guarded.server.endpoint, namespace, token=guarded.tokens["all"]) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        with RawClient(guarded.server) as raw:
            assert log_in(raw, namespace.canonical(), guarded.tokens["read"])[0] == harness.WELCOME
            foreign = msgspec.structs.replace(namespace, tenant="a").canonical()
            assert log_in(raw, foreign, guarded.tokens["other"])[2] == NOT_AUTHORIZED
            reply = raw.ask(pack(harness.DELETE, 7, *KEYED), b"".join(KEYS))
            assert reply[0] == ERROR
        assert client.contains(KEYS).all()


def test_a_purge_empties_its_namespace_despite_a_later_hello(guarded: Guarded) -> None:
    first, second = make_namespace(BLOCK_BYTES, "purged first"), make_namespace(BLOCK_BYTES, "kept second")
    token = guarded.tokens["all"]
    with (
        KVStoreClient(guarded.server.endpoint, first, token=token) as one,
        KVStoreClient(guarded.server.endpoint, second, token=token) as two,
        RawClient(guarded.server) as raw,
    ):
        for client in (one, two):
            put(client, KEYS)
        assert log_in(raw, first.canonical(), token)[0] == harness.WELCOME
        raw.send(pack(harness.PURGE, 5, 10_000))
        raw.send(pack(HELLO, 6, PROTOCOL, second.canonical(), "raw", token.encode()))
        assert {raw.reply()[0][0] for _ in range(2)} == {harness.WELCOME, 76}
        assert not one.contains(KEYS).any()
        assert two.contains(KEYS).all(), two.info()
