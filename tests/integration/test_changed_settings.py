"""Settings that are changed while a server runs (`kvstore config`): each takes effect in every shard, survives the
restart of a shard, and delays no other client."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient, NotAuthorized, SettingRefused, ShardSettings
from tests.integration.test_interoperability import FakeShard
from tests.support import forked
from tests.support.faults import InBackground
from tests.support.harness import (
    ERROR,
    INFO,
    RawClient,
    Server,
    blocks_of,
    environment,
    make_keys,
    make_namespace,
    pack,
    stays,
    wait_until,
)
from tests.support.logins import log_in

CONFIGURE, CONFIGURE_REPLY = 24, 88
PROTOCOL_CODE, NOT_AUTHORIZED_CODE, SETTING_CODE = 1, 7, 11
BLOCK = 65_536
MIB = 1 << 20
NAMESPACE = make_namespace(BLOCK, "changed")
SHARDS = 2


class Store:
    """A server of two shards with logins and a disk tier: tenants `chat` and `search`, and an operator of both."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "auth.toml"
        self.audit = folder / "audit.jsonl"
        everything = ["read", "write", "delete", "admin", "monitor"]
        self.tokens = {name: add(self.file, name, name, everything) for name in ("chat", "search")}
        self.tokens["operator"] = add(self.file, "operator", "*", ["admin", "monitor"])
        self.tokens["qwen"] = add(self.file, "qwen", "*", ["admin"], ["Qwen/*"])
        self.tokens["monitor"] = add(self.file, "monitor", "*", ["read", "write", "delete", "monitor"])
        self.write_quota("16MiB")
        self.server = Server(
            folder / "log",
            *("--shards", str(SHARDS), "--memory", "64MiB", "--segment", "1MiB", "--http", "127.0.0.1:0"),
            *("--auth", str(self.file), "--audit", str(self.audit)),
            *("--disk", str(folder / "disk"), "--disk-size", "64MiB"),
        )

    def write_quota(self, size: str) -> None:
        """Give the tenant `chat` this quota in the file."""
        text = self.file.read_text().partition("\n[tenants.")[0]
        beside = self.file.with_suffix(".new")
        beside.write_text(f'{text}\n[tenants.chat]\nmemory = "{size}"\nmemory_guaranteed = "2MiB"\n')
        beside.chmod(0o600)
        beside.rename(self.file)

    def client(self, principal: str = "operator", **options: Any) -> KVStoreClient:
        return KVStoreClient(self.server.endpoint, NAMESPACE, token=self.tokens[principal], **options)

    def command(self, *arguments: str, status: int = 0, principal: str = "operator") -> str:
        done = forked.run(
            *("kvstore_cli", "--endpoint", self.server.endpoint, "config", *arguments),
            env=environment(KVSTORE_TOKEN=self.tokens[principal], COLUMNS="160"),
        )
        assert done.returncode == status, done.stdout + done.stderr
        return str(done.stdout + done.stderr if status else done.stdout)

    def set(self, name: str, value: str) -> None:
        with self.client() as operator:
            assert values(operator.config_set(name, value), name) == [value] * SHARDS

    def get(self, name: str) -> list[str]:
        """Return the value of a setting in each shard."""
        with self.client() as operator:
            return values(operator.config_get(), name)


def values(answers: Sequence[ShardSettings], name: str) -> list[str]:
    assert [answer.error for answer in answers] == [None] * SHARDS, answers
    return [setting.value for answer in answers for setting in answer.settings if setting.name == name]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store"))
    yield store
    if store.server.running:
        store.server.stop()


@pytest.fixture(autouse=True)
def as_configured(store: Store) -> Iterator[None]:
    """Undo the changes of a test."""
    yield
    for name, value in (("log-level", "info"), ("scrub-mbps", "0")):
        store.set(name, value)
    store.write_quota("16MiB")
    with store.client() as operator:
        (configured,) = {
            each.configured
            for answer in wait_until(lambda: _file_is_read(operator), what="all shards have read the file")
            for each in answer.settings
            if each.name == "quota-bytes.chat"
        }
        operator.config_set("quota-bytes.chat", configured)


def _file_is_read(operator: KVStoreClient) -> list[ShardSettings] | None:
    answers = operator.config_get()
    read = [each.configured for answer in answers for each in answer.settings if each.name == "quota-bytes.chat"]
    return answers if read == ["16MiB"] * SHARDS else None


def debug_lines(store: Store, process: str, since: int) -> list[str]:
    return [line for line in store.server.log_text()[since:].splitlines() if f" DEBUG   {process} " in line]


