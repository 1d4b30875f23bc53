"""The page of a real server with real traffic, in a real browser: what the page shows, and what it requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from kvstore_client import KVStoreClient
from tests.support.browser import Browser, need_browser
from tests.support.etcd import Etcd
from tests.support.harness import Server, blocks_of, make_keys, make_namespace, wait_until

BLOCK = 4096
HOSTILE = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
ELSEWHERE = "http://127.0.0.1:9/"
SHOWN_S = 15.0  # the time until the page shows an event: on an idle machine, two refreshes of 2 s


class Watched(NamedTuple):
    server: Server
    client: KVStoreClient
    browser: Browser

    @property
    def errors(self) -> list[str]:
        """Return the page's errors, except those that a test causes on purpose."""
        return [error for error in self.browser.errors if ELSEWHERE not in error]

    def shows(self, text: str, where: str = "body") -> str:
        """Wait until a matching text appears at this place of the page. Returns all text shown there."""
        return str(
            wait_until(
                lambda: (found := self.browser.text(where)) and re.search(text, found) and found,
                SHOWN_S,
                f"the page shows {text!r} in {where}",
            )
        )


@pytest.fixture(scope="module")
def watched(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A node with two shards and a disk tier, its page in a browser, and a client with a malicious name."""
    need_browser()
    folder = tmp_path_factory.mktemp("page")
    with ExitStack() as stack:
        server = Server(
            folder / "log",
            *("--shards", "2", "--memory", "32MiB", "--segment", "1MiB", "--http", "127.0.0.1:0"),
            *("--disk", str(folder / "disk"), "--disk-size", "64MiB"),
            *("--cluster", etcd.url("page"), "--node-id", "n1", "--zone", "rack-7", "--grace-seconds", "0"),
        )
        stack.callback(server.kill)
        browser = Browser(folder / "browser")
        stack.callback(browser.close)
        client = stack.enter_context(KVStoreClient(server.endpoint, make_namespace(BLOCK, HOSTILE), fail_open=True))
        keys = make_keys(1000)
        client.set(keys[:800], blocks_of(keys[:800], BLOCK), deferred=False)
        assert client.get(keys).hit == 800
        browser.look(1200, 900)
        browser.open(server.http_url)
        yield Watched(server, client, browser)


def test_it_shows_the_servers_contents_and_requests(watched: Watched) -> None:
    watched.shows("All is well|Needs a look", "#verdict")  # on a busy machine, the page reports slow turns
    watched.shows(r"800\s+in memory", "#tiles")
    tiles = watched.shows(r"Hit rate\s+80\.0 %\s+1,000 blocks asked for", "#tiles")  # may need another refresh
    assert re.search(r"Shards\s+2 of 2", tiles) and re.search(r"Memory\s+\d+ %\s+\d", tiles), tiles
    assert "get" in watched.shows("set", "#requests")
    assert watched.browser.evaluate("document.querySelectorAll('#shards tbody tr').length") == 2
    label = watched.browser.evaluate("document.querySelector('#chart-bytes svg').getAttribute('aria-label')")
    assert re.search(r"out .* in ", label), label


def test_it_shows_the_cluster(watched: Watched) -> None:
    watched.shows(r"n1 \(this one\)\s+serving\s+rack-7\s+2\s", "#members")
    assert "This node is serving. The list of members is of epoch " in watched.browser.text("#cluster-about")


def test_it_refreshes_by_itself(watched: Watched) -> None:
    before = len(watched.browser.requests)
    keys = make_keys(300, first=1000)
    watched.client.set(keys, blocks_of(keys, BLOCK), deferred=False)
    watched.shows(r"1,100\s+in memory", "#tiles")  # including the first ones
    later = watched.browser.requests[before:]
    assert later and all(url.endswith("/status.json") for url in later)  # no file was loaded again


def test_a_namespaces_name_is_shown_as_text(watched: Watched) -> None:
    assert HOSTILE in watched.shows("script", "#namespaces tbody")
    assert watched.browser.evaluate("window.harmed") is None
    assert watched.browser.evaluate("document.querySelectorAll('main script, main img').length") == 0


def test_it_requests_nothing_from_other_hosts_and_has_no_errors(watched: Watched) -> None:
    asked = {url.removeprefix(watched.server.http_url) for url in watched.browser.requests if url != "about:blank"}
    assert asked >= {"/", "/page.css", "/page.js", "/charts.js", "/status.json"}
    assert not [url for url in asked if not url.startswith("/")]
    assert not watched.errors
    refused = watched.browser.evaluate(f"fetch('{ELSEWHERE}').then(() => 'loaded', () => 'refused')")
    assert refused == "refused"
    wait_until(lambda: "Content Security Policy" in str(watched.browser.errors), what="its policy forbids it")


def test_it_fits_a_phone_and_has_dark_colors(watched: Watched) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = watched.browser.evaluate(ground)
    watched.browser.look(360, 780, dark=True)
    assert watched.browser.evaluate("document.documentElement.scrollWidth") <= 360
    assert watched.browser.evaluate(ground) != light
    watched.browser.look(1200, 900)


def test_hanging_and_killed_shards_are_named(watched: Watched) -> None:
    hangs = watched.server.shards()[1]
    hangs.suspend()
    try:
        said = watched.shows("Shard 1 does not answer: ", "#messages")
        assert re.search(r"no answer within [\d.]+ s. Its blocks are misses.", said), said
        watched.shows("Something is wrong", "#verdict")
        watched.shows("does not answer: .*no answer within", "#shards")
    finally:
        hangs.resume()
    watched.shows(r"2 of 2", "#tiles")
    hangs.kill()
    watched.shows(r"Shard 1 died and was restarted \d+ s ago", "#messages")
    watched.shows("Needs a look", "#verdict")
    assert not watched.errors


def test_it_shows_when_the_server_is_gone(watched: Watched) -> None:
    watched.server.kill()
    watched.shows("The server does not answer: .+ The numbers below are not current.", "#lost")
