"""`kvstore plan`: its commands, their results, and its errors for wrong options. The tests with engines are in
tests/engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore_serving.proxy.pools_file import read_pools
from tests.support import forked
from tests.support.endpoint import Behaviour, Endpoint
from tests.support.harness import START_S, environment, interruptible, wait_until
from tests.support.profiles import SHIPPED, on_one_gpu

SEARCH = ["--slo-ttft", "0.3", "--slo-tpot", "0.1", "--percentile", "90"]
ENGINE = ["--profile", SHIPPED, "--nodes", "1", "--gpus-per-node", "2"]
NODE = ENGINE[2:]
LOAD = ["--rate", "3", "--input-tokens", "512", "--output-tokens", "6"]
QUICK = ["--seeds", "1", "--no-sensitivity"]


def plan(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = forked.run("kvstore_cli", "plan", *arguments, env=environment(COLUMNS="100"), timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def document(*arguments: str, status: int = 0) -> dict[str, Any]:
    return dict(json.loads(plan(*arguments, "--json", status=status).stdout))


# ---- queue -------------------------------------------------------------------------------------------------------


def test_queue_prints_the_closed_forms() -> None:
    found = document("queue", "--service-s", "0.2", "--rate", "2.5")
    assert found["utilisation"] == pytest.approx(0.5)
    assert found["wait_s"]["mean"] == pytest.approx(0.1)
    assert found["ttft_s"]["mean"] == pytest.approx(0.3)
    assert found["wait_s"]["mean"] < found["wait_s"]["p90"] < found["wait_s"]["p99"]
    inter = document("queue", "--service-s", "0.2", "--rate", "2.5", "--inter", "2")
    assert inter["ttft_s"]["mean"] == pytest.approx(0.2 + 2.5 * 0.04 / (4 * 1.5))
    intra = document("queue", "--service-s", "0.2", "--rate", "2.5", "--intra", "2", "--speedup", "1.6")
    assert intra["ttft_s"]["mean"] == pytest.approx(0.125 + 2.5 * 0.04 / (2 * 1.6 * 1.1))
    assert "time to the first token" in plan("queue", "--service-s", "0.2", "--rate", "2.5").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--service-s", "0.2", "--rate", "5"], "expected less than 5 requests/s"),
        (["--service-s", "0", "--rate", "5"], "--service-s 0: expected a number of seconds above 0"),
        (["--service-s", "0.2", "--rate", "1", "--intra", "2"], "--intra N and --speedup K must be given together"),
        (["--service-s", "0.2", "--rate", "1", "--intra", "2", "--speedup", "3"], "expected 1 to 2"),
        (["--service-s", "0.2", "--rate", "1", "--intra", "2", "--speedup", "2", "--inter", "2"], "one of them"),
    ],
)
def test_an_unstable_queue_is_a_usage_error(arguments: list[str], message: str) -> None:
    assert message in document("queue", *arguments, status=2)["error"]["message"]


# ---- pipeline ----------------------------------------------------------------------------------------------------

A100 = ["--link-bytes-per-s", "272e9", "--memory-bytes-per-s", "1.55e12"]


def test_pipeline_computes_the_share_that_may_leave() -> None:
    """Computes with the bandwidths that a reply to the proposal measured, without the formula's second term. The share
    is 18 %; the reply computed 30 %."""
    found = document("pipeline", "--kv-bytes", "40e9", *A100, "--other-s", "0", "--overhead-s", "0")
    assert found["alpha"] == pytest.approx(272 / 1550)
    assert found["capacity_gain"] == pytest.approx(1 / (1 - 272 / 1550))
    assert found["lender_bytes"] == pytest.approx(40e9 * 272 / 1550)
    more = document("pipeline", "--kv-bytes", "40e9", *A100, "--other-s", "0.017", "--overhead-s", "0.001")
    assert more["alpha"] == pytest.approx(272 / 1550 + 272e9 * 0.016 / 40e9)
    everything = document("pipeline", "--kv-bytes", "1e9", *A100, "--other-s", "1", "--overhead-s", "0")
    assert everything["alpha"] == 1.0 and everything["capacity_gain"] is None
    nothing = document("pipeline", "--kv-bytes", "1e9", *A100, "--other-s", "0", "--overhead-s", "1")
    assert (nothing["alpha"], nothing["capacity_gain"], nothing["lender_bytes"]) == (0.0, 1.0, 0.0)
    buffers = document("pipeline", "--kv-bytes", "40e9", *A100, "--other-s", "0", "--overhead-s", "0", "--layers", "40")
    assert buffers["capacity_gain"] < found["capacity_gain"]


def test_pipeline_computes_the_kv_that_fits_a_lending_engine() -> None:
    """The more KV there is, the smaller is the share that may be lent. The result is the amount of KV whose remaining
    share exactly fills the engine's memory."""
    hardware = [*A100, "--other-s", "0.017", "--overhead-s", "0"]
    found = document("pipeline", "--resident-bytes", "40e9", *hardware)
    assert found["resident_bytes"] == pytest.approx(40e9)
    assert found["alpha"] == pytest.approx(0.261, abs=0.001)
    assert found["capacity_gain"] == pytest.approx(1.353, abs=0.001)
    lent = found["lender_bytes"] / found["alpha"]
    again = document("pipeline", "--kv-bytes", str(lent), *hardware)
    assert again["alpha"] == pytest.approx(found["alpha"])
    buffers = document("pipeline", "--resident-bytes", "40e9", *hardware, "--layers", "40")
    assert buffers["resident_bytes"] == pytest.approx(40e9)
    assert 1 < buffers["capacity_gain"] < found["capacity_gain"]
    nothing = document("pipeline", "--resident-bytes", "40e9", *A100, "--other-s", "0", "--overhead-s", "9")
    assert (nothing["alpha"], nothing["capacity_gain"]) == (0.0, 1.0)
    fast = ["--link-bytes-per-s", "2e12", "--memory-bytes-per-s", "1e12", "--other-s", "0", "--overhead-s", "0"]
    message = document("pipeline", "--resident-bytes", "40e9", *fast, status=2)["error"]["message"]
    assert "any amount of KV" in message
    both = document("pipeline", "--resident-bytes", "1", "--kv-bytes", "1", *hardware, status=2)
    assert "either --kv-bytes or --resident-bytes" in both["error"]["message"]