def visit(store: Store) -> None:
    """Connect and disconnect a client, and request a page: each process has a debug line about that."""
    store.client("monitor").close()
    urllib.request.urlopen(f"{store.server.http_url}/healthz").read()


def test_the_log_level_decides_what_every_process_logs_from_now_on(store: Store) -> None:
    processes = ("shard=0", "shard=1", "supervisor")
    visit(store)
    assert not any(debug_lines(store, process, 0) for process in processes)
    since = len(store.server.log_text())
    said = store.command("set", "log-level", "debug")
    assert said.startswith("log-level is debug now, and was info, in 2 shard(s)\n"), said
    assert 'To keep it, write log_level = "debug" in the file of --config, or give --log-level debug' in said
    visit(store)
    wait_until(lambda: all(debug_lines(store, process, since) for process in processes), what=store.server.log_text())
    assert store.command("set", "log-level", "info") == "log-level is info now, and was debug, in 2 shard(s)\n"
    with store.client("monitor", timeout_s=20.0) as client:
        connections = [shard.connections for shard in client.info().shards]
        since = len(store.server.log_text())
        visit(store)
        wait_until(lambda: [shard.connections for shard in client.info().shards] <= connections)
    assert not any(debug_lines(store, process, since) for process in processes)


def test_the_log_and_the_audit_log_say_who_changed_what(store: Store) -> None:
    since = len(store.server.log_text())
    for value in ("error", "warning"):  # the line is logged even if neither level would show it later
        store.command("set", "log-level", value)
    text = store.server.log_text()[since:]
    for shard in range(SHARDS):
        (line,) = [line for line in text.splitlines() if f"shard={shard}" in line and "from info to error" in line]
        assert "principal 'operator': changed log-level from info to error" in line
    records = [json.loads(line) for line in store.audit.read_text().splitlines()]
    found = [each for each in records if each["event"] == "configure" and each.get("value") == "error"]
    assert sorted(each["shard"] for each in found) == [0, 1]
    assert {(each["principal"], each["setting"], each["before"], each["outcome"]) for each in found} == {
        ("operator", "log-level", "info", "done")
    }


def test_the_scrub_rate_is_applied_in_each_shard(store: Store) -> None:
    keys = make_keys(64)
    with store.client("chat") as client:

        def scrubbed() -> list[int]:
            return [shard.disk.scrubbed_bytes for shard in client.info().shards if shard.disk is not None]

        client.set(keys, blocks_of(keys, BLOCK), deferred=False)
        wait_until(lambda: all(shard.disk and shard.disk.blocks > 8 for shard in client.info().shards))
        assert scrubbed() == [0, 0]
        document = json.loads(store.command("set", "scrub-mbps", "1000", "--json"))
        assert (document["value"], document["configured"], document["shards_left"]) == ("1000", "0", [])
        wait_until(lambda: min(scrubbed()) > 0, what="both shards scrub")
        store.set("scrub-mbps", "0")
        wait_until(lambda: not any(shard.disk and shard.disk.scrubbing for shard in client.info().shards))
        before = scrubbed()
        stays(lambda: scrubbed() == before, 1.5, "no shard scrubs")  # a pass begins at most 1 s after the last one


def memory_of(client: KVStoreClient) -> int:
    return sum(each.memory_bytes for shard in client.info().shards for each in shard.tenants if each.tenant == "chat")


def test_a_smaller_quota_evicts_and_a_larger_one_admits_blocks(store: Store) -> None:
    with store.client("chat") as chat, store.client("search") as search:
        others = make_keys(64, 50_000)
        search.set(others, blocks_of(others, BLOCK), deferred=False)

        def fill(first: int) -> None:
            for at in range(0, 384, 16):  # 24 MiB
                some = make_keys(16, first + at)
                chat.set(some, blocks_of(some, BLOCK), deferred=False)

        fill(0)
        assert 8 * MIB < memory_of(chat) <= 16 * MIB
        store.command("set", "quota-bytes.chat", "4MiB")
        wait_until(lambda: memory_of(chat) <= 4 * MIB, what="the tenant's blocks are evicted")
        fill(1000)
        assert 0 < memory_of(chat) <= 4 * MIB
        limits = [each.memory_limit_bytes for shard in chat.info().shards for each in shard.tenants]
        assert limits == [2 * MIB] * SHARDS
        store.set("quota-bytes.chat", "none")
        fill(2000)
        assert memory_of(chat) > 16 * MIB
        assert search.contains(others).all()  # the blocks of other tenants stay


