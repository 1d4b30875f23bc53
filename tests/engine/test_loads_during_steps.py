"""Why the connector ends a load before the step that uses its blocks begins.

A load could also run during that step, and the model could wait for each layer. With asynchronous scheduling, vLLM has
then planned the next step before it knows whether the load succeeded. If vLLM repairs what is tested here, the
connector may use such loads: see docs/vllm-inside.md.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from tests.engine.scheduled_engine import PROMPT, ScheduledEngine, StartEngine

FROM_MISSING_BLOCKS = 41  # a token that the model sampled while blocks were missing


def finish(engine: ScheduledEngine, output: SchedulerOutput, token: int, missing: set[int]) -> None:
    """Report that a step sampled this token for its request, and which cache blocks its loads did not bring."""
    [name] = output.num_scheduled_tokens
    engine.scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=[name],
            req_id_to_index={name: 0},
            sampled_token_ids=[[token]],
            kv_connector_output=KVConnectorOutput(invalid_block_ids=missing),
        ),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vllm_keeps_tokens_from_missing_blocks_only_with_asynchronous_scheduling(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    engine = start(asynchronous=asynchronous)
    for rank in engine.ranks:
        rank.held.update(engine.keys(PROMPT))
    connector = engine.scheduler.connector
    matched = connector.get_num_new_matched_tokens
    monkeypatch.setattr(connector, "get_num_new_matched_tokens", lambda *given: (matched(*given)[0], False))
    request = engine.add(PROMPT, max_tokens=4)
    steps = [engine.scheduler.schedule() for _ in range(engine.depth)]
    [load] = steps[0].kv_connector_metadata.loads
    finish(engine, steps[0], FROM_MISSING_BLOCKS, set(load.block_ids))
    assert not request.output_token_ids, "vLLM notices a load that failed in the same step"
    for step in steps[1:]:
        finish(engine, step, FROM_MISSING_BLOCKS, set())
    assert (FROM_MISSING_BLOCKS in request.output_token_ids) is asynchronous
    engine.abort(request)
    engine.half.loads.end(request.request_id)
