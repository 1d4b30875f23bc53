"""`kvstore plan verify` with an endpoint whose times are known. The tests with real engines are in tests/engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_plan import document, plan
from tests.support.endpoint import Endpoint
from tests.support.harness import START_S, Server, environment, interruptible, wait_until
from tests.support.proxies import ProxyProcess, StandInEngine
from tests.support.stand_in_engine import MODEL

RATES, FAST = (
    [word for rate in rates for word in ("--rate", str(rate))] for rates in (range(10, 60, 10), range(40, 90, 10))
)
SLO = ["--slo-ttft", "1", "--slo-tpot", "0.5"]
LOAD = ["--input-tokens", "16", "--output-tokens", "5", "--requests", "8", "--warmup", "2"]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """The profile of an endpoint that serves any number of requests in the same time, so there is no cost per
    request."""
    degree = {
        "tp": 1,
        "prefill": {"fixed_s": 0.05, "per_token_s": 1e-9, "per_token_squared_s": 0.0},
        "decode": [{"fixed_s": 0.02, "per_context_token_s": 0.0, "per_request_s": 0.0}],
        "kv_tokens": {"1": 100_000},
    }
    made = {"name": "p", "model": "m", "gpu": "none", "source": "test", "measured": False, "kv_bytes_per_token": 1}
    file = tmp_path / "p.json"
    file.write_text(json.dumps(made | {"degrees": [degree], "stage_s": 0.0}))
    return str(file)


def test_verify_compares_prediction_and_measurement(paced_endpoint: Endpoint, profile: str) -> None:
    at = ["--profile", profile, "--url", paced_endpoint.url, "--model", "m"]
    found = document("verify", *at, *RATES, *LOAD, *SLO)
    assert [each["rate_rps"] for each in found["compared"]] == [10.0, 20.0, 30.0, 40.0, 50.0]
    for each in found["compared"]:
        assert each["predicted"] == each["measured"] == 1.0 and each["error"] == 0.0
        for ends in (each["predicted_ci95"], each["measured_ci95"]):
            assert ends == [pytest.approx(0.676, abs=0.001), 1.0], "eight of eight, by Wilson"
        # If the client runs late, it receives several tokens together.
        assert each["measured_ttft_s"] > 0.05 and each["measured_tpot_s"] > 0.01
        assert each["predicted_ttft_s"] == pytest.approx(0.05, abs=0.03)
    missing = document("verify", *at, *RATES, *LOAD, *SLO, "--prefill", "4,1,1", "--decode", "1,1,1", status=2)
    assert "tp 4 with pp 1 is not in the profile, which has 1,1" in missing["error"]["message"]
    at[3] = "http://127.0.0.1:9"
    assert document("verify", *at, *RATES, *LOAD, *SLO, status=1)["error"]["kind"] == "unreachable"


def test_verify_takes_engines_load_slos_and_rates_from_a_plan(
    paced_endpoint: Endpoint, profile: str, tmp_path: Path
) -> None:
    what = ["--input-tokens", "600", "--output-tokens", "4", "--input-cv", "0.5", "--hit-rate", "0.5"]
    nodes = ["--nodes", "1", "--gpus-per-node", "2"]
    # With loose SLOs or large batches, simulations take long.
    short = ["--slo-ttft", "0.3", "--slo-tpot", "0.1", "--max-batch", "8", "--seeds", "1", "--no-sensitivity"]
    searched = plan("search", "--profile", profile, *nodes, *what, *short, "--json")
    file = tmp_path / "plan.json"
    file.write_text(searched.stdout)
    planned = json.loads(searched.stdout)
    Path(profile).unlink()  # the plan contains the data it was made from
    at = ["--plan", str(file), "--url", paced_endpoint.url, "--model", "m"]
    found = document("verify", *at, "--requests", "10", "--warmup", "3")
    assert [each["rate_rps"] for each in found["compared"]] == [each["rate_rps"] for each in planned["curve"]]
    assert found["slo"] == planned["slo"] and found["workload"] == planned["workload"]
    asked = [len(each.body["prompt"]) for each in paced_endpoint.asked]
    assert len(asked) == 13 * len(planned["curve"]) and len(set(asked)) > 5, "lengths vary, as the plan's do"
    assert {each.body["max_tokens"] for each in paced_endpoint.asked} == {4}
    assert any(each["predicted_hit_rate"] > 0.2 for each in found["compared"]), "the simulator finds what prompts share"
    said = plan("verify", *at, *RATES, "--requests", "8", "--warmup", "2").stdout
    assert "95 %" in said and "68% … 100%" in said and "mean error" in said
    wrong = document("verify", *at, *SLO, *LOAD[:2], status=2)["error"]["message"]
    assert "leave out --slo-ttft, --slo-tpot, --input-tokens" in wrong


def test_verify_sends_a_trace_at_each_rate(paced_endpoint: Endpoint, profile: str, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * number, "input_length": 1024, "output_length": 3, "hash_ids": [7, 100 + number]}
        for number in range(20)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    at = ["--profile", profile, "--url", paced_endpoint.url, "--model", "m", *SLO]
    found = document("verify", *at, "--trace", str(file), *RATES, "--warmup", "2")
    assert found["workload"] == "trace trace.jsonl"
    assert len(paced_endpoint.asked) == 20 * 5
    heads = [tuple(each.body["prompt"][:512]) for each in paced_endpoint.asked]
    assert len(set(heads)) == 5, "prompts share what the trace says, and each rate has others"
    assert {each["predicted_hit_rate"] for each in found["compared"]} == {0.5}
    times = [each.at_s for each in paced_endpoint.asked]
    assert times[19] - times[0] > 19 / 10 * 0.6, "ten a second, though the trace has one"
    alone = document("verify", *at, "--trace", str(file), *FAST, "--warmup", "2", "--no-hits")
    assert {each["predicted_hit_rate"] for each in alone["compared"]} == {0.0}, "an engine without a store and a cache"
    both = document("verify", *at, "--trace", str(file), *LOAD[:2], *RATES, status=2)
    assert "--trace has its own lengths" in both["error"]["message"]
    none = document("verify", *at, "--trace", str(file), *RATES, "--warmup", "20", status=2)
    assert "--warmup 20 leaves none to count" in none["error"]["message"]


def test_verify_names_what_is_missing(profile: str, tmp_path: Path) -> None:
    at = ["--url", "http://127.0.0.1:9", "--model", "m"]
    few = document("verify", *at, "--profile", profile, *LOAD, *SLO, *RATES[:8], *RATES[:2], status=2)
    assert "--rate: 4 different rates; expected 5 or more" in few["error"]["message"]
    nothing = document("verify", *at, *RATES, status=2)["error"]["message"]
    assert "--profile, --slo-ttft, --slo-tpot not given: give --plan" in nothing
    no_load = document("verify", *at, "--profile", profile, *SLO, *RATES, status=2)["error"]["message"]
    assert "expected a load: --input-tokens with --output-tokens, --trace" in no_load
    other = document("verify", *at, "--plan", profile, status=2)["error"]["message"]
    assert "expected what this version's `kvstore plan search --json` prints" in other
    gone = document("verify", *at, "--plan", str(tmp_path / "no.json"), status=2)["error"]["message"]
    assert "no.json: No such file or directory; expected what" in gone


def test_after_ctrl_c_the_complete_rates_are_compared(paced_endpoint: Endpoint, profile: str) -> None:
    at = ["--profile", profile, "--url", paced_endpoint.url, "--model", "m", "--json"]
    command = [sys.executable, "-m", "kvstore_cli", "plan", "verify", *at, *RATES, *LOAD, *SLO]
    with interruptible(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as verifying:
        wait_until(lambda: len(paced_endpoint.asked) > 10, START_S, "the second rate is sent")
        verifying.send_signal(signal.SIGINT)
        out, err = verifying.communicate(timeout=START_S)
    assert verifying.returncode == 1 and "Traceback" not in err, err
    found = json.loads(out)
    assert 1 <= len(found["compared"]) < 5
    assert found["error"]["message"] == f"interrupted: {len(found['compared'])} of 5 rates are compared"


def test_verify_says_which_requests_the_proxy_split(
    paced_endpoint: Endpoint, tcp_server: Server, profile: str, tmp_path: Path
) -> None:
    engines = [StandInEngine(tmp_path / f"{name}.log") for name in "pd"]
    try:
        roles = [f"--prefill={engines[0].url}", f"--decode={engines[1].url}"]
        options = [f"--store={tcp_server.endpoint}", *roles, "--policy=colocate", "--check-seconds=0.1"]
        apart = ["--prefill", "1,1,1", "--decode", "1,1,1"]
        with ProxyProcess(tmp_path / "proxy", *options) as proxy:
            at = ["--profile", profile, "--url", proxy.url, "--model", MODEL]
            said = " ".join(plan("verify", *at, *FAST, *LOAD, *SLO, *apart).stdout.split())
            assert "the proxy split 0% of the requests, and one engine served each of the others" in said
            found = document("verify", *at, *FAST, *LOAD, *SLO, *apart)
            assert {each["split_share"] for each in found["compared"]} == {0.0}
    finally:
        for engine in engines:
            engine.kill()
    direct = ["--profile", profile, "--url", paced_endpoint.url, "--model", "m"]
    said = " ".join(plan("verify", *direct, *FAST, *LOAD, *SLO, *apart).stdout.split())
    assert "the endpoint is not a kvstore proxy" in said
