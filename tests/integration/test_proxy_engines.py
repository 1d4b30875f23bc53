"""How the proxy learns of engines and of their blocks: from a real etcd in which they register, or from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore_client.engine.directory import EngineList, EngineRecord, Registered
from tests.support import forked
from tests.support.etcd import Etcd
from tests.support.harness import Server, environment, wait_until
from tests.support.kv_events import Publisher
from tests.support.ports import free_ports
from tests.support.proxies import ProxyProcess, StandInEngine, chunks_of, get, post, text_of
from tests.support.stand_in_engine import MODEL, expected

ASK = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}


def test_the_proxy_follows_engines_and_changes_of_their_weights(tcp_server: Server, tmp_path: Path) -> None:
    with Etcd(tmp_path / "etcd") as etcd:
        url = etcd.url("fleet")
        arguments = (f"--store={tcp_server.endpoint}", f"--engines={url}", "--policy=split", "--check-seconds=0.1")
        engines = [StandInEngine(tmp_path / f"{number}.log") for number in range(2)]
        try:
            with ProxyProcess(tmp_path / "proxy", *arguments) as proxy:
                assert proxy.first_line.endswith("prefill=0 decode=0")
                assert post(proxy.url, "/v1/completions", ASK)[0] == 503

                def decision() -> tuple[int, str]:
                    name = f"request-{len(proxy.access.read_text().splitlines())}"
                    status = post(proxy.url, "/v1/completions", ASK, **{"x-request-id": name})[0]
                    return status, proxy.record(name)["decision"]

                decode = EngineRecord(engines[0].url, ("decode",), weights="1")
                with Registered(url, "d", decode, ttl_s=3):
                    wait_until(lambda: decision() == (200, "colocate"), what="the decode engine is used")
                    with Registered(url, "p", EngineRecord(engines[1].url, ("prefill",), weights="2"), ttl_s=3):
                        wait_until(lambda: proxy.status()["unpaired"], what="other weights are noticed")
                        assert decision() == (200, "colocate")
                        assert proxy.metrics()["kvstore_proxy_unpaired_engines"] == 1
                    wait_until(lambda: not proxy.status()["pools"]["prefill"], what="the prefill engine has left")
                    with Registered(url, "p", EngineRecord(engines[1].url, ("prefill",), weights="1"), ttl_s=3):
                        wait_until(lambda: decision() == (200, "split"), what="the pair is used")
                        etcd.kill()
                        assert decision() == (200, "split")
                        etcd.restart(empty=True)
                        wait_until(lambda: decision() == (200, "split"), what="both have registered again")
        finally:
            for engine in engines:
                engine.kill()


def test_an_engine_that_withdraws_is_removed_at_once_and_stays_away(tmp_path: Path) -> None:
    with Etcd(tmp_path / "etcd") as etcd:
        url = etcd.url("fleet")
        record = EngineRecord("http://127.0.0.1:1", ("decode",))
        heard: list[dict[str, EngineRecord]] = []
        engines = EngineList(url, heard.append)
        with Registered(url, "d", record, ttl_s=600) as entry:
            wait_until(lambda: heard and heard[-1] == {"d": record}, what="it is there")
            entry.withdraw()
            wait_until(lambda: not heard[-1], what="it has left")
            entry.update()
        engines.close()
        assert not heard[-1]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    found = Publisher()
    yield found
    found.close()


def entry(engine: StandInEngine, role: str, more: str = "") -> str:
    return f'[[engines]]\nurl = "{engine.url}"\nroles = ["{role}"]\n{more}\n'


def test_the_proxy_follows_a_file_and_the_events_it_names(
    tcp_server: Server, tmp_path: Path, publisher: Publisher
) -> None:
    engines = [StandInEngine(tmp_path / f"{number}.log") for number in range(2)]
    pools, new = tmp_path / "pools.toml", tmp_path / "new.toml"
    pools.write_text(entry(engines[0], "decode"))
    options = (f"--store={tcp_server.endpoint}", f"--pools={pools}", "--split-tokens=64", "--check-seconds=0.1")
    asked = 0

    def ask(prompt: list[int]) -> tuple[str, str]:
        nonlocal asked
        asked += 1
        name = f"request-{asked}"
        assert post(proxy.url, "/v1/completions", {**ASK, "prompt": prompt}, **{"x-request-id": name})[0] == 200
        record = proxy.record(name)
        return record["decision"], record["why"]

    try:
        with ProxyProcess(tmp_path / "proxy", *options) as proxy:
            assert proxy.first_line.endswith("prefill=0 decode=1")
            assert ask(list(range(100)))[0] == "colocate"
            both = entry(engines[0], "decode", f'events = "{publisher.live}"') + entry(engines[1], "prefill")
            new.write_text(both)
            os.replace(new, pools)
            wait_until(lambda: proxy.status()["pools"]["prefill"], what="the prefill engine is there")
            wait_until(lambda: ask(list(range(asked * 200, asked * 200 + 100)))[0] == "split", what="the pair is used")
            # The decode engine reports blocks that this proxy has never seen.
            told = list(range(50_000, 50_096))

            def heard() -> bool:
                publisher.store(told)  # the event reaches the proxy only if the proxy listens already
                return ask([*told, asked])[1] == "1 uncached tokens"

            wait_until(heard, what="its events are heard")
            pools.write_text("[[engines")
            log = proxy.log
            wait_until(lambda: "stay as they are" in log.read_text(), what="the wrong file is told of")
            assert ask(list(range(60_000, 60_100)))[0] == "split"
            pools.write_text(entry(engines[1], "decode"))
            wait_until(lambda: not proxy.status()["pools"]["prefill"], what="it is a decode engine now")
            assert [each["url"] for each in proxy.status()["pools"]["decode"]] == [engines[1].url]
            assert ask([*told, 1])[0] == "colocate"
            assert log.read_text().count("stay as they are") == 1
    finally:
        for engine in engines:
            engine.kill()


NAMES = {"namespaces": "a", "generation": 3}


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"namespaces": "b"}, "other namespaces"),
        ({"generation": 4}, "generations 3 and 4 of the namespaces"),
        ({"namespaces": "none"}, "one of them shares no blocks now"),
    ],
)
def test_engines_that_name_blocks_differently_are_paired_once_they_agree(
    tcp_server: Server, tmp_path: Path, others: dict[str, object], why: str
) -> None:
    p, d = (StandInEngine(tmp_path / f"{name}.log") for name in "pd")
    try:
        p.behave(names=NAMES)
        d.behave(names={**NAMES, **others})
        options = (f"--prefill={p.url}", f"--decode={d.url}", "--policy=split", "--check-seconds=0.1")
        with ProxyProcess(tmp_path / "proxy", f"--store={tcp_server.endpoint}", *options) as proxy:
            assert post(proxy.url, "/v1/completions", ASK, **{"x-request-id": "first"})[0] == 200
            assert proxy.record("first")["decision"] == "colocate", "the first request is not lost either"
            (told,) = proxy.status()["unpaired"]
            assert told["alone"] and (told["decode"]["url"], told["prefill"][0]["url"]) == (d.url, p.url)
            assert told["prefill"][0]["why"] == why
            metrics = proxy.metrics()
            assert metrics["kvstore_proxy_unpaired_engines"] == 1
            labels = f'decode="{d.url}",model="{MODEL}",prefill="{p.url}",why="{why}"'
            assert metrics[f"kvstore_proxy_unpaired_pairs{{{labels}}}"] == 1
            wait_until(lambda: f"is not paired with {p.url}: {why}" in proxy.log.read_text(), what="the log says it")
            d.behave(names=NAMES)
            wait_until(lambda: not proxy.status()["unpaired"], what="it is asked again")
            assert post(proxy.url, "/v1/completions", ASK, **{"x-request-id": "last"})[0] == 200
            assert proxy.record("last")["decision"] == "split"
            assert proxy.log.read_text().count("is not paired with") == 1
    finally:
        p.kill()
        d.kill()


def test_equal_weights_in_another_folder_are_paired(tcp_server: Server, tmp_path: Path) -> None:
    """Engines are paired by the weights that they report for the model and its adapters, and not by the location of the
    files."""
    adapters = [f"--adapter={name}" for name in ("same", "other")]
    p = StandInEngine(tmp_path / "p.log", "--root=/models/a", "--adapter-root=/a", *adapters)
    d = StandInEngine(tmp_path / "d.log", "--root=/models/b", "--adapter-root=/b", *adapters)
    try:
        p.behave(names=NAMES, contents={"same": "1", "other": "2"})
        d.behave(names=NAMES, contents={"same": "1", "other": "3"})
        options = (f"--prefill={p.url}", f"--decode={d.url}", "--policy=split", "--check-seconds=0.1")
        with ProxyProcess(tmp_path / "proxy", f"--store={tcp_server.endpoint}", *options) as proxy:
            asked = iter(range(1000))

            def decision(model: str) -> str:
                name = f"{model} {next(asked)}"
                body = {**ASK, "model": model}
                assert post(proxy.url, "/v1/completions", body, **{"x-request-id": name})[0] == 200
                return str(proxy.record(name)["decision"])

            assert decision(MODEL) == "split"
            assert decision("same") == "colocate", "it is not known yet what is in it"
            wait_until(lambda: decision("same") == "split", what="the content is found to be the same")
            told = {each["model"]: each["prefill"][0]["why"] for each in proxy.status()["unpaired"]}
            assert told == {"other": "another root"}
            assert decision("other") == "colocate"
            wait_until(lambda: "another adapter" in str(proxy.status()["unpaired"]), what="its content is known")
            assert decision("other") == "colocate"
    finally:
        p.kill()
        d.kill()


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("renders", [200, 403, 404])
def test_a_chat_is_rendered_once_and_both_engines_get_its_tokens(
    tcp_server: Server, tmp_path: Path, stream: bool, renders: int
) -> None:
    """The chat template contains the date, and the two engines have different dates."""
    p, d = (StandInEngine(tmp_path / f"{name}.log") for name in "pd")
    try:
        for number, engine in enumerate((p, d)):
            engine.behave(date=[2026, number], cached=100, **({} if renders == 200 else {"renders_not": renders}))
        options = (f"--prefill={p.url}", f"--decode={d.url}", "--split-tokens=64", "--check-seconds=0.1")
        with ProxyProcess(tmp_path / "proxy", f"--store={tcp_server.endpoint}", *options) as proxy:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "a long question " * 20}], "max_tokens": 5}
            body |= {"temperature": 0, "stream": stream}
            if stream:
                said = text_of(chunks_of(proxy.url, CHAT, body, **{"x-request-id": "one"}))
            else:
                status, whole = post(proxy.url, CHAT, body, **{"x-request-id": "one"})
                assert status == 200
                said = json.loads(whole)["choices"][0]["message"]["content"]
            assert proxy.record("one")["decision"] == "split"
            sent = [engine.seen()["requests"][0]["body"] for engine in (p, d)]
            given = [each["kv_transfer_params"].get("prompt_token_ids") for each in sent]
            assert [each["messages"] for each in sent] == [body["messages"]] * 2
            if renders == 200:
                assert given[0] == given[1] and given[0][:2] == [2026, 1]
                assert said == expected(given[0], 5)
            else:
                assert given == [None, None], "what /tokenize says may not be all that the template shows"
    finally:
        p.kill()
        d.kill()


def test_both_engines_get_a_text_as_the_same_tokens(tcp_server: Server, tmp_path: Path) -> None:
    p, d = (StandInEngine(tmp_path / f"{name}.log") for name in "pd")
    try:
        options = (f"--prefill={p.url}", f"--decode={d.url}", "--split-tokens=64", "--check-seconds=0.1")
        with ProxyProcess(tmp_path / "proxy", f"--store={tcp_server.endpoint}", *options) as proxy:
            for more in ({}, {"truncate_prompt_tokens": 70}, {"prompt": "short"}):
                text = "a long text " * 10
                assert post(proxy.url, "/v1/completions", {**ASK, "prompt": text, **more})[0] == 200
                sent = d.seen()["requests"][-1]["body"]["prompt"]
                assert sent == (more.get("prompt", text) if more else list(text.encode()))
            assert p.seen()["requests"][0]["body"]["prompt"] == list(text.encode())
    finally:
        p.kill()
        d.kill()


def test_engines_are_queried_again_when_prompts_do_not_arrive(tcp_server: Server, tmp_path: Path) -> None:
    """The properties of an engine may have changed since the proxy asked for them."""
    p, d = (StandInEngine(tmp_path / f"{name}.log") for name in "pd")
    try:
        p.behave(names=NAMES)
        d.behave(names=NAMES, cached=0, delay_s=0.2)
        options = (f"--prefill={p.url}", f"--decode={d.url}", "--policy=split", "--check-seconds=0.1")
        with ProxyProcess(tmp_path / "proxy", f"--store={tcp_server.endpoint}", *options) as proxy:
            p.behave(names={"namespaces": "none", "generation": -1})
            for number in range(2):
                body = {**ASK, "prompt": [number] * 100}
                assert post(proxy.url, "/v1/completions", body, **{"x-request-id": str(number)})[0] == 200
                assert proxy.record(str(number))["decision"] == "split"
            wait_until(lambda: proxy.status()["unpaired"], what="it was asked again")
            assert proxy.status()["unpaired"][0]["prefill"][0]["why"] == "one of them shares no blocks now"
            assert p.seen()["described"] < 5
            p.behave(names=NAMES)
            wait_until(lambda: not proxy.status()["unpaired"], what="it shares again")
            d.behave(names=NAMES, cached=100)
            assert post(proxy.url, "/v1/completions", ASK, **{"x-request-id": "last"})[0] == 200
            assert proxy.record("last")["decision"] == "split", "what did not arrive before says nothing now"
            assert not proxy.status()["not_arriving"]
    finally:
        p.kill()
        d.kill()


@pytest.mark.parametrize("differs", ["root", "weights"])
def test_engines_of_another_model_or_version_are_never_paired(tcp_server: Server, tmp_path: Path, differs: str) -> None:
    """Such engines also never continue an answer that another one has begun."""
    versions = {"p": "1", "a": "1", "b": "2"}
    roots = {name: f"/models/{version if differs == 'root' else '1'}" for name, version in versions.items()}
    engines = {name: StandInEngine(tmp_path / f"{name}.log", "--root", root) for name, root in roots.items()}
    p, a, b = engines.values()
    roles = {"p": "prefill", "a": "decode", "b": "decode"}
    weights = {name: f'weights = "{version}"' if differs == "weights" else "" for name, version in versions.items()}
    pools = tmp_path / "pools.toml"
    pools.write_text("".join(entry(engines[name], roles[name], weights[name]) for name in "pab"))
    options = (f"--store={tcp_server.endpoint}", f"--pools={pools}", "--policy=split", "--check-seconds=0.1")
    try:
        with ProxyProcess(tmp_path / "proxy", *options) as proxy:
            wait_until(lambda: proxy.status()["unpaired"], what="one has nobody to prefill for it")
            (told,) = proxy.status()["unpaired"]
            assert told["decode"]["url"] == b.url and [each["url"] for each in told["prefill"]] == [p.url]
            assert told["decode"][differs] != told["prefill"][0][differs]
            for engine in (a, b):
                engine.behave(delay_s=0.5)  # so that two requests at once go to both

            def ask(number: int) -> None:
                body = {**ASK, "prompt": [number] * 40}
                assert post(proxy.url, "/v1/completions", body, **{"x-request-id": str(number)})[0] == 200

            with ThreadPoolExecutor(2) as users:
                list(users.map(ask, range(8)))
            records = [proxy.record(str(number)) for number in range(8)]
            decided = {(record["decode"], record["decision"], record["prefill"]) for record in records}
            assert decided == {(a.url, "split", p.url), (b.url, "colocate", "")}

            def prompts(engine: StandInEngine) -> list[list[int]]:
                return sorted(seen["body"]["prompt"] for seen in engine.seen()["requests"])

            assert prompts(p) == prompts(a)
            b.behave()
            a.behave(cut_at=3)
            prompt = list(range(40))
            body = {**ASK, "max_tokens": 12, "prompt": prompt}
            chunks = chunks_of(proxy.url, "/v1/completions", body, **{"x-request-id": "cut"})
            assert text_of(chunks) == expected(prompt, 12)
            assert proxy.record("cut")["retries"] == 1 and not b.seen()["requests"]
    finally:
        for engine in engines.values():
            engine.kill()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "engines"),
        ('[[engines]]\nurl = "http://127.0.0.1:1"\nroles = ["decode"]\nevents = "nonsense"', "'nonsense'"),
    ],
)
def test_an_unusable_file_prevents_the_start(tcp_server: Server, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "pools.toml").write_text(text)
    words = ["proxy", "--listen", "127.0.0.1:0", "--store", tcp_server.endpoint]
    done = forked.run("kvstore_cli", *words, "--pools", str(tmp_path / "pools.toml"), env=environment())
    assert done.returncode == 2 and says in done.stderr and "expected" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_file_prevents_the_start_and_is_named_once(tcp_server: Server, tmp_path: Path) -> None:
    missing = str(tmp_path / "nix")
    words = ["proxy", "--listen", "127.0.0.1:0", "--store", tcp_server.endpoint, "--pools", missing]
    done = forked.run("kvstore_cli", *words, env=environment())
    assert done.returncode == 2 and f"--pools {missing}: No such file" in done.stderr, done.stderr
    assert done.stderr.count(missing) == 1


def test_an_invalid_store_prevents_the_start_with_one_line() -> None:
    words = ["proxy", "--listen", "127.0.0.1:0", "--decode", "http://127.0.0.1:1", "--store", "foo"]
    done = forked.run("kvstore_cli", *words, env=environment())
    assert done.returncode == 2 and "--store" in done.stderr and "'foo'" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_unusable_records_are_refused_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="engine's name"):
        Registered("etcd://127.0.0.1:2379/fleet", "a/b", EngineRecord("http://h:1", ("decode",)))
    with pytest.raises(ValueError, match="url"):
        Registered("etcd://127.0.0.1:2379/fleet", "a", EngineRecord("ftp://h:1", ("decode",)))
    with pytest.raises(ValueError, match="etcd"):
        Registered("dns://cache:7070", "a", EngineRecord("http://h:1", ("decode",)))


def test_the_proxy_says_ready_once_readyz_succeeds(tcp_server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    options = [f"--store={tcp_server.endpoint}", f"--decode={url}", "--check-seconds=0.1"]
    with ProxyProcess(tmp_path / "proxy", *options) as proxy:
        assert proxy.first_line == f"kvstore proxy listens {proxy.url} prefill=0 decode=1"
        assert get(proxy.url, "/readyz") == (503, b"no healthy engine\n")
        refused, _ = post(proxy.url, "/v1/completions", ASK, **{"x-request-id": "no-engine"})
        record = proxy.record("no-engine")
        assert (refused, record["decision"], record["ttft_s"]) == (503, "none", None)
        assert b'{decision="none",endpoint="/v1/completions",outcome="failed"} 1.0' in get(proxy.url, "/metrics")[1]
        [engine] = proxy.status()["pools"]["decode"]
        assert engine["why_down"] == f"cannot connect to {url.removeprefix('http://')}: Connection refused"
        started = StandInEngine(tmp_path / "d.log", url=url)
        try:
            assert proxy.next_line() == f"kvstore proxy ready {proxy.url} prefill=0 decode=1"
            assert get(proxy.url, "/readyz")[0] == 200
        finally:
            started.kill()
