"""A small router for vLLM engines: a prompt goes to the engine that has most of it, or else to the least busy one.

    python examples/router.py --port 8080 \\
        --engine a=http://127.0.0.1:8000,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 \\
        --engine b=http://127.0.0.1:8001,tcp://127.0.0.1:5567,tcp://127.0.0.1:5568

Each engine is given by its name, its address, and the publisher and replay addresses of its events, as in `vllm serve
MODEL --shutdown-timeout 30 --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint":
"tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'`. Answers are streamed. The header `x-kvstore-engine` names the
engine that answered, and `x-kvstore-tokens` has the number of the prompt's tokens that it had.
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvstore_client.engine.routing import Routes

PIECE = 1 << 16
ANSWER_S = 600.0


@dataclass(frozen=True)
class Engine:
    name: str
    url: str
    events: str
    replay: str


def engine_of(text: str) -> Engine:
    """Parse NAME=URL,EVENTS[,REPLAY]."""
    name, _, rest = text.partition("=")
    url, events, replay = [*rest.split(","), "", ""][:3]
    if not (name and url.startswith("http") and events):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=URL,EVENTS[,REPLAY]")
    return Engine(name, url.rstrip("/"), events, replay)


class Router:
    """Chooses engines. Thread-safe."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.routes = Routes()
        self._busy: Counter[str] = Counter()
        self._lock = threading.Lock()
        for engine in engines:
            self.routes.add(engine.name, engine.events, engine.replay)

    def tokens_of(self, body: dict[str, Any]) -> list[int]:
        """Return the prompt's tokens: those in the request, or an engine's tokens for the text."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        asked = {key: body[key] for key in ("model", "prompt", "messages") if key in body}
        url = next(iter(self.engines.values())).url + "/tokenize"
        request = urllib.request.Request(url, json.dumps(asked).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                tokens: list[int] = json.load(answer)["tokens"]
                return tokens
        except (OSError, ValueError, KeyError):
            return []  # then the least busy engine gets the request

    def choose(self, tokens: Sequence[int]) -> tuple[Engine, int]:
        """Return the engine, and the number of the tokens that it has. Call `done` when it has answered."""
        have = {name: tiers.get("any", 0) for name, tiers in self.routes.find(tokens).engines.items()}
        with self._lock:
            name = max(self.engines, key=lambda name: (have.get(name, 0), -self._busy[name]))
            self._busy[name] += 1
        return self.engines[name], have.get(name, 0)

    def done(self, engine: Engine) -> None:
        with self._lock:
            self._busy[engine.name] -= 1


def handler_of(router: Router) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
            try:
                tokens = router.tokens_of(json.loads(data))
            except ValueError:
                self.send_error(400, "the body is no JSON object")
                return
            engine, cached = router.choose(tokens)
            try:
                self._pass_on(engine, cached, data)
            finally:
                router.done(engine)

        def do_GET(self) -> None:
            self._pass_on(next(iter(router.engines.values())), 0, None)

        def _pass_on(self, engine: Engine, cached: int, data: bytes | None) -> None:
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(engine.url + self.path, data, headers)
            try:
                answer = urllib.request.urlopen(request, timeout=ANSWER_S)
            except urllib.error.HTTPError as error:
                answer = error  # the engine's own answer
            except OSError as error:
                self.send_error(502, f"engine {engine.name} does not answer: {error}")
                return
            with answer:
                self.send_response(answer.status)
                self.send_header("content-type", answer.headers.get("content-type", "application/json"))
                self.send_header("x-kvstore-engine", engine.name)
                self.send_header("x-kvstore-tokens", str(cached))
                self.end_headers()
                while piece := answer.read1(PIECE):
                    self.wfile.write(piece)
                    self.wfile.flush()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Do not log single requests."""

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=engine_of, action="append", required=True, metavar="NAME=URL,EVENTS[,REPLAY]")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    router = Router(options.engine)
    server = ThreadingHTTPServer((options.host, options.port), handler_of(router))
    print(f"router ready http://{options.host}:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    finally:
        router.routes.close()


if __name__ == "__main__":
    main()