def test_pipeline_includes_the_computing_time_lost_to_copies() -> None:
    """Copies make the step longer, so the link moves more bytes during a step. The plan stays consistent: the copies
    take exactly the time that the step allows."""
    hardware = [*A100, "--other-s", "0.017", "--overhead-s", "0.001"]
    without = document("pipeline", "--kv-bytes", "40e9", *hardware)
    assert without["step_s"] == without["step_alone_s"] == pytest.approx(0.017 + 40 / 1550)
    found = document("pipeline", "--kv-bytes", "40e9", *hardware, "--lost-share", "0.2")
    assert found["step_alone_s"] == without["step_s"]
    copies_s = found["lender_bytes"] / 272e9
    assert found["step_s"] == pytest.approx(found["step_alone_s"] + 0.2 * copies_s)
    assert copies_s == pytest.approx(found["step_s"] - 0.001)
    assert found["alpha"] == pytest.approx(without["alpha"] / 0.8)
    assert found["knee_bytes_per_s"] == pytest.approx(without["knee_bytes_per_s"] * 0.8)
    fits = document("pipeline", "--resident-bytes", "40e9", *hardware, "--lost-share", "0.2")
    assert fits["resident_bytes"] == pytest.approx(40e9)
    assert "longer than without" in plan("pipeline", "--kv-bytes", "40e9", *hardware, "--lost-share", "0.2").stdout


def test_pipeline_refuses_impossible_hardware() -> None:
    wrong = ["--kv-bytes", "0", *A100, "--other-s", "0", "--overhead-s", "0"]
    assert "'--kv-bytes': '0': expected at least one byte" in document("pipeline", *wrong, status=2)["error"]["message"]
    wrong = ["--kv-bytes", "1", *A100, "--other-s", "-1", "--overhead-s", "0"]
    assert "expected a number of seconds, 0 or more" in document("pipeline", *wrong, status=2)["error"]["message"]
    wrong = ["--kv-bytes", "1", *A100, "--other-s", "0", "--overhead-s", "0", "--lost-share", "1"]
    assert "--lost-share 1: expected a share" in document("pipeline", *wrong, status=2)["error"]["message"]


