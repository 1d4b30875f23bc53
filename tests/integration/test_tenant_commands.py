"""Commands with the tokens of an engine and of an operator: an engine's token is enough to ping and to measure, and an
operator sees each tenant's use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient
from tests.support import forked
from tests.support.browser import Browser, need_browser
from tests.support.harness import Server, blocks_of, environment, make_keys, make_namespace, wait_until

BLOCK = 4096


class TwoTenants(NamedTuple):
    server: Server
    tokens: dict[str, str]

    def run(self, principal: str, *arguments: str, status: int = 0) -> str:
        done = forked.run(
            *("kvstore_cli", *arguments, "--endpoint", self.server.endpoint),
            env=environment(KVSTORE_TOKEN=self.tokens[principal], COLUMNS="160"),
        )
        assert done.returncode == status, done.stdout + done.stderr
        return str(done.stdout + done.stderr if status else done.stdout)

    def answer(self, principal: str, *arguments: str) -> Any:
        return json.loads(self.run(principal, *arguments, "--json"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoTenants]:
    """A server with the tenants `chat` and `search`, whose namespaces have the same model, and an operator."""
    folder = tmp_path_factory.mktemp("tenants")
    file = folder / "auth.toml"
    tokens = {name: add(file, name, name, ["read", "write"]) for name in ("chat", "search", "measured")}
    tokens["operator"] = add(file, "operator", "*", ["monitor"])
    tokens["owner"] = add(file, "owner", "*", ["admin", "monitor", "read"])
    tokens["reader"] = add(file, "reader", "chat", ["read"])
    with file.open("a") as lines:
        lines.write('\n[tenants.chat]\nmemory = "16MiB"\n')
    server = Server(
        folder / "log",
        *("--auth", str(file), "--shards", "2", "--memory", "64MiB", "--segment", "1MiB", "--http", "127.0.0.1:0"),
    )
    for name, count in (("chat", 30), ("search", 50)):
        with KVStoreClient(server.endpoint, make_namespace(BLOCK, "shared-model"), token=tokens[name]) as client:
            keys = make_keys(count)
            assert client.set(keys, blocks_of(keys, BLOCK), deferred=False).created == count
    yield TwoTenants(server, tokens)
    server.kill()


def test_an_engines_token_is_enough_to_ping(two: TwoTenants) -> None:
    assert "2 shard(s) answered in" in two.run("chat", "ping")
    assert two.answer("chat", "ping") == {"ok": True, "shards": 2, "seconds": pytest.approx(1.0, abs=1.0)}


@pytest.mark.parametrize("command", [("info",), ("top", "--once"), ("cluster", "status")], ids=" ".join)
def test_a_refusal_is_not_called_silence(two: TwoTenants, command: tuple[str, ...]) -> None:
    shown = two.run("reader", *command, status=1)
    assert "2 of 2 shards refused: " in shown and "may not" in shown and "did not answer" not in shown
    assert "No shard answers" not in shown


def test_an_engines_token_is_enough_to_measure_and_the_report_says_what_it_could_not_do(two: TwoTenants) -> None:
    arguments = ("bench", "--block-bytes", "65536", "--rounds", "2", "--blocks", "16")
    refused = two.run("measured", *arguments, status=2)
    assert "may not ask how much is free" in refused and "--evict" in refused
    report = two.answer("measured", *arguments, "--evict")
    assert report["removed_blocks"] == 0 and len(report["notes"]) == 1
    assert all(row["blocks_s"] > 0 for row in report["operations"])
    shown = two.run("measured", *arguments, "--evict")
    assert "stay for 10 minutes" in shown and "removed" not in shown


def test_a_token_that_cannot_write_measures_nothing(two: TwoTenants) -> None:
    assert "may not" in two.run("reader", "bench", "--evict", "--blocks", "4", "--rounds", "1", status=1)


def test_a_purge_without_its_rights_names_them(two: TwoTenants) -> None:
    assert "purge needs a token with the verb admin" in two.run("chat", "purge", "--all", "--yes", status=1)


def test_commands_tell_the_namespaces_of_two_tenants_apart(two: TwoTenants) -> None:
    without_tenant = make_namespace(BLOCK, "shared-model").canonical().decode()
    for command in (("purge", "--yes"), ("keys",)):
        shown = two.run("owner", *command, "--namespace", without_tenant, status=3)
        assert "(shared-model, tenant chat)" in shown and "(shared-model, tenant search)" in shown, shown
        assert '"tenant": "NAME"' in shown
    with KVStoreClient(two.server.endpoint, make_namespace(BLOCK, "shared-model"), token=two.tokens["chat"]) as client:
        assert client.contains(make_keys(30)).all(), "nothing was removed"


def test_info_shows_each_tenants_use_and_limits(two: TwoTenants) -> None:
    shown = two.run("operator", "info")
    tenants = shown.partition("Tenants")[2].partition("Namespaces")[0]
    chat = next(line for line in tenants.splitlines() if line.startswith("chat"))
    assert re.search(r"chat +2.0 MiB +16.0 MiB ", chat), shown
    assert re.search(r"^search +2.0 MiB +- ", tenants, re.MULTILINE), shown
    namespaces = shown.partition("Namespaces")[2]
    assert re.search(r"shared-model +chat ", namespaces) and re.search(r"shared-model +search ", namespaces), shown


def test_an_operator_learns_where_a_block_belongs_without_the_right_to_read(two: TwoTenants) -> None:
    namespace = make_namespace(BLOCK, "shared-model").canonical().decode()
    shown = two.run("operator", "cluster", "where", "00" * 16, "--namespace", namespace)
    assert shown.startswith("owner ") and "may not" not in shown, shown


@pytest.mark.parametrize(("by", "names"), [("tenant", {"chat", "search"}), ("namespace", None)])
def test_top_has_a_row_for_each_tenant_or_namespace(two: TwoTenants, by: str, names: set[str] | None) -> None:
    found = two.answer("operator", "top", "--once", "--interval", "0.3", "--by", by, "--sort", "blocks")
    rows = [row for row in found["rows"] if row["blocks"] in (30, 50)]
    assert [row["tenant"] for row in rows] == ["search", "chat"]
    assert names is None or {row["name"] for row in rows} == names
    limits = {row["tenant"]: row["memory_limit_bytes"] for row in rows}
    assert limits == ({"chat": 16 << 20, "search": None} if by == "tenant" else {"chat": None, "search": None})
    table = two.run("operator", "top", "--once", "--interval", "0.3", "--by", by, "--sort", "memory", "--reverse")
    assert "memory▲" in table and "search" in table
    assert "'slow' is not one of" in two.run("operator", "top", "--by", by, "--sort", "slow", status=2)


def test_the_page_shows_tenants_even_under_an_address_with_a_password(two: TwoTenants, tmp_path: Path) -> None:
    need_browser()
    browser = Browser(tmp_path / "browser")
    try:
        browser.look(1200, 900)
        browser.open(two.server.http_url.replace("://", f"://x:{two.tokens['operator']}@"))
        shown = wait_until(
            lambda: (found := browser.text("#tenants")) and "search" in found and found, 15, "the page shows tenants"
        )
        assert re.search(r"chat\s+2 MiB of 16 MiB", str(shown)), shown
        assert "search" in browser.text("#namespaces")
    finally:
        browser.close()
