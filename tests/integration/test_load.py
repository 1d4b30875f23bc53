"""`kvstore load` against endpoints that are slow or broken in known ways: what it measures, and what it counts as
errors.

The endpoint records the time at which it writes each chunk. The tests compare the generator's measurements with these
times, so a busy machine cannot make them fail.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.endpoint import Behaviour, Endpoint
from tests.support.harness import environment, wait_until

NEAR_S = 0.25  # the delay that a busy machine may add
FIXED = ["--model", "m", "--slo-ttft", "5", "--slo-tpot", "1"]


def command(url: str, *arguments: str) -> list[str]:
    return ["kvstore_cli", "load", "--url", url, *FIXED, *arguments]


def load(url: str, *arguments: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    done = forked.run(*command(url, *arguments), env=environment(COLUMNS="100", **variables))
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def poisson(requests: int, rate: float = 50, input_tokens: int = 8, output_tokens: int = 5) -> list[str]:
    numbers = {"rate": rate, "requests": requests, "input-tokens": input_tokens, "output-tokens": output_tokens}
    return [part for name, value in numbers.items() for part in (f"--{name}", str(value))]


def report(url: str, *arguments: str, status: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(load(url, *arguments, "--json", status=status).stdout)
    return made


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_measured_times_are_those_of_the_sent_tokens(tmp_path: Path) -> None:
    with Endpoint(lambda number: Behaviour(first_s=0.3, gap_s=0.1)) as endpoint:
        made = report(endpoint.url, *poisson(6), "--output", str(tmp_path / "out"))
        assert made["requests"] == made["completed"] == 6 and made["failed"] == 0
        asked = sorted(endpoint.asked, key=lambda each: each.at_s)
    lines = lines_of(tmp_path / "out")
    assert len(lines) == 6
    for each, line in zip(asked, lines, strict=True):
        chunks = each.chunk_times_s
        assert chunks[0] - each.at_s <= line["ttft_s"] <= chunks[0] - each.at_s + NEAR_S
        assert len(line["itl_s"]) == 4
        assert sum(line["itl_s"]) == pytest.approx(chunks[-1] - chunks[0], abs=NEAR_S)
        assert line["tpot_s"] == pytest.approx(sum(line["itl_s"]) / 4)
    for name, low in (("ttft_s", 0.3), ("tpot_s", 0.1), ("itl_s", 0.1)):
        assert set(made[name]) >= {"mean", "p50", "p90", "p99"}
        assert low - 0.02 <= made[name]["p50"] <= low + NEAR_S
    assert made["attainment"]["joint"] == 1.0
    low, high = made["attainment"]["ci95"]
    assert 0 < low < high == 1.0
    assert made["goodput_rps"] == pytest.approx(made["sent_rps"])


def test_a_stalled_request_delays_no_later_one(tmp_path: Path) -> None:
    """All requests stall until they time out. They are more than a usual pool of connections allows, and each is still
    sent on time."""
    requests = 300
    with Endpoint(lambda number: Behaviour(stop_after=1, ending="stall")) as endpoint:
        arguments = [*poisson(requests, rate=200), "--timeout", "4", "--output", str(tmp_path / "out")]
        made = report(endpoint.url, *arguments, status=1)
        assert len(endpoint.asked) == requests
    assert made["failed"] == requests and made["errors"][0]["kind"] == "timeout"
    lines = lines_of(tmp_path / "out")
    # The last request was sent as planned, before any other request had ended.
    assert min(line["ended_s"] for line in lines) > max(line["scheduled_s"] for line in lines)
    assert max(line["sent_s"] for line in lines) < min(line["ended_s"] for line in lines)
    assert all(line["sent_s"] >= line["scheduled_s"] for line in lines)


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        (Behaviour(status=500, body={"error": {"message": "out of blocks"}}), "http_500", "out of blocks"),
        (Behaviour(status=404, body={"detail": "Not Found"}), "http_404", "Not Found"),
        (Behaviour(stop_after=2, ending="close"), "cut", ""),
        (Behaviour(stop_after=2, ending="end", usage=False), "cut", "without [DONE], after 2 of 5 tokens"),
        (Behaviour(stop_after=2), "fewer_tokens", "after 2 of 5 tokens"),
        (Behaviour(stop_after=0), "fewer_tokens", "5 were requested"),
        (Behaviour(stop_after=2, ending="nonsense"), "malformed", "JSON"),
        (Behaviour(stop_after=2, ending="error"), "server", "the engine is dead"),
        (Behaviour(stop_after=2, ending="stall"), "timeout", "not complete after 1 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_are_classified_and_count_against_attainment(
    behaviour: Behaviour, kind: str, message: str, tmp_path: Path
) -> None:
    with Endpoint(lambda number: behaviour if number % 2 else Behaviour()) as endpoint:
        made = report(endpoint.url, *poisson(4), "--timeout", "1", "--output", str(tmp_path / "out"))
    assert (made["completed"], made["failed"]) == (2, 2)
    assert [(error["kind"], error["count"]) for error in made["errors"]] == [(kind, 2)]
    assert message in made["errors"][0]["message"]
    held = made["attainment"]
    assert held["joint"] == held["ttft"] == held["tpot"] == 0.5
    assert sorted(line["error"] or "" for line in lines_of(tmp_path / "out")) == ["", "", kind, kind]


def test_an_endpoint_that_disappears_gives_connection_errors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = command(f"http://127.0.0.1:{listener.getsockname()[1]}", *poisson(3, rate=4), "--json")
        with forked.running(*words, env=environment()) as process:
            listener.accept()[0].close()  # the generator checks whether the endpoint listens
            listener.close()
            done = process.finish()
    made = json.loads(done.stdout)
    assert done.returncode == 1 and made["failed"] == 3 and made["completed"] == 0
    assert made["errors"][0]["kind"] == "connection"
    assert "all requests failed, 3 with connection" in made["error"]["message"]


def test_a_generator_without_sockets_reports_itself_as_the_cause() -> None:
    with Endpoint(lambda number: Behaviour(stop_after=1, ending="stall")) as endpoint:
        limited = ["bash", "-c", 'ulimit -n 40 && exec "$@"', "bash", sys.executable, "-m"]
        arguments = command(endpoint.url, *poisson(60, rate=200), "--timeout", "2", "--json")
        done = subprocess.run(
            [*limited, *arguments], env=environment(), capture_output=True, text=True, timeout=60, check=False
        )
        made = json.loads(done.stdout)
        assert done.returncode == 1 and {error["kind"] for error in made["errors"]} == {"timeout", "generator"}
        assert made["requests"] == made["failed"] == 60 > len(endpoint.asked)


def test_a_chunk_of_several_tokens_is_one_gap_and_several_tokens() -> None:
    with Endpoint(lambda number: Behaviour(gap_s=0.5, tokens_a_chunk=4)) as endpoint:
        made = report(endpoint.url, *poisson(2, output_tokens=9))
    assert made["tokens"]["completion"] == 18 and made["tokens"]["chunks"] == 6
    assert 0.25 <= made["itl_s"]["p50"] <= 0.5 + NEAR_S  # if a chunk is read late, the next gap is shorter
    # The eight tokens after the first one come after two gaps.
    assert made["tpot_s"]["p50"] == pytest.approx(made["itl_s"]["mean"] * 2 / 8)


def test_an_empty_last_chunk_is_not_a_token() -> None:
    with Endpoint(lambda number: Behaviour(gap_s=0.02, reason_chunk=True)) as endpoint:
        made = report(endpoint.url, *poisson(2))
        assert made["tokens"]["completion"] == made["tokens"]["chunks"] == 10
        chat = report(endpoint.url, *poisson(2), "--api", "chat")
        assert chat["tokens"]["completion"] == chat["tokens"]["chunks"] == 10


def test_without_a_count_from_the_server_chunks_are_counted() -> None:
    with Endpoint(lambda number: Behaviour(usage=False)) as endpoint:
        made = report(endpoint.url, *poisson(2))
    assert (made["completed"], made["tokens"]["completion"], made["tokens"]["prompt"]) == (2, 10, None)


def test_requests_contain_what_the_options_say() -> None:
    with Endpoint() as endpoint:
        report(
            f"{endpoint.url}/v1/", *poisson(3, input_tokens=700), "--api-key", "secret", "--extra-body", '{"top_k":1}'
        )
        load(endpoint.url, *poisson(1), "--no-extensions", "--api", "chat", OPENAI_API_KEY="other")
        asked = endpoint.asked
    for each in asked[:3]:
        prompt = each.body.pop("prompt")
        assert len(prompt) == 700 and all(isinstance(token, int) for token in prompt)
        assert each.body == {
            "model": "m",
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "top_k": 1,
        }
        assert each.headers["authorization"] == "Bearer secret"
    assert "ignore_eos" not in asked[3].body and asked[3].headers["authorization"] == "Bearer other"
    assert len(asked[3].body["messages"][0]["content"].split()) == 8


def test_a_trace_is_sent_at_its_times_with_its_prefixes(tmp_path: Path) -> None:
    ids = [[1], [1, 2], [3], [1, 2, 4]]
    lengths = [300, 600, 512, 1025]
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 7000 + 1000 * number, "input_length": length, "output_length": number + 1, "hash_ids": each}
        for number, (each, length) in enumerate(zip(ids, lengths, strict=True))
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Endpoint() as endpoint:
        made = report(endpoint.url, "--trace", str(trace), "--speed", "4", "--output", str(tmp_path / "out"))
        asked = endpoint.asked
    assert made["requests"] == made["completed"] == 4
    prompts = [each.body["prompt"] for each in asked]
    assert [len(prompt) for prompt in prompts] == lengths
    assert [each.body["max_tokens"] for each in asked] == [1, 2, 3, 4]
    assert prompts[1][:300] == prompts[0] and prompts[3][:600] == prompts[1]
    assert prompts[2][:16] != prompts[0][:16]
    for number, (line, each) in enumerate(zip(lines_of(tmp_path / "out"), asked, strict=True)):
        assert line["scheduled_s"] == number / 4
        assert number / 4 - 0.05 <= each.at_s - asked[0].at_s <= number / 4 + NEAR_S


def test_ctrl_c_reports_the_results_so_far() -> None:
    answered = 5
    with Endpoint(lambda number: Behaviour(first_s=0.01 if number < answered else 60)) as endpoint:
        for number in (signal.SIGINT, signal.SIGTERM):
            endpoint.asked.clear()
            words = command(endpoint.url, *poisson(1000, rate=20), "--json")
            with forked.running(*words, env=environment()) as process:
                wait_until(lambda: len(endpoint.asked) > answered + 2)
                process.send_signal(number)
                done = process.finish(20)
            made, err = json.loads(done.stdout), done.stderr
            assert done.returncode == 1 and "Traceback" not in err
            assert made["completed"] == answered and made["interrupted"] and made["unfinished"] >= 2
            assert made["error"]["message"] in err and "interrupted" in err


def test_a_sweep_has_a_report_and_new_prompts_for_each_rate(tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    with Endpoint() as endpoint:
        sweep = report(endpoint.url, *poisson(4, rate=40), "--rate", "20", "--chart", str(chart))
        assert len({tuple(each.body["prompt"]) for each in endpoint.asked}) == 8
    assert [each["rate_rps"] for each in sweep["sweep"]] == [20, 40]
    assert sweep["goodput_at_90_rps"] == 40
    assert chart.read_text().startswith("<?xml")


def test_text_output_has_tables_remarks_and_errors(tmp_path: Path) -> None:
    chart = tmp_path / "chart.png"
    with Endpoint(lambda number: Behaviour(status=503, body={}) if number == 3 else Behaviour()) as endpoint:
        done = load(endpoint.url, *poisson(6), "--warmup", "2", "--chart", str(chart))
        assert len(endpoint.asked) == 8
        swept = load(endpoint.url, *poisson(2), "--rate", "30")
    assert "6 requests (Poisson, 50 req/s, 8 to 5 tokens)" in done.stdout and "5 completed, 1 failed" in done.stdout
    for text in ("TTFT and TPOT", "83.3%", "inter-token", "goodput", "http_503"):
        assert text in done.stdout
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "SLO attainment against rate" in swept.stdout and "goodput at 90 % attainment" in swept.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "1", "--input-tokens", "5"], "--output-tokens, --requests not given"),
        ([], "--rate, --input-tokens, --output-tokens, --requests not given"),
        ([*poisson(1), "--rate", "0"], "--rate 0: expected a number of requests per second"),
        ([*poisson(1), "--speed", "2"], "need --trace"),
        ([*poisson(1), "--trace", "t.jsonl"], "leave out --rate"),
        (["--trace", "none.jsonl"], "none.jsonl: No such file"),
        (["--trace", "t.jsonl", "--speed", "0"], "--speed 0"),
        (["--trace", "t.jsonl"], "t.jsonl, line 2: "),
        (["--trace", "t.jsonl", "--requests", "1", "--warmup", "2"], "line 2: "),
        ([*poisson(1), "--extra-body", "[]"], "--extra-body: '[]'"),
        ([*poisson(1), "--chart", "chart.gif"], "expected a file name that ends with .svg or .png"),
        ([*poisson(1), "--chart", "c.svg", "--output", "c.svg"], "--output and --chart are both c.svg"),
        ([*poisson(1), "--slo-tpot", "inf"], "--slo-tpot inf: expected a finite number of seconds"),
        ([*poisson(1), "--timeout", "inf"], "--timeout inf: expected a finite number of seconds"),
        ([*poisson(1), "--extra-body", '{"max_completion_tokens": 9}'], "max_completion_tokens cannot be replaced"),
        ([*poisson(1), "--output", "no/such/folder"], "--output no/such/folder: No such file"),
        ([*poisson(1), "--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_options_are_reported_before_anything_is_sent(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}
    (tmp_path / "t.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line | {"hash_ids": []}) + "\n")
    monkeypatch.chdir(tmp_path)
    with Endpoint() as endpoint:
        done = forked.run(*command(endpoint.url, *arguments, "--json"), env=environment())
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert json.loads(done.stdout)["error"]["kind"] == "usage"
        assert not endpoint.asked


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_an_invalid_address_is_refused(url: str) -> None:
    assert "expected http://HOST:PORT" in load(url, *poisson(1), status=2).stderr


def test_an_address_without_a_listener_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    made = report(f"http://127.0.0.1:{port}", *poisson(1000, rate=1), status=1)
    assert made["error"]["kind"] == "unreachable" and str(port) in made["error"]["message"]


@pytest.mark.parametrize(("missing", "arguments"), [("aiohttp", []), ("matplotlib", ["--chart", "chart.svg"])])
def test_without_the_extra_it_says_what_to_install(missing: str, arguments: list[str], tmp_path: Path) -> None:
    """The test's import finder hides a package, as if it were not installed."""
    hide = f"""
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""
    (tmp_path / "sitecustomize.py").write_text(hide)
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = load("http://127.0.0.1:1", *poisson(1), *arguments, status=1, PYTHONPATH=path)
    assert missing in done.stderr and 'pip install "llm-kvstore[serving]"' in done.stderr


def test_a_usage_error_leaves_files_of_earlier_runs_unchanged(tmp_path: Path) -> None:
    output, trace = tmp_path / "results.jsonl", tmp_path / "trace.jsonl"
    output.write_text("results\n")
    trace.write_text("trace\n")
    with Endpoint(lambda number: Behaviour()) as endpoint:
        assert "--requests" in load(endpoint.url, "--rate", "4", "--output", str(output), status=2).stderr
        said = load(endpoint.url, "--trace", str(trace), "--output", str(trace), status=2).stderr
    assert "this is the file of --trace" in said
    assert output.read_text() == "results\n" and trace.read_text() == "trace\n"
