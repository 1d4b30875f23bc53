"""An OpenAI-compatible endpoint that misbehaves on request: it delays, stalls, cuts streams, or answers nonsense.

It replaces only broken and slow engines, whose delays must be known exactly; tests of correct engines use vLLM. It
listens on a real socket, in a thread of its own.

The number of a request, in order of arrival, selects the behaviour. The time and the content of each request are
recorded.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.harness import wait_until


@dataclass(frozen=True)
class Behaviour:
    """How a request is answered. `first_s`: the time until the first token; `gap_s`: the time between chunks;
    `tokens_a_chunk`: the tokens in each chunk but the last; `stop_after`: the number of chunks after which `ending`
    replaces the rest."""

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens_a_chunk: int = 1
    stop_after: int | None = None
    ending: str = "done"  # or: end, close, stall, nonsense, error
    status: int = 200
    body: Any = None
    usage: bool = True
    reason_chunk: bool = False  # whether a last, empty chunk has the reason to end, as OpenAI sends it
    held: Callable[[], bool] = lambda: False  # after `first_s`, the answer waits while this is true
    # Sent instead of the tokens, each part `gap_s` after the one before. Objects are sent as events, and strings as
    # they are.
    script: tuple[dict[str, Any] | str, ...] = ()


@dataclass
class Asked:
    """A request that arrived."""

    at_s: float
    body: dict[str, Any]
    headers: dict[str, str]
    chunk_times_s: list[float] = field(default_factory=list)


class Endpoint:
    """`with Endpoint(lambda number: Behaviour(...)) as endpoint`: serves at `endpoint.url` until the end of the `with`
    block."""

    def __init__(self, behave: Callable[[int], Behaviour] = lambda number: Behaviour()) -> None:
        self._behave = behave
        self.asked: list[Asked] = []
        self.running = 0  # answers in progress
        self.idle_since_s = time.monotonic()  # valid if nothing is running
        self._released = asyncio.Event()
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self._answer, methods=["POST"]) for path in paths]
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
        config.timeout_graceful_shutdown = 1
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Endpoint:
        self._thread.start()
        wait_until(lambda: self._server.started, what="the endpoint serves")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._loop.call_soon_threadsafe(self._released.set)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._listener])

        asyncio.run(serve())

    async def _answer(self, request: Request) -> Response:
        asked = Asked(time.monotonic(), await request.json(), dict(request.headers))
        self.asked.append(asked)
        behaviour = self._behave(len(self.asked) - 1)
        if behaviour.status != 200:
            return JSONResponse(behaviour.body, behaviour.status)
        return StreamingResponse(self._counted(self._stream(asked, behaviour)), media_type="text/event-stream")

    async def _counted(self, stream: AsyncIterator[str]) -> AsyncIterator[str]:
        self.running += 1
        try:
            async for part in stream:
                yield part
        finally:
            self.running -= 1
            self.idle_since_s = time.monotonic()

    async def _stream(self, asked: Asked, behaviour: Behaviour) -> AsyncIterator[str]:
        for part in behaviour.script:
            await asyncio.sleep(behaviour.gap_s)
            asked.chunk_times_s.append(time.monotonic())
            yield part if isinstance(part, str) else _event(part)
        if behaviour.script:
            return
        total = asked.body["max_tokens"]
        chat = "messages" in asked.body
        if chat:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        sent = chunks = 0
        while sent < total and chunks != behaviour.stop_after:
            await asyncio.sleep(behaviour.gap_s if chunks else behaviour.first_s)
            while not chunks and behaviour.held():
                await asyncio.sleep(0.01)
            count = min(behaviour.tokens_a_chunk, total - sent)
            sent, chunks = sent + count, chunks + 1
            text = " word" * count
            asked.chunk_times_s.append(time.monotonic())
            yield _event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        if behaviour.ending == "stall":
            await self._released.wait()
        if behaviour.ending == "close":
            raise ConnectionAbortedError  # uvicorn closes the connection in the middle of the body
        if behaviour.ending == "nonsense":
            yield "data: {this is not JSON\n\n"
        if behaviour.ending == "error":
            yield _event({"error": {"message": "the engine is dead", "code": 500}})
        if behaviour.reason_chunk:
            yield _event({"choices": [{"delta": {}} if chat else {"text": "", "finish_reason": "length"}]})
        if behaviour.usage:
            prompt = asked.body.get("prompt", [])
            yield _event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": sent}})
        if behaviour.ending != "end":
            yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
