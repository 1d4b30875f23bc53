"""The example with a store, two `vllm serve` processes and the proxy, which readers of the documents run first."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.engine.examples import run_example


@pytest.mark.timeout(400)
def test_one_engine_prefills_and_another_answers_through_the_proxy(tmp_path: Path) -> None:
    options = ["--json", "--keep", "--model", "tiny", "--prompt-tokens", "1000"]
    result = run_example("disaggregated.py", *options, folder=tmp_path, end_at="Ctrl-C ends all of it")
    said = (tmp_path / "stderr").read_text()
    kept = dict(re.findall(r"^  (proxy|P|D|store)\b.* ((?:http|tcp)://127.0.0.1:\d+)", said, re.MULTILINE))
    assert set(kept) == {"proxy", "P", "D", "store"} and f"curl -s {kept['proxy']}/v1/completions" in said, said
    (logs,) = re.findall(r"with logs in\s+(\S+)\s+\(deleted\s+at\s+the\s+end\):", said)
    assert not Path(logs).exists()
    assert said.rstrip().endswith("stopped")
    for url in kept.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    assert result["decision"] == "split" and result["token_ids_equal"] and result["hand_overs"] == 5
    for answers in (result["alone"], result["apart"]):
        assert len(answers) == 3 and all(0 < each["first_token_s"] < each["seconds"] for each in answers)
        assert all(0 < each["longest_pause_s"] < each["seconds"] for each in answers)
    assert 0 < result["phases_s"]["prefill"] < max(each["seconds"] for each in result["apart"])
