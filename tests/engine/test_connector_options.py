"""The connector's error for each wrong option."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from kvstore.sizes import parse_size
from kvstore_client.vllm.connector.options import ConnectorOptions
from kvstore_client.vllm.shared.store_options import StoreOptions, parse_options
from kvstore_client.vllm.tier.options import TierOptions
from tests.support.harness import ROOT

ENDPOINT = "tcp://127.0.0.1:7070"


def parse(options: dict[str, Any]) -> ConnectorOptions:
    return parse_options(ConnectorOptions, options, "kv_connector_extra_config")


def test_an_endpoint_is_enough() -> None:
    config = parse({"endpoint": ENDPOINT})
    assert config == ConnectorOptions(endpoint=ENDPOINT)
    assert (config.cpu_bytes, config.staging_bytes, config.save_decode) == (0, 512 << 20, True)


@pytest.mark.parametrize(
    ("options", "step", "on_gpu", "room"),
    [
        ({}, 1 << 30, False, 512 << 20),
        ({}, 1 << 30, True, 4 << 30),
        ({}, 200 << 20, True, 800 << 20),
        ({}, 10 << 20, True, 512 << 20),
        ({}, 8 << 30, True, 4 << 30),
        ({"staging_bytes": "1GiB"}, 1 << 30, True, 1 << 30),
        ({"staging_bytes": "16GiB"}, 1 << 30, True, 16 << 30),
    ],
)
def test_outgoing_blocks_have_room_for_a_gpus_steps(
    options: dict[str, Any], step: int, on_gpu: bool, room: int
) -> None:
    assert parse({"endpoint": ENDPOINT, **options}).staging(step, on_gpu) == room


@pytest.mark.parametrize(
    ("options", "transport"), [({}, None), ({"nixl": True}, "nixl"), ({"transport": "nixl"}, "nixl")]
)
def test_nixl_is_one_of_the_transports(options: dict[str, Any], transport: str | None) -> None:
    assert parse({"endpoint": ENDPOINT, **options}).client.transport == transport


@pytest.mark.parametrize(
    ("given", "size"), [("64GiB", 64 << 30), ("1.5 GB", 1_500_000_000), (4096, 4096), (0, 0), ("0", 0)]
)
def test_a_size_is_a_number_or_text_with_a_unit(given: object, size: int) -> None:
    assert parse({"endpoint": ENDPOINT, "cpu_bytes": given}).cpu_bytes == size


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "endpoint is missing; it must be given, for example endpoint='tcp://127.0.0.1:7070'"),
        ({"endpoint": ENDPOINT, "end_point": ENDPOINT}, "did you mean 'endpoint'"),
        (
            {"endpoint": ENDPOINT, "zzz": 1},
            "unknown option 'zzz'. Valid options: endpoint, timeout_s",
        ),
        ({"endpoint": ""}, "endpoint '': expected tcp://HOST:PORT, tls://HOST:PORT or HOST:PORT"),
        ({"endpoint": []}, "endpoint: an empty list: expected tcp://HOST:PORT"),
        ({"endpoint": ["a:7070", "a:7070"]}, "endpoint 'a:7070' is named twice"),
        ({"endpoint": "127.0.0.1"}, "endpoint '127.0.0.1': expected tcp://HOST:PORT"),
        ({"endpoint": "etcd://127.0.0.1:2379"}, "expected etcd://HOST:PORT[,HOST:PORT...]/NAME"),
        ({"endpoint": 7070}, "endpoint is 7070; expected text or a list, got a whole number"),
        ({"endpoint": [7070]}, "endpoint is [7070]; expected text, got a whole number"),
        ({"endpoint": ENDPOINT, "cpu_policy": "lfu"}, "cpu_policy is 'lfu'; expected one of default, lru"),
        ({"endpoint": ENDPOINT, "timeout_s": 0}, "timeout_s is 0"),
        ({"endpoint": ENDPOINT, "timeout_s": 601}, "above 0 and at most 600"),
        ({"endpoint": ENDPOINT, "timeout_s": float("nan")}, "timeout_s is nan"),
        ({"endpoint": ENDPOINT, "timeout_s": "soon"}, "timeout_s is 'soon'; expected a number, got text"),
        ({"endpoint": ENDPOINT, "lookup_timeout_s": -1}, "lookup_timeout_s is -1"),
        ({"endpoint": ENDPOINT, "cpu_bytes": "lots"}, "cpu_bytes is 'lots'; expected a number of bytes, or text with"),
        ({"endpoint": ENDPOINT, "cpu_bytes": -1}, "cpu_bytes is -1; expected a number of bytes"),
        ({"endpoint": ENDPOINT, "cpu_bytes": True}, "cpu_bytes is True; expected a number of bytes"),
        ({"endpoint": ENDPOINT, "cpu_bytes": None}, "cpu_bytes is None; expected a number of bytes"),
        ({"endpoint": ENDPOINT, "staging_bytes": 0}, "staging_bytes is 0; expected at least 1MiB"),
        ({"endpoint": ENDPOINT, "min_hit_tokens": -1}, "min_hit_tokens is -1"),
        ({"endpoint": ENDPOINT, "min_hit_tokens": 0.5}, "expected a whole number, got a number"),
        ({"endpoint": ENDPOINT, "save_decode": "no"}, "save_decode is 'no'; expected true or false, got text"),
        ({"endpoint": ENDPOINT, "block_secret_file": "/none"}, "block_secret_file /none: No such file or directory"),
        (
            {"endpoint": ENDPOINT, "nixl": True, "transport": "fabric"},
            "nixl=True and transport='fabric': expected one of them",
        ),
        ({"endpoint": ENDPOINT, "transport": "none"}, "transport 'none': expected one of nixl"),
        ({"endpoint": ENDPOINT, "tenant": 7}, "tenant is 7; expected text"),
        ({"endpoint": ENDPOINT, "tenant": "t" * 300}, "tenant has 300 characters"),
    ],
)
def test_a_wrong_option_is_named_with_the_expected_value(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as error:
        parse(options)
    assert said in str(error.value)


def test_other_options_are_read_the_same_way() -> None:
    class TierOptions(msgspec.Struct):
        endpoint: str
        threads: int = 2

    assert parse_options(TierOptions, {"endpoint": ENDPOINT, "threads": 3}, "the tier") == TierOptions(ENDPOINT, 3)
    with pytest.raises(ValueError, match=r"^the tier: unknown option 'thread'; did you mean 'threads'\?"):
        parse_options(TierOptions, {"endpoint": ENDPOINT, "thread": 3}, "the tier")
    with pytest.raises(ValueError, match=r"^the tier: endpoint is missing; it must be given$"):
        parse_options(TierOptions, {}, "the tier")


@pytest.mark.parametrize(
    "endpoint",
    [ENDPOINT, "127.0.0.1:7070", "[::1]:7070", ["a:7070", "tcp://b:7070"], "etcd://e:2379/name", "dns://d:7070"],
)
def test_an_endpoint_has_the_clients_form(endpoint: str | list[str]) -> None:
    assert parse({"endpoint": endpoint}).endpoint == endpoint


def options_in_the_manual() -> dict[str, str]:
    """Return the options in the table of docs/vllm.md, with the defaults given there."""
    text = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    table = text.split("\n## Options of ")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for names, default in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| [^|]+ \| ([^|]+) \|", table, re.MULTILINE):
        for name in re.findall(r"\w+", names):
            assert name not in found, f"{name} is there twice"
            found[name] = default.strip("`")
    return found


@pytest.mark.parametrize("kind", [ConnectorOptions, TierOptions])
def test_every_option_is_in_the_manuals_table_with_its_default(kind: type[StoreOptions]) -> None:
    manual = options_in_the_manual()
    for field in msgspec.structs.fields(kind):
        said: Any = manual[field.name]
        if isinstance(field.default, bool):
            said = {"true": True, "false": False}[said]
        elif isinstance(field.default, int | float):
            said = parse_size(said)
        wanted = "required" if field.required else field.default
        assert said == ("none" if wanted in ("", None) else wanted), field.name


def test_the_manuals_table_has_only_valid_options() -> None:
    valid = {*ConnectorOptions.__struct_fields__, *TierOptions.__struct_fields__}
    assert set(options_in_the_manual()) == valid
