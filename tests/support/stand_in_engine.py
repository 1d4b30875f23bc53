"""A small engine that misbehaves on demand: a real process with those parts of vLLM's API that the proxy uses.

    python -m tests.support.stand_in_engine --port N [--root NAME] [--adapter NAME]

It answers a prompt of token ids with tokens that follow from all tokens before (`next_token`), each with the text
"<number> ". So a continued prompt gives the same answer only if it contains exactly the tokens that were sent; see
`expected`. POST /behave sets its behaviour from then on. GET /seen returns the requests that it received, and the
number that it abandoned.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

MODEL = "stand-in"
PROBE = "kvstore-proxy-asks-for-a-token"
_TOKENS = 1000


def next_token(prompt: list[int], drift: int = 0) -> int:
    """Return the token after these tokens, which depends on all of them and on their order."""
    return _state(prompt, drift) % _TOKENS


def _state(tokens: list[int], state: int = 0) -> int:
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state


def expected(prompt: list[int], count: int) -> str:
    """Return the text of the right answer."""
    said: list[int] = []
    for _ in range(count):
        said.append(next_token(prompt + said))
    return "".join(f"{token} " for token in said)


class StandIn:
    """The state of the engine, and its answers to requests."""

    def __init__(self, root: str, adapters: list[str], adapter_root: str) -> None:
        self.root = root
        self.adapter_root = adapter_root
        self.adapters = adapters
        self.behaviour: dict[str, Any] = {}
        self.seen: list[dict[str, Any]] = []
        self.running = 0
        self.given_up = 0
        self.streamed = 0
        self.described = 0  # the number of requests for its block names
        self.responses: list[str] = []

    async def behave(self, request: Request) -> Response:
        self.behaviour = await request.json()
        self.seen.clear()
        self.given_up = 0
        self.streamed = 0
        self.described = 0
        return JSONResponse({})

    async def what_was_seen(self, request: Request) -> Response:
        counts = {"running": self.running, "given_up": self.given_up, "streamed": self.streamed}
        counts |= {"described": self.described}
        return JSONResponse({"requests": self.seen, **counts})

    async def health(self, request: Request) -> Response:
        return Response(status_code=self.behaviour.get("health", 200))

    async def models(self, request: Request) -> Response:
        card = {"id": MODEL, "object": "model", "root": self.root, "max_model_len": 100_000}
        adapters = [
            {**card, "id": name, "root": f"{self.adapter_root}/{name}", "parent": MODEL} for name in self.adapters
        ]
        return JSONResponse({"object": "list", "data": [card, *adapters]})

    async def metrics(self, request: Request) -> Response:
        return Response(self.behaviour.get("metrics", ""), media_type="text/plain")

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.0"})

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        return JSONResponse({"tokens": self._dated(body)})

    async def render(self, request: Request) -> Response:
        if "renders_not" in self.behaviour:  # 404: an earlier release of vLLM; 403: the option that allows this is off
            return JSONResponse({"detail": "as told"}, self.behaviour["renders_not"])
        return JSONResponse({"token_ids": self._dated(await request.json()), "model": MODEL})

    def _dated(self, body: dict[str, Any]) -> list[int]:
        """Return the tokens of a prompt. `date`: the date that this engine's chat template shows."""
        tokens = _tokens(body)
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        return tokens if given or "messages" not in body else [*self.behaviour.get("date", []), *tokens]

    async def respond(self, request: Request) -> Response:
        """Answer like /v1/responses, whose state this engine keeps."""
        body = await request.json()
        before = body.get("previous_response_id")
        if before is not None and before not in self.responses:
            return JSONResponse({"error": {"message": f"{before} not found", "code": 404}}, 404)
        self.responses.append(f"resp_{os.getpid()}_{len(self.responses)}")
        return JSONResponse({"id": self.responses[-1], "object": "response", "engine": os.getpid()})

    async def response(self, request: Request) -> Response:
        known = request.path_params["name"] in self.responses
        return JSONResponse({"id": request.path_params["name"], "engine": os.getpid()}, 200 if known else 404)

    async def reflect(self, request: Request) -> Response:
        """Answer with the request itself."""
        body = await request.body()
        headers = [(name.decode(), value.decode("latin-1")) for name, value in request.headers.raw]
        told = {
            "method": request.method,
            "headers": headers,
            "body": body.decode("latin-1"),
            "query": request.url.query,
        }
        return JSONResponse(told, headers={"set-cookie": "a=1", "x-engine": "yes", "content-language": "de"})

    async def embed(self, request: Request) -> Response:
        """Send half of an answer, and then break the connection."""

        async def half() -> AsyncIterator[bytes]:
            yield b'{"half": '
            raise ConnectionAbortedError("as told")

        return StreamingResponse(half(), media_type=self.behaviour.get("media_type", "application/json"))

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        path = request.url.path
        if request.headers.get("x-request-id") != PROBE:
            self.seen.append({"path": path, "body": body, "headers": dict(request.headers)})
        if body.get("model") not in (None, MODEL, *self.adapters):
            error = {"message": f"no model {body['model']}", "type": "NotFoundError", "param": "model", "code": 404}
            return JSONResponse({"error": error}, 404)
        count = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        # `only`: the behaviour applies only to requests for this many tokens
        how = self.behaviour if self.behaviour.get("only", count) == count else {}
        if how.get("frozen"):  # the worker has frozen; the engine still reports that it is healthy
            await asyncio.sleep(3600)
        if "delay_s" in how:
            await asyncio.sleep(how["delay_s"])
        helped = (body.get("kv_transfer_params") or {}).get("do_remote_prefill")
        if helped and "helped_takes" in how:  # the engine finds the prompt in its cache
            how = {**how, "cached": len(_tokens(body)) - 1}
        first_s, each_s = how.get("helped_takes" if helped else "takes", (0, 0))
        if each_s and request.headers.get("x-request-id") != PROBE:
            await asyncio.sleep(first_s + each_s * len(_tokens(body)))
        if "headers" in how:
            return Response(b"{}", how.get("status", 200), how["headers"], "application/json")
        if "status" in how:
            error = {"error": {"message": "as told", "type": "told", "param": None, "code": how["status"]}}
            return JSONResponse(error, how["status"])
        prompt = self._dated(body)
        chat = path.endswith("/chat/completions")
        if body.get("stream") and how.get("no_events"):
            return JSONResponse(_error(how))
        if body.get("stream"):
            return StreamingResponse(self._stream(how, body, prompt, count, chat), media_type="text/event-stream")
        said = self._say(how, prompt, count)
        text = "".join(f"{token} " + "x" * how.get("pad", 0) for token in said)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        base: dict[str, Any] = {"id": "x", "object": "o", "created": 1, "model": MODEL}
        if ((body.get("kv_transfer_params") or {}).get("kvstore") or {}).get("describe") and "names" in self.behaviour:
            self.described += 1
            adapter = self.behaviour.get("contents", {}).get(body.get("model"), "")
            base["kv_transfer_params"] = {"kvstore": {**self.behaviour["names"], "adapter": adapter}}
        return JSONResponse({**base, "choices": [choice], "usage": _usage(how, prompt, len(said))})

    def _say(self, how: dict[str, Any], prompt: list[int], count: int) -> list[int]:
        """Apply `next_token` repeatedly, in a time that does not grow with the number of tokens sent."""
        said: list[int] = []
        state = _state(prompt)
        for _ in range(count):
            said.append(state % _TOKENS if said else next_token(prompt, how.get("drift", 0)))
            state = _state(said[-1:], state)
        return said

    async def _stream(
        self, how: dict[str, Any], body: dict[str, Any], prompt: list[int], count: int, chat: bool
    ) -> AsyncIterator[bytes]:
        base = {"id": f"{os.getpid()}-{len(self.seen)}", "created": int(time.time() * 1000) % 10**9, "model": MODEL}
        base["object"] = "chat.completion.chunk" if chat else "text_completion"
        ids = body.get("return_token_ids")
        usage = (body.get("stream_options") or {}).get("include_usage")
        more = how.get("says_last", {})  # in the last event
        self.running += 1
        done = False
        try:
            for _ in range(how.get("comments", 0)):
                yield b": keep-alive\n\n"
                await asyncio.sleep(how.get("gap_s", 0))
            while how.get("only_comments"):
                yield b": keep-alive\n\n"
                await asyncio.sleep(0.05)
            if how.get("silent"):
                await asyncio.sleep(3600)
            if chat:
                role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield _event({**base, "choices": [role], "prompt_token_ids": prompt if ids else None})
            said, batch = self._say(how, prompt, count), bytearray()
            finish_at = how.get("stop_at", count)
            for number, token in enumerate(said[:finish_at]):
                if how.get("cut_at") == number:
                    os._exit(1)
                if how.get("malformed_at") == number:
                    yield b"data: {this is no JSON\n\n"
                if how.get("error_at") == number:
                    yield _event(_error(how))
                    yield b"data: [DONE]\n\n"  # as vLLM does
                    return
                if how.get("end_at") == number:
                    return
                if how.get("hang_at") == number:
                    await asyncio.sleep(3600)
                last = number == finish_at - 1
                finish = ("stop" if "stop_at" in how else "length") if last else None
                choice: dict[str, Any] = {
                    "index": 0,
                    "logprobs": None,
                    "finish_reason": finish,
                    "token_ids": how.get("odd_ids", [token]) if ids else None,
                }
                text = f"{token} " + "x" * how.get("pad", 0)
                choice |= {"delta": {"content": text}} if chat else {"text": text}
                if not chat:
                    choice["prompt_token_ids"] = prompt if ids and number == 0 else None
                if not chat or last:
                    choice["stop_reason"] = None
                batch += _event({**base, "choices": [choice], **(more if last and not usage else {})})
                self.streamed += 1
                if last or len(batch) >= how.get("batch_bytes", 0):
                    yield bytes(batch)
                    batch.clear()
                    await asyncio.sleep(how.get("gap_s", 0))
            if usage:
                yield _event({**base, **more, "choices": [], "usage": _usage(how, prompt, min(count, finish_at))})
            yield b"data: [DONE]\n\n"
            done = True
        finally:
            self.running -= 1
            self.given_up += not done


