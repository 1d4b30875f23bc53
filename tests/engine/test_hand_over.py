"""Prompts handed over through the store from an engine that computes them to one that decodes.

The expected tokens always come from an engine that did everything itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.remote_kv_cache.engine_models import EngineModel, save_model
from tests.engine.driver import Ask
from tests.engine.engines import LONGEST, Engine, Expected, Ledger, StartEngine, full_blocks, namespaces, prompt
from tests.engine.site import Site
from tests.engine.trace_waits import LATE_S, waited
from tests.support.harness import Server, wait_until

PREFILL, DECODE = "do_remote_decode", "do_remote_prefill"
# A model whose blocks are twice as large as those of the other tests' model.
LARGER = EngineModel("larger", 512, 1024, 8, 8, 4, 4096)
CHUNKS = {"max_num_batched_tokens": 256, "max_num_seqs": 4}  # a prompt takes several steps

# Values of the option for the number of layer slices in a block.
IN_PARTS = pytest.mark.parametrize("parts", [{}, {"layer_parts": 4}], ids=["whole blocks", "parts"], scope="module")


def nothing_left(server: Server) -> None:
    """Wait until no block is promised or waited for."""
    wait_until(
        lambda: all((each.promised, each.awaited) == (0, 0) for each in namespaces(server)),
        what="no block is promised or awaited",
    )


@pytest.fixture(scope="module")
def shared_site(parts: dict[str, int], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = Site(tmp_path_factory.mktemp("site"), model, parts, **CHUNKS)
    yield found
    found.stop()


@pytest.fixture
def site(shared_site: Site, request: pytest.FixtureRequest) -> Iterator[Site]:
    """The site for tests with `IN_PARTS` whose engines have no other options. Engine 0 is `prefiller`, engine 1 is
    `decoder`."""
    yield from shared_site.used_by(request)


@pytest.fixture
def prefiller(site: Site) -> Engine:
    return site.engine(0)


@pytest.fixture
def decoder(site: Site) -> Engine:
    return site.engine(1)


@pytest.fixture(scope="module")
def shared_flights(parts: dict[str, int], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    options = {"single_flight_s": 30, **parts}
    found = Site(tmp_path_factory.mktemp("flights"), model, options, **CHUNKS, max_model_len=LONGEST)
    yield found
    found.stop()


@pytest.fixture
def flights(shared_flights: Site, request: pytest.FixtureRequest) -> Iterator[Site]:
    """The site for tests with `IN_PARTS` whose engines wait half a minute for each other's prompts."""
    yield from shared_flights.used_by(request)


@IN_PARTS
def test_the_decode_side_loads_blocks_while_the_prefill_side_computes(
    site: Site, prefiller: Engine, decoder: Engine, expected: Expected
) -> None:
    books = Ledger(decoder)
    questions = [prompt(seed, 1500) for seed in (1, 2, 3)]
    for question in questions:
        decoder.order_play(Ask(question, 12, side=DECODE))  # comes first: no block is promised yet
        [first] = prefiller.play(Ask(question, 1, side=PREFILL))
        [answer] = decoder.result()
        [right] = expected(question, max_tokens=12)
        assert answer.token_ids == right
        assert answer.cached_tokens == 1500, "also the tokens behind the last whole block"
        assert first.token_ids == right[:1]
        assert first.params is not None
        assert (first.params[DECODE], first.params[PREFILL]) == (True, False)
    assert books["hand_overs/decode"] == 3
    assert books["failed_loads"] == books["unpromised_requests"] == books["unkept_blocks"] == 0
    nothing_left(site.server)


@IN_PARTS
def test_an_engine_can_take_either_side_of_each_request(
    site: Site, prefiller: Engine, decoder: Engine, expected: Expected
) -> None:
    """Each engine gets several requests at once: some to prefill, some to decode, and one that is not handed over.

    An engine promises a prompt when it begins to compute it, and the other engine waits 2 s for that promise. So each
    engine has only two short prompts to compute.
    """
    questions = [prompt(seed, 400) for seed in range(10, 14)]
    alone = prompt(14, 700)
    asks = [[Ask(alone, 8, at=2)], [Ask(alone, 8, at=2)]]
    for number, question in enumerate(questions):
        asks[number % 2].append(Ask(question, 1, side=PREFILL))
        asks[1 - number % 2].append(Ask(question, 12, side=DECODE))
    prefiller.order_play(*asks[0])
    decoder.order_play(*asks[1])
    for engine, asked in ((prefiller, asks[0]), (decoder, asks[1])):
        answers = engine.result()
        for ask, answer in zip(asked, answers, strict=True):
            assert [answer.token_ids] == expected(ask.prompt, max_tokens=ask.max_tokens)
            if ask.side == DECODE:
                assert answer.cached_tokens == 400
    for engine in (prefiller, decoder):
        engine.settle()
    nothing_left(site.server)


