"""The real engine on a cluster of three real nodes, one of which is killed. The kill costs only hits: with one copy of
each block, those of the node's own blocks; with two copies, none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvstore.cluster.members import Membership
from kvstore.wire.queries import ShardQueries
from tests.engine.driver import Answer, Ask
from tests.engine.engines import BLOCK, BLOCK_BYTES, Expected, StartEngine, full_blocks, prompt, until_it_hits
from tests.support.cluster import Cluster, owner_nodes
from tests.support.etcd import Etcd
from tests.support.harness import ANSWER_S, wait_until

NODES = ("n1", "n2", "n3")
SERVE_S = 20.0
LENGTHS = (40, 70, 100, 200)  # tokens: chains of 1, 2, 3 and 6 blocks, because the first missing block cuts a chain
LONG = 1500
OPTIONS = {"timeout_s": 10.0, "lookup_timeout_s": 10.0}  # long enough for a busy machine
LOOKUP_TIMEOUT_S = 0.5
TIMEOUT_S = 1.5
SLACK_S = 4.0  # what a busy machine may add

one_and_two_copies = pytest.mark.parametrize("replicas", [1, 2])


def mend(cluster: Cluster) -> None:
    """Restart the nodes that were killed, and wait until all nodes serve."""
    for node in cluster.nodes.values():
        if not node.running:
            node.restart()
    cluster.wait_for(SERVE_S, **dict.fromkeys(NODES, "serving"))


def kill_one_that_sends(cluster: Cluster, send_bytes: int, load: Callable[[], None]) -> None:
    """Call `load`, and kill the first node that has sent more than this, while the rest is still in transit."""
    with ExitStack() as stack:
        asked = {
            node: stack.enter_context(ShardQueries((server.host, server.port), ANSWER_S))
            for node, server in cluster.nodes.items()
        }
        shards = {node: server.shards()[0] for node, server in cluster.nodes.items()}
        before = {node: asking.info().bytes_out for node, asking in asked.items()}
        load()

        def sends() -> str | None:
            return next((node for node in NODES if asked[node].info().bytes_out > before[node] + send_bytes), None)

        node = wait_until(sends, what="a node sends")
        shards[node].kill()
    cluster.nodes[node].kill()


def kill(cluster: Cluster, node: str) -> None:
    """Kill a node, and wait until it is no longer a member."""
    cluster.nodes[node].kill()
    cluster.wait_until(lambda states: node not in states, ANSWER_S, f"{node} is out")


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with (
        Etcd(folder / "etcd") as etcd,
        Cluster(etcd.url("engines"), folder, memory="256MiB", grace_seconds=0) as cluster,
    ):
        for node in NODES:
            cluster.start(node, zone=f"zone-{node}")
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """A cluster whose nodes all serve; the test may kill them."""
    mend(shared_cluster)
    return shared_cluster


def check(expected: Expected, prompts: list[list[int]], answers: list[Answer]) -> None:
    assert [answer.token_ids for answer in answers] == expected(*prompts)


def tokens_kept(membership: Membership, question: list[int], keys: list[bytes], dead: str) -> int:
    """With one copy of each block, return how many tokens of a prompt are still found: those before the dead node's
    first block."""
    blocks = full_blocks(len(question)) // BLOCK
    packed = np.frombuffer(b"".join(keys[:blocks]), dtype=np.uint8).reshape(blocks, -1)
    owners = owner_nodes(membership.members, packed, 1)[:, 0].tolist()
    return BLOCK * (owners.index(dead) if dead in owners else blocks)


@one_and_two_copies
def test_a_node_killed_between_runs_costs_at_most_its_blocks(
    cluster: Cluster, start_engine: StartEngine, expected: Expected, replicas: int
) -> None:
    questions = [prompt(1000 * replicas + number, LENGTHS[number % len(LENGTHS)]) for number in range(16)]
    options = {**OPTIONS, "replicas": replicas, "tenant": f"between-{replicas}"}
    first = start_engine(cluster.url, options=options)
    computed = first.play(*[Ask(question) for question in questions])
    check(expected, questions, computed)
    assert not any(answer.cached_tokens for answer in computed)
    first.settle()

    membership = cluster.membership()
    kill(cluster, "n2")
    second = start_engine(cluster.url, options=options)
    answers = second.generate(*questions)
    check(expected, questions, answers)
    everything = [full_blocks(len(question)) for question in questions]
    kept = everything
    if replicas == 1:
        kept = [
            tokens_kept(membership, question, answer.keys, "n2")
            for question, answer in zip(questions, computed, strict=True)
        ]
        assert 0 < sum(kept) < sum(everything), "n2 has some of the blocks, not all of them"
    assert [answer.cached_tokens for answer in answers] == kept
    second.settle()
    numbers = second.metrics()
    assert (numbers["failed_loads"], numbers["checksum_errors"], numbers["defects"]) == (0, 0, 0)
    # The lost blocks are stored again on the remaining nodes. The first engine knows that the node has gone, and finds
    # them there.
    assert second.stop() == 0
    first.reset_prefix_cache()
    answers = first.generate(*questions)
    check(expected, questions, answers)
    assert [answer.cached_tokens for answer in answers] == everything


@one_and_two_copies
def test_a_node_killed_while_the_engine_serves_fails_no_request(
    cluster: Cluster, start_engine: StartEngine, expected: Expected, replicas: int
) -> None:
    options = {"timeout_s": TIMEOUT_S, "lookup_timeout_s": LOOKUP_TIMEOUT_S, "replicas": replicas}
    engine = start_engine(
        cluster.url, options={**options, "tenant": f"serving-{replicas}"}, enable_prefix_caching=False
    )
    questions = [prompt(1000 * replicas + number, LONG) for number in (500, 501, 502)]
    engine.generate(prompt(1))  # the first request takes longer
    answers = [engine.generate(question)[0] for question in questions]
    check(expected, questions, answers)
    compute_s = max(answer.seconds for answer in answers)
    for question in questions:
        until_it_hits(engine, question)
    engine.settle()
    before = engine.metrics()

    kill_one_that_sends(cluster, 4 * BLOCK_BYTES, lambda: engine.order(*questions))
    answers = engine.result()
    check(expected, questions, answers)
    started = time.monotonic()
    expected(*(prompt(1000 * replicas + number, LONG) for number in (510, 511, 512)))  # the machine's speed now
    computed_s = max(len(questions) * compute_s, time.monotonic() - started)
    assert max(answer.seconds for answer in answers) < computed_s + LOOKUP_TIMEOUT_S + TIMEOUT_S + SLACK_S
    # The node stays dead: no request waits for it, and its blocks are stored again on the others.
    answers = engine.generate(*questions)
    check(expected, questions, answers)
    assert max(answer.seconds for answer in answers) < computed_s + SLACK_S
    engine.settle()
    gained = {name: value - before[name] for name, value in engine.metrics().items()}
    if replicas == 2:
        assert [answer.cached_tokens for answer in answers] == [full_blocks(LONG)] * len(questions)
        assert (gained["failed_loads"], gained["missed_blocks"]) == (0, 0)
    for question in questions:
        until_it_hits(engine, question)
    # The node returns empty, and owns the same blocks as before.
    mend(cluster)
    check(expected, questions, engine.generate(*questions))
    for question in questions:
        until_it_hits(engine, question)
    assert engine.metrics()["checksum_errors"] == engine.metrics()["defects"] == 0
