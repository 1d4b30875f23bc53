"""One request on one timeline, with the events of the proxy, P, the store's clients and D; and vLLM's own spans in its
trace."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvstore_client.engine.trace_file import read_trace
from tests.engine.engines import StartEngine
from tests.engine.fleet import Fleet
from tests.engine.served import MODEL, post
from tests.support import forked
from tests.support.harness import Server, environment, wait_until
from tests.support.proxies import Reading

COMPLETIONS = "/v1/completions"
TRACE, USER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# Processes do not read the clock at the same instant, and round times to microseconds.
TOLERANCE_S = 0.005


def body(number: int, **more: Any) -> dict[str, Any]:
    """Return a request that no test has made before."""
    words = random.Random(f"traced {number}")  # no prompt of another test begins with these words
    prompt = [words.randrange(300, 4000) for _ in range(1000)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}


def timeline(fleet: Fleet, request: str) -> list[dict[str, Any]]:
    """Run `kvstore trace`, and return the events of a request once P and D have written all. Each event also has its
    `row`, and `began` and `ended` in seconds."""
    out = fleet.folder / f"{request}.json"
    arguments = ["trace", *map(str, fleet.files), "-o", str(out), "--request", request]

    def complete() -> list[dict[str, Any]] | None:
        if forked.run("kvstore_cli", *arguments, env=environment()).returncode:
            return None
        events = json.loads(out.read_bytes())["traceEvents"]
        rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
        timed = [
            {**each, "row": rows[each["tid"]].partition(" (")[0], "began": each["ts"] / 1e6}
            for each in events
            if each["ph"] != "M"
        ]
        for each in timed:
            each["ended"] = each["began"] + each.get("dur", 0) / 1e6
        return timed if {"set", "decode"} <= {each["name"] for each in timed if each["row"] != "proxy to D"} else None

    return list(wait_until(complete, what=f"P and D have told of {request}"))


def one(events: list[dict[str, Any]], row: str, name: str) -> dict[str, Any]:
    [found] = [each for each in events if (each["row"], each["name"]) == (row, name)]
    return found


def inside(part: dict[str, Any], whole: dict[str, Any]) -> bool:
    return bool(whole["began"] - TOLERANCE_S <= part["began"] <= part["ended"] <= whole["ended"] + TOLERANCE_S)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_has_all_rows_and_its_parts_are_consistent(fleet: Fleet, stream: bool) -> None:
    name = f"seen-{stream}"
    if stream:
        with Reading(fleet.proxy.url, COMPLETIONS, body(1), **{"x-request-id": name}) as reading:
            assert list(reading) and reading.done
    else:
        assert post(fleet.proxy.url, COMPLETIONS, body(2), **{"x-request-id": name})[0] == 200
    events = timeline(fleet, name)
    rows = ["proxy", "proxy to P", "proxy to D", "P", "store, from P", "store, to D", "D"]
    assert list(dict.fromkeys(each["row"] for each in sorted(events, key=lambda each: each["tid"]))) == rows
    assert {each["args"]["trace_id"] for each in events} == {fleet.proxy.record(name)["trace"]}
    assert len({each["pid"] for each in events}) == 1

    request = one(events, "proxy", f"POST {COMPLETIONS}")
    asked_p, asked_d = one(events, "proxy to P", "prefill"), one(events, "proxy to D", "decode")
    for part in (one(events, "proxy", "decide"), asked_p, asked_d):
        assert inside(part, request)
    for part in (one(events, "P", "queue"), one(events, "P", "prefill")):
        assert inside(part, asked_p)
    for part in (one(events, "D", each) for each in ("queue", "load", "decode")):
        assert inside(part, asked_d)
    assert one(events, "P", "queue")["ended"] <= one(events, "P", "prefill")["began"] + TOLERANCE_S
    load, send = one(events, "D", "load"), one(events, "store, from P", "set")
    assert load["args"]["tokens"] > 900 and not load["args"]["failed_blocks"]
    assert inside(load, one(events, "store, to D", "get"))
    # D loads the blocks that P sets: it loads none before P has begun, and waits for the last block.
    assert one(events, "P", "prefill")["began"] < load["ended"] and send["began"] < load["ended"]
    assert load["ended"] <= one(events, "D", "decode")["began"] + TOLERANCE_S
    if stream:
        assert load["ended"] <= one(events, "proxy to D", "first token")["began"] + TOLERANCE_S
        assert inside(one(events, "proxy to P", "first token"), asked_p)
    assert one(events, "D", "decode")["args"]["output_tokens"] == 8


@pytest.mark.timeout(400)
def test_proxy_and_vllm_spans_are_in_the_users_trace(fleet: Fleet) -> None:
    given = {"traceparent": f"00-{TRACE}-{USER}-01", "x-request-id": "mine"}
    assert post(fleet.proxy.url, COMPLETIONS, body(3), **given)[0] == 200
    receiver = fleet.receiver

    def services() -> set[str]:
        return {each["resource"]["service.name"] for each in receiver.of(TRACE)}

    wait_until(lambda: len(services()) == 2, what="the spans of the proxy and of P")
    spans = {each["name"]: each for each in receiver.of(TRACE) if each["resource"]["service.name"] == "kvstore-proxy"}
    assert spans[f"POST {COMPLETIONS}"]["parent"] == USER
    engine = [each for each in receiver.of(TRACE) if each["resource"]["service.name"] != "kvstore-proxy"]
    roots = [each for each in engine if each["parent"] not in {other["id"] for other in engine}]
    assert roots and {each["parent"] for each in roots} == {spans["prefill"]["id"]}
    assert {each["args"]["trace_id"] for each in timeline(fleet, "mine")} == {TRACE}


@pytest.mark.timeout(400)
def test_without_a_proxy_an_engine_writes_only_sampled_requests(fleet: Fleet) -> None:
    unwanted = "2" * 32
    header = {"traceparent": f"00-{unwanted}-{USER}-00"}
    assert post(fleet.proxy.url, COMPLETIONS, body(4), **header)[0] == 200
    assert post(fleet.d.url, COMPLETIONS, body(5), **{"x-request-id": "alone"})[0] == 200
    path = fleet.files[2]
    wait_until(lambda: "alone" in path.read_text(), what="it is written")
    assert [each.name for each in read_trace(path) if "alone" in each.request_id] == ["queue", "decode"]
    assert not any(unwanted in file.read_text() for file in fleet.files)
    assert not fleet.receiver.of(unwanted)


def test_an_engine_with_an_unwritable_trace_file_does_not_start(server: Server, start_engine: StartEngine) -> None:
    engine = start_engine(server.endpoint, options={"trace_file": "/no/such/trace.json"}, wait=False)
    assert not engine.ready()
    says = "kvstore: trace_file: [Errno 2] No such file or directory: '/no/such/trace.json'"
    assert says in engine.log_text()
