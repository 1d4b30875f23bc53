"""`traceparent` headers follow W3C's Trace Context: an invalid one begins a new trace."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from kvstore_client.engine.trace_context import new_trace, parse_traceparent
from kvstore_serving.proxy.record import begin

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01-",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-0g",
        f"01-{TRACE}-{PARENT}-01more",
        f"{GOOD},{GOOD}",
        f"00-{TRACE}-{PARENT}-01\n",
    ],
)
def test_an_invalid_header_starts_a_new_trace_without_tracestate(header: str) -> None:
    assert parse_traceparent(header) is None
    given = {"traceparent": header, "tracestate": "a=1", "baggage": "b=2"}
    record = begin("POST", "/v1/completions", Headers(given))
    assert record.trace.trace_id != TRACE and not record.trace.parent_id and record.trace.sampled
    sent = record.for_engine(record.root)
    assert "tracestate" not in sent and sent["baggage"] == "b=2"
    assert sent["traceparent"].split("-")[1:3] == [record.trace.trace_id, record.root.id]


@pytest.mark.parametrize(
    ("header", "sent"),
    [
        (GOOD, "00-{}-{}-01"),
        (f" {GOOD}\t", "00-{}-{}-01"),
        (f"00-{TRACE}-{PARENT}-00", "00-{}-{}-00"),
        (f"00-{TRACE}-{PARENT}-ff", "00-{}-{}-03"),  # unknown flags are sent on as 0
        (f"cc-{TRACE}-{PARENT}-01-what-will-come", "00-{}-{}-01"),
        (f"cc-{TRACE}-{PARENT}-01", "00-{}-{}-01"),
    ],
)
def test_a_trace_continues_with_our_own_spans(header: str, sent: str) -> None:
    record = begin("POST", "/v1/completions", Headers({"traceparent": header, "tracestate": "a=1"}))
    headers = record.for_engine(record.root)
    assert headers["traceparent"] == sent.format(TRACE, record.root.id) and headers["tracestate"] == "a=1"
    assert record.trace.parent_id == PARENT and record.root.id != PARENT


def test_new_traces_are_valid_and_different() -> None:
    made = [new_trace() for _ in range(100)]
    assert len({each.trace_id for each in made}) == 100
    for each in made:
        again = parse_traceparent(each.header(PARENT))
        assert again is not None and again.trace_id == each.trace_id and again.sampled