def test_the_file_of_logins_wins_when_it_gets_another_quota(store: Store) -> None:
    store.set("quota-bytes.chat", "4MiB")
    store.tokens["another"] = add(store.file, "another", "*", ["read"])
    store.server.signal(signal.SIGHUP)
    with store.client() as operator:
        wait_until(lambda: _knows(store, "another"), what="both shards have read the file")
        assert values(operator.config_get(), "quota-bytes.chat") == ["4MiB"] * SHARDS
        store.write_quota("6MiB")
        wait_until(lambda: values(operator.config_get(), "quota-bytes.chat") == ["6MiB"] * SHARDS)
    wait_until(lambda: store.server.log_text().count("quota-bytes.chat is 6MiB now: the file of --auth was") == SHARDS)


def _knows(store: Store, principal: str) -> bool:
    """Whether a new principal can log in to both shards."""
    try:
        store.client(principal).close()
    except NotAuthorized:
        return False
    return True


def test_a_restarted_shard_keeps_the_changes_and_a_restarted_server_does_not(store: Store) -> None:
    store.set("log-level", "debug")
    store.set("scrub-mbps", "7")
    store.set("quota-bytes.chat", "4MiB")
    for shard in store.server.shards():
        shard.kill()
    wait_until(lambda: store.server.log_text().count("is serving again") >= SHARDS)
    assert (store.get("log-level"), store.get("scrub-mbps")) == (["debug"] * SHARDS, ["7"] * SHARDS)
    assert store.get("quota-bytes.chat") == ["4MiB"] * SHARDS
    since = len(store.server.log_text())
    visit(store)
    wait_until(lambda: debug_lines(store, "shard=1", since), what="the level is in force")
    wait_until(lambda: _shown(store) == ("debug", "7"), what="the page shows the values in force")

    # What the file says in the meantime wins, also in a shard that dies after that.
    store.write_quota("6MiB")
    wait_until(lambda: store.get("quota-bytes.chat") == ["6MiB"] * SHARDS)
    store.write_quota("16MiB")
    wait_until(lambda: store.get("quota-bytes.chat") == ["16MiB"] * SHARDS)
    again = store.server.log_text().count("is serving again")
    store.server.shards()[-1].kill()
    wait_until(lambda: store.server.log_text().count("is serving again") > again)
    assert store.get("quota-bytes.chat") == ["16MiB"] * SHARDS

    store.server.stop()
    store.server.restart()
    assert (store.get("log-level"), store.get("scrub-mbps")) == (["info"] * SHARDS, ["0"] * SHARDS)


def _shown(store: Store) -> tuple[str, str]:
    """Return the log level and the scrub rate that the server's page shows."""
    token = {"Authorization": f"Bearer {store.tokens['operator']}"}
    request = urllib.request.Request(f"{store.server.http_url}/status.json", headers=token)
    settings = json.loads(urllib.request.urlopen(request).read())["settings"]
    return settings["log_level"], settings["scrub_mbps"]


def test_get_shows_values_and_names_shards_that_differ(store: Store) -> None:
    shown = store.command("get")
    assert "shards" not in shown.splitlines()[0]
    for name, value in (("log-level", "info"), ("scrub-mbps", "0"), ("quota-bytes.chat", "16MiB")):
        assert any(line.split()[:3] == [name, value, value] for line in shown.splitlines()), shown
    with RawClient(store.server) as raw:  # this connection has only the first shard
        log_in(raw, NAMESPACE.canonical(), store.tokens["operator"])
        reply = raw.ask(pack(CONFIGURE, 7, 1000, "log-level", "warning"))
        assert reply[:2] == [CONFIGURE_REPLY, 7] and reply[2][0][:3] == ["log-level", "warning", "info"]
        assert reply[3] == "info"
    rows = json.loads(store.command("get", "log-*", "--json"))["settings"]
    first, second = (f"127.0.0.1:{store.server.port + shard}" for shard in range(SHARDS))
    assert [(row["value"], row["shards"]) for row in rows] == [("warning", [first]), ("info", [second])]
    assert store.command("get").splitlines()[0].split()[-1] == "shards"
    assert "no setting matches 'size*': the settings are log-level, scrub-mbps" in store.command(
        "get", "size*", status=2
    )


