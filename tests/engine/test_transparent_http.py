"""The proxy in front of a real vLLM server, byte by byte: its replies to any request are the engine's own.

Requests are written to the socket unchanged. `OTHERWISE` names the requests that the proxy answers differently, with
its status; docs/reference/proxy.md describes them.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.engine.fleet import Fleet
from tests.engine.test_transparent import PLAIN, TRIES, Reply, comparable
from tests.support.proxies import ProxyProcess

BODY = json.dumps(PLAIN).encode()
STREAM = json.dumps({**PLAIN, "stream": True}).encode()
FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--b--\r\n'
JSON, CLOSE, CHUNKED = b"Content-Type: application/json", b"Connection: close", b"Transfer-Encoding: chunked"
MULTIPART = b"Content-Type: multipart/form-data; boundary=b"
UPGRADE = (b"Connection: Upgrade, close", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")
KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="


def request(line: str, *headers: bytes, body: bytes = b"", last: bool = True, length: bool = True) -> bytes:
    """Return the bytes of a request. `last`: the connection is closed after this request. `length`: the head has the
    body's length."""
    lines = [line.encode() if "HTTP/" in line else f"{line} HTTP/1.1".encode(), b"Host: x", *headers]
    lines += [CLOSE] if last and not any(each.startswith(b"Connection") for each in headers) else []
    lines += [b"Content-Length: %d" % len(body)] if body and length else []
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def ask(*headers: bytes, body: bytes = BODY, **how: Any) -> bytes:
    """Return a completion request."""
    return request("POST /v1/completions", *headers, body=body, **how)


def in_chunks(body: bytes, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    pieces = [body[start : start + 10] for start in range(0, len(body), 10)]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in pieces) + b"0\r\n" + trailer + b"\r\n"


CASES: dict[str, bytes] = {
    **{
        f"{method} {path}": request(f"{method} {path}")
        for method in ("HEAD", "OPTIONS", "PROPFIND", "BREW")
        for path in ("/v1/models", "/v1/completions", "/version", "/tokenize")
    },
    **{
        f"GET {path}": request(f"GET {path}")
        for path in (
            *(
                "/nowhere",
                "/v1",
                "/v1/completions/",
                "/v1/models/",
                "//v1/models",
                "/v1/../v1/models",
                "/V1/Models",
            ),
            *("/v1/models?a=1&b=%20", "/v1/models?", "/v1%2Fmodels", "/v1/models%00", "/v1/models%zz", "/v1/model%73"),
            *("http://x/v1/models", "HTTP://x:80/version?a=1", "/version?" + "a" * 9000),
        )
    },
    "a query": request("POST /v1/completions?a=1&b=%20", JSON, body=BODY),
    "a letter in hexadecimal": request("POST /v1/completion%73", JSON, body=BODY),
    "the type twice": ask(JSON, JSON),
    "another type first": ask(b"Content-Type: text/plain", JSON),
    "another type last": ask(JSON, b"Content-Type: text/plain"),
    "a header twice": request("GET /v1/models", b"X-A: 1", b"X-A: 2"),
    "no type": ask(),
    "no type to tokens": request("POST /tokenize", body=b'{"model": "tiny", "prompt": "a"}'),
    "an empty type": ask(b"Content-Type:"),
    "a charset": ask(b"Content-Type: application/json; charset=utf-8"),
    "capital letters": ask(b"CONTENT-TYPE: Application/JSON"),
    "a patch": ask(b"Content-Type: application/merge-patch+json"),
    "a form": ask(b"Content-Type: application/x-www-form-urlencoded", body=b"model=tiny&prompt=a"),
    "parts": ask(MULTIPART, body=FORM),
    "a recording": request("POST /v1/audio/transcriptions", MULTIPART, body=FORM),
    "no body": ask(JSON, body=b""),
    "a length of none": ask(JSON, b"Content-Length: 0", body=b""),
    "GET with a body": request("GET /v1/models", JSON, body=b"{}"),
    "chunks": ask(JSON, CHUNKED, body=in_chunks(BODY), length=False),
    "chunks with more": ask(JSON, CHUNKED, body=in_chunks(BODY, b";a=b", b"X-T: 1\r\n"), length=False),
    "chunks that are none": ask(JSON, CHUNKED, body=b"zz\r\n", length=False),
    "chunks and a length": ask(JSON, CHUNKED, b"Content-Length: 5", body=in_chunks(BODY), length=False),
    "a length and chunks": ask(JSON, b"Content-Length: 5", CHUNKED, body=in_chunks(BODY), length=False),
    "two lengths": ask(JSON, b"Content-Length: 3"),
    "a negative length": ask(JSON, b"Content-Length: -1", length=False),
    "HTTP/1.0": request("POST /v1/completions HTTP/1.0", JSON, body=BODY),
    "HTTP/1.0, streamed": request("POST /v1/completions HTTP/1.0", JSON, body=STREAM),
    "streamed to the end": ask(JSON, body=STREAM),
    "asked before it is sent": ask(JSON, b"Expect: 100-continue"),
    "one after the other": ask(JSON, last=False) + ask(JSON, body=STREAM, last=False) + request("GET /version"),
    "packed if you like": ask(JSON, b"Accept-Encoding: gzip, br"),
    "many headers": request("GET /version", *(b"X-%d: %d" % (number, number) for number in range(300))),
    "a long header": request("GET /version", b"X-L: " + b"a" * 60_000),
    "a name that is none": request("GET /version", b"X A: 1"),
    "another protocol": request("GET /v1/models", b"Connection: Upgrade, close", b"Upgrade: h2c"),
    "no HTTP": b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03\r\n\r\n",
    # answered otherwise
    "a websocket": request("GET /v1/realtime", *UPGRADE, KEY),
    "a websocket of the models": request("GET /v1/models", *UPGRADE, KEY),
    "a very long header": request("GET /version", b"X-L: " + b"a" * 1_000_000),
    "other codings": ask(JSON, b"Transfer-Encoding: gzip, chunked", body=in_chunks(BODY), length=False),
}
OTHERWISE = {
    **{f"GET {path}": 404 for path in ("/v1/completions/", "/v1/models/")},
    "a websocket": 404,
    "a websocket of the models": 200,
    "a very long header": 400,
    "other codings": 400,
}


