"""`kvstore purge` with real engines: blocks from before the purge are neither used nor sent again, wherever engines
hold them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.driver import Ask
from tests.engine.engines import BLOCK, Expected, StartEngine, full_blocks, namespaces, prompt, stored_blocks
from tests.support.harness import Server, StartServer, wait_until

CACHED = full_blocks(500)
EVERY_OPTION = pytest.mark.parametrize(
    "options",
    [
        {},
        {"cpu_bytes": "64MiB"},
        {"cpu_bytes": "64MiB", "weights_version": "2026-11"},
        {"local": "near", "cpu_bytes": "64MiB"},
    ],
    ids=["store", "CPU tier", "CPU tier and named weights", "CPU tier and local server"],
)


def purge(server: Server) -> dict[str, Any]:
    """Run the command that the runbook names for a purge. Returns its report."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvstore_cli",
            "purge",
            "--model",
            "*",
            "--yes",
            "--json",
            "--endpoint",
            server.endpoint,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def blocks_in(*servers: Server) -> int:
    return sum(map(stored_blocks, servers))


@EVERY_OPTION
def test_after_a_purge_engines_use_and_send_no_older_block(
    server: Server,
    start_server: StartServer,
    start_engine: StartEngine,
    expected: Expected,
    options: dict[str, Any],
) -> None:
    servers = [server]
    if "local" in options:
        servers.append(start_server())
        options = {**options, "local": servers[1].endpoint}
    engines = [start_engine(server.endpoint, options=options) for _ in range(2)]
    question = prompt(90)
    for engine, cached in zip(engines, (0, CACHED), strict=True):
        [answer] = engine.generate(question)
        assert ([answer.token_ids], answer.cached_tokens) == (expected(question), cached)
        engine.settle()
    report = purge(server)
    assert report["blocks"] >= CACHED // BLOCK and report["clients"]["told"] >= 4 and report["clients"]["silent"] == []
    # Only a part of the prompt is requested. Blocks behind that part would be stored again if an engine sent the blocks
    # that it holds.
    for engine in engines:
        [answer] = engine.generate(question[:100])
        engine.settle()
        assert [answer.token_ids] == expected(question[:100])
        assert answer.cached_tokens == (0 if engine is engines[0] else full_blocks(100))
    few = full_blocks(100) // BLOCK + 1
    assert all(0 < stored_blocks(each) <= few for each in servers)
    for engine in engines:
        [answer] = engine.generate(question)
        engine.settle()
        assert [answer.token_ids] == expected(question)
        assert answer.cached_tokens <= (full_blocks(108) if engine is engines[0] else CACHED)
    assert engines[1].generate(question)[0].cached_tokens == CACHED, "sharing goes on"


@pytest.mark.parametrize("options", [{}, {"cpu_bytes": "64MiB"}], ids=["store", "CPU tier"])
def test_a_request_running_during_a_purge_leaves_nothing_behind(
    server: Server, start_engine: StartEngine, expected: Expected, options: dict[str, Any]
) -> None:
    engine = start_engine(server.endpoint, options=options, max_num_batched_tokens=128, max_num_seqs=4)
    question = prompt(91)
    engine.begin(Ask(question, 40))
    engine.compute(300)
    purge(server)
    engine.play()  # to its end
    engine.settle()
    assert stored_blocks(server) == 0, "what the running request has computed was saved"
    [answer] = engine.generate(question)
    assert ([answer.token_ids], answer.cached_tokens) == (expected(question), 0)
    engine.settle()
    assert stored_blocks(server) >= CACHED // BLOCK


def test_an_engine_cut_off_during_a_purge_drops_its_blocks_on_return(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    engine = start_engine(server.endpoint, options={"cpu_bytes": "64MiB"})
    question = prompt(92)
    engine.generate(question)
    engine.settle()
    with engine.stopped():
        done = subprocess.run(
            [sys.executable, "-m", "kvstore_cli", "purge", "--all", "--yes", "--json", "--endpoint", server.endpoint],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        report = json.loads(done.stdout)
        assert done.returncode == 1 and report["clients"]["silent"], "it says that an engine has not heard of it"
    wait_until(lambda: purge(server)["clients"]["silent"] == [], what="it has heard of it")
    [answer] = engine.generate(question)
    assert ([answer.token_ids], answer.cached_tokens) == (expected(question), 0)


def test_engines_of_other_models_keep_their_blocks(
    server: Server, start_engine: StartEngine, expected: Expected, other_model: Any
) -> None:
    question = prompt(93)
    mine, other = start_engine(server.endpoint), start_engine(server.endpoint, model=other_model)
    for engine in (mine, other):
        engine.generate(question)
        engine.settle()
    model = {json.loads(each.namespace)["model"] for each in namespaces(server)}
    assert len(model) == 2
    before = stored_blocks(server)
    chosen = next(each for each in namespaces(server) if each.blocks)
    subprocess.run(
        [
            *(sys.executable, "-m", "kvstore_cli", "purge", "--namespace-id", chosen.id, "--yes"),
            *("--endpoint", server.endpoint),
        ],
        check=True,
        timeout=60,
        capture_output=True,
    )
    assert stored_blocks(server) == before - chosen.blocks
    cached = sorted(engine.generate(question)[0].cached_tokens for engine in (mine, other))
    assert cached == [0, CACHED]