# ---- search ------------------------------------------------------------------------------------------------------


def test_search_finds_a_placement_and_writes_the_proxys_options(tmp_path: Path) -> None:
    pools, chart = tmp_path / "pools.toml", tmp_path / "plan.svg"
    files = ["--pools", str(pools), "--chart", str(chart), "--prefill-url", "http://p-{}:80"]
    given = ["--profile", on_one_gpu(tmp_path), *NODE[:-1], "3", *LOAD, *SEARCH]
    found = document("search", *given, "--seeds", "2", *files)
    for phase in ("prefill", "decode"):
        assert {"tp", "pp", "instances"} <= found["placement"][phase].keys()
    assert found["enough"] and found["goodput_rps"] >= 3 and found["gpus"] <= 3
    low, high = found["goodput_rps_per_gpu"]["ci95"]
    assert low <= found["goodput_rps_per_gpu"]["value"] <= high
    assert found["store"].keys() >= {"read_bytes_per_s", "write_bytes_per_s", "capacity_bytes", "nodes"}
    assert found["store"]["write_bytes_per_s"] == pytest.approx(3 * 512 * 819_200)
    assert found["binding"] and found["colocated"]["placement"]["instances"] >= 1
    assert found["sensitivity"]
    theory = found["closed_form"]
    assert 0 < theory["utilisation"] < 1
    assert theory["ttft_s"]["p90"] >= theory["ttft_s"]["mean"] > theory["wait_s"]["mean"] > 0
    engines = read_pools(pools)
    roles = [engine.roles for engine in engines]
    placed = found["placement"]
    assert roles.count(("prefill",)) == placed["prefill"]["instances"]
    assert roles.count(("decode",)) == placed["decode"]["instances"]
    assert engines[0].url == "http://p-0:80" and engines[0].model == "facebook/opt-13b"
    assert chart.read_text().startswith("<?xml")


def test_search_prints_the_same_as_text() -> None:
    said = plan("search", *ENGINE, *LOAD, *SEARCH, *QUICK, "--outage", "30").stdout
    assert "price" not in said, "nothing was said of prices"
    for words in (
        "Placement",
        "A100-80G",
        "Where the engines are",
        "prefill",
        "decode",
        "instead, colocated",
        "the first limit as the rate grows",
        "(M/D/1); in the simulation, prompts wait",
        "the store must deliver",
        "One engine fails, at 3 req/s",
    ):
        assert words in said
    away = [line.split() for line in said.partition("One engine fails")[2].splitlines()[2:]]
    missed = {row[0]: (float(row[2]), int(row[3])) for row in away if len(row) > 3}
    assert missed["prefill"][0] == 30 and missed["prefill"][1] > 3 * 30 / 2, "there is no other one"


def test_search_prints_prices_and_nodes_of_several_kinds(tmp_path: Path) -> None:
    kinds = [word for name in (SHIPPED, f"{SHIPPED}-vllm") for word in ("--profile", on_one_gpu(tmp_path, name))]
    nodes = ["--nodes", "1", "--nodes", "2", "--gpus-per-node", "2", "--gpus-per-node", "1"]
    said = plan("search", *kinds, *nodes, "--price", "4", "--price", "2.5", *LOAD, *SEARCH, *QUICK).stdout
    row = next(line.split() for line in said.splitlines() if line.lstrip().startswith("P/D "))
    goodput, gpus, price, per_price = float(row[1]), int(row[2]), float(row[-2]), float(row[-1])
    assert gpus * 2.5 <= price <= gpus * 4
    assert per_price == pytest.approx(goodput / price, rel=0.02)
    seats = said.partition("Where the engines are")[2]
    assert "prefill 0" in seats and "decode 0" in seats