@IN_PARTS
def test_a_prompt_without_a_promise_is_computed(site: Site, decoder: Engine, expected: Expected) -> None:
    question = prompt(20, 600)
    books = Ledger(decoder)
    [answer] = decoder.play(Ask(question, 8, side=DECODE))
    assert [answer.token_ids] == expected(question)
    assert answer.cached_tokens == 0
    assert books["unpromised_requests"] == 1
    tries = (Ask(prompt(21 + each, 600), 8, side=DECODE, options={"wait_s": 0.05}) for each in range(5))
    assert any(decoder.play(each)[0].seconds < 2 for each in tries), "it waits no longer than it was told to"
    nothing_left(site.server)


@IN_PARTS
def test_one_of_several_engines_computes_a_simultaneous_prompt(flights: Site, expected: Expected) -> None:
    """One of the requests computes the prompt, and all others load its blocks."""
    engines = [flights.engine(number) for number in range(2)]
    question = prompt(40, 2300)
    [right] = expected(question)
    for engine in engines:
        engine.order_play(*[Ask(question, 8) for _ in range(8)])
    answers = [answer for engine in engines for answer in engine.result()]
    assert [answer.token_ids for answer in answers] == [right] * 16
    assert sorted(answer.cached_tokens for answer in answers) == [0] + [full_blocks(2300)] * 15
    for engine in engines:
        engine.settle()
    nothing_left(flights.server)


@IN_PARTS
def test_a_prompt_with_a_known_beginning_is_handed_over_in_full(
    site: Site, prefiller: Engine, decoder: Engine, expected: Expected
) -> None:
    for number, known in enumerate(("decode", "prefill", "both")):
        question = prompt(120 + number, 1000)
        for name, engine in (("decode", decoder), ("prefill", prefiller)):
            engine.generate(question[:512] if known in (name, "both") else prompt(99, 40), max_tokens=1)
            engine.settle()
        decoder.order_play(Ask(question, 12, side=DECODE))
        [first] = prefiller.play(Ask(question, 1, side=PREFILL))
        [answer] = decoder.result()
        [right] = expected(question, max_tokens=12)
        assert (answer.token_ids, first.token_ids) == (right, right[:1]), known
        assert (answer.cached_tokens, first.cached_tokens) == (1000, 512), known
        nothing_left(site.server)


@IN_PARTS
def test_a_decode_request_aborted_while_waiting_leaves_nothing(
    site: Site, prefiller: Engine, decoder: Engine, expected: Expected
) -> None:
    question = prompt(130, 1500)
    prefiller.order_play(Ask(question, 1, side=PREFILL))
    decoder.order_play(Ask(question, 12, side=DECODE, abort="loading"))
    [gone] = decoder.result()
    assert gone.aborted
    decoder.settle()
    [right] = expected(question, max_tokens=12)
    assert [answer.token_ids for answer in prefiller.result()] == [right[:1]]
    nothing_left(site.server)
    [again] = decoder.play(Ask(question, 12, side=DECODE))
    assert (again.token_ids, again.cached_tokens) == (right, 1500)


@IN_PARTS
def test_no_request_waits_too_long_for_a_frozen_prefill_engine(
    site: Site, prefiller: Engine, decoder: Engine, expected: Expected
) -> None:
    """The promise lasts half a minute, but the decode side waits only as long as its request says."""
    question, since = prompt(140, 1500), time.time()
    prefiller.order_play(Ask(question, 1, side=PREFILL))
    wait_until(lambda: any(each.promised for each in namespaces(site.server)), what="the prompt is promised")
    with prefiller.stopped():
        [answer] = decoder.play(Ask(question, 8, side=DECODE, options={"wait_s": 1.0}))
        assert any(each.promised for each in namespaces(site.server)), "the promise ended: nothing is shown"
    assert [answer.token_ids] == expected(question)
    [times] = wait_until(lambda: waited(site.trace(1), since), what="the decode engine tells its times")
    assert times.queue_s <= LATE_S, "it was promised before"
    assert 0.5 <= times.load_s <= 1.0 + LATE_S
    prefiller.result()
    nothing_left(site.server)