class Packing:
    """Compresses answers that are not streamed, even if the client has not requested it, as some sidecars do."""

    def __init__(self, app: ASGIApp, engine: StandIn) -> None:
        self._app, self._engine = app, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._engine.behaviour.get("packs") or scope["path"] in ("/behave", "/seen"):
            await self._app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        body = bytearray()

        async def pack(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            packed = gzip.compress(bytes(body))
            kept = [(name, value) for name, value in start["headers"] if name != b"content-length"]
            start["headers"] = [*kept, (b"content-encoding", b"gzip"), (b"content-length", str(len(packed)).encode())]
            await send(start)
            await send({"type": "http.response.body", "body": packed})

        await self._app(scope, receive, pack)


def _error(how: dict[str, Any]) -> dict[str, Any]:
    """Return the error that an engine sends instead of a chunk. `alone`: without the enclosing `error`, as some engines
    do."""
    error = {"message": "as told", "type": "told", "code": how.get("code", 500)}
    return {"object": "error", **error} if how.get("alone") else {"error": error}


def _usage(how: dict[str, Any], prompt: list[int], said: int) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "completion_tokens": said,
        "total_tokens": len(prompt) + said,
    }
    if "odd_usage" in how:
        return dict(how["odd_usage"])
    if "cached" in how:
        usage["prompt_tokens_details"] = {"cached_tokens": how["cached"]}
    return usage


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def _tokens(body: dict[str, Any]) -> list[int]:
    prompt = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or body.get("prompt")
    if isinstance(prompt, list):
        return prompt
    text = prompt if isinstance(prompt, str) else json.dumps(_without_media(body.get("messages")))
    return list(text.encode())


