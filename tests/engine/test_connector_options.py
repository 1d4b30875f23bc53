"""What the connector's options say when they are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore_client.vllm.config import parse_config

ENDPOINT = "tcp://127.0.0.1:7070"


def test_an_endpoint_is_enough() -> None:
    config = parse_config({"endpoint": ENDPOINT})
    assert (config.endpoint, config.cpu_bytes, config.tenant) == (ENDPOINT, 0, "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "endpoint is missing"),
        ({"endpoint": ENDPOINT, "end_point": ENDPOINT}, "did you mean 'endpoint'"),
        ({"endpoint": "127.0.0.1:7070"}, "expected an address such as"),
        ({"endpoint": []}, "expected an address such as"),
        ({"endpoint": ENDPOINT, "timeout_s": 0}, "timeout_s is 0"),
        ({"endpoint": ENDPOINT, "timeout_s": "soon"}, "timeout_s"),
        ({"endpoint": ENDPOINT, "cpu_bytes": 1 << 30}, "no CPU tier yet"),
        ({"endpoint": ENDPOINT, "min_hit_tokens": -1}, "min_hit_tokens is -1"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_expected(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as error:
        parse_config(options)
    assert said in str(error.value)