@IN_PARTS
def test_one_prefill_engine_serves_three_alternating_decode_engines(
    site: Site, prefiller: Engine, expected: Expected
) -> None:
    """Engines are not paired: any decode engine can take a prompt, also when the engine that waits for it is killed."""
    decoders = [site.engine(number) for number in (2, 3, 1)]
    questions = [prompt(50 + number, 400 + 300 * number) for number in range(4)]
    for turn in range(2):
        for number, question in enumerate(questions[:3]):
            decoders[(turn + number) % 3].order_play(Ask(question, 12, side=DECODE))
        prefiller.play(*[Ask(question, 1, side=PREFILL) for question in questions[:3]])
        for number, question in enumerate(questions[:3]):
            [answer] = decoders[(turn + number) % 3].result()
            assert [answer.token_ids] == expected(question, max_tokens=12)
            assert answer.cached_tokens >= full_blocks(len(question))
    decoders[0].order_play(Ask(questions[3], 12, side=DECODE))
    prefiller.order_play(Ask(questions[3], 1, side=PREFILL))
    wait_until(lambda: any(each.awaited for each in namespaces(site.server)), what="a decode engine waits")
    decoders[0].kill()
    [answer] = decoders[1].play(Ask(questions[3], 12, side=DECODE))
    assert [answer.token_ids] == expected(questions[3], max_tokens=12)
    assert answer.cached_tokens >= full_blocks(len(questions[3]))
    prefiller.result()
    nothing_left(site.server)


@IN_PARTS
def test_the_decode_side_computes_after_an_aborted_or_killed_prefill(
    site: Site, prefiller: Engine, decoder: Engine, expected: Expected
) -> None:
    aborted, killed = prompt(30, 1800), prompt(31, 1800)
    decoder.order_play(Ask(aborted, 8, side=DECODE))
    prefiller.play(Ask(aborted, 1, side=PREFILL, abort="prefilling"))
    [answer] = decoder.result()
    assert [answer.token_ids] == expected(aborted)
    nothing_left(site.server)
    decoder.order_play(Ask(killed, 8, side=DECODE))
    prefiller.order_play(Ask(killed, 1, side=PREFILL))
    wait_until(lambda: any(each.promised for each in namespaces(site.server)), what="the prompt is promised")
    prefiller.kill()
    [answer] = decoder.result()
    assert [answer.token_ids] == expected(killed)
    nothing_left(site.server)
    decoder.settle()


def test_an_engine_continues_alone_if_the_other_takes_too_long(
    server: Server, start_engine: StartEngine, expected: Expected, tmp_path: Path
) -> None:
    traces = [tmp_path / f"trace{number}.json" for number in range(2)]
    engines = [
        start_engine(server.endpoint, options={"single_flight_s": 1, "trace_file": str(trace)}, **CHUNKS)
        for trace in traces
    ]
    for engine in engines:
        engine.generate(prompt(99, 40))
    question, since = prompt(150, 1500), time.time()
    engines[0].order_play(Ask(question, 8))
    wait_until(lambda: any(each.promised for each in namespaces(server)), what="the prompt is promised")
    with engines[0].stopped():
        answers = engines[1].play(*[Ask(question, 8) for _ in range(2)])
    assert [answer.token_ids for answer in answers] == expected(question) * 2
    waits = wait_until(lambda: len(found := waited(traces[1], since)) == 2 and found, what="both tell their times")
    assert 0.5 <= max(map(sum, waits)) <= 1.0 + LATE_S
    assert [answer.token_ids for answer in engines[0].result()] == expected(question)
    nothing_left(server)


@IN_PARTS
def test_an_engine_continues_alone_if_the_other_is_killed(flights: Site, expected: Expected) -> None:
    engines = [flights.engine(number) for number in range(2)]
    question = prompt(50, 1900)
    engines[0].order_play(Ask(question, 1))
    wait_until(lambda: any(each.promised for each in namespaces(flights.server)), what="the prompt is promised")
    engines[1].order_play(*[Ask(question, 8) for _ in range(3)])
    wait_until(lambda: any(each.awaited for each in namespaces(flights.server)), what="the prompt is awaited")
    engines[0].kill()
    assert [answer.token_ids for answer in engines[1].result()] == expected(question) * 3
    nothing_left(flights.server)
    engines[1].settle()


@IN_PARTS
def test_prompts_of_a_larger_model_are_handed_over(
    server: Server, start_engine: StartEngine, parts: dict[str, int]
) -> None:
    """The model differs from that of the other tests in its layers, its heads, and the heads' size and dtype. One of
    the engines first computes the expected answer without the store."""
    how = {"dtype": "bfloat16", "num_gpu_blocks_override": 64, "max_model_len": 1024, **CHUNKS}
    larger = save_model(LARGER)
    prefiller, decoder = (start_engine(server.endpoint, options=parts, model=larger, **how) for _ in range(2))
    question = prompt(170, 600)
    [alone] = decoder.play(Ask(question, 12, options={"load": False, "save": False}))
    decoder.reset_prefix_cache()
    prefiller.generate(prompt(99, 40))
    decoder.order_play(Ask(question, 12, side=DECODE))
    [first] = prefiller.play(Ask(question, 1, side=PREFILL))
    [answer] = decoder.result()
    assert (answer.token_ids, first.token_ids) == (alone.token_ids, alone.token_ids[:1])
    assert (alone.cached_tokens, answer.cached_tokens) == (0, 600)
    nothing_left(server)


