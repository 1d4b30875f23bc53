"""Users of the proxy may disconnect at any moment: both engines become free, nothing is left behind, and other users
notice nothing."""

from __future__ import annotations

import itertools
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.engine.fleet import CHAT, COMPLETIONS, GREEDY, SEEDED, Fleet, all_well, ask, some
from tests.support.harness import wait_until
from tests.support.proxies import ProxyProcess, Reading, answer_of, chunks_of

# When the user disconnects: after sending this part of the request, while the request is served, or after this number
# of a stream's events. The first event may come from P.
MOMENTS = ("nothing", "headers", "half", "all", "served", 1, 2, 7)
FORMS: dict[str, dict[str, Any]] = {
    "streamed": {"stream": True, **GREEDY},
    "seeded": {"stream": True, **SEEDED},
    "whole": {**GREEDY},
    "two answers": {"stream": True, "n": 2, **SEEDED},
}
LONG = {"max_tokens": 500, "ignore_eos": True}
OTHERS = [(COMPLETIONS, GREEDY, 301), (CHAT, SEEDED, 302)]


def leave(fleet: Fleet, moment: str | int, path: str, body: dict[str, Any], name: str) -> None:
    """Send a request, and close the connection at that moment."""
    where, data = urlsplit(fleet.proxy.url), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {name}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    sent = {"nothing": b"", "headers": head.encode(), "half": head.encode() + data[: len(data) // 2]}
    with socket.create_connection((str(where.hostname), int(where.port or 0)), 60) as sock:
        sock.sendall(sent[moment] if moment in sent else head.encode() + data)
        if moment == "served":
            wait_until(lambda: in_flight(fleet.proxy) > len(OTHERS), what="it is served, as are the others")
        elif isinstance(moment, int):
            came = b""
            while came.count(b"data: ") < moment:
                piece = sock.recv(1 << 16)
                assert piece, came
                came += piece


def in_flight(proxy: ProxyProcess) -> int:
    return int(proxy.status()["in_flight"])


def open_files(process: psutil.Process, fleet: Fleet) -> tuple[int, int]:
    """Return the number of the proxy's open files without its connections to engines, and the number of those
    connections."""
    engines = {urlsplit(engine.url).port for engine in (fleet.p, fleet.d)}
    to_engines = sum(1 for each in process.net_connections("tcp") if each.raddr and each.raddr.port in engines)
    return process.num_fds() - to_engines, to_engines


def nothing_is_left(fleet: Fleet) -> None:
    for engine in (fleet.p, fleet.d):
        for state in ("running", "waiting"):
            name = f"vllm:num_requests_{state}"
            wait_until(lambda engine=engine, name=name: not engine.metric(name), what=f"{name} of {engine.url}")
    wait_until(lambda: not in_flight(fleet.proxy), what="nothing is in flight")
    names = ("kvstore_proxy_in_flight", "kvstore_proxy_engine_running", "kvstore_proxy_engine_queued_tokens")
    left = {name: value for name, value in fleet.proxy.metrics().items() if name.startswith(names) and value}
    assert not left


@pytest.mark.timeout(400)
def test_users_who_disconnect_at_any_moment_leave_nothing_behind(fleet: Fleet) -> None:
    choose, left = random.Random(7), list[str]()
    wait_until(lambda: all_well(fleet.proxy), what="both engines take requests")
    nothing_is_left(fleet)
    process = psutil.Process(fleet.proxy.process.pid)
    before = open_files(process, fleet)
    others = [Reading(fleet.proxy.url, path, ask(path, number, **LONG, **how)) for path, how, number in OTHERS]
    with ThreadPoolExecutor(len(others)) as users:
        reading = [users.submit(list, each) for each in others]
        for (number, moment), (form, how) in some(itertools.product(enumerate(MOMENTS), FORMS.items())):
            if isinstance(moment, int) and form == "whole":
                continue
            path, name = choose.choice((COMPLETIONS, CHAT)), f"leaves at {moment}, {form}"
            leave(fleet, moment, path, ask(path, 400 + 10 * number + len(form), **LONG, **how), name)
            left += [name] if moment != "nothing" else []
        answers = [answer_of(each.result(120)) for each in reading]
    for each in others:
        assert each.done
        each.leave()
    right = [chunks_of(fleet.d.url, path, ask(path, number, **LONG, **how)) for path, how, number in OTHERS]
    assert answers == [answer_of(chunks) for chunks in right]
    nothing_is_left(fleet)
    assert {fleet.proxy.record(name)["outcome"] for name in left} == {"disconnect"}
    # The proxy keeps idle connections to an engine: at most as many as were in use at once, by the other users, the
    # leaving user and a health check.
    wait_until(lambda: open_files(process, fleet)[0] <= before[0], what="what was opened for users is closed")
    wait_until(lambda: open_files(process, fleet)[1] <= 2 * (len(OTHERS) + 2), what="engines' connections are closed")
