"""Prometheus' own checker, with the alert rules and every query of the dashboard, and the alerts for invented
series."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.support.deployment import DOCKER, expressions
from tests.support.network import need

ALERTS = DOCKER / "prometheus" / "alerts.yml"
NODE = 'instance="n1:9100"'
SHARD = f'{NODE}, shard="0"'
LOOKUPS = f'kvstore_request_seconds_bucket{{{SHARD}, verb="contains", tier="memory", le='

# Series with a value per minute, in promtool's form, and the alert that they cause after 15 minutes, with its labels.
CASES = {
    "a shard that does not answer": (
        {f"kvstore_shard_up{{{SHARD}}}": "0x20"},
        {"KVStoreShardDown": {"shard": "0", "severity": "page"}},
    ),
    "a TLS process that is gone": (
        {f"kvstore_tls_up{{{SHARD}}}": "0x20"},
        {"KVStoreTLSDown": {"shard": "0", "severity": "page"}},
    ),
    "handshakes that fail": (
        {
            f"kvstore_tls_failed_handshakes_total{{{SHARD}}}": "0+600x20",
            f"kvstore_tls_handshakes_total{{{SHARD}}}": "0+60x20",
        },
        {"KVStoreTLSHandshakesFail": {"shard": "0", "severity": "ticket"}},
    ),
    "slow look-ups": (
        {f'{LOOKUPS}"0.032768"}}': "0+10x20", f'{LOOKUPS}"0.131072"}}': "0+20x20", f'{LOOKUPS}"+Inf"}}': "0+20x20"},
        {"KVStoreSlowLookups": {"severity": "ticket"}},
    ),
    "quick look-ups": ({f'{LOOKUPS}"0.000064"}}': "0+20x20", f'{LOOKUPS}"+Inf"}}': "0+20x20"}, {}),
    "few descriptors left": (
        {f"kvstore_open_fds{{{SHARD}}}": "900x20", f"kvstore_max_fds{{{SHARD}}}": "1024x20"},
        {"KVStoreDescriptors": {"shard": "0", "severity": "ticket"}},
    ),
}


def promtool(*arguments: str | Path) -> str:
    need("" if shutil.which("promtool") else "promtool is not installed")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_the_rules_and_dashboard_queries(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", ALERTS)
    queries = [query.replace("$__rate_interval", "1m").replace("$node", ".*") for query in expressions()]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))  # JSON is YAML
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    names = {name for _, expected in CASES.values() for name in expected}
    tests = [
        {
            "interval": "1m",
            "name": name,
            "input_series": [{"series": series, "values": values} for series, values in given.items()],
            "alert_rule_test": [
                {
                    "eval_time": "15m",
                    "alertname": alert,
                    "exp_alerts": [{"exp_labels": {"instance": "n1:9100", **expected[alert]}}]
                    if alert in expected
                    else [],
                }
                for alert in sorted(names)
            ],
        }
        for name, (given, expected) in CASES.items()
    ]
    rules = tmp_path / "alerts.yml"
    text = [line for line in ALERTS.read_text().splitlines() if "annotations:" not in line and "summary:" not in line]
    rules.write_text("\n".join(text))  # without the descriptions, which expected alerts would have to repeat
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)
