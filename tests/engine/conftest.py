"""Fixtures of the engine tests: real engines, servers that tests may damage, and a model that is saved once. Without
vLLM every test here is skipped, except in CI, where it fails."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.engines import LONGEST, Engine, Expected, StartEngine, answers_alone, save_model
from tests.engine.fleet import Fleet
from tests.support.harness import Server
from tests.support.proxies import ProxyProcess
from tests.support.slow_link import SlowLink

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from tests.engine.engine_config import Rank
    from tests.engine.scheduled_engine import ScheduledEngine

HERE = Path(__file__).parent
MISSING = [name for name in ("torch", "transformers", "vllm") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(HERE)]
    for item in here:
        item.add_marker(pytest.mark.engine)
    if not MISSING or not here:
        return
    reason = f"the engine tests need {', '.join(MISSING)}, which cannot be imported"
    if os.environ.get("CI") == "true":
        raise pytest.UsageError(f"{reason}; with CI=true nothing may be missing")
    print(f"\nskipped: {reason}")
    for item in here:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same architecture under the same folder name, with other weights."""
    return save_model(tmp_path_factory.mktemp("other") / "tiny", seed=1)


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    """A server that only this test uses and may damage."""
    return start_server(memory="256MiB")


@pytest.fixture
def link(server: Server) -> Iterator[SlowLink]:
    """A link to that server, which the test can slow down or stop."""
    with SlowLink(server.port) as link:
        yield link


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Expected]:
    """``expected(prompt, ..., max_tokens=8)`` returns the answers of an engine without any cache."""
    log = tmp_path_factory.mktemp("expected") / "engine.log"
    engine = Engine(model, log, connector=None, enable_prefix_caching=False, max_model_len=LONGEST)
    yield answers_alone(engine)
    engine.stop()


@pytest.fixture
def start_engine(tmp_path: Path, model: Path) -> Iterator[StartEngine]:
    """``start_engine(endpoint, options={...}, ...)`` starts an engine with the connector. The engine is stopped after
    the test."""
    engines: list[Engine] = []

    def start(endpoint: str, *, options: dict[str, Any] | None = None, model: Path = model, **arguments: Any) -> Engine:
        log = tmp_path / f"engine{len(engines)}.log"
        # The machines are busy and the model is tiny, so chance would decide whether loading is faster than computing.
        connector = {"endpoint": endpoint, "always_load": True, **(options or {})}
        engine = Engine(model, log, connector=connector, **arguments)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    found = Fleet(tmp_path_factory.mktemp("fleet"))
    yield found
    found.stop()


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """A store, two engines and a proxy that other tests use too. A test may kill the engines."""
    shared_fleet.mend()
    return shared_fleet


@pytest.fixture(scope="module")
def alone(shared_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy in front of the decode engine alone."""
    shared_fleet.mend()
    folder = tmp_path_factory.mktemp("alone")
    roles = [f"--decode={shared_fleet.d.url}", "--max-body=1MiB"]
    with ProxyProcess(folder, *shared_fleet.store_options, *roles) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def real_config(model: Path) -> VllmConfig:
    from tests.engine.engine_config import engine_config  # imports torch, so only when a test needs it

    return engine_config(model)


@pytest.fixture
def config(real_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """vLLM's configuration of an engine: a copy that tests may change, in an environment without a hash seed."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return copy.deepcopy(real_config)


@pytest.fixture
def rank(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A worker of an engine with that configuration."""
    from tests.engine.engine_config import Rank

    rank = Rank(config, monkeypatch)
    rank.be()
    return rank


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., ScheduledEngine]]:
    """``start(ranks=..., slots=...)`` makes vLLM's scheduler without a model. After the test, the fixture checks that
    every request has ended and left nothing behind."""
    from tests.engine.scheduled_engine import ScheduledEngine  # imports torch, so only when a test needs it

    engines: list[ScheduledEngine] = []

    def make(**arguments: Any) -> ScheduledEngine:
        engines.append(ScheduledEngine(model, **arguments))
        return engines[-1]

    logging.disable(logging.WARNING)
    yield make
    logging.disable(logging.NOTSET)
    for engine in engines:
        engine.lookups.answering = True
        engine.run()
        engine.check_idle()