def test_a_shard_that_does_not_answer_is_named_and_the_others_are_changed(store: Store) -> None:
    port = str(store.server.port + 1)
    (stopped,) = [each for each in store.server.shards() if port in _ports_of(each)]
    stopped.suspend()
    try:
        said = store.command("set", "log-level", "warning", "--timeout", "1", status=1)
        assert "log-level is warning now, and was info, in 1 shard(s)" in said
        assert re.search(rf"error: 127.0.0.1:{port} \(.*/1\) may be unchanged: (?!127)", said), said
        assert "The other 1 of 2 shards have log-level warning. Run this again" in said
        assert "The other 1 of 2 shards are shown." in store.command("get", "--timeout", "1", status=1)
    finally:
        stopped.resume()
    store.command("set", "log-level", "warning")
    assert store.get("log-level") == ["warning"] * SHARDS


def _ports_of(process: psutil.Process) -> set[str]:
    return {str(each.laddr.port) for each in process.net_connections() if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        (
            "memory",
            "1GiB",
            "'memory' is not a setting that can be changed while this server runs: expected one of log-",
        ),
        ("", "debug", "NAME is empty"),
        ("log-level", "loud", "log-level 'loud': expected one of debug, info, warning, error"),
        ("log-level", "DEBUG", "expected one of debug"),
        ("log-level", "", "log-level '': expected one of debug"),
        ("log_level\x1b[31m\n", "debug", r"'log_level\x1b[31m\n' is not a setting"),
        ("log-level", "debug\r\n2026 INFO forged", r"log-level 'debug\r\n2026 INFO forged': expected"),
        ("scrub-mbps", "nan", "scrub-mbps 'nan': expected a whole number of MB/s from 0 (never) to 100000"),
        ("scrub-mbps", "100001", "expected a whole number"),
        ("scrub-mbps", "1e3", "expected a whole number"),
        ("scrub-mbps", "\u0661\u0662", "expected a whole number"),
        ("scrub-mbps", "9" * 128, "expected a whole number"),
        ("scrub-mbps", "9" * 129, "the value of a setting has 129 characters: expected at most 128"),
        ("x" * 60_000, "1", "the name of a setting has 60000 characters: expected at most 128"),
        ("quota-bytes.chat", "inf", "expected a size from 2MiB (its guaranteed memory) to 4194304TiB, or none"),
        ("quota-bytes.chat", "1", "expected a size from 2MiB"),
        ("quota-bytes.chat", "99999999999999999999TiB", "expected a size from 2MiB"),
        ("quota-bytes.search", "1MiB", "expected a size from 2MiB (a segment in each shard) to"),
        ("quota-bytes.*", "1GiB", "'quota-bytes.*' is not a setting"),
        ("quota-bytes.", "1GiB", "quota-bytes.chat, quota-bytes.search"),
        ("quota-bytes.nobody", "1GiB", "'quota-bytes.nobody' is not a setting"),
    ],
)
def test_wrong_names_and_values_are_refused_and_change_nothing(store: Store, name: str, value: str, part: str) -> None:
    with store.client() as operator, store.server.unharmed():
        before = [answer.settings for answer in operator.config_get()]
        since = len(store.server.log_text())
        said = store.command("set", "--", name, value, status=2)
        assert part in said and "\x1b" not in said, said
        assert [answer.settings for answer in operator.config_get()] == before
        assert "forged" not in {line[:20] for line in store.server.log_text()[since:].splitlines()}
        if name:
            errors = [answer.error for answer in operator.config_set(name, value)]
            assert all(isinstance(error, SettingRefused) for error in errors), errors


def test_negative_and_ill_typed_values_are_refused(store: Store) -> None:
    with RawClient(store.server) as raw, store.server.unharmed():
        log_in(raw, b"", store.tokens["operator"])
        for value, code in (
            ("-1", SETTING_CODE),
            (-1, PROTOCOL_CODE),
            (float("nan"), PROTOCOL_CODE),
            (b"10", PROTOCOL_CODE),
            (["10"], PROTOCOL_CODE),
        ):
            for name in ("scrub-mbps", "quota-bytes.chat"):
                assert raw.ask(pack(CONFIGURE, 7, 1000, name, value))[:3] == [ERROR, 7, code], value
        assert raw.ask(pack(CONFIGURE, 7, 0, "scrub-mbps", "10"))[:2] == [ERROR, 7]  # the deadline is out of range
        raw.send(pack(CONFIGURE, 7, 1000, "scrub-mbps", "10"), b"more")
        assert raw.reply()[0][:3] == [ERROR, 7, PROTOCOL_CODE]
        assert raw.ask(pack(INFO, 8, 1000))[1] == 8
    assert store.get("scrub-mbps") == ["0"] * SHARDS


