"""The toy engine and its adapter of docs/adding-an-engine.md, in examples/paged_engine, with real servers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore_client import KVStoreClient  # noqa: E402
from tests.support.harness import ROOT, Server, StartServer, environment  # noqa: E402

FOLDER = ROOT / "examples" / "paged_engine"
RUN_S = 120.0
TOKENS = 200

Connect: TypeAlias = Callable[..., tuple[Any, Any]]


def prompts(count: int, seed: int, common: int = 96) -> list[list[int]]:
    """Return prompts of `TOKENS` tokens that begin alike."""
    drawn = np.random.default_rng(seed).integers(0, 512, (count, TOKENS))
    drawn[:, :common] = drawn[0, :common]
    return [row.tolist() for row in drawn]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module of the engine, with the adapter's module as its `adapter`."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    import adapter  # type: ignore[import-not-found]

    yield adapter
    torch.set_num_threads(before)
    for name in ("adapter", "engine"):
        del sys.modules[name]


@pytest.fixture
def connect(toy: Any) -> Iterator[Connect]:
    """Return an engine and its connector."""
    made: list[Any] = []

    def connect(endpoint: str, num_blocks: int = 256, **how: Any) -> tuple[Any, Any]:
        engine = toy.Engine(num_blocks)
        engine.connector = toy.KVStoreConnector(endpoint, engine, **how)
        made.append(engine.connector)
        return engine, engine.connector

    yield connect
    for each in made:
        each.close()


def test_the_example_runs_unchanged(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "adapter.py"), "--endpoint", server.endpoint],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=True,
    )
    first = re.search(r"first engine, nothing cached: computed (\d+) of 400 tokens", done.stdout)
    # When the engine admits the second prompt, the store may have some of the 96 tokens that it shares with the first.
    assert first is not None and int(first[1]) in range(400 - 96, 400 + 1), done.stdout
    assert "second engine, the same prompts: computed 16 of 400 tokens" in done.stdout
    assert "all answers are equal" in done.stdout


def test_one_engine_loads_what_another_computed(server: Server, toy: Any, connect: Connect) -> None:
    asked = prompts(3, 1)
    expected = toy.Engine().generate(asked)
    first, connector = connect(server.endpoint)
    assert first.generate(asked) == expected and connector.settle()
    second, _ = connect(server.endpoint)
    assert second.generate(asked) == expected
    assert second.tokens_computed == 3 * (TOKENS - (TOKENS - 1) // 16 * 16)


def test_an_engine_loads_from_its_cpu_tier_without_the_store(
    start_server: StartServer, toy: Any, connect: Connect
) -> None:
    server = start_server()
    asked = prompts(2, 2)
    expected = toy.Engine().generate(asked)
    engine, connector = connect(server.endpoint, timeout_s=1.0)
    assert engine.generate(asked) == expected and connector.settle()
    server.stop()
    computed = engine.tokens_computed
    assert engine.generate(asked) == expected
    assert engine.tokens_computed - computed == 2 * (TOKENS - (TOKENS - 1) // 16 * 16)


def test_nothing_is_loaded_after_a_purge(server: Server, toy: Any, connect: Connect) -> None:
    asked = prompts(1, 3)
    expected = toy.Engine().generate(asked)
    engine, connector = connect(server.endpoint)
    assert engine.generate(asked) == expected and connector.settle()
    with KVStoreClient(server.endpoint, connector.namespace) as operator:
        assert operator.purge() >= TOKENS // 16
    computed = engine.tokens_computed
    assert engine.generate(asked) == expected
    assert engine.tokens_computed - computed == TOKENS


def test_answers_are_right_where_every_cache_is_too_small(
    start_server: StartServer, toy: Any, connect: Connect
) -> None:
    """The engine's cache has room for two prompts, the CPU tier for half a prompt, and the store for five prompts."""
    server = start_server(memory="1MiB", segment="1MiB")
    engines = [connect(server.endpoint, num_blocks=2 * 13, cpu_blocks=8) for _ in range(2)]
    expected = toy.Engine().generate(prompts(8, 4, common=32))
    for turn in range(6):
        some = np.random.default_rng(turn).permutation(8)[:4]
        engine, connector = engines[turn % 2]
        assert engine.generate([prompts(8, 4, common=32)[at] for at in some]) == [expected[at] for at in some]
    for engine, connector in engines:
        assert connector.settle() and sorted(engine._free) == list(range(2 * 13))
        assert not connector._tier.busy


def test_the_adapter_uses_only_the_public_interface() -> None:
    tree = ast.parse((FOLDER / "adapter.py").read_text(encoding="utf-8"))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [name for name in imported if name.startswith("kvstore")]
    assert ours and not [name for name in ours if "._" in name or name.startswith("kvstore_client.vllm")]
    [adapter] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert adapter.end_lineno is not None and adapter.end_lineno - adapter.lineno < 180, "it is a page, not a book"
