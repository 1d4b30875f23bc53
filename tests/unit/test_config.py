"""Settings from the file, the environment and flags: which source wins, and the errors for invalid values."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from kvstore.cluster.url import EtcdURL
from kvstore.node.cli import HEADING
from kvstore.node.config import NamespaceRule, ServerConfig, read
from kvstore.node.fitting import misfits
from kvstore.node.settings import ConfigError, HostPort, Setting, Size, Sources, changed, describe, listed
from kvstore.node.settings_file import effective, sample
from kvstore.sizes import parse_size
from tests.support.harness import ROOT
from tests.support.settings import load

CLUSTER = "etcd://a:2379/n"


def refused(
    file: Path | None = None, environment: dict[str, str] | None = None, flags: dict[str, Any] | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, environment or {}, flags or {})
    return str(caught.value)


def as_file(config: ServerConfig) -> str:
    """Return the output of --print-config for settings that all come from one file."""
    return effective(config, HEADING, lambda name: "a.toml")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        file = tmp_path / "server.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_the_defaults_are_the_documented_ones() -> None:
    config = load(None, {}, {})
    assert config == ServerConfig()
    assert (config.host, config.port, config.shards, config.log_level) == ("127.0.0.1", 7070, 1, "info")
    assert (config.memory, config.segment, config.http, config.log_format) == (4 << 30, 32 << 20, None, "text")
    assert (config.disk, config.disk_size, config.disk_write, config.scrub_mbps) == (None, 50 << 30, "all", 0)
    assert (config.cluster, config.node_id, config.advertise, config.zone) == (None, None, None, "")
    assert (config.drain_seconds, config.grace_seconds, config.lease_seconds) == (0, 300, 2)
    assert (config.policy, config.ttl_seconds, config.namespaces, config.warm_start) == ("default", 0, [], True)


def test_the_manuals_table_and_sample_file_are_generated_from_the_settings() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "settings_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    manual = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for each in describe(ServerConfig):
        assert (f"`[[{each.name}]]`" if each.setting.file_only else f"`{each.flag}") in manual, each.name
    assert load(ROOT / "packaging" / "server.toml", {}, {}) == ServerConfig()


def test_a_flag_beats_the_environment_which_beats_the_file(write: Any) -> None:
    file = write('port = 1000\nshards = 2\nmemory = "1GiB"\nlog_level = "debug"\n')
    environment = {"KVSTORE_SERVER_PORT": "2000", "KVSTORE_SERVER_SHARDS": "4", "PATH": "/bin"}
    config = load(file, environment, {"port": 3000, "shards": None, "memory": None})
    assert (config.port, config.shards, config.memory, config.log_level) == (3000, 4, 1 << 30, "debug")
    assert config.shard_memory_bytes == 1 << 28


def test_every_setting_can_come_from_every_source(write: Any) -> None:
    settings = {
        "host": "0.0.0.0",
        "port": 7171,
        "shards": 2,
        "memory": "128MiB",
        "segment": "2MiB",
        "transient_memory": "2.5%",
        "log_level": "error",
        "log_format": "json",
        "slowlog_ms": 250,
        "http": "[::]:9100",
        "policy": "lru",
        "ttl_seconds": 3600,
        "disk": "/data/kv",
        "disk_size": "1GiB",
        "disk_key_file": "/etc/kvstore/disk-key",
        "disk_key_command": "key-manager get kvstore",
        "disk_write": "reused",
        "warm_start": False,
        "scrub_mbps": 20,
        "cluster": "etcd://etcd-0:2379,etcd-1:2379/prod",
        "node_id": "node-7",
        "advertise": "10.0.0.7",
        "zone": "rack-3",
        "drain_seconds": 120,
        "grace_seconds": 600,
        "lease_seconds": 5,
        "unix_socket": "/run/kvstore/kv.sock",
        "unix_users": "vllm, 1001",
        "nixl": True,
        "transport": "nixl",
        "auth": "/etc/kvstore/auth.toml",
        "insecure": True,
        "audit": "syslog",
        "tls_cert": "/etc/kvstore/node.crt",
        "tls_key": "/etc/kvstore/node.key",
        "tls_client_ca": "/etc/kvstore/clients.pem",
        "tls_ca": "/etc/kvstore/ca.pem",
    }
    assert set(settings) == set(ServerConfig.__struct_fields__) - {"namespaces"}
    toml = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    environment = {f"KVSTORE_SERVER_{name.upper()}": text for name, text in texts.items()}
    from_file, from_environment = load(write(toml), {}, {}), load(None, environment, {})
    assert from_file == from_environment == load(None, {}, settings)
    expected = {**settings, "memory": 128 << 20, "segment": 2 << 20, "disk_size": 1 << 30}
    assert {name: getattr(from_file, name) for name in settings} == expected
    assert load(None, {}, texts) == from_file  # flags are text, like variables
    assert load(write(as_file(from_file)), {}, {}) == from_file


def test_printed_settings_are_a_file_that_gives_them_again(write: Any) -> None:
    assert load(write(as_file(ServerConfig())), {}, {}) == ServerConfig()
    defaults = sample(ServerConfig, HEADING)
    assert load(write(defaults), {}, {}) == ServerConfig()
    # Every commented-out example in the file is valid.
    keys = re.sub(r"^# (\w+ = |\[\[)", r"\1", defaults, flags=re.MULTILINE)
    keys = keys.replace('"HOST:PORT"', '"[::1]:0"').replace('"URL"', '"etcd://a:2379/n"').replace('= "HOST"', '= "b"')
    config = load(write(keys), {}, {})
    assert (config.http, config.disk, config.node_id) == ("[::1]:0", "FOLDER", "ID")
    assert config.namespaces == [NamespaceRule("Qwen/*", 3600, 1)]
    assert load(write(as_file(config)), {}, {}) == config
    for each in describe(ServerConfig):
        assert each.name in defaults and each.setting.help.split()[0] in defaults


def test_the_source_of_each_setting_is_printed(write: Any) -> None:
    file = write('port = 1\nshards = 2\n[[namespaces]]\nmatch = "*"\n')
    config, sources = read(file, {"KVSTORE_SERVER_SHARDS": "3"}, {"memory": "1GiB", "warm_start": False})
    lines = effective(config, HEADING, sources.source).splitlines()
    for line in (
        'host = "127.0.0.1"  # source: default',
        f"port = 1  # source: {file}",
        "shards = 3  # source: KVSTORE_SERVER_SHARDS",
        'memory = "1GiB"  # source: --memory',
        "warm_start = false  # source: --no-warm-start",
        '# disk = "FOLDER"  # source: default',
    ):
        assert line in lines
    assert lines[lines.index("[[namespaces]]") - 1] == f"# source: {file}"


class _WithSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: Annotated[str | None, Setting("Server", "A token.", "TOKEN", secret=True)] = None
    size: Annotated[Size, Setting("Server", "A size.", secret=True)] = Size(0)


def test_secrets_are_never_printed(write: Any) -> None:
    sources = Sources(_WithSecret, "X_")
    sources.read_file(write('token = "hidden1"\n'))
    sources.read_environment({"X_SIZE": "hidden2"}, ())
    sources.read_flags({"token": "hidden3"})
    config = sources.config()
    assert config.token == "hidden3"
    shown = [
        effective(config, "", sources.source),
        *sources.problems,
        *listed(config).values(),
        *changed(config).values(),
    ]
    assert sources.problems == ["X_SIZE=(secret): expected a size such as 512MiB, 4GiB or 512Mi, or a number of bytes"]
    assert "token: a secret, which is not printed  # source: --token" in shown[0]
    assert not [text for text in shown if "hidden" in text]


def test_settings_that_differ_from_their_defaults_are_reported() -> None:
    assert changed(ServerConfig()) == {}
    config = load(None, {}, {"memory": "512Mi", "warm_start": False, "http": "127.0.0.1:0"})
    assert changed(config) == {"http": "127.0.0.1:0", "memory": "512MiB", "warm_start": "false"}


@pytest.mark.parametrize(
    ("text", "size"), [('"512Mi"', 512 << 20), ("1073741824", 1 << 30), ('"4G"', 4 * 10**9), ('"1073741824"', 1 << 30)]
)
def test_a_size_in_the_file_has_a_unit_or_is_bytes(write: Any, text: str, size: int) -> None:
    assert load(write(f"memory = {text}\n"), {}, {}).memory == size


@pytest.mark.parametrize(
    ("text", "size"), [('"10%"', 102 << 20), ('"2.5%"', 26843545), ('"64MiB"', 64 << 20), ("0", 0), ('"0%"', 0)]
)
def test_transient_memory_is_a_share_or_a_size(write: Any, text: str, size: int) -> None:
    config = load(write(f'memory = "1GiB"\nshards = 2\ntransient_memory = {text}\n'), {}, {})
    assert config.shard_transient_bytes == pytest.approx(size / 2, abs=1 << 18)


@pytest.mark.parametrize(("text", "host", "port"), [("0.0.0.0:9100", "0.0.0.0", 9100), ("[fd00::7]:0", "fd00::7", 0)])
def test_the_http_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    address = load(None, {"KVSTORE_SERVER_HTTP": text}, {"insecure": True}).http
    assert address is not None and (address.host, address.port) == (host, port)
    assert HostPort.of(host, port) == text


def test_a_variable_can_name_the_file_and_a_flag_overrides_it(write: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("port = 1\n")
    environment = {"KVSTORE_SERVER_CONFIG": str(other)}
    assert load(None, environment, {}).port == 1
    assert load(write("port = 2\n"), environment, {}).port == 2
    message = refused(environment={"KVSTORE_SERVER_CONFIG": "/nosuch/x.toml"})
    assert message == "KVSTORE_SERVER_CONFIG /nosuch/x.toml: the file cannot be read: No such file or directory"


def test_namespace_rules_are_tables_of_the_file(write: Any) -> None:
    rules = """