def _without_media(messages: Any) -> Any:
    """Replace media by tokens. A picture always becomes the same tokens, whatever it shows."""
    if not isinstance(messages, list):
        return messages

    def shown(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [part if part.get("type") == "text" else part.get("type") for part in content]

    return [{**message, "content": shown(message.get("content"))} for message in messages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--root", default="/models/stand-in")
    parser.add_argument("--adapter", action="append", default=[])
    parser.add_argument("--adapter-root", default="")
    parser.add_argument("--keep-alive-s", type=int, default=5)
    options = parser.parse_args()
    engine = StandIn(options.root, options.adapter, options.adapter_root)
    app = Starlette(
        routes=[
            Route("/behave", engine.behave, methods=["POST"]),
            Route("/seen", engine.what_was_seen),
            Route("/health", engine.health),
            Route("/v1/models", engine.models),
            Route("/version", engine.version),
            Route("/metrics", engine.metrics),
            Route("/tokenize", engine.tokenize, methods=["POST"]),
            Route("/v1/chat/completions/render", engine.render, methods=["POST"]),
            Route("/v1/embeddings", engine.embed, methods=["POST"]),
            Route("/v1/responses", engine.respond, methods=["POST"]),
            Route("/v1/responses/{name}", engine.response),
            Route("/pooling", engine.reflect, methods=["GET", "POST", "PUT"]),
            Route("/v1/completions", engine.complete, methods=["POST"]),
            Route("/v1/chat/completions", engine.complete, methods=["POST"]),
        ],
        middleware=[
            Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]),
            Middleware(Packing, engine=engine),
        ],
    )
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_keep_alive=options.keep_alive_s,
    )


if __name__ == "__main__":
    main()