def trace(path: Path) -> Path:
    lines = [
        {"timestamp": 400 * number, "input_length": 1024, "output_length": 4, "hash_ids": [number % 5, 1000 + number]}
        for number in range(300)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_search_uses_a_traces_rate_and_hits(tmp_path: Path) -> None:
    file = trace(tmp_path / "trace.jsonl")
    given = ["--profile", on_one_gpu(tmp_path), *NODE, "--trace", str(file), *SEARCH]
    found = document("search", *given, *QUICK)
    assert found["rate_rps"] == pytest.approx(2.5)
    assert found["hit_rate"] == pytest.approx(0.5, abs=0.05)
    assert found["store"]["capacity_bytes"] > 0
    short = document("search", *given, "--requests", "150", "--no-sensitivity")
    assert short["goodput_rps_per_gpu"]["ci95"] is None, "one part of a trace has no interval"
    faster = document("search", *given, "--speed", "2", "--no-hits", *QUICK)
    assert faster["rate_rps"] == pytest.approx(5.0) and faster["hit_rate"] == 0


def test_search_follows_the_hit_curve(tmp_path: Path) -> None:
    file = tmp_path / "eviction.json"
    parameters = {"group": "trace", "blocks": [100, 200, 400], "hit_rate": {"default": [0.1, 0.3, 0.5]}}
    file.write_text(json.dumps({"cases": [{"parameters": parameters}]}))
    kept = 300 * 512 * 819_200
    options = ["--hit-curve", str(file), "--store-keeps", str(kept), "--seeds", "1"]
    said = plan("search", "--profile", on_one_gpu(tmp_path), *NODE, *LOAD, *SEARCH, *options).stdout
    rows = said.partition("by what the store keeps")[2].splitlines()
    assert [row.split()[-3] for row in rows if "GiB" in row] == ["10%", "30%", "40%", "50%"]
    assert sum("as assumed" in row and row.endswith("100%") for row in map(str.rstrip, rows)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ENGINE, *SEARCH, "--rate", "1"], "expected --input-tokens, --output-tokens"),
        ([*ENGINE, *SEARCH, *LOAD, "--trace", "x"], "--trace has its own rate"),
        ([*ENGINE, *SEARCH, "--trace", "no-such-file"], "no-such-file: No such file or directory"),
        ([*ENGINE, *SEARCH, *LOAD, "--speed", "2"], "need --trace"),
        ([*ENGINE, *LOAD, *SEARCH, "--percentile", "100"], "expected 1 to 99.9, for example 90"),
        ([*ENGINE, *LOAD, *SEARCH, "--percentile", "0.9"], "--percentile 0.9: expected 1 to 99.9, for example 90"),
        ([*ENGINE, *LOAD, *SEARCH, "--profile", "opt-66b-a100-80g"], "expected it once for each of 2 --profile"),
        ([*ENGINE, *LOAD, *SEARCH, "--via", "pigeon"], "expected store or direct"),
        ([*ENGINE, *LOAD, *SEARCH, "--price", "0"], "expected a price above 0"),
        ([*ENGINE, *LOAD, *SEARCH, "--input-cv", "nan"], "--input-cv"),
        ([*ENGINE, *LOAD, *SEARCH, "--arrival-cv", "1e200"], "at most 20"),
        ([*ENGINE, *LOAD, *SEARCH, "--decode-url", "http://d:80"], "in place of the engine's number"),
        ([*ENGINE, *LOAD, *SEARCH, "--prefill-url", "http://{host}:80"], "in place of the engine's number"),
        ([*ENGINE, *LOAD, *SEARCH, "--prefill-url", "http://p-{}:80/"], "in place of the engine's number"),
        (
            [*ENGINE, *LOAD, *SEARCH, "--prefill-url", "http://g-{}", "--decode-url", "http://g-{}"],
            "would have the same URL",
        ),
        ([*ENGINE, *LOAD, *SEARCH, "--chart", "x.gif"], "expected a file name that ends with"),
        ([*ENGINE, *LOAD, *SEARCH, "--store-memory", "lots"], "is not a size"),
        ([*ENGINE, *LOAD, *SEARCH, "--hit-curve", "x"], "expected --store-keeps SIZE, too"),
        (["--profile", "nobody", *ENGINE[2:], *LOAD, *SEARCH], "or one of opt-13b-a100-80g"),
    ],
)
def test_search_reports_what_is_wrong_with_an_option(arguments: list[str], message: str) -> None:
    assert message in document("search", *arguments, status=2)["error"]["message"]