ttl_seconds = 3600
[[namespaces]]
match = "Qwen/*"
ttl_seconds = 60
priority = 2
[[namespaces]]
match = "*"
"""
    config = load(write(rules), {}, {})
    assert config.namespaces == [NamespaceRule("Qwen/*", 60, 2), NamespaceRule("*", 0, 0)]
    assert config.ttl_seconds == 3600


def test_a_member_advertises_where_it_listens_under_its_host_name() -> None:
    config = load(None, {}, {"cluster": "etcd://a:2379/n", "host": "10.0.0.7", "insecure": True})
    assert config.advertised_host == "10.0.0.7" and config.cluster_node_id == socket.gethostname()
    assert config.cluster_url == EtcdURL((("a", 2379),), "n")
    settings = {"host": "0.0.0.0", "advertise": "fd00::7", "node_id": "x", "auth": "auth.toml"}
    config = load(None, {}, {"cluster": "etcd://a:2379/n", **settings})
    assert config.advertised_host == "fd00::7" and config.cluster_node_id == "x"


SIZES = [f"{count}{unit}" for unit in ("MiB", "GiB", "TiB") for count in (8, 9, 15, 31, 64, 100)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_disk_of_any_size_has_dozens_to_hundreds_of_segments(size: str, shards: int) -> None:
    config = ServerConfig(disk_size=Size(parse_size(size)), shards=shards)
    segment, limit = config.disk_segment_bytes, config.shard_disk_bytes
    assert segment >= 1 << 20 and segment & (segment - 1) == 0
    if limit >= 8 << 20:
        assert not list(misfits(config))
        assert 8 <= limit // segment <= 1024
    if limit >= 16 << 20:
        assert limit // segment >= 16


def test_segments_grow_before_there_are_more_of_them() -> None:
    assert ServerConfig(disk_size=Size(parse_size("8MiB"))).disk_segment_bytes == 1 << 20
    assert ServerConfig(disk_size=Size(parse_size("50GiB"))).disk_segment_bytes == 256 << 20
    assert ServerConfig(disk_size=Size(parse_size("100TiB"))).disk_segment_bytes == 128 << 30


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_all_mistakes_are_reported_at_once(write: Any) -> None:
    file = write('memroy = 1\nport = "x"\nlog_level = "loud"\n')
    with pytest.raises(ConfigError) as caught:
        load(file, {"KVSTORE_SERVER_HOSTS": "a"}, {"memory": "16MiB", "drain_seconds": "5", "segment": "much"})
    problems = caught.value.problems
    assert str(caught.value).splitlines() == list(problems) and len(problems) == 7
    starts = (
        f"{file}: unknown setting 'memroy'",
        "environment: unknown setting 'KVSTORE_SERVER_HOSTS'",
        f'{file}: port = "x": expected a whole number',
        f'{file}: log_level = "loud": expected one of',
        "--segment much: expected a size",
        "--drain-seconds 5: only a member of a cluster",
        "--memory 16MiB: this gives each of 1 shard(s)",
    )
    assert all(problem.startswith(start) for problem, start in zip(problems, starts, strict=True)), problems


def test_an_unknown_key_of_the_file_is_named(write: Any) -> None:
    message = refused(write('memroy = "1GiB"\n'))
    assert "'memroy'" in message and "server.toml" in message and "memory" in message


def test_an_unknown_variable_is_named() -> None:
    message = refused(environment={"KVSTORE_SERVER_MEMROY": "1GiB"})
    assert "'KVSTORE_SERVER_MEMROY'" in message and "KVSTORE_SERVER_MEMORY" in message


def test_unrelated_variables_are_ignored() -> None:
    assert load(None, {"KVSTORE_CACHE": "x", "KVSTORE_SERVERS": "y"}, {}) == ServerConfig()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path / "none.toml")
    assert "none.toml" in message and "No such file" in message


@pytest.mark.parametrize("data", [b"port = ", b"\xff\xfe"])
def test_an_invalid_toml_file_is_named(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "server.toml"
    file.write_bytes(data)
    assert "server.toml" in (message := refused(file)) and "TOML" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "70000"}, "--port 70000: expected a whole number from 0 to 65535"),
        ({"port": "65530", "shards": "8"}, "--port 65530: 8 shards need the ports up to 65537: the last port is 65535"),
        ({"http": "127.0.0.1:7073", "shards": "4"}, "--http 127.0.0.1:7073: shard 3 listens on this port"),
        ({"port": "-1"}, "--port -1: expected a whole number from 0 to 65535"),
        ({"port": "7070.5"}, "--port 7070.5: expected a whole number from 0 to 65535"),
        ({"shards": "0"}, "--shards 0: expected a whole number from 1 to 256"),
        ({"shards": "257"}, "--shards 257: expected a whole number from 1 to 256"),
        ({"memory": "lots"}, "--memory lots: expected a size such as 512MiB, 4GiB or 512Mi, or a number of bytes"),
        ({"memory": "-1GiB"}, "--memory -1GiB: expected a size"),
        ({"memory": "4 GiBs"}, "--memory '4 GiBs': expected a size"),
        ({"memory": "9" * 400}, "--memory 999"),
        ({"memory": ""}, "--memory '': expected a size"),
        ({"transient_memory": "101%"}, "--transient-memory 101%: expected a share from 0% to 100%, or a size such as"),
        ({"transient_memory": "some"}, "--transient-memory some: expected a share from 0% to 100%, or a size such as"),
        ({"transient_memory": "-1%"}, "--transient-memory -1%: expected a share"),
        ({"transient_memory": "5GiB"}, "--transient-memory 5GiB: expected at most the memory of all shards, 4GiB"),
        ({"segment": "much"}, "--segment much: expected a size"),
        ({"segment": "4KiB"}, "--segment 4KiB: expected at least 1MiB, and a multiple of 4KiB"),
        ({"segment": "1048577"}, "--segment 1048577: expected at least 1MiB, and a multiple of 4KiB"),
        (
            {"memory": "16MiB"},
            "--memory 16MiB: this gives each of 1 shard(s) 16777216 bytes: expected at least one segment of 32MiB; "
            "raise --memory, or lower --shards or --segment",
        ),
        ({"memory": "64MiB", "shards": "3"}, "--memory 64MiB: this gives each of 3 shard(s) 22369621 bytes"),
        ({"shards": "200"}, "--memory 4GiB (the default): this gives each of 200 shard(s) 21474836 bytes"),
        ({"policy": "mru"}, "--policy mru: expected one of "),
        ({"ttl_seconds": "-1"}, "--ttl-seconds -1: expected a whole number from 0 to 315360000"),
        ({"ttl_seconds": "10000000000"}, "--ttl-seconds 10000000000: expected a whole number from 0 to 315360000"),
        ({"disk": ""}, "--disk '': expected the path of a folder"),
        ({"disk_size": "big"}, "--disk-size big: expected a size"),
        (
            {"disk_size": "4MiB"},
            "--disk-size 4MiB: this gives each of 1 shard(s) 4194304 bytes: expected at least 8MiB for each shard; "
            "raise --disk-size",
        ),
        ({"disk_size": "64MiB", "shards": "9"}, "--disk-size 64MiB: this gives each of 9 shard(s) 7456540 bytes"),
        ({"disk_write": "some"}, "--disk-write some: expected one of all, reused, evicted"),
        ({"disk_key_file": "key"}, "--disk-key-file key: a key needs a disk tier: expected --disk as well"),
        ({"scrub_mbps": "-1"}, "--scrub-mbps -1: expected a whole number from 0 to 100000"),
        ({"cluster": "10.0.0.1:2379"}, "--cluster 10.0.0.1:2379: expected etcd://HOST:PORT"),
        ({"cluster": "etcd://a/n"}, "--cluster etcd://a/n: the address 'a' is not valid: expected HOST:PORT"),
        (
            {"cluster": "etcd://a:2379"},
            "--cluster etcd://a:2379: the cluster's name '' is not valid: expected etcd://HOST:PORT[,HOST:PORT...]/",
        ),
        ({"cluster": ""}, "--cluster '': expected etcd://HOST:PORT"),
        ({"cluster": "dns://kvstore:7070"}, "--cluster dns://kvstore:7070: expected etcd://HOST:PORT"),
        ({"cluster": CLUSTER, "node_id": "a/b"}, "--node-id a/b: expected 1 to 64 letters"),
        ({"cluster": CLUSTER, "node_id": ""}, "--node-id '': expected 1 to 64 letters"),
        ({"cluster": CLUSTER, "host": "0.0.0.0"}, "--host 0.0.0.0: other machines cannot connect to this address: giv"),
        ({"host": "10.0.0.7"}, "--host 10.0.0.7: other machines reach 10.0.0.7"),
        ({"http": "[::]:9100"}, "--http '[::]:9100': other machines reach ::"),
        ({"auth": "a.toml", "nixl": True}, "--nixl: reads by this transport need no login"),
        ({"nixl": True, "transport": "other"}, "--transport other: --nixl chooses a transport already"),
        ({"auth": ""}, "--auth '': expected a file"),
        ({"cluster": CLUSTER, "advertise": "::"}, "--advertise ::: other machines cannot connect to this address"),
        ({"cluster": CLUSTER, "advertise": "10.0.0.7:7070"}, "--advertise 10.0.0.7:7070: expected a host name or an"),
        ({"cluster": CLUSTER, "advertise": "a b"}, "--advertise 'a b': expected a host name or an address, without a"),
        ({"cluster": CLUSTER, "zone": "a,b"}, "--zone a,b: expected up to 64 letters"),
        ({"cluster": CLUSTER, "drain_seconds": "-1"}, "--drain-seconds -1: expected a whole number from 0 to 86400"),
        ({"cluster": CLUSTER, "lease_seconds": "1"}, "--lease-seconds 1: expected a whole number from 2 to 60"),
        (
            {"advertise": "10.0.0.7"},
            "--advertise 10.0.0.7: only a member of a cluster has this setting: give --cluster",
        ),
        ({"drain_seconds": "5"}, "--drain-seconds 5: only a member of a cluster has this setting: give --cluster too"),
        ({"log_level": "loud"}, "--log-level loud: expected one of debug, info, warning, error"),
        ({"log_format": "xml"}, "--log-format xml: expected one of text, json"),
        ({"http": ":9090"}, "--http :9090: expected HOST:PORT or [IPv6]:PORT, such as 0.0.0.0:9100"),
        ({"http": "9090"}, "--http 9090: expected HOST:PORT"),
        ({"http": "::1:9090"}, "--http ::1:9090: expected HOST:PORT or [IPv6]:PORT"),
        ({"http": "a:65536"}, "--http a:65536: expected HOST:PORT"),
        ({"http": "http://a:80"}, "--http http://a:80: expected HOST:PORT"),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) and len(str(value)) < 40 else "",
)
def test_an_invalid_setting_reports_the_given_and_the_expected_value(flags: dict[str, Any], message: str) -> None:
    assert refused(flags=flags).startswith(message)


@pytest.mark.parametrize("value", ["many", "", "1.5", "0x10"])
def test_a_variable_for_a_number_must_be_a_number(value: str) -> None:
    message = refused(environment={"KVSTORE_SERVER_SHARDS": value})
    shown = value or "''"
    assert message == f"KVSTORE_SERVER_SHARDS={shown}: expected a whole number from 1 to 256"


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ('match = "*"\nttl = 5', "[[namespaces]] number 1: object contains unknown field `ttl`"),
        ("ttl_seconds = 5", "[[namespaces]] number 1: object missing required field `match`"),
        ('match = "*"\nttl_seconds = "x"', "[[namespaces]] number 1, ttl_seconds: expected `int`, got `str`"),
        ('match = "*"\nttl_seconds = -1', "[[namespaces]] number 1, ttl_seconds: expected `int` >= 0"),
        ('match = "*"\n[[namespaces]]\nmatch = "*"\npriority = 4', "[[namespaces]] number 2, priority: expected `int`"),
        ("match = 5", "[[namespaces]] number 1, match: expected `str`, got `int`"),
    ],
)
def test_an_invalid_rule_is_named(write: Any, rule: str, problem: str) -> None:
    file = write(f"[[namespaces]]\n{rule}\n")
    assert refused(file).startswith(f"{file}: {problem}")


def test_variables_cannot_set_namespace_rules() -> None:
    message = refused(environment={"KVSTORE_SERVER_NAMESPACES": "[]"})
    assert "KVSTORE_SERVER_NAMESPACES" in message and "[[namespaces]]" in message and "--config" in message
    unknown = refused(environment={"KVSTORE_SERVER_NAMESPACE": "[]"})
    assert "'KVSTORE_SERVER_NAMESPACE'" in unknown and "KVSTORE_SERVER_NAMESPACES" not in unknown


@pytest.mark.parametrize("value", ["yes", "", "on"])
def test_a_variable_for_a_switch_is_true_or_false(value: str) -> None:
    message = refused(environment={"KVSTORE_SERVER_WARM_START": value})
    shown = value or "''"
    assert message == f"KVSTORE_SERVER_WARM_START={shown}: expected true or false"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("memory = -5", "a size such as"),
        ("memory = true", "a size such as"),
        ("memory = 1.5", "a size such as"),
        ("port = [1]", "a whole number from 0 to 65535"),
        ("disk = 5", "text"),
        ('log_level = "loud"', "one of debug, info, warning, error"),
        ("http = 9090", "HOST:PORT"),
    ],
)
def test_an_invalid_file_value_is_reported_with_file_and_key(write: Any, line: str, expected: str) -> None:
    file = write(f"{line}\n")
    shown = line.replace("[1]", "...")
    assert refused(file).startswith(f"{file}: {shown}: expected {expected}")


def test_conflicting_settings_are_reported_with_their_sources(write: Any) -> None:
    file = write('memory = "16Mi"\n')
    assert refused(file).startswith(f'{file}: memory = "16Mi": this gives each of 1 shard(s) 16777216 bytes')
    message = refused(environment={"KVSTORE_SERVER_DISK_SIZE": "4Mi"})
    assert message.startswith("KVSTORE_SERVER_DISK_SIZE=4Mi: this gives each of 1 shard(s) 4194304 bytes")