@pytest.mark.parametrize(
    ("principal", "part"),
    [
        ("monitor", "CONFIGURE: principal 'monitor' may not: this needs the verb admin"),
        ("chat", "CONFIGURE: principal 'chat' may not, because this concerns all tenants and models"),
        ("qwen", "CONFIGURE: principal 'qwen' may not, because this concerns all tenants and models"),
    ],
)
def test_only_an_admin_of_all_tenants_may_see_or_change_settings(store: Store, principal: str, part: str) -> None:
    with RawClient(store.server) as raw:
        log_in(raw, b"", store.tokens[principal])
        for fields in ((), ("log-level", "error"), ("quota-bytes.chat", "64MiB")):
            reply = raw.ask(pack(CONFIGURE, 7, 1000, *fields))
            assert reply[:3] == [ERROR, 7, NOT_AUTHORIZED_CODE] and part in reply[3]
    if principal != "qwen":  # the command has a namespace, of another model
        for arguments in (("get",), ("set", "log-level", "error")):
            assert part in store.command(*arguments, status=1, principal=principal)
    records = [json.loads(line) for line in store.audit.read_text().splitlines()]
    denied = [each for each in records if each["event"] == "configure" and each["principal"] == principal]
    assert {each["outcome"] for each in denied} == {"denied"}
    with RawClient(store.server) as raw:
        assert raw.ask(pack(CONFIGURE, 7, 1000, "log-level", "error"))[:3] == [ERROR, 7, NOT_AUTHORIZED_CODE]
    assert store.get("log-level") == ["info"] * SHARDS


def test_a_client_reads_and_writes_through_a_hundred_changes(store: Store, in_background: InBackground) -> None:
    changes = [("log-level", "debug"), ("scrub-mbps", "500"), ("quota-bytes.chat", "12MiB")]
    undone = [("log-level", "info"), ("scrub-mbps", "0"), ("quota-bytes.chat", "16MiB")]

    def change() -> int:
        with store.client() as operator:
            for number in range(100):
                name, value = (changes if number // 3 % 2 else undone)[number % 3]
                assert values(operator.config_set(name, value), name) == [value] * SHARDS
        return 100

    with store.client("search") as search, store.server.unharmed():
        changing = in_background(change)
        rounds = 0
        while not changing.done() or rounds < 3:
            keys = make_keys(8, 100_000 + 8 * rounds)
            assert search.set(keys, blocks_of(keys, BLOCK), deferred=False).created == len(keys)
            assert search.get(keys).blocks == blocks_of(keys, BLOCK)
            rounds += 1
        assert changing.result() == 100
        assert search.stats.failures == 0


@pytest.mark.parametrize("spoken", [3, 4])
def test_an_older_server_is_named_with_what_to_do(spoken: int) -> None:
    text = "the header is not a request of protocol 4: Invalid value 24 - at `$[0]`"
    asked = []

    def answer(fields: list[Any], _: list[bytes]) -> list[list[bytes]]:
        asked.append(fields[0])
        return [[pack(ERROR, fields[1], 1, text)]]

    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    shard = FakeShard(router, answer, spoken, block_bytes=1)
    shard.start()
    try:
        for arguments in (("get",), ("set", "log-level", "debug")):
            done = forked.run(
                *("kvstore_cli", "config", *arguments, "--endpoint", f"tcp://127.0.0.1:{shard.port}"), env=environment()
            )
            expected = f"127.0.0.1:{shard.port}: this server has an earlier release, which has no settings"
            assert done.returncode == 1 and expected in done.stderr, done.stderr
            assert "upgrade the server" in done.stderr
        assert asked == ([] if spoken == 3 else [CONFIGURE] * 2)  # version 3 has no such request
    finally:
        shard.stop.set()
        shard.join()
        router.close(0)
        context.term()


def test_without_logins_any_client_may_change_settings_and_no_quota_is_listed(start_server: Any) -> None:
    server = start_server("--shards", "2")
    with KVStoreClient(server.endpoint, NAMESPACE) as client:
        for answer in client.config_get():
            assert [(each.name, each.value) for each in answer.settings] == [("log-level", "info")]
        (first, second) = client.config_set("log-level", "warning")
        assert (first.before, second.before) == ("info", "info")
        (refused, _) = client.config_set("scrub-mbps", "10")  # there is no disk tier
        assert "expected one of log-level" in str(refused.error)


def test_a_principal_without_rights_raises_nothing_but_has_the_error(store: Store) -> None:
    with store.client("monitor") as monitor:
        assert all(isinstance(answer.error, NotAuthorized) for answer in monitor.config_get())
