"""An engine that computes nothing, for measurements of the proxy's own cost. It answers at once, or sends events at a
given pace.

    python -m benchmarks.remote_kv_cache.capacity_engine --port N [--first-ms N]

It speaks only the HTTP that one client needs, on one event loop without a framework, so that it costs less than the
proxy. A completion has `max_tokens` tokens. Each event has the time at which it was sent (`sent`, by the clock that all
processes of this host share), so the client can compute its travel time. The request's field `user` sets the number of
events per second in a stream; without it they come as fast as the connection allows. `--first-ms`: the milliseconds to
the first token.

After GET /freeze it behaves like an engine whose worker hangs: it accepts requests and answers /health, but sends no
completion. After GET /thaw it goes on. GET /taken returns the number of completions that were requested.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import time
from typing import Any, Final

import msgspec

MODEL: Final = "capacity"
_BASE: Final = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": MODEL}
_MODELS: Final = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]}


class _Worker:
    """The part that computes."""

    def __init__(self, first_s: float) -> None:
        self.first_s = first_s
        self.works = asyncio.Event()
        self.works.set()
        self.taken = 0

    async def first(self) -> None:
        """Wait until the first token is computed."""
        self.taken += 1
        await asyncio.sleep(self.first_s)
        await self.works.wait()


def _reply(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _usage(asked: dict[str, Any], said: int) -> dict[str, int]:
    prompt = len(asked["prompt"])
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


async def _stream(asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head)
    count, pause_s = asked["max_tokens"], 1 / float(asked["user"]) if asked.get("user") else 0.0
    due = time.monotonic()
    for number in range(count):
        if pause_s:
            due += pause_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        finish = "length" if number == count - 1 else None
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish, "token_ids": [7]}
        _write(writer, msgspec.json.encode({**_BASE, "choices": [choice], "sent": time.monotonic()}))
        await writer.drain()
    if (asked.get("stream_options") or {}).get("include_usage"):
        _write(writer, msgspec.json.encode({**_BASE, "choices": [], "usage": _usage(asked, count)}))
    _write(writer, b"[DONE]")
    writer.write(b"0\r\n\r\n")


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: %b\n\n" % data
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))


async def _serve(worker: _Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            line, *rest = head.decode("latin-1").split("\r\n")
            names = dict(each.lower().split(": ", 1) for each in rest if ": " in each)
            body = await reader.readexactly(int(names.get("content-length", 0)))
            path = line.split()[1]
            if path == "/v1/completions":
                asked = msgspec.json.decode(body)
                await worker.first()
                if asked.get("stream"):
                    await _stream(asked, writer)
                    continue
                said = asked["max_tokens"]
                choice = {"index": 0, "text": " word" * said, "logprobs": None, "finish_reason": "length"}
                answer = {**_BASE, "choices": [choice], "usage": _usage(asked, said)}
                writer.write(_reply(msgspec.json.encode(answer)))
            elif path in ("/health", "/v1/models"):
                writer.write(_reply(json.dumps(_MODELS).encode()))
            elif path in ("/freeze", "/thaw"):
                (worker.works.set if path == "/thaw" else worker.works.clear)()
                writer.write(_reply(b"{}"))
            elif path == "/taken":
                writer.write(_reply(str(worker.taken).encode()))
            else:
                writer.write(_reply(b"{}", "404 Not Found"))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client has closed the connection
    finally:
        writer.close()


async def _run(port: int, first_s: float) -> None:
    worker = _Worker(first_s)
    server = await asyncio.start_server(functools.partial(_serve, worker), "127.0.0.1", port, backlog=4096)
    print(f"capacity engine ready http://127.0.0.1:{port}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-ms", type=float, default=0.0)
    given = parser.parse_args()
    asyncio.run(_run(given.port, given.first_ms / 1e3))


if __name__ == "__main__":
    main()