@IN_PARTS
def test_prompts_are_handed_over_between_engines_of_different_sizes(
    server: Server, start_engine: StartEngine, expected: Expected, parts: dict[str, int]
) -> None:
    one = start_engine(server.endpoint, options={"head_shards": 2, **parts}, **CHUNKS)
    two = start_engine(
        server.endpoint,
        options={"head_shards": 2, **parts},
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"},
        fork=True,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **CHUNKS,
    )
    for engine in (one, two):
        engine.generate(prompt(99, 40))
    for seed, prefiller, decoder in ((60, one, two), (61, two, one)):
        question = prompt(seed, 1200)
        decoder.order_play(Ask(question, 12, side=DECODE))
        prefiller.play(Ask(question, 1, side=PREFILL))
        [answer] = decoder.result()
        assert [answer.token_ids] == expected(question, max_tokens=12)
        assert answer.cached_tokens == 1200
    nothing_left(server)


@IN_PARTS
def test_engines_that_preempt_still_hand_over(
    server: Server, start_engine: StartEngine, expected: Expected, parts: dict[str, int]
) -> None:
    """Both sides preempt requests: next to the hand-overs, two requests need more blocks than the cache has."""
    small = {"num_gpu_blocks_override": 48, "max_model_len": 1024, **CHUNKS}
    engines = [start_engine(server.endpoint, options={"cpu_bytes": "8MiB", **parts}, **small) for _ in range(2)]
    for engine in engines:
        engine.generate(prompt(99, 40))
    questions = [prompt(seed, 150) for seed in (70, 71, 72)]
    beside = [[prompt(80 + 2 * side + number, 660) for number in range(2)] for side in range(2)]
    for engine, side, others in zip(engines, (PREFILL, DECODE), beside, strict=True):
        asks = [Ask(other, 150) for other in others]
        asks += [
            Ask(question, 1 if side == PREFILL else 40, at=4 * number, side=side)
            for number, question in enumerate(questions)
        ]
        engine.order_play(*asks)
    for engine, side, others in zip(engines, (PREFILL, DECODE), beside, strict=True):
        answers = engine.result()
        assert sum(answer.preemptions for answer in answers), f"nothing was taken back at {side}: nothing is shown"
        assert [answer.token_ids for answer in answers[:2]] == expected(*others, max_tokens=150)
        tokens = 1 if side == PREFILL else 40
        assert [answer.token_ids for answer in answers[2:]] == expected(*questions, max_tokens=tokens)
    for engine in engines:
        engine.settle()
    nothing_left(server)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_an_engine_with_lookup_drafts_shares_with_one_without_drafts(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    """Drafts that are looked up in the prompt have no layers. So blocks are the same, also in ranges of heads, and
    prompts are handed over."""
    options = {"head_shards": 2}
    plain = start_engine(server.endpoint, options=options, **CHUNKS)
    drafting = start_engine(server.endpoint, options=options, speculative_config=NGRAM, **CHUNKS)
    for engine in (plain, drafting):
        engine.generate(prompt(99, 40))
    books = Ledger(drafting)
    sides = [(plain, drafting), (drafting, plain)]
    for number, (prefiller, decoder) in enumerate(sides):
        question = prompt(70 + number, 700)
        decoder.order_play(Ask(question, 12, side=DECODE))
        [first] = prefiller.play(Ask(question, 1, side=PREFILL))
        [answer] = decoder.result()
        [right] = expected(question, max_tokens=12)
        assert (answer.token_ids, first.token_ids) == (right, right[:1])
        assert answer.cached_tokens == 700
    assert books["hand_overs/decode"] == 1 and books["unpromised_requests"] == 0
    repeated = prompt(80, 30) * 10  # in which many drafts are found
    for number, (saver, loader) in enumerate(sides):
        question = [*repeated, number]
        [right] = expected(question, max_tokens=40)
        saver.generate(question, max_tokens=40)
        saver.settle()
        [answer] = loader.generate(question, max_tokens=40)
        assert answer.token_ids == right and answer.cached_tokens >= full_blocks(300)
    assert len(namespaces(server)) == 1
    nothing_left(server)