class _Bytes(io.BytesIO):
    """All bytes received over a connection, for http.client, which expects a socket."""

    def makefile(self, *_: object) -> _Bytes:
        return self

    def close(self) -> None:
        """Do nothing: a response calls this at its end, but another response may follow."""


def replies(url: str, sent: bytes) -> list[Reply]:
    where, came = urlsplit(url), _Bytes()
    with socket.create_connection((str(where.hostname), int(where.port or 0)), 60) as sock:
        try:
            sock.sendall(sent)
            while piece := sock.recv(1 << 16):
                came.write(piece)
        except ConnectionError:  # the request was refused before it was sent completely
            pass
    came.seek(0)
    found = []
    while came.tell() < came.getbuffer().nbytes:
        reply = http.client.HTTPResponse(came, method="HEAD" if sent.startswith(b"HEAD") else None)  # type: ignore[arg-type]
        reply.begin()
        headers = [(name.lower(), value) for name, value in reply.getheaders()]
        found.append(Reply(reply.status, headers, reply.read()))
    return found


@pytest.mark.timeout(400)
def test_replies_to_any_bytes_are_the_engines_own(fleet: Fleet, alone: ProxyProcess) -> None:
    different = {}
    for name, sent in CASES.items():
        for _ in range(TRIES):
            right, through = replies(fleet.d.url, sent), replies(alone.url, sent)
            if name in OTHERWISE:
                assert [each.status for each in through] == [OTHERWISE[name]], name
                assert [each.status for each in right] != [OTHERWISE[name]], f"{name}: no longer another one"
                break
            if same(through, right):
                break
        else:
            different[name] = through, right
    print(f"{len(CASES)} cases, {len(OTHERWISE)} answered otherwise, {len(different)} differ: {', '.join(different)}")
    lines = (f"{name}\n  proxy  {through}\n  engine {right}" for name, (through, right) in different.items())
    assert not different, "\n".join(lines)


def same(through: list[Reply], right: list[Reply]) -> bool:
    """Whether the replies are the same. If neither side has the path, or the request is not HTTP, the proxy's text may
    differ."""
    statuses = [each.status for each in through]
    if statuses != [each.status for each in right]:
        return False
    if statuses == [404] or (statuses == [400] and right[0].body == b"Invalid HTTP request received."):
        return True
    return list(map(comparable, through)) == list(map(comparable, right))
