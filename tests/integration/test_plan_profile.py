"""`kvstore plan profile` with an endpoint whose times are known, and with a store. The tests with real engines are in
tests/engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient, Namespace
from kvstore_serving.planning.transfers import measure_transfers
from tests.integration.test_plan import QUICK, document, plan
from tests.support.endpoint import Behaviour, Endpoint
from tests.support.harness import Server, blocks_of, make_namespace, wait_until
from tests.support.logins import BLOCK_BYTES, KEYS, Guarded, connect_when_known

NODE = ["--nodes", "1", "--gpus-per-node", "2", "--max-batch", "8"]  # with larger batches, simulations take longer


def test_profile_measures_fits_and_writes(paced_endpoint: Endpoint, tmp_path: Path) -> None:
    output = tmp_path / "engine.json"
    what = ["--model", "m", "--kv-bytes-per-token", "1000", "--kv-tokens", "5000", "--output", str(output)]
    sweep = ["--lengths", "16,64", "--prefill-batches", "1,2", "--decode-batches", "1,2", "--rounds", "1"]
    found = document("profile", "--url", paced_endpoint.url, *what, *sweep, "--decode-tokens", "8")
    [degree] = found["degrees"]
    assert degree["prefill"]["fixed_s"] == pytest.approx(0.05, abs=0.03)
    [decode] = degree["decode"]
    assert decode["fixed_s"] + decode["per_request_s"] == pytest.approx(0.02, abs=0.01)
    assert found["measured"] and degree["kv_tokens"] == {"1": 5000}
    assert [(each["requests"], each["tokens"]) for each in degree["prefill"]["residuals"]] == [
        (1, 16), (2, 16), (1, 64), (2, 64),
    ]  # fmt: skip
    for fit in (degree["prefill"], decode):
        errors = [abs(each["fitted_s"] / each["seconds"] - 1) for each in fit["residuals"]]
        assert fit["error"] == pytest.approx(sum(errors) / 4) and fit["worst_error"] == pytest.approx(max(errors))
    assert json.loads(output.read_text()) == found, "residuals are in the file, too"
    small = ["--rate", "1", "--input-tokens", "20", "--output-tokens", "5", "--slo-ttft", "1", "--slo-tpot", "0.2"]
    planned = document("search", "--profile", str(output), *NODE, *small, *QUICK)
    assert planned["enough"]


def test_a_profile_that_fails_leaves_no_file_and_an_old_one_as_it_was(tmp_path: Path) -> None:
    output = tmp_path / "engine.json"
    what = ["--url", "http://127.0.0.1:1", "--model", "m", "--kv-bytes-per-token", "1000", "--output", str(output)]
    document("profile", *what, status=1)
    assert list(tmp_path.iterdir()) == []
    output.write_text("old")
    document("profile", *what, status=1)
    assert output.read_text() == "old"
    missing = document("profile", *what[:-1], str(tmp_path / "nix" / "engine.json"), status=2)["error"]["message"]
    assert "engine.json: No such file" in missing, "known before anything is measured"


def test_profile_measures_interference_between_engines(tmp_path: Path) -> None:
    """One of two endpoints takes three times as long while the other one has requests, like engines on one host."""
    output = tmp_path / "engine.json"
    what = ["--model", "m", "--kv-bytes-per-token", "1000", "--kv-tokens", "5000", "--output", str(output)]
    sweep = ["--lengths", "16,64", "--prefill-batches", "1,2", "--decode-batches", "1,2", "--rounds", "1"]
    endpoint: Endpoint

    def busy(number: int) -> Behaviour:
        """Answer the first request at once, and later ones after the measured endpoint has received and answered a
        request."""
        began_s = time.monotonic()

        def held() -> bool:
            idle_s = time.monotonic() - max(began_s, endpoint.idle_since_s)
            asked = endpoint.asked[-1].at_s > began_s
            return number > 0 and (endpoint.running > 0 or idle_s < (0.5 if asked else 20.0))

        return Behaviour(held=held)

    seen, beside = 1, False  # the other endpoint's requests so far, and whether it got new ones before this batch

    def behave(number: int) -> Behaviour:
        # The other endpoint's running requests are not used: it learns late that its users have gone.
        nonlocal seen, beside
        if number == 0 or endpoint.asked[number - 1].chunk_times_s:  # the first request of a batch
            beside, seen = len(other.asked) > seen, max(seen, len(other.asked))
        return Behaviour(first_s=0.3, gap_s=0.15) if beside else Behaviour(first_s=0.1, gap_s=0.05)

    with Endpoint(busy) as other, Endpoint(behave) as endpoint:
        urls = ["--url", endpoint.url, "--beside", other.url]
        found = document("profile", *urls, *what, *sweep, "--decode-tokens", "8")
    assert 1.5 < found["contention"]["prefill"] < 4.5 and 1.5 < found["contention"]["decode"] < 4.5
    wrong = document("profile", "--distserve", str(output), "--beside", "http://x", *what, status=2)
    assert "expected only one: --distserve measures nothing" in wrong["error"]["message"]


def test_profile_says_that_no_engine_listens(tmp_path: Path) -> None:
    what = ["--model", "m", "--kv-bytes-per-token", "1000", "--output", str(tmp_path / "x.json")]
    error = document("profile", "--url", "http://127.0.0.1:9", *what, status=1)["error"]
    assert error["message"] == "no server listens at http://127.0.0.1:9: Connection refused"
    wrong = document("profile", "--url", "127.0.0.1:9", *what, status=2)["error"]
    assert "expected http://HOST:PORT" in wrong["message"]


def test_profile_requires_the_memory_size(paced_endpoint: Endpoint, tmp_path: Path) -> None:
    what = ["--model", "m", "--kv-bytes-per-token", "1000", "--output", str(tmp_path / "x.json")]
    error = document("profile", "--url", paced_endpoint.url, *what, status=1)["error"]
    assert "give --kv-tokens N" in error["message"]


def test_profile_reads_distserve_files(tmp_path: Path) -> None:
    one = {"decoding_large_small_bs_threshold": 95, "prefill": [18.1, 0.1, 7e-6]}
    one |= {"decoding_smallbs": [19.9, 6e-4, 0.04], "decoding_largebs": [7.2, 5e-4, 0.16]}
    coefficients, capacities, output = (tmp_path / name for name in ("c.json", "m.csv", "p.json"))
    coefficients.write_text(json.dumps({"m": {"1": one}}))
    capacities.write_text("model,tp,pp,max_num_tokens\nm,1,1,66144\n")
    files = ["--distserve", str(coefficients), "--kv-tokens", str(capacities), "--output", str(output)]
    found = document("profile", *files, "--model", "m", "--kv-bytes-per-token", "819200")
    assert found["degrees"][0]["kv_tokens"] == {"1": 66144} and not found["measured"]
    assert json.loads(output.read_text()) == found
    capacities.write_text("model,tp,pp,max_num_tokens\nm,1\n")
    message = document("profile", *files, "--model", "m", "--kv-bytes-per-token", "1", status=2)["error"]["message"]
    assert "expected rows of model,tp,pp,max_num_tokens" in message


def test_profile_fits_transfers_of_several_sizes_for_search(
    paced_endpoint: Endpoint, tcp_server: Server, tmp_path: Path
) -> None:
    output = tmp_path / "engine.json"
    what = ["--model", "m", "--kv-bytes-per-token", "4096", "--kv-tokens", "5000", "--output", str(output)]
    sweep = ["--lengths", "16,64", "--prefill-batches", "1,2", "--decode-batches", "1,2", "--rounds", "1"]
    options = ["--url", paced_endpoint.url, *what, *sweep, "--decode-tokens", "8", "--store", tcp_server.endpoint]
    store = document("profile", *options)["store"]
    for way in ("read", "write"):
        assert [each["nbytes"] for each in store[way]["residuals"]] == [n << 16 for n in (1, 4, 16, 64, 256)]
        assert store[way]["latency_s"] >= 0 and store[way]["per_byte_s"] > 0
        assert store[way]["worst_error"] >= store[way]["error"] >= 0
    said = plan("profile", *options).stdout
    assert "Transfers of one client: a + bytes / b" in said and "Measured transfers" in said
    assert "Measured, tp 1" in said and "at worst" in said
    profile = json.loads(output.read_text())
    profile["store"]["read"] |= {"latency_s": 0.125, "per_byte_s": 1e-9}
    profile["store"]["write"] |= {"latency_s": 0.0625, "per_byte_s": 2e-9}
    output.write_text(json.dumps(profile))
    load = ["--rate", "1", "--input-tokens", "20", "--output-tokens", "5", "--slo-ttft", "1", "--slo-tpot", "0.2"]
    searched = document("search", "--profile", str(output), *NODE, *load, *QUICK)
    links = searched["basis"]["links"]
    assert (links["store_read_latency_s"], links["store_write_latency_s"]) == (0.125, 0.0625)
    assert links["store_bytes_per_s"] == pytest.approx(5e8), "the slower of both"
    # The latency of writing may be part of the wait for the decode engine's memory.
    assert searched["time_s"]["decode_memory"] + searched["time_s"]["hand_over"] > 0.125 + 0.0625


def test_transfers_are_measured_with_an_engines_token_and_leave_only_other_blocks(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = add(guarded.file, "engine", "a", ["read", "write"])
    written: list[bytes] = []
    namespaces: list[Namespace] = []
    put = KVStoreClient.set

    def noted(self: KVStoreClient, keys: list[bytes], *blocks: Any, **options: Any) -> Any:
        written.extend(keys)
        namespaces.append(self.namespace)
        return put(self, keys, *blocks, **options)

    with connect_when_known(guarded, make_namespace(BLOCK_BYTES, "kept"), token) as client:
        assert client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES)).created == len(KEYS)
        monkeypatch.setattr(KVStoreClient, "set", noted)
        monkeypatch.setenv("KVSTORE_TOKEN", token)
        reads, writes = measure_transfers([guarded.server.endpoint], 256)  # all rounds together have room
        assert len(reads) == len(writes) >= 2 and written
        assert client.contains(KEYS).all()
    with connect_when_known(guarded, namespaces[-1], token) as profiled:
        wait_until(lambda: not profiled.contains(written).any(), what="the measured blocks expire")
        assert profiled.generation == 0, "nothing was purged"
