"""A decode engine that is killed in the middle of streams through the proxy.

This file runs after the others that use the same fleet, because it takes long to restart the engine.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from tests.engine.fleet import CHAT, COMPLETIONS, GREEDY, SEEDED, Fleet, ask
from tests.engine.served import post
from tests.support.harness import wait_until
from tests.support.proxies import Reading, chunks_of, text_of


@pytest.mark.timeout(400)
def test_killing_a_decode_engine_does_not_change_the_answers(fleet: Fleet) -> None:
    asks = [
        (path, ask(path, 90, ignore_eos=True, **sampling))
        for path in (COMPLETIONS, CHAT)
        for sampling in (GREEDY, SEEDED)
    ]
    for _, body in asks:
        body["max_tokens"] = 200
    right = [text_of(chunks_of(fleet.d.url, path, body)) for path, body in asks]
    readings = [Reading(fleet.proxy.url, path, body) for path, body in asks]
    begun = [list(islice(reading, 20)) for reading in readings]
    fleet.d.kill()
    with ThreadPoolExecutor(4) as pool:
        rests = list(pool.map(list, readings))
    for reading in readings:
        assert reading.done
        reading.leave()
    assert [text_of(chunks + rest) for chunks, rest in zip(begun, rests, strict=True)] == right
    metrics = fleet.proxy.metrics()
    assert metrics['kvstore_proxy_retries_total{when="in the stream"}'] == 4
    wait_until(lambda: not fleet.proxy.status()["pools"]["decode"][0]["healthy"], what="the decode engine is down")
    path, body = asks[0]
    assert post(fleet.proxy.url, path, body, **{"x-request-id": "alone"})[1]["choices"][0]["text"] == right[0]
    assert fleet.proxy.record("alone")["why"] == "no decode engine"
