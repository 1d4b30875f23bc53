"""The connector next to vLLM's NIXL connector, inside vLLM's own MultiConnector, in real engines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.engines import BLOCK, Expected, StartEngine, full_blocks, prompt
from tests.support.harness import Server
from tests.support.ports import free_ports

NIXL: tuple[str, dict[str, Any]] = ("NixlConnector", {"kv_role": "kv_both", "kv_buffer_device": "cpu"})
KVSTORE: tuple[str, dict[str, Any]] = ("kvstore", {})


@pytest.mark.parametrize("beside", [(KVSTORE, NIXL), (NIXL, KVSTORE)], ids=["kvstore first", "NIXL first"])
def test_blocks_are_saved_and_loaded_together_with_nixl(
    beside: list[tuple[str, dict[str, Any]]], server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    questions = [prompt(70), prompt(71)]
    arguments: dict[str, Any] = {
        "beside": beside,
        "load_failure_policy": "recompute",
        "environment": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0])},
    }
    filler = start_engine(server.endpoint, **arguments)
    answers = filler.generate(*questions, max_tokens=40)
    assert [answer.token_ids for answer in answers] == expected(*questions, max_tokens=40)
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    filler.settle()
    assert filler.metrics()["transfer_blocks/out"] >= 2 * (500 // BLOCK)
    assert filler.stop() == 0

    reader = start_engine(server.endpoint, **arguments)
    answers = reader.generate(*questions, max_tokens=40)
    assert [answer.cached_tokens for answer in answers] == [full_blocks(500)] * 2
    assert [answer.token_ids for answer in answers] == expected(*questions, max_tokens=40)
    reader.settle()


def test_the_engine_refuses_to_start_if_failed_loads_would_fail_requests(start_engine: StartEngine) -> None:
    engine = start_engine("tcp://127.0.0.1:7070", beside=(KVSTORE, NIXL), wait=False)
    assert not engine.ready()
    assert engine.stop() == 1
    assert "kv_load_failure_policy of MultiConnector is 'fail'" in engine.log_text()