def test_search_names_an_slo_that_no_placement_meets() -> None:
    strict = ["--slo-ttft", "0.001", "--slo-tpot", "0.1"]
    error = document("search", *ENGINE, *LOAD, *strict, *QUICK, status=1)["error"]
    assert error["kind"] == "failed" and "TTFT of 0.001 s" in error["message"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("after_s", [0, 0.01, 0.03])  # while the first simulating process, or another one, starts
def test_a_signal_ends_a_search_and_its_processes_at_once(sent: signal.Signals, after_s: float) -> None:
    command = [sys.executable, "-m", "kvstore_cli", "plan", "search", *ENGINE[:2], "--nodes", "2"]
    command += ["--gpus-per-node", "8", *LOAD[2:], *SEARCH, "--json"]
    # The output ends only when the last process that can write to it, a simulating one too, has ended.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as searching:

        def children(pid: str) -> list[str]:
            return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

        started = str(searching.pid)
        wait_until(lambda: any(map(children, children(started))), START_S, "processes simulate")
        with pytest.raises(subprocess.TimeoutExpired):
            searching.wait(after_s)
        searching.send_signal(sent)
        out, err = searching.communicate(timeout=START_S)
    assert (searching.returncode, out) == (130 if sent == signal.SIGTERM else -sent, "")
    assert sent == signal.SIGKILL or ("Traceback" not in err and "resource_tracker" not in err), err


# ---- roles and watch ---------------------------------------------------------------------------------------------

FOUR = """
[[engines]]
url = "http://a:1"
roles = ["prefill", "decode"]
model = "m \\"quoted\\""
[[engines]]
url = "http://b:1"
roles = ["decode"]
[[engines]]
url = "http://c:1"
roles = ["prefill"]
weights = "v2"
tensor_parallel_size = 2
pipeline_parallel_size = 3
[[engines]]
url = "http://d:1"
roles = ["decode"]
"""


def test_role_changes_affect_as_few_engines_as_possible(tmp_path: Path) -> None:
    pools = tmp_path / "pools.toml"
    pools.write_text(FOUR)
    before = {engine.url: engine for engine in read_pools(pools)}
    found = document("roles", str(pools), "--prefill", "2", "--decode", "2")
    assert [each[0] for each in found["changed"]] == ["http://a:1"], "it did both; the others keep their roles"
    after = {engine.url: engine for engine in read_pools(pools)}
    assert {url: engine.roles for url, engine in after.items()} == {
        "http://a:1": ("prefill",),
        "http://b:1": ("decode",),
        "http://c:1": ("prefill",),
        "http://d:1": ("decode",),
    }
    for url, engine in after.items():
        assert msgspec.structs.replace(engine, roles=before[url].roles) == before[url], "nothing else changes"
    assert (after["http://c:1"].tensor_parallel_size, after["http://c:1"].pipeline_parallel_size) == (2, 3)
    stamp = pools.stat().st_mtime_ns
    assert document("roles", str(pools), "--prefill", "2", "--decode", "2")["changed"] == []
    assert pools.stat().st_mtime_ns == stamp, "nothing to change, nothing written"
    message = document("roles", str(pools), "--prefill", "3", "--decode", "2", status=2)["error"]["message"]
    assert "names 4 engines, but --prefill 3 and --decode 2 are 5 together" in message


def test_roles_name_a_missing_file_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "nix")
    message = document("roles", missing, "--prefill", "1", "--decode", "1", status=2)["error"]["message"]
    assert message.startswith(f"{missing}: No such file") and message.count(missing) == 1


