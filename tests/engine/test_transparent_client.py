"""The proxy in front of a real vLLM server, as OpenAI's Python client sees it: the same objects and errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.engine.fleet import CHAT, COMPLETIONS, Fleet, some
from tests.engine.served import MODEL
from tests.engine.test_transparent import (
    OF_CHATS,
    OF_COMPLETIONS,
    PLAIN,
    PLAIN_CHAT,
    SAMPLING,
    TRIES,
    without_names,
)
from tests.support.harness import wait_until
from tests.support.proxies import ProxyProcess

ENDLESS = {**PLAIN, "max_tokens": 2000, "ignore_eos": True}
CHOSEN = {
    COMPLETIONS: (
        PLAIN,
        OF_COMPLETIONS,
        ("logprobs 0", "logprobs 5", "echo and logprobs", "several prompts", "unicode"),
    ),
    CHAT: (
        PLAIN_CHAT,
        OF_CHATS,
        ("top logprobs 0", "top logprobs 5", "parts", "goes on", "a tool", "no tools", "a tool by itself", "a picture"),
    ),
}
OF_BOTH = (
    *("plain", "one token", "two answers", "a seed", "stop", "token ids", "json object", "json schema", "user"),
    *("too hot", "hot as text", "another model", "too many"),
)
NOWHERE = ("/v1/models/", "/v1/moderations")  # paths that the engine does not have
STREAMS = ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}})


def client(url: str, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **more)


def arguments(create: Callable[..., Any], body: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call. Fields that the client knows are arguments of their own; the others are in
    `extra_body`."""
    known = inspect.signature(create).parameters
    more = {name: value for name, value in body.items() if name not in known}
    return {name: value for name, value in body.items() if name in known} | {"extra_body": more}


def seen(call: Callable[[], Any]) -> Any:
    """Return what a call returns or raises, without the fields that differ in each answer."""
    try:
        got = call()
        if isinstance(got, openai.Stream):
            events = [without_names(each.to_dict()) for each in got]
            return type(got), sorted(events, key=lambda event: [each["index"] for each in event["choices"]] or [99])
    except openai.OpenAIError as error:
        if isinstance(error, openai.NotFoundError) and any(each in error.request.url.path for each in NOWHERE):
            return type(error), error.status_code  # the proxy has a message of its own
        told = [getattr(error, name, None) for name in ("status_code", "message", "body", "code", "param", "type")]
        return type(error), told
    return type(got), without_names(got.to_dict())


def calls() -> dict[str, Callable[[openai.OpenAI], Any]]:
    made: dict[str, Callable[[openai.OpenAI], Any]] = {}

    def add(name: str, path: str, body: dict[str, Any]) -> None:
        def call(client: openai.OpenAI) -> Any:
            create = client.completions.create if path == COMPLETIONS else client.chat.completions.create
            return create(**arguments(create, body))

        made[name] = call

    for path, (plain, own, chosen) in CHOSEN.items():
        for name, more in [*((name, SAMPLING[name]) for name in OF_BOTH), *((name, own[name]) for name in chosen)]:
            for stream in STREAMS[: None if name in ("plain", "two answers", "token ids") else 2]:
                add(f"{path} {name} {stream}", path, {**plain, **more, **stream})
    made["models"] = lambda client: client.models.list()
    made["a model"] = lambda client: client.models.retrieve(MODEL)
    made["embeddings"] = lambda client: client.embeddings.create(model=MODEL, input="a")
    made["moderations"] = lambda client: client.moderations.create(input="a")
    made["a response"] = lambda client: client.responses.create(
        model=MODEL, input="a", max_output_tokens=4, temperature=0
    )
    made["no response"] = lambda client: client.responses.retrieve("resp_1")
    made["no time"] = lambda client: client.with_options(timeout=0.3).completions.create(
        **arguments(client.completions.create, ENDLESS)
    )
    return made


@pytest.mark.timeout(400)
def test_openais_client_gets_the_same_objects_and_errors(fleet: Fleet, alone: ProxyProcess) -> None:
    different, cases = {}, dict(some(calls().items()))
    with client(fleet.d.url) as engine, client(alone.url) as proxy:
        for name, call in cases.items():
            for _ in range(TRIES):  # for the reasons in test_transparent.py
                right, through = seen(lambda call=call: call(engine)), seen(lambda call=call: call(proxy))
                if through == right:
                    break
            else:
                different[name] = through, right
    print(f"{len(cases)} calls, {len(different)} differ: {', '.join(different)}")
    told = "\n".join(f"{name}\n  proxy  {through}\n  engine {right}" for name, (through, right) in different.items())
    assert not different, told
    wait_until(lambda: not fleet.d.metric("vllm:num_requests_running"), what="what had no time has ended")
    wait_until(lambda: not alone.status()["in_flight"], what="here, too")


@pytest.mark.timeout(400)
def test_a_named_request_has_its_name_in_answer_and_error(alone: ProxyProcess) -> None:
    with client(alone.url, default_headers={"X-Request-Id": "mine"}) as proxy:
        assert proxy.completions.create(**PLAIN)._request_id == "mine"
        with pytest.raises(openai.NotFoundError) as caught:
            proxy.completions.create(**{**PLAIN, "model": "none"})
        assert caught.value.request_id == "mine"


@pytest.mark.timeout(400)
def test_many_streams_of_the_asynchronous_client_equal_the_engines(fleet: Fleet, alone: ProxyProcess) -> None:
    bodies = [{**PLAIN_CHAT, "seed": seed, "temperature": 0.9, "stream": True} for seed in range(8)]

    async def text(client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
        stream = await client.chat.completions.create(**body)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def texts(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return await asyncio.gather(*(text(client, body) for body in bodies))

    through, right = (asyncio.run(texts(url)) for url in (alone.url, fleet.d.url))
    assert through == right and len(set(right)) > 1
