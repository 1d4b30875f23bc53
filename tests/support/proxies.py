"""Real processes for the tests of the proxy, `kvstore proxy` and stand-in engines, and users of its streams."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import Self

from tests.support import forked
from tests.support.harness import START_S, STOP_S, environment, wait_until
from tests.support.ports import free_ports


class ProxyProcess:
    """`kvstore proxy`. Its log goes to `folder`/proxy.log, its access log to `folder`/access.jsonl."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.access = folder / "proxy.log", folder / "access.jsonl"
        words = ["proxy", "--listen", "127.0.0.1:0", "--access-log", str(self.access), *arguments]
        out, theirs = os.pipe()
        self._stdout = os.fdopen(out)
        with self.log.open("ab") as log, open(theirs, "wb") as says, open(os.devnull, "rb") as nothing:
            self.process = forked.start("kvstore_cli", words, stdin=nothing, stdout=says, stderr=log, env=environment())
        self.first_line = self._stdout.readline().strip()
        assert self.first_line.startswith("kvstore proxy listens http://"), self.log.read_text()[-4000:]
        self.url = self.first_line.split()[3]

    def __enter__(self) -> ProxyProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Send SIGTERM. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._stdout.close()
        return status

    def next_line(self) -> str:
        """Wait for the next line on standard output, and return it."""
        return self._stdout.readline().strip()

    def status(self) -> dict[str, Any]:
        return dict(json.loads(get(self.url, "/status")[1]))

    def metrics(self) -> dict[str, float]:
        lines = get(self.url, "/metrics")[1].decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def record(self, id: str) -> dict[str, Any]:
        """Wait for the access log's line for the request with this x-request-id, and return it."""

        def line() -> dict[str, Any] | None:
            whole, _, _ = self.access.read_text().rpartition("\n")  # the last line may be incomplete
            records = map(json.loads, whole.splitlines())
            return next((record for record in records if record["id"] == id), None)

        return dict(wait_until(line, what=f"{id} in the access log"))


class StandInEngine:
    """A process of `tests.support.stand_in_engine`. url: the address of this host and the port on which it listens;
    None: any free port."""

    def __init__(self, log: Path, *arguments: str, url: str | None = None) -> None:
        self.url = url or f"http://127.0.0.1:{free_ports(1)[0]}"
        where = urlsplit(self.url)
        self._arguments = [*arguments, "--host", str(where.hostname), "--port", str(where.port)]
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log, open(os.devnull, "rb") as nothing:
            self.process = forked.start(
                "tests.support.stand_in_engine",
                self._arguments,
                stdin=nothing,
                stdout=log,
                stderr=log,
                env=environment(),
            )
        wait_until(self._healthy, START_S, f"the stand-in engine serves: {self._log}")

    def _healthy(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        try:
            return get(self.url, "/health")[0] == 200
        except OSError:
            return False

    def behave(self, **how: Any) -> None:
        """Set the engine's behaviour from now on, and clear its records."""
        try:
            assert post(self.url, "/behave", how)[0] == 200
        except OSError:  # the test told it to exit
            self.process.wait(STOP_S)
            self.start()
            assert post(self.url, "/behave", how)[0] == 200

    def seen(self) -> dict[str, Any]:
        return dict(json.loads(get(self.url, "/seen")[1]))

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(STOP_S)


def get(url: str, path: str, **headers: str) -> tuple[int, bytes]:
    """Send a GET request. Returns the status and the body of the answer."""
    return _ask(urllib.request.Request(f"{url}{path}", headers=headers))


def post(url: str, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    """Send JSON. Returns the status and the body of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _ask(urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json", **headers}))


def _ask(request: urllib.request.Request) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(request.full_url).netloc, timeout=120)
    try:
        connection.request(request.get_method(), request.selector, request.data, dict(request.headers))
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


class Asking:
    """A request whose answer is not read."""

    def __init__(self, url: str, path: str, body: dict[str, Any], **headers: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Close the connection, even if the answer has not ended."""
        self.connection.close()


class Reading(Asking):
    """A streamed answer, read event by event."""

    def __init__(self, url: str, path: str, body: dict[str, Any], **headers: str) -> None:
        super().__init__(url, path, {**body, "stream": True}, **headers)
        self._reply = self.connection.getresponse()
        self.status = self._reply.status
        self.done = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks. Afterwards, `done` says whether the stream ended with [DONE]."""
        while line := self._reply.readline():
            if line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])

    def leave(self) -> None:
        self._reply.close()
        super().leave()


def chunks_of(url: str, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """Return the chunks of a stream. Fails if the stream does not end with [DONE]."""
    with Reading(url, path, body, **headers) as reading:
        assert reading.status == 200, reading._reply.read()
        chunks = list(reading)
        assert reading.done, chunks[-1:]
        return chunks


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    return "".join((each["delta"].get("content") if "delta" in each else each["text"]) or "" for each in choices)


def answer_of(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of an answer, however it was divided into chunks."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    prompts = [each["prompt_token_ids"] for each in (*chunks, *choices) if each.get("prompt_token_ids")]
    ends = [(choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]]
    usage = {
        name: value for chunk in chunks for name, value in (chunk.get("usage") or {}).items() if "details" not in name
    }
    roles = [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", {})]
    models = {chunk["model"] for chunk in chunks}
    return {
        "text": text_of(chunks),
        "ids": ids,
        "prompts": prompts,
        "ends": ends,
        "usage": usage,
        "roles": roles,
        "models": models,
    }


def same_answer(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chunks without the fields that differ between two requests: ids and times."""
    return [{name: value for name, value in chunk.items() if name not in ("id", "created")} for chunk in chunks]
