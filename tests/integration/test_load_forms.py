"""`kvstore load` against endpoints whose answers are not streamed texts, or that end during the load, over real
connections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_load import NEAR_S, command, lines_of, load, poisson, report
from tests.support import forked
from tests.support.endpoint import Behaviour, Endpoint
from tests.support.harness import environment, wait_until
from tests.support.proxies import StandInEngine
from tests.support.stand_in_engine import MODEL

GAP_S = 0.15
DONE = "data: [DONE]\n\n"


def chat(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


ROLE = chat(role="assistant", content="")
CALL = [{"index": 0, "function": {"name": "look", "arguments": ""}}]
MORE = [{"index": 0, "function": {"arguments": "{}"}}]


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": tokens}}


@pytest.mark.parametrize(
    ("script", "tokens", "first"),
    [
        ((ROLE, chat(content=""), chat("length", content=""), usage(2), DONE), 2, 1),
        ((ROLE, chat(tool_calls=CALL), chat(tool_calls=MORE), chat("tool_calls"), usage(4), DONE), 4, 1),
        ((ROLE, chat(reasoning_content="a"), chat("length", content="b"), usage(2), DONE), 2, 1),
        ((": keep-alive\n\n", ROLE, ": keep-alive\n\n", chat("length", content=""), usage(1), DONE), 1, 3),
    ],
    ids=["no visible text", "tool call", "reasoning", "one token after comments"],
)
def test_an_answer_counts_from_its_first_token_of_any_kind(
    script: tuple[dict[str, Any] | str, ...], tokens: int, first: int, tmp_path: Path
) -> None:
    with Endpoint(lambda number: Behaviour(gap_s=GAP_S, script=script)) as endpoint:
        arguments = [*poisson(2, output_tokens=2 if tokens != 1 else 1), "--api", "chat"]
        made = report(endpoint.url, *arguments, "--output", str(tmp_path / "out"))
        asked = sorted(endpoint.asked, key=lambda each: each.at_s)
    assert (made["completed"], made["failed"], made["tokens"]["completion"]) == (2, 0, 2 * tokens)
    for each, line in zip(asked, lines_of(tmp_path / "out"), strict=True):
        sent_s = each.chunk_times_s[first] - each.at_s
        assert sent_s <= line["ttft_s"] <= sent_s + NEAR_S, "not later than it was sent, nor with the role"
        whole_s = each.chunk_times_s[-1] - each.at_s
        assert whole_s <= line["latency_s"] <= whole_s + NEAR_S
    assert made["latency_s"]["p50"] >= len(script) * GAP_S - 0.02
    assert set(made["latency_s"]) == set(made["ttft_s"])


def test_an_unstreamed_answer_is_one_piece_without_time_per_token() -> None:
    message = '{"choices": [{"index": 0, "message": {"content": "a b c d e"}, "finish_reason": "length"}], '
    script = (message, '"usage": {"prompt_tokens": 8, "completion_tokens": 5}}')
    with Endpoint(lambda number: Behaviour(gap_s=GAP_S, script=script)) as endpoint:
        made = report(endpoint.url, *poisson(3), "--api", "chat")
        said = load(endpoint.url, *poisson(3), "--api", "chat").stdout
    assert (made["completed"], made["whole"], made["tokens"]["completion"]) == (3, 3, 15)
    assert made["tpot_s"]["p50"] is None and made["ttft_s"]["p50"] >= 2 * GAP_S - 0.02
    assert "3 answers came whole" in said and "overall" in said
    assert "3 requests completed: with fewer than 100, the p99 is near the maximum" in said


def test_answers_with_several_choices_complete_when_all_have() -> None:
    def choice(index: int, finish: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": index, "text": "a", "finish_reason": finish}]}

    script = (choice(1), choice(0), choice(1, "length"), choice(0, "length"), usage(4), DONE)
    with Endpoint(lambda number: Behaviour(gap_s=GAP_S, script=script)) as endpoint:
        made = report(endpoint.url, *poisson(2, output_tokens=2), "--extra-body", '{"n": 2}')
        other = report(endpoint.url, *poisson(2, output_tokens=3), "--extra-body", '{"n": 2}', status=1)
        assert all(each.body["n"] == 2 for each in endpoint.asked)
        wrong = load(endpoint.url, *poisson(1), "--extra-body", '{"n": 0}', status=2)
    assert (made["completed"], made["tokens"]["output"], made["tokens"]["completion"]) == (2, 8, 8)
    assert made["itl_s"]["p50"] == pytest.approx(2 * GAP_S, abs=NEAR_S) and made["itl_s"]["p50"] > 1.5 * GAP_S
    assert "after 4 of 6 tokens" in other["errors"][0]["message"]
    assert "n is 0: expected the number of answers" in wrong.stderr


def test_an_answer_may_stop_early_unless_its_length_is_forced() -> None:
    with Endpoint(lambda number: Behaviour(script=(ROLE, chat("stop"), usage(0), DONE))) as endpoint:
        made = report(endpoint.url, *poisson(2), "--api", "chat", "--no-extensions")
        said = load(endpoint.url, *poisson(2), "--api", "chat", "--no-extensions").stdout
        insisted = report(endpoint.url, *poisson(2), "--api", "chat", status=1)
    assert (made["completed"], made["empty"], made["ttft_s"]["p50"]) == (2, 2, None)
    assert made["attainment"]["joint"] == 1.0 and made["latency_s"]["p50"] > 0
    assert "2 answers ended without a token" in said
    assert insisted["errors"][0]["kind"] == "fewer_tokens"


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (('{"error": {"message": "no such model"}}',), "server", "no such model"),
        ((ROLE, {"object": "error", "message": "out of blocks"}, DONE), "server", "out of blocks"),
        ((ROLE, chat(content="a"), chat("abort"), usage(1), DONE), "server", "finish_reason 'abort'"),
        (("<html>Bad gateway</html>",), "malformed", "<html>Bad gateway</html>"),
    ],
    ids=["instead of an answer", "alone", "aborted", "no answer"],
)
def test_an_endpoints_reply_in_place_of_an_answer_is_reported(
    script: tuple[dict[str, Any] | str, ...], kind: str, message: str
) -> None:
    with Endpoint(lambda number: Behaviour(script=script)) as endpoint:
        made = report(endpoint.url, *poisson(2), "--api", "chat", "--no-extensions", status=1)
    assert [(each["kind"], each["count"]) for each in made["errors"]] == [(kind, 2)]
    assert message in made["errors"][0]["message"]


def test_a_restarted_engine_fails_only_the_requests_it_missed(tmp_path: Path) -> None:
    """The engine is killed in the twelfth request. Requests sent before its restart fail, and later ones succeed."""
    engine = StandInEngine(tmp_path / "engine.log")
    engine.behave(gap_s=0.02)
    output = tmp_path / "out"
    arguments = [*poisson(120, rate=6), "--model", MODEL, "--api", "chat", "--json", "--output", str(output)]
    try:
        with forked.running(*command(engine.url, *arguments), env=environment()) as loading:
            wait_until(lambda: len(engine.seen()["requests"]) >= 12, what="requests came")
            engine.kill()
            engine.start()
            done = loading.finish(120)
    finally:
        engine.kill()
    made = json.loads(done.stdout)
    assert done.returncode == 0 and made["requests"] == 120
    assert made["completed"] + made["failed"] == 120 and made["completed"] >= 10
    assert {each["kind"] for each in made["errors"]} <= {"connection", "cut"}
    lines = lines_of(output)
    assert not lines[0]["error"] and not lines[-1]["error"], "it is used again"
    assert all(line["latency_s"] >= 0 and line["sent_s"] >= line["scheduled_s"] for line in lines)
    assert "NaN" not in done.stdout and "Infinity" not in done.stdout
