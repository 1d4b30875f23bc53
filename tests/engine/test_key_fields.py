"""Which fields of vLLM's request classes decide what is in a request's blocks. A field that is not listed here fails
the test, because it may decide, too. Then look up what vLLM does with the field. If it decides, make sure that the keys
cover it (`kvstore_client/vllm/connector/block_keys.py`). Add the field here."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldElem, PlaceholderRange
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request, StreamingUpdate

# For fields that decide: how the keys cover them.
HASH = "in vLLM's hash of the block"
ADDED = "added to the hash"
PART = "is, or is made of, what other fields have"
# For fields that do not decide: why.
ANSWER = "chooses tokens, or what is answered, from what the model made"
WHEN = "says when, where or for whom a request is computed"
NAME = "a name of the request, or of its client"
STATE = "how far the request has come"
TRANSFER = "what connectors are told"

DECIDES = (HASH, ADDED, PART)
DOES_NOT = (ANSWER, WHEN, NAME, STATE, TRANSFER)

INPUTS = {
    "prompt_token_ids": f"{HASH}, at the places of tokens",
    "prompt_embeds": f"{HASH}: the bytes of the block's rows. {ADDED}: their type; in the tail the rows, too",
    "prompt_is_token_ids": f"{ADDED}: which places are embeddings",
    "mm_features": f"{HASH}: ids and places of the first that overlaps. {ADDED}: see MultiModalFeatureSpec",
    "lora_request": f"{ADDED}: see LoRARequest",
    "cache_salt": f"{HASH} of the first block",
    "sampling_params": ANSWER,
    "pooling_params": f"{ADDED}: see PoolingParams",
}
BOTH = {
    **INPUTS,
    "request_id": NAME,
    "client_index": NAME,
    "priority": WHEN,
    "arrival_time": WHEN,
    "trace_headers": NAME,
    "session_id": NAME,
    "kv_hints": TRANSFER,
    "resumable": WHEN,
    "abort_immediately": WHEN,
}
ENGINE_CORE_REQUEST = {
    **BOTH,
    "data_parallel_rank": WHEN,
    "current_wave": WHEN,
    "external_req_id": NAME,
    "reasoning_ended": ANSWER,
    "reasoning_parser_kwargs": ANSWER,
}
REQUEST = {
    **BOTH,
    "_all_token_ids": PART,
    "all_token_ids": PART,
    "_output_token_ids": f"{HASH}",
    "output_token_ids": PART,
    "num_prompt_tokens": PART,
    "block_hashes": f"{PART}: what keys begin with",
    "_block_hasher": f"{HASH}: the namespace names it",
    "_prompt_embeds_per_block_hashes": PART,
    "structured_output_request": ANSWER,
    "max_tokens": ANSWER,
    "kv_transfer_params": TRANSFER,
    "ec_transfer_params": TRANSFER,
    "kv_cache_report_mode": TRANSFER,
    "skip_reading_prefix_cache": WHEN,
    **dict.fromkeys(
        [
            *("status", "events", "stop_reason", "num_output_placeholders", "num_stale_output_tokens"),
            *("drop_stale_output", "num_in_flight_tokens", "next_decode_eligible_step", "last_sched_seq"),
            *("spec_token_ids", "num_computed_tokens", "is_prefill_chunk", "shared_prefix_boundary", "replay_start"),
            *("num_nans_in_logits", "num_preemptions", "prefill_stats", "spec_decode_metrics", "streaming_queue"),
        ],
        STATE,
    ),
}
STREAMING_UPDATE = {
    "mm_features": PART,
    "prompt_token_ids": PART,
    "sampling_params": ANSWER,
    "max_tokens": ANSWER,
    "arrival_time": WHEN,
}
FEATURE = {
    "data": f"{ADDED}: by content",
    "modality": ADDED,
    "identifier": f"{HASH}; {ADDED}, too",
    "mm_position": f"{HASH} and {ADDED}: see PlaceholderRange",
    "mm_hash": f"{PART}: the identifier without the adapter's name",
}
PLACE = {"offset": f"{HASH} and {ADDED}", "length": ADDED, "is_embed": ADDED}
ELEMENT = {"data": ADDED, "field": f"{PART}: how the model's code puts data of several requests together"}
LORA = {
    "lora_name": NAME,
    "lora_path": f"{ADDED}: the content of the files there",
    "is_3d_lora_weight": ADDED,
    "load_inplace": f"{PART}: whether the files are read again",
    "lora_int_id": NAME,
    "base_model_name": NAME,
}
SAMPLING = dict.fromkeys(
    [
        *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "watermarking", "top_p"),
        *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs"),
        *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "_eos_token_id"),
        *("_all_stop_token_ids", "_watermarking_skipped", "structured_outputs", "logit_bias", "allowed_token_ids"),
        *("extra_args", "bad_words", "_bad_words_token_ids", "skip_reading_prefix_cache", "thinking_token_budget"),
        *("repetition_detection", "routed_experts_prompt_start", "trace_decode_token_ids"),
    ],
    ANSWER,
)
POOLING = {
    **dict.fromkeys(
        [
            *("use_activation", "dimensions", "step_tag_id", "returned_token_ids", "task", "requires_token_ids"),
            *("skip_reading_prefix_cache", "late_interaction_params", "output_kind"),
        ],
        ANSWER,
    ),
    "extra_kwargs": f"{ADDED}: the model gets them",
}


def names(kind: type) -> Iterable[str]:
    if kind is Request:
        return vars(Request("request", [1], SamplingParams(), None))
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return kind.__struct_fields__  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (EngineCoreRequest, ENGINE_CORE_REQUEST),
        (Request, REQUEST),
        (StreamingUpdate, STREAMING_UPDATE),
        (MultiModalFeatureSpec, FEATURE),
        (PlaceholderRange, PLACE),
        (MultiModalFieldElem, ELEMENT),
        (LoRARequest, LORA),
        (SamplingParams, SAMPLING),
        (PoolingParams, POOLING),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_every_request_field_is_classified_as_deciding_or_not(kind: type, known: Mapping[str, str]) -> None:
    found = set(names(kind))
    assert not found - set(known), f"{kind.__name__} has fields that may decide what is in blocks; see this file's head"
    assert not set(known) - found, f"{kind.__name__} has these fields no more"
    assert all(why.startswith((*DECIDES, *DOES_NOT)) for why in known.values())