class _Proxy(BaseHTTPRequestHandler):
    """The metrics page of a proxy that gets four requests a second."""

    looked_at = requests = prompt_tokens = 0.0
    decoders = "abc"
    tokens = 2000  # of each prompt
    answers = 10  # tokens of each

    def do_GET(self) -> None:
        now, its = time.monotonic(), type(self)
        came = 4 * (now - its.looked_at) if its.looked_at else 0.0
        its.looked_at = now
        its.requests += came
        its.prompt_tokens += came * its.tokens
        lines = [
            f'kvstore_proxy_requests_total{{endpoint="/v1/completions",decision="split",outcome="ok"}} {its.requests}',
            # The next two kinds of requests generate nothing, so they do not count. Engine b has failed; it is still
            # listed.
            f'kvstore_proxy_requests_total{{endpoint="/tokenize",decision="passed",outcome="ok"}} {its.requests * 2}',
            f'kvstore_proxy_requests_total{{endpoint="/v1/completions",decision="",outcome="rejected"}} {its.requests}',
            f"kvstore_proxy_prompt_tokens_total {its.prompt_tokens}",
            f"kvstore_proxy_cached_tokens_total {its.prompt_tokens / 4}",
            f"kvstore_proxy_output_tokens_total {its.requests * its.answers}",
            *(f'kvstore_proxy_engine_up{{engine="http://{n}",role="decode"}} {int(n != "b")}' for n in self.decoders),
            'kvstore_proxy_engine_up{engine="http://d",role="prefill"} 1',
        ]
        body = ("\n".join(lines) + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(lambda number: Behaviour()) as endpoint:
        yield endpoint


@pytest.fixture
def proxy() -> Iterator[str]:
    _Proxy.looked_at = _Proxy.requests = _Proxy.prompt_tokens = 0.0
    _Proxy.decoders, _Proxy.tokens, _Proxy.answers = "abc", 2000, 10
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_watch_proposes_again_after_lost_engines_or_load_drift(proxy: str) -> None:
    command = [sys.executable, "-m", "kvstore_cli", "plan", "watch", "--proxy", proxy, "--json", "--interval", "1"]
    command += ["--profile", "opt-13b-a100-80g", "--slo-ttft", "0.6", "--slo-tpot", "0.1", "--drift", "0.9"]
    _Proxy.answers = 2  # quick to simulate
    with interruptible(command, stdout=subprocess.PIPE, text=True, env=environment()) as watch:
        try:
            assert watch.stdout is not None
            looks = map(json.loads, watch.stdout)
            first = next(looks)
            assert (first["now"]["prefill"], first["now"]["decode"], first["drift"]) == (1, 3, [])
            assert next(looks)["now"] is None, "nothing has changed: nothing is simulated"
            _Proxy.decoders = "ab"
            fewer = next(look for look in looks if look["drift"])
            assert fewer["drift"] == ["4 -> 3 engines"]
            assert (fewer["now"]["prefill"], fewer["now"]["decode"]) == (1, 2)
            _Proxy.tokens = 4000
            longer = next(look for look in looks if look["drift"])
            assert [each.partition(" -> ")[2].partition(" ")[2] for each in longer["drift"]] == ["tokens a prompt"]
            assert longer["best"]["prefill"] + longer["best"]["decode"] == 3
            watch.send_signal(signal.SIGINT)
            assert watch.wait(30) == 0, "Ctrl-C is how it ends"
        finally:
            watch.kill()


def test_watch_names_what_it_cannot_watch(endpoint: Endpoint) -> None:
    options = ["--profile", "opt-13b-a100-80g", "--slo-ttft", "0.6", "--slo-tpot", "0.1", "--once"]
    nobody = document("watch", "--proxy", "http://127.0.0.1:9", *options, status=1)
    assert nobody["error"]["kind"] == "unreachable"
    shape = document("watch", "--proxy", endpoint.url, "--shape", "7,1", *options, status=2)
    assert "is not in the profile" in shape["error"]["message"]


def test_search_without_its_extra_says_what_to_install() -> None:
    code = "import sys; sys.modules['simpy'] = None; from kvstore_cli.main import run; sys.exit(run(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "search", *ENGINE, *LOAD, *SEARCH],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and 'pip install "llm-kvstore[serving]"' in done.stderr
