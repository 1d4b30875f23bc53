"""The proxy's page in a real browser: what it shows of the engines and requests, and what it requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, need_browser
from tests.support.harness import Server, wait_until
from tests.support.proxies import ProxyProcess, StandInEngine, get, post
from tests.support.stand_in_engine import MODEL

SHOWN_S = 15.0


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[StandInEngine]]:
    """A prefill engine and a decode engine."""
    found = [StandInEngine(tmp_path / f"{name}.log") for name in "pd"]
    yield found
    for engine in found:
        engine.kill()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    need_browser()
    opened = Browser(tmp_path / "browser")
    yield opened
    opened.close()


def test_the_page_shows_engines_and_requests_and_loads_nothing_else(
    tcp_server: Server, engines: list[StandInEngine], browser: Browser, tmp_path: Path
) -> None:
    prefill, decode = engines
    options = [f"--store={tcp_server.endpoint}", f"--prefill={prefill.url}", f"--decode={decode.url}"]
    with ProxyProcess(tmp_path / "proxy", *options, "--policy=split", "--check-seconds=0.1") as proxy:
        body = {"model": MODEL, "prompt": list(range(40)), "max_tokens": 4, "temperature": 0, "stream": True}
        for _ in range(4):
            assert post(proxy.url, "/v1/completions", body)[0] == 200
        browser.look(1200, 900)
        browser.open(proxy.url)

        def shows(text: str, where: str) -> str:
            return str(
                wait_until(
                    lambda: (found := browser.text(where)) and re.search(text, found) and found,
                    SHOWN_S,
                    f"the page shows {text!r} in {where}",
                )
            )

        shown = shows(r"Requests\s+4", "#tiles")
        shows(r"^Every prompt is split between a prefill and a decode engine \(policy split\)$", "#about")
        legend = str(browser.evaluate("[...document.querySelectorAll('.note')].at(-1).textContent"))
        assert all(f"{decision}: " in legend for decision in ("split", "colocate", "passed", "none")), legend
        assert re.search(r"Split\s+100 %", shown) and re.search(r"Engines\s+2 of 2", shown), shown
        table = shows("prefill", "#engines")
        assert all(engine.url in table for engine in engines) and MODEL in table, table
        assert re.search(r"split\s+4\s+[\d.]+ m?s", shows("split", "#latency"))
        label = browser.evaluate("document.querySelector('#chart-requests svg').getAttribute('aria-label')")
        assert "The last five minutes" in str(label)
        decode.kill()
        shows(f"{re.escape(decode.url)} gets no requests: cannot connect to .+: Connection refused", "#messages")
        shows("Something is wrong", "#verdict")
        assert all(url.startswith(proxy.url) for url in browser.requests if url.startswith("http"))
    shows("The proxy does not answer: .+ The numbers below are not current", "#lost")


def test_the_files_of_the_page_come_with_a_strict_policy(
    tcp_server: Server, engines: list[StandInEngine], tmp_path: Path
) -> None:
    with ProxyProcess(tmp_path / "proxy", f"--store={tcp_server.endpoint}", f"--decode={engines[0].url}") as proxy:
        for path in ("/", "/proxy.js", "/charts.js", "/parts.js", "/page.css", "/icon.svg"):
            status, content = get(proxy.url, path)
            assert status == 200 and len(content) > 100, path
        assert post(proxy.url, "/", {})[0] == 405
        assert get(proxy.url, "/page.js")[0] == 404
